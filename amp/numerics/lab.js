"use strict";

// The same arithmetic as amp.numerics: float64 inside, of which all formats here are parts.

const data = JSON.parse(document.getElementById("data").textContent, (key, value) =>
  ({ "#inf": Infinity, "#-inf": -Infinity, "#nan": NaN })[value] ?? value);
const formats = Object.fromEntries(data.formats.map((fmt) => [fmt.name, fmt]));

function exponentOf(magnitude, fmt) {
  if (!(magnitude > 0)) return fmt.min_exponent;
  if (magnitude === Infinity) return fmt.max_exponent + 1;
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, magnitude);
  const exponent = (view.getUint32(0) >>> 20) - 1023;
  return Math.min(Math.max(exponent, fmt.min_exponent), fmt.max_exponent + 1);
}

function quantumOf(magnitude, fmt) {
  return 2 ** (exponentOf(magnitude, fmt) - fmt.mantissa_bits);
}

function nearestEven(units) {
  const low = Math.floor(units);
  const rest = units - low;
  if (rest !== 0.5) return rest < 0.5 ? low : low + 1;
  return low % 2 === 0 ? low : low + 1;
}

function withSign(magnitude, x) {
  return x < 0 || Object.is(x, -0) ? -magnitude : magnitude;
}

function toGrid(x, fmt, mode) {
  const magnitude = Math.abs(x);
  if (!Number.isFinite(magnitude)) return fmt.signed ? x : magnitude;
  const quantum = quantumOf(magnitude, fmt);
  const units = magnitude / quantum;
  let rounded = (mode === "toward_zero" ? Math.floor(units) : nearestEven(units)) * quantum;
  if (!fmt.has_zero) {
    rounded = Math.max(rounded, fmt.min_normal);
    if (mode !== "toward_zero" && magnitude > fmt.min_normal && magnitude < 2 * fmt.min_normal) {
      rounded = 2 * fmt.min_normal;
    }
  }
  return fmt.signed ? withSign(rounded, x) : rounded;
}

function roundTo(x, fmt, mode = "nearest") {
  if (Number.isNaN(x)) return fmt.nan === "none" ? -0 : NaN;
  let rounded = toGrid(x, fmt, mode);
  if (Math.abs(rounded) > fmt.max) {
    const largest = withSign(fmt.max, rounded);
    const beyond = { inf: withSign(Infinity, rounded), nan: NaN, saturate: largest }[fmt.overflow];
    rounded = mode === "toward_zero" && Number.isFinite(x) ? largest : beyond;
  }
  return fmt.nan === "negative_zero" && rounded === 0 ? 0 : rounded;
}

function encode(value, fmt) {
  const ones = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1;
  if (Number.isNaN(value)) return fmt.nan_pattern;
  const magnitude = Math.abs(value);
  const exponent = exponentOf(magnitude, fmt);
  let pattern;
  if (fmt.has_inf && magnitude === Infinity) {
    pattern = ones - (2 ** fmt.mantissa_bits - 1);
  } else if (!fmt.has_zero) {
    pattern = exponent - fmt.min_exponent;
  } else {
    pattern = (exponent - fmt.min_exponent) * 2 ** fmt.mantissa_bits + magnitude / quantumOf(magnitude, fmt);
  }
  const negative = fmt.signed && (value < 0 || Object.is(value, -0));
  return pattern + (negative ? ones + 1 : 0);
}

function decode(pattern, fmt) {
  const unit = 2 ** fmt.mantissa_bits;
  const span = 2 ** (fmt.exponent_bits + fmt.mantissa_bits);
  const magnitude = pattern % span;
  const exponent = Math.floor(magnitude / unit);
  const mantissa = magnitude % unit;
  const negative = fmt.signed && pattern >= span;
  if (fmt.nan === "negative_zero" && pattern === fmt.nan_pattern) return NaN;
  if (fmt.nan === "all_ones" && magnitude === span - 1) return NaN;
  let value;
  if (fmt.has_inf && exponent === 2 ** fmt.exponent_bits - 1) {
    value = mantissa ? NaN : Infinity;
  } else {
    const normal = exponent > 0 || !fmt.has_zero;
    const power = exponent - fmt.bias + (normal ? 0 : 1) - fmt.mantissa_bits;
    value = (mantissa + (normal ? unit : 0)) * 2 ** power;
  }
  return negative ? -value : value;
}

function bits(x, fmt) {
  const value = roundTo(x, fmt);
  const pattern = encode(value, fmt);
  const span = 2 ** (fmt.exponent_bits + fmt.mantissa_bits);
  const exponent = Math.floor((pattern % span) / 2 ** fmt.mantissa_bits);
  const mantissa = pattern % 2 ** fmt.mantissa_bits;
  return {
    pattern, exponent, mantissa, value,
    sign: Math.floor(pattern / span),
    error: value - x,
    overflow: Number.isFinite(x) && Math.abs(toGrid(x, fmt)) > fmt.max,
    underflow: value === 0 && x !== 0 && Number.isFinite(x),
    subnormal: fmt.has_zero && exponent === 0 && mantissa !== 0 && Number.isFinite(value),
  };
}

function ulp(x, fmt) {
  if (!Number.isFinite(x)) return Math.abs(x);
  return quantumOf(Math.min(Math.abs(toGrid(x, fmt, "toward_zero")), fmt.max), fmt);
}

function above(x, fmt) {
  if (Number.isNaN(x) || x === Infinity) return NaN;
  const magnitude = Math.abs(x);
  if (x < -fmt.max) return -fmt.max;
  const quantum = quantumOf(magnitude, fmt);
  const low = Math.floor(magnitude / quantum) * quantum;
  if (x < 0) {
    if (low < magnitude) return -low + 0;
    const atPower = magnitude === 2 ** exponentOf(magnitude, fmt) && magnitude > fmt.min_normal;
    return -(magnitude - (atPower ? quantum / 2 : quantum)) + 0;
  }
  return low + quantum > fmt.max ? (fmt.has_inf ? Infinity : NaN) : low + quantum;
}

function neighbours(x, fmt) {
  let [below, next] = [-above(-x, fmt) + 0, above(x, fmt)];
  if (!fmt.signed) {
    if (x <= fmt.min_normal) below = NaN;
    if (x < fmt.min_normal) next = fmt.min_normal;
  }
  return [below, next];
}

function survivesUpdate(w, dw, fmt) {
  const weight = roundTo(w, fmt);
  const updated = roundTo(weight + dw, fmt);
  return updated !== weight && !(Number.isNaN(updated) && Number.isNaN(weight));
}

// The loss scale's state machine: amp.kernels.update_scale.

const smallestScale = 2 ** -126;

class Scaler {
  constructor({ init = 2 ** 16, growth_factor = 2, backoff_factor = 0.5, growth_interval = 2000, hysteresis = 1,
    min = null, max = 2 ** 24 } = {}) {
    Object.assign(this, { growth_factor, backoff_factor, growth_interval, hysteresis });
    this.floor = min ?? smallestScale;
    this.scale = Math.fround(Math.min(init, max));
    this.ceiling = Math.max(max, this.scale);
    this.good = 0;
    this.left = hysteresis;
    this.trace = [];
  }

  step(overflow) {
    const before = this.scale;
    if (overflow) {
      this.good = 0;
      this.left = Math.max(this.left - 1, 0);
      if (this.left <= 0) {
        this.scale = Math.min(Math.fround(Math.max(before * this.backoff_factor, this.floor)), before);
      }
    } else {
      this.good += 1;
      if (this.good >= this.growth_interval) {
        this.scale = Math.max(Math.fround(Math.min(before * this.growth_factor, this.ceiling)), before);
        this.good = 0;
        this.left = this.hysteresis;
      }
    }
    this.trace.push({ step: this.trace.length, scale: before, overflow, next_scale: this.scale,
      good_steps: this.good, hysteresis_left: this.left });
  }
}

function simulate(steps, overflows, options) {
  const scaler = new Scaler(options);
  for (let i = 0; i < steps; i += 1) scaler.step(overflows.includes(i));
  return scaler.trace;
}

// Fates of numbers that are counted by their exponents: amp.numerics.Histogram.fates.

function fates(counts, fmt, log2Scale) {
  const lowest = fmt.min_exponent - fmt.mantissa_bits - (fmt.has_zero ? 1 : 1000);
  const found = { zero: 0, subnormal: 0, overflow: 0 };
  for (const [exponent, count] of counts) {
    const at = exponent + log2Scale;
    if (at < lowest) found.zero += count;
    if (lowest <= at && at < fmt.min_exponent && fmt.has_zero) found.subnormal += count;
    if (at > fmt.max_exponent) found.overflow += count;
  }
  return found;
}

function memory(params, optimizer, { activations = 0, world = 1, sharding = "none" } = {}) {
  const cut = ["none", "zero1", "zero2", "zero3"].indexOf(sharding);
  const share = (size, level) => (cut >= level ? Math.ceil(size / world) : size);
  return data.memory[optimizer].map((row) => {
    const terms = {
      weights: share(row.weights * params, 3),
      gradients: share(row.gradients * params, 2),
      masters: share(row.masters * params, 1),
      optimizer_state: share(row.optimizer_state * params, 1),
      activations: row.activations * activations,
      transient: row.transient * params,
    };
    const total = Object.values(terms).reduce((sum, term) => sum + term, 0);
    return { opt_level: row.opt_level, masters_kept: row.masters_kept, ...terms, total };
  });
}

// FP8: what quantization keeps, amp.numerics.fp8_losses.

function factorOf(amax, fmt) {
  if (!(amax < Infinity)) return NaN;
  return amax === 0 ? 1 : 2 ** Math.min(exponentOf(fmt.max / amax, formats.float32), 126);
}

function partOf(scaling) {
  return { tensor: [Infinity, Infinity], row: [1, Infinity], "1x128": [1, 128], "128x128": [128, 128], "1x32": [1, 32] }[scaling];
}

function quantize(rows, fmt, scaling) {
  const factors = new Map();
  const [down, across] = partOf(scaling) ?? [1, 1];
  const part = (i, j) => `${Math.floor(i / down)},${Math.floor(j / across)}`;
  if (scaling !== "none") {
    const amaxes = new Map();
    rows.forEach((row, i) => row.forEach((x, j) => {
      amaxes.set(part(i, j), Math.max(amaxes.get(part(i, j)) ?? 0, Math.abs(x)));
    }));
    for (const [key, amax] of amaxes) factors.set(key, factorOf(amax, fmt));
  }
  return rows.flatMap((row, i) => row.map((x, j) => {
    const factor = factors.get(part(i, j)) ?? 1;
    const scaled = x * factor;
    const kept = roundTo(Math.min(Math.max(scaled, -fmt.max), fmt.max), fmt);
    return { x, scaled, kept, value: kept / factor };
  }));
}

function fp8Loss(rows, fmt, scaling) {
  const found = quantize(rows, fmt, scaling);
  const counted = found.filter(({ x }) => x !== 0);
  const part = (isLost) => counted.filter(isLost).length / Math.max(counted.length, 1);
  const norm = found.reduce((sum, { x }) => sum + x * x, 0);
  return {
    zero: part(({ kept }) => kept === 0),
    subnormal: part(({ kept }) => kept !== 0 && Math.abs(kept) < fmt.min_normal),
    saturated: part(({ scaled }) => Math.abs(scaled) > fmt.max),
    error: norm ? Math.sqrt(found.reduce((sum, { x, value }) => sum + (value - x) ** 2, 0) / norm) : 0,
  };
}

// A delayed scale: amp.numerics.simulate_fp8.

class AmaxHistory {
  constructor(fmt, { amax_history = 16, amax_algo = "max", margin = 0 } = {}) {
    Object.assign(this, { fmt, amax_history, amax_algo, margin });
    this.past = [];
    this.trace = [];
  }

  step(given) {
    const amax = Math.fround(given);
    const known = this.amax_algo === "max" ? Math.max(0, ...this.past) : this.past[0] ?? 0;
    const current = factorOf(amax, this.fmt);
    const factor = known > 0 ? factorOf(known, this.fmt) * 2 ** -this.margin : current;
    const largest = amax * factor;
    if (amax > 0 && amax < Infinity) this.past = [amax, ...this.past].slice(0, this.amax_history);
    this.trace.push({ step: this.trace.length, amax, factor, current, largest, saturated: !(largest <= this.fmt.max) });
  }
}

// Every number of the shared table, by these functions and by the library's.

const same = (a, b) => Object.is(a, b) || (a === b) || (Number.isNaN(a) && Number.isNaN(b));
const near = (a, b) => same(a, b) || Math.abs(a - b) <= 1e-6 * Math.abs(b) + 64;

function check(vectors = data.vectors) {
  const wrong = [];
  let count = 0;
  const compare = (what, ours, theirs, agree = same) => {
    count += 1;
    if (!agree(ours, theirs)) wrong.push(`${what}: ${ours} here, ${theirs} in the library`);
  };
  for (const v of vectors.numbers) {
    const fmt = formats[v.format];
    const found = bits(v.x, fmt);
    for (const key of ["pattern", "sign", "exponent", "mantissa", "value", "overflow", "underflow", "subnormal"]) {
      compare(`${v.format} ${v.x} ${key}`, found[key], v[key]);
    }
    compare(`${v.format} ${v.x} decoded`, decode(v.pattern, fmt), v.value);
    compare(`${v.format} ${v.x} ulp`, ulp(v.x, fmt), v.ulp);
    const [below, next] = neighbours(v.x, fmt);
    compare(`${v.format} ${v.x} below`, below, v.below);
    compare(`${v.format} ${v.x} above`, next, v.above);
    compare(`${v.format} ${v.x} survives`, survivesUpdate(v.x, v.update, fmt), v.survives);
  }
  for (const v of vectors.traces) {
    const trace = simulate(v.steps, v.overflows, v.options);
    trace.forEach((step, i) => {
      compare(`step ${i}`, step.next_scale, v.scales[i]);
      compare(`step ${i} good`, step.good_steps, v.good[i]);
    });
  }
  for (const v of vectors.fates) {
    const found = fates(vectors.counts, formats[v.format], v.log2_scale);
    compare(`${v.format} zero`, found.zero, v.zero);
    compare(`${v.format} subnormal`, found.subnormal, v.subnormal);
    compare(`${v.format} overflow`, found.overflow, v.overflow);
  }
  for (const v of vectors.memory) {
    memory(v.params, v.optimizer, v.options).forEach((row, i) => {
      for (const key of Object.keys(v.rows[i])) compare(`memory ${key}`, row[key], v.rows[i][key], near);
    });
  }
  const alike = (a, b) => same(a, b) || Math.abs(a - b) <= 1e-9 * Math.abs(b);
  for (const v of vectors.fp8) {
    for (const loss of v.losses) {
      const found = fp8Loss(v.x, formats[loss.format], loss.scaling);
      for (const key of Object.keys(found)) {
        compare(`${loss.format} ${loss.scaling} ${key}`, found[key], loss[key], alike);
      }
    }
  }
  for (const v of vectors.histories) {
    const history = new AmaxHistory(formats[v.format], v.options);
    v.amaxes.forEach((amax, i) => {
      history.step(amax);
      for (const key of Object.keys(v.steps[i])) {
        compare(`${v.format} iteration ${i} ${key}`, history.trace[i][key], v.steps[i][key], alike);
      }
    });
  }
  return { count, wrong };
}

// What the figures share.

const $ = (id) => document.getElementById(id);
const svgns = "http://www.w3.org/2000/svg";

function draw(svg, items) {
  svg.replaceChildren(...items.map(([tag, attributes, text]) => {
    const node = document.createElementNS(svgns, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }));
}

function shown(x) {
  if (!Number.isFinite(x)) return String(x).replace("Infinity", "inf").replace("NaN", "nan");
  if (Object.is(x, -0)) return "-0";
  const text = String(x);
  return text.length <= 12 ? text : String(Number(x.toPrecision(9)));
}

function parse(text) {
  const plain = text.trim().toLowerCase();
  const power = plain.match(/^(-?)2(?:\*\*|\^)(-?\d+(?:\.\d+)?)$/);
  if (power) return (power[1] ? -1 : 1) * 2 ** Number(power[2]);
  if (/^[+-]?inf(inity)?$/.test(plain)) return plain.startsWith("-") ? -Infinity : Infinity;
  if (plain === "nan") return NaN;
  return plain === "" || Number.isNaN(Number(plain)) ? undefined : Number(plain);
}

function fillFormats(select, chosen) {
  for (const fmt of data.formats) select.add(new Option(fmt.name, fmt.name, false, fmt.name === chosen));
}

function mark(input, good) {
  input.classList.toggle("invalid", !good);
  input.setAttribute("aria-invalid", String(!good));
}

function presets(holder, entries, choose) {
  for (const [name, value] of entries) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => choose(value));
    holder.append(button);
  }
}

const percent = (part, whole) => `${((100 * part) / whole).toFixed(2)} %`;

// 1. Bits.

const bitsState = { x: 3.14159, pattern: 0 };

function showBits() {
  const fmt = formats[$("bits-format").value];
  const found = bits(bitsState.x, fmt);
  const row = $("bits-row");
  const digits = bitsState.pattern.toString(2).padStart(fmt.bits, "0");
  const focused = [...row.children].indexOf(document.activeElement);
  row.replaceChildren(...[...digits].map((digit, i) => {
    const field = fmt.signed && i === 0 ? "sign" : i < fmt.bits - fmt.mantissa_bits ? "exponent" : "mantissa";
    const button = document.createElement("button");
    button.type = "button";
    button.className = field;
    button.textContent = digit;
    button.tabIndex = i === Math.max(focused, 0) ? 0 : -1;
    button.setAttribute("aria-pressed", String(digit === "1"));
    button.setAttribute("aria-label", `${field} bit ${fmt.bits - 1 - i} is ${digit}`);
    button.addEventListener("click", () => flip(fmt.bits - 1 - i));
    return button;
  }));
  if (focused >= 0) row.children[Math.min(focused, fmt.bits - 1)].focus();
  const value = decode(bitsState.pattern, fmt);
  const unit = 2 ** fmt.mantissa_bits;
  const span = 2 ** (fmt.exponent_bits + fmt.mantissa_bits);
  const exponent = Math.floor((bitsState.pattern % span) / unit);
  const mantissa = bitsState.pattern % unit;
  const normal = exponent > 0 || !fmt.has_zero;
  const formula = !Number.isFinite(value) ? "" :
    `\n= ${bitsState.pattern >= span && fmt.signed ? "-" : ""}(${normal ? 1 : 0}${
      fmt.mantissa_bits ? ` + ${mantissa}/${unit}` : ""}) × 2^${exponent - fmt.bias + (normal ? 0 : 1)}`;
  const notes = ["overflow", "underflow", "subnormal"].filter((key) => found[key]);
  $("bits-out").textContent =
    `${fmt.name} holds ${shown(value)}, 0x${bitsState.pattern.toString(16).toUpperCase().padStart(Math.ceil(fmt.bits / 4), "0")}` +
    `${formula}\nerror ${shown(value - bitsState.x)}${notes.length ? `; ${notes.join(", ")}` : ""}`;
}

function setNumber(x) {
  bitsState.x = x;
  bitsState.pattern = encode(roundTo(x, formats[$("bits-format").value]), formats[$("bits-format").value]) ?? 0;
  $("bits-number").value = shown(x);
  mark($("bits-number"), true);
  showBits();
}

function flip(position) {
  const fmt = formats[$("bits-format").value];
  const on = Math.floor(bitsState.pattern / 2 ** position) % 2;
  bitsState.pattern += (on ? -1 : 1) * 2 ** position;
  bitsState.x = decode(bitsState.pattern, fmt);
  $("bits-number").value = shown(bitsState.x);
  mark($("bits-number"), true);
  showBits();
}

function startBits() {
  fillFormats($("bits-format"), "float16");
  presets($("bits-presets"), [["π", Math.PI], ["0.1", 0.1], ["1e-8", 1e-8], ["1 + 5e-5", 1.00005], ["2^-24", 2 ** -24],
    ["65504", 65504], ["65520", 65520], ["448", 448], ["-0", -0], ["inf", Infinity], ["nan", NaN]], setNumber);
  $("bits-format").addEventListener("change", () => setNumber(bitsState.x));
  $("bits-number").addEventListener("input", () => {
    const x = parse($("bits-number").value);
    mark($("bits-number"), x !== undefined);
    if (x === undefined) {
      $("bits-out").textContent = `“${$("bits-number").value}” is not a number; try 3.14159, 1e-8, 2^-24 or inf`;
      return;
    }
    const fmt = formats[$("bits-format").value];
    bitsState.x = x;
    bitsState.pattern = encode(roundTo(x, fmt), fmt) ?? 0;
    showBits();
  });
  $("bits-row").addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const buttons = [...$("bits-row").children];
    const at = buttons.indexOf(document.activeElement);
    if (!step || at < 0) return;
    const next = buttons[Math.min(Math.max(at + step, 0), buttons.length - 1)];
    buttons[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    event.preventDefault();
  });
  setNumber(3.14159);
}

// 2. Ranges.

function showRanges() {
  const left = 185, width = 525, low = -150, high = 130;
  const at = (power) => left + ((power - low) / (high - low)) * width;
  const power = Number($("ranges-exponent").value);
  const x = 2 ** power;
  const items = [];
  data.formats.forEach((fmt, i) => {
    const y = 8 + i * 29;
    const fits = bits(x, fmt);
    const [start, normal, end] = [Math.log2(fmt.min_subnormal), fmt.min_exponent, Math.log2(fmt.max)];
    items.push(["text", { x: 0, y: y + 15, class: "small" }, fmt.name]);
    items.push(["rect", { x: at(start), y, width: at(normal) - at(start), height: 19, fill: "var(--soft)" }]);
    items.push(["rect", { x: at(normal), y, width: at(end) - at(normal), height: 19, fill: "var(--accent)" }]);
    const fate = fits.overflow ? "too large" : fits.underflow ? "0" : fits.subnormal ? "subnormal" : "";
    if (fate) items.push(["text", { x: Math.min(at(power) + 4, 630), y: y + 15, class: "small" }, fate]);
  });
  for (const tick of [-149, -100, -50, 0, 50, 100]) {
    items.push(["text", { x: at(tick), y: 290, "text-anchor": "middle", class: "small dim" }, `2^${tick}`]);
  }
  items.push(["line", { x1: at(power), x2: at(power), y1: 4, y2: 268, stroke: "var(--mark)", "stroke-width": 2 }]);
  draw($("ranges-chart"), items);
  const lines = data.formats.map((fmt) => {
    const found = bits(x, fmt);
    const fate = found.overflow ? `overflows to ${shown(found.value)}` : found.underflow ? "becomes 0"
      : found.subnormal ? `is subnormal, ${shown(found.value)}` : `is ${shown(found.value)}`;
    return `${fmt.name}: ${fate}`;
  });
  $("ranges-out").textContent = `2^${power} = ${shown(x)}\n${lines.join("\n")}`;
  $("ranges-exponent").setAttribute("aria-valuetext", `2 to the power of ${power}`);
}

// 3. Ulps.

const ulpsView = { from: 0, to: 1, centre: 1, update: 0 }; // as dragged: finer than the sliders

function ulpsNumbers() {
  const fmt = formats[$("ulps-format").value];
  const weight = Math.min(roundTo(ulpsView.centre, fmt) || fmt.max, fmt.max);
  return { fmt, weight, update: ulpsView.update * ($("ulps-negative").checked ? -1 : 1) };
}

function showUlps() {
  const { fmt, weight, update } = ulpsNumbers();
  const numbers = [weight];
  for (let i = 0, x = weight; i < 5; i += 1) {
    [x] = neighbours(x, fmt);
    if (!Number.isFinite(x)) break;
    numbers.unshift(x);
  }
  for (let i = 0, x = weight; i < 5; i += 1) {
    [, x] = neighbours(x, fmt);
    if (!Number.isFinite(x)) break;
    numbers.push(x);
  }
  const span = numbers.at(-1) - numbers[0] || Math.abs(weight) || 1;
  Object.assign(ulpsView, { from: numbers[0] - span / 20, to: numbers.at(-1) + span / 20 });
  const at = (x) => 20 + (680 * (x - ulpsView.from)) / (ulpsView.to - ulpsView.from);
  const exact = weight + update;
  const updated = roundTo(exact, fmt);
  const inside = Math.min(Math.max(exact, ulpsView.from), ulpsView.to);
  const items = [["line", { x1: 10, x2: 710, y1: 95, y2: 95, stroke: "var(--line)", "stroke-width": 2 }]];
  numbers.forEach((x, i) => {
    items.push(["line", { x1: at(x), x2: at(x), y1: 82, y2: 108, stroke: "var(--ink)", "stroke-width": x === weight ? 4 : 1.5 }]);
    if (i === 0 || x === weight || i === numbers.length - 1) {
      items.push(["text", { x: at(x), y: 128, "text-anchor": "middle", class: "small" }, shown(x)]);
    }
  });
  items.push(["line", { x1: at(weight), x2: at(inside), y1: 50, y2: 50, stroke: "var(--mark)", "stroke-width": 3 }]);
  items.push(["circle", { cx: at(inside), cy: 50, r: 9, fill: "var(--mark)", "data-drag": "update" }]);
  items.push(["circle", { cx: at(weight), cy: 95, r: 10, fill: "var(--accent)", "data-drag": "centre" }]);
  if (Number.isFinite(updated) && updated >= ulpsView.from && updated <= ulpsView.to) {
    items.push(["circle", { cx: at(updated), cy: 95, r: 5, fill: "var(--alarm)", "pointer-events": "none" }]);
  }
  draw($("ulps-chart"), items);
  const survives = survivesUpdate(weight, update, fmt);
  $("ulps-out").textContent =
    `weight ${shown(weight)} in ${fmt.name}; one ulp there is ${shown(ulp(weight, fmt))}\n` +
    `weight + update = ${shown(exact)}, kept as ${shown(updated)}: ${survives ? "the update counts" : "the update is lost"}`;
  $("ulps-centre").setAttribute("aria-valuetext", shown(weight));
  $("ulps-update").setAttribute("aria-valuetext", shown(update));
}

function startUlps() {
  fillFormats($("ulps-format"), "float16");
  const slid = () => {
    ulpsView.centre = 2 ** Number($("ulps-centre").value);
    ulpsView.update = 2 ** Number($("ulps-update").value);
    showUlps();
  };
  for (const id of ["ulps-centre", "ulps-update"]) $(id).addEventListener("input", slid);
  for (const id of ["ulps-format", "ulps-negative"]) $(id).addEventListener("input", showUlps);
  const chart = $("ulps-chart");
  let dragging = null;
  const number = (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 720;
    return ulpsView.from + ((x - 20) / 680) * (ulpsView.to - ulpsView.from);
  };
  chart.addEventListener("pointerdown", (event) => {
    dragging = event.target.dataset?.drag ?? null;
    if (dragging) {
      chart.setPointerCapture(event.pointerId);
      event.preventDefault();
    }
  });
  chart.addEventListener("pointermove", (event) => {
    if (!dragging) return;
    const { weight } = ulpsNumbers();
    const x = number(event);
    if (dragging === "centre" && x > 0) {
      ulpsView.centre = x;
      $("ulps-centre").value = Math.log2(x);
    }
    if (dragging === "update" && x !== weight) {
      ulpsView.update = Math.abs(x - weight);
      $("ulps-negative").checked = x < weight;
      $("ulps-update").value = Math.log2(ulpsView.update);
    }
    showUlps();
  });
  for (const end of ["pointerup", "pointercancel"]) chart.addEventListener(end, () => { dragging = null; });
  slid();
}

// 4. Gradients times a scale.

function normalCdf(z) {
  // Abramowitz and Stegun 7.1.26; far more exact than a picture needs.
  const t = 1 / (1 + 0.3275911 * Math.abs(z) / Math.SQRT2);
  const poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  const erf = 1 - poly * Math.exp(-(z * z) / 2);
  return z < 0 ? (1 - erf) / 2 : (1 + erf) / 2;
}

function showScaling() {
  const fmt = formats[$("scaling-format").value];
  const power = Number($("scaling-scale").value);
  const mean = Number($("scaling-mean").value);
  const spread = Number($("scaling-spread").value);
  const good = { "scaling-mean": mean >= -60 && mean <= 20 && $("scaling-mean").value !== "",
    "scaling-spread": spread >= 0.5 && spread <= 20 };
  for (const [id, isGood] of Object.entries(good)) mark($(id), isGood);
  if (!Object.values(good).every(Boolean)) {
    $("scaling-out").textContent = "give a mean from -60 to 20, and a spread from 0.5 to 20";
    return;
  }
  const counts = [];
  for (let e = -149; e <= 127; e += 1) {
    counts.push([e, 1e6 * (normalCdf((e + 1 - mean) / spread) - normalCdf((e - mean) / spread))]);
  }
  const low = -60, high = 40;
  const at = (e) => 20 + (680 * (e - low)) / (high - low);
  const top = Math.max(...counts.map(([, count]) => count));
  const lowest = fmt.has_zero ? fmt.min_exponent - fmt.mantissa_bits - 1 : low;
  const zone = (from, to, fill) => ["rect", { x: at(Math.max(from, low)), y: 10,
    width: Math.max(at(Math.min(to, high)) - at(Math.max(from, low)), 0), height: 205, fill, opacity: 0.25 }];
  const items = [zone(low, lowest, "var(--alarm)"), zone(fmt.max_exponent + 1, high, "var(--alarm)")];
  if (fmt.has_zero) items.push(zone(lowest, fmt.min_exponent, "var(--soft)"));
  for (const [e, count] of counts) {
    const x = at(e + power);
    if (e + power < low || e + power >= high) continue;
    const height = (200 * count) / top;
    items.push(["rect", { x, y: 215 - height, width: 6.3, height, fill: "var(--accent)" }]);
  }
  for (let tick = low; tick <= high; tick += 20) {
    items.push(["text", { x: at(tick), y: 235, "text-anchor": "middle", class: "small dim" }, `2^${tick}`]);
  }
  items.push(["text", { x: 22, y: 254, class: "small dim" }, "red: becomes 0 or overflows; amber: subnormal"]);
  draw($("scaling-chart"), items);
  const found = fates(counts, fmt, power);
  let best = null;
  for (let p = 0; p <= 24; p += 1) {
    const lost = fates(counts, fmt, p); // of a million: a fraction of one counts as none
    const better = (key) => lost[key] < best[key] - 0.5;
    const alike = best !== null && Math.abs(lost.zero - best.zero) <= 0.5;
    if (lost.overflow < 1 && (best === null || better("zero") || (alike && better("subnormal")))) best = { p, ...lost };
  }
  $("scaling-out").textContent =
    `times ${shown(2 ** power)} in ${fmt.name}: ${percent(found.zero, 1e6)} become 0, ` +
    `${percent(found.subnormal, 1e6)} subnormal, ${percent(found.overflow, 1e6)} overflow\n` +
    (best === null ? "every scale overflows" : `of the powers of 2, 2^${best.p} loses least`);
  $("scaling-scale").setAttribute("aria-valuetext", `2 to the power of ${power}`);
}

// 5. The loss scale.

let scaler = new Scaler();
let timer = null;

function resetScaler() {
  const options = {
    init: 2 ** Number($("sim-init").value), growth_interval: Number($("sim-interval").value),
    growth_factor: Number($("sim-growth").value), backoff_factor: Number($("sim-backoff").value),
    hysteresis: Number($("sim-hysteresis").value),
  };
  const good = {
    "sim-interval": Number.isInteger(options.growth_interval) && options.growth_interval >= 1,
    "sim-growth": options.growth_factor >= 1,
    "sim-backoff": options.backoff_factor > 0 && options.backoff_factor <= 1,
    "sim-hysteresis": Number.isInteger(options.hysteresis) && options.hysteresis >= 1,
    "sim-init": options.init >= smallestScale && options.init <= 2 ** 126 && $("sim-init").value !== "",
  };
  for (const [id, isGood] of Object.entries(good)) mark($(id), isGood);
  if (!Object.values(good).every(Boolean)) {
    $("sim-out").textContent = "intervals and hysteresis are whole numbers of at least 1, growth is at least 1, backoff above 0 and at most 1";
    return;
  }
  scaler = new Scaler(options);
  showScaler();
}

function stepScaler(overflow) {
  scaler.step(overflow);
  showScaler();
}

function showScaler() {
  const recent = scaler.trace.slice(-60);
  const powers = [Math.log2(scaler.scale), ...recent.map((s) => Math.log2(s.next_scale)), ...recent.map((s) => Math.log2(s.scale))];
  const low = Math.floor(Math.min(...powers)) - 1, high = Math.ceil(Math.max(...powers)) + 1;
  const y = (power) => 190 - (170 * (power - low)) / (high - low);
  const x = (i) => 60 + (i * 650) / Math.max(recent.length, 20);
  const items = [];
  for (let p = low + 1; p < high; p += Math.max(1, Math.round((high - low) / 6))) {
    items.push(["text", { x: 50, y: y(p) + 4, "text-anchor": "end", class: "small dim" }, `2^${p}`]);
    items.push(["line", { x1: 55, x2: 715, y1: y(p), y2: y(p), stroke: "var(--line)" }]);
  }
  const path = recent.map((s, i) => `${i ? "L" : "M"}${x(i)} ${y(Math.log2(s.scale))}L${x(i + 1)} ${y(Math.log2(s.scale))}`).join("");
  if (path) {
    items.push(["path", { d: `${path}L${x(recent.length)} ${y(Math.log2(scaler.scale))}`, fill: "none", stroke: "var(--accent)", "stroke-width": 3 }]);
  }
  recent.forEach((s, i) => {
    if (s.overflow) items.push(["circle", { cx: x(i + 0.5), cy: y(Math.log2(s.scale)), r: 6, fill: "var(--alarm)" }]);
  });
  items.push(["text", { x: 60, y: 212, class: "small dim" }, "red: an overflow; its step is skipped"]);
  draw($("sim-chart"), items);
  const last = scaler.trace.at(-1);
  const event = !last ? "no step yet" : last.overflow
    ? `step ${last.step} overflowed and was skipped`
    : last.next_scale > last.scale ? `step ${last.step} was good, and the scale grows` : `step ${last.step} was good`;
  const skipped = scaler.trace.filter((s) => s.overflow).length;
  $("sim-out").textContent = `scale ${shown(scaler.scale)}; ${event}\n` +
    `${scaler.good} good since the scale moved; ${scaler.trace.length} steps, ${skipped} skipped`;
}

function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => stepScaler(Math.random() < 0.04), 150) : null;
  $("sim-play").setAttribute("aria-pressed", String(on));
  $("sim-out").setAttribute("aria-live", on ? "off" : "polite");
  $("sim-play").textContent = on ? "Pause" : "Play";
}

function startSimulator() {
  for (const id of ["sim-init", "sim-interval", "sim-growth", "sim-backoff", "sim-hysteresis"]) $(id).addEventListener("input", resetScaler);
  $("sim-step").addEventListener("click", () => stepScaler(false));
  $("sim-overflow").addEventListener("click", () => stepScaler(true));
  $("sim-reset").addEventListener("click", () => { play(false); resetScaler(); });
  $("sim-play").addEventListener("click", () => play(timer === null));
  resetScaler();
}

// 6. Memory.

const termColours = { weights: "var(--accent)", gradients: "var(--mantissa)", masters: "var(--mark)",
  optimizer_state: "var(--soft)", activations: "var(--sign)", transient: "var(--dim)" };

function showMemory() {
  const inputs = { params: parse($("memory-params").value), activations: parse($("memory-activations").value),
    world: Number($("memory-world").value), limit: Number($("memory-gpu").value) };
  const good = {
    "memory-params": inputs.params >= 1 && inputs.params < 1e18,
    "memory-activations": inputs.activations >= 0 && Number.isFinite(inputs.activations),
    "memory-world": Number.isInteger(inputs.world) && inputs.world >= 1,
    "memory-gpu": inputs.limit > 0,
  };
  for (const [id, isGood] of Object.entries(good)) mark($(id), isGood);
  if (!Object.values(good).every(Boolean)) {
    $("memory-out").textContent = "give a number of parameters of at least 1, such as 7e9, and positive sizes";
    return;
  }
  const rows = memory(inputs.params, $("memory-optimizer").value,
    { activations: inputs.activations, world: inputs.world, sharding: $("memory-sharding").value });
  const name = (row) => row.opt_level + (row.masters_kept === "split16" ? " split16" : "");
  const top = Math.max(...rows.map((row) => row.total), inputs.limit * 1e9);
  const y = (size) => 250 - (235 * size) / top;
  const items = [];
  rows.forEach((row, i) => {
    const x = 20 + i * 76;
    let bottom = 0;
    for (const [term, fill] of Object.entries(termColours)) {
      items.push(["rect", { x, y: y(bottom + row[term]), width: 50, height: y(bottom) - y(bottom + row[term]), fill }]);
      bottom += row[term];
    }
    items.push(["text", { x: x + 25, y: 268, "text-anchor": "middle", class: "small" }, row.opt_level]);
    if (row.masters_kept === "split16") items.push(["text", { x: x + 25, y: 284, "text-anchor": "middle", class: "small dim" }, "split16"]);
  });
  items.push(["line", { x1: 10, x2: 710, y1: y(inputs.limit * 1e9), y2: y(inputs.limit * 1e9), stroke: "var(--ink)", "stroke-dasharray": "6 4" }]);
  items.push(["text", { x: 712, y: y(inputs.limit * 1e9) - 4, "text-anchor": "end", class: "small" }, `${inputs.limit} GB`]);
  draw($("memory-chart"), items);
  const terms = Object.keys(termColours);
  const table = $("memory-table");
  const head = document.createElement("tr");
  for (const text of ["GB", ...terms.map((term) => term.replace("_", " ")), "total", ""]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = text;
    const colour = termColours[text.replace(" ", "_")];
    if (colour) cell.style.borderBottom = `4px solid ${colour}`;
    head.append(cell);
  }
  table.replaceChildren(head, ...rows.map((row) => {
    const line = document.createElement("tr");
    const fits = row.total <= inputs.limit * 1e9;
    const sizes = [...terms.map((term) => row[term]), row.total].map((size) => (size / 1e9).toFixed(size < 1e12 ? 2 : 0));
    [name(row), ...sizes, fits ? "fits" : "too large"].forEach((text, i, all) => {
      const cell = document.createElement("td");
      cell.textContent = text;
      if (i === all.length - 1) cell.className = fits ? "fits" : "large";
      line.append(cell);
    });
    return line;
  }));
  const fitting = rows.filter((row) => row.total <= inputs.limit * 1e9).map(name);
  $("memory-out").textContent = fitting.length ? `fits in ${inputs.limit} GB: ${fitting.join(", ")}` : `nothing fits in ${inputs.limit} GB`;
}

function startMemory() {
  for (const optimizer of Object.keys(data.memory)) $("memory-optimizer").add(new Option(optimizer, optimizer));
  presets($("memory-presets"), [["ResNet-50", 25557032], ["BERT large", 335e6], ["7 billion", 7e9], ["70 billion", 70e9],
    ["GPT-3", 175e9]], (params) => { $("memory-params").value = String(params); showMemory(); });
  for (const id of ["memory-params", "memory-optimizer", "memory-activations", "memory-world", "memory-sharding", "memory-gpu"]) {
    $(id).addEventListener("input", showMemory);
  }
  showMemory();
}

// 7. FP8.

const fp8Shape = { rows: 32, columns: 128 };
const fp8Normal = Array.from({ length: 4096 }, (_, i) => {
  const share = (((1597 * i * (i + 1) / 2) % 4096) + 0.5) / 4096; // a normal distribution, shuffled
  let [low, high] = [-5, 5];
  while (high - low > 1e-9) {
    const middle = (low + high) / 2;
    if (normalCdf(middle) < share) low = middle;
    else high = middle;
  }
  return low;
});
let fp8History = null;

function fp8Rows(mean, spread, outlier) {
  return Array.from({ length: fp8Shape.rows }, (_, i) => Array.from({ length: fp8Shape.columns }, (_, j) =>
    Math.fround(2 ** (mean + spread * fp8Normal[i * fp8Shape.columns + j] + (i % 16 ? 0 : outlier)))));
}

function exponents(numbers) {
  const counts = new Map();
  for (const x of numbers) {
    const exponent = exponentOf(Math.abs(x), formats.float32);
    if (x !== 0) counts.set(exponent, (counts.get(exponent) ?? 0) + 1);
  }
  return counts;
}

function showFp8() {
  const fmt = formats[$("fp8-format").value];
  const [mean, spread, outlier] = ["mean", "spread", "outlier"].map((name) => Number($(`fp8-${name}`).value));
  const good = { "fp8-mean": mean >= -60 && mean <= 20 && $("fp8-mean").value !== "", "fp8-spread": spread >= 0.5 && spread <= 10,
    "fp8-outlier": outlier >= 0 && outlier <= 20 };
  for (const [id, isGood] of Object.entries(good)) mark($(id), isGood);
  if (!Object.values(good).every(Boolean)) return;
  const rows = fp8Rows(mean, spread, outlier);
  const chosen = $("fp8-scaling").value;
  const counts = exponents(quantize(rows, fmt, chosen).map(({ scaled }) => scaled));
  const low = -40, high = 30;
  const at = (e) => 20 + (680 * (Math.min(Math.max(e, low), high) - low)) / (high - low);
  const lowest = fmt.min_exponent - fmt.mantissa_bits - 1;
  const zone = (from, to, fill) => ["rect", { x: at(from), y: 10, width: at(to) - at(from), height: 205, fill, opacity: 0.25 }];
  const items = [zone(low, lowest, "var(--alarm)"), zone(lowest, fmt.min_exponent, "var(--soft)"),
    zone(fmt.max_exponent + 1, high, "var(--alarm)")];
  const top = Math.max(...counts.values());
  for (const [e, count] of counts) {
    if (e < low || e >= high) continue;
    items.push(["rect", { x: at(e), y: 215 - (200 * count) / top, width: 9, height: (200 * count) / top, fill: "var(--accent)" }]);
  }
  for (let tick = low; tick <= high; tick += 10) {
    items.push(["text", { x: at(tick), y: 235, "text-anchor": "middle", class: "small dim" }, `2^${tick}`]);
  }
  items.push(["text", { x: 22, y: 254, class: "small dim" }, "red: becomes 0 or is too large; amber: subnormal"]);
  draw($("fp8-chart"), items);
  const cells = (tag, texts, name = "") => {
    const line = document.createElement("tr");
    line.className = name;
    line.append(...texts.map((text) => Object.assign(document.createElement(tag), { textContent: text })));
    return line;
  };
  $("fp8-table").replaceChildren(cells("th", ["a scale for", "become 0", "subnormal", "saturate", "error"]),
    ...data.scalings.map((scaling) => {
      const { zero, subnormal, saturated, error } = fp8Loss(rows, fmt, scaling);
      return cells("td", [scaling, ...[zero, subnormal, saturated, error].map((part) => percent(part, 1))],
        scaling === chosen ? "chosen" : "");
    }));
}

function resetFp8History() {
  const options = { amax_history: Number($("fp8-history").value), margin: Number($("fp8-margin").value),
    amax_algo: $("fp8-algo").value };
  const good = { "fp8-history": Number.isInteger(options.amax_history) && options.amax_history >= 1,
    "fp8-margin": Number.isInteger(options.margin) && options.margin >= 0 && options.margin <= 16 && $("fp8-margin").value !== "" };
  for (const [id, isGood] of Object.entries(good)) mark($(id), isGood);
  if (!Object.values(good).every(Boolean)) {
    $("fp8-out").textContent = "a history has at least 1 iteration, and the margin is a whole number from 0 to 16";
    return;
  }
  fp8History = new AmaxHistory(formats[$("fp8-format").value], options);
  for (let i = 0; i < 12; i += 1) fp8History.step(fp8Amax());
  showFp8History();
}

function fp8Amax() {
  const i = fp8History.trace.length;
  return 2 ** (4 - i / 6 + Math.sin(i)); // activations that become smaller, not evenly
}

function showFp8History() {
  const recent = fp8History.trace.slice(-60);
  const fits = ({ factor }) => Math.log2(fp8History.fmt.max / factor);
  const amaxes = recent.filter((s) => s.amax < Infinity).map((s) => Math.log2(s.amax));
  const powers = [...amaxes, ...recent.map(fits).filter(Number.isFinite)];
  const low = Math.floor(Math.min(...powers)) - 1, high = Math.ceil(Math.max(...powers)) + 1;
  const y = (power) => 190 - (170 * (Math.min(power, high) - low)) / (high - low);
  const x = (i) => 60 + (i * 650) / Math.max(recent.length, 20);
  const items = [];
  for (let p = low + 1; p < high; p += Math.max(1, Math.round((high - low) / 6))) {
    items.push(["text", { x: 50, y: y(p) + 4, "text-anchor": "end", class: "small dim" }, `2^${p}`]);
    items.push(["line", { x1: 55, x2: 715, y1: y(p), y2: y(p), stroke: "var(--line)" }]);
  }
  const path = recent.map((s, i) => `${i ? "L" : "M"}${x(i)} ${y(fits(s))}L${x(i + 1)} ${y(fits(s))}`).join("");
  items.push(["path", { d: path, fill: "none", stroke: "var(--accent)", "stroke-width": 3 }]);
  recent.forEach((s, i) => {
    const fill = s.saturated ? "var(--alarm)" : "var(--mark)";
    items.push(["circle", { cx: x(i + 0.5), cy: y(Math.log2(s.amax)), r: 5, fill }]);
  });
  items.push(["text", { x: 60, y: 212, class: "small dim" }, "line: the largest number that fits; dots: the largest there was, red if it is cut off"]);
  draw($("fp8-trace"), items);
  const last = fp8History.trace.at(-1);
  const cut = fp8History.trace.filter((s) => s.saturated).length;
  $("fp8-out").textContent = `iteration ${last.step}: amax ${shown(Number(last.amax.toPrecision(4)))} times ${shown(last.factor)}; ` +
    (last.amax === Infinity ? "an inf makes the result NaN, and does not enter the history"
      : last.saturated ? `cut off, where a scale of its own would be ${shown(last.current)}` : "fits") +
    `\n${fp8History.trace.length} iterations, ${cut} too large`;
}

function startFp8() {
  for (const name of ["float8_e4m3fn", "float8_e5m2"]) $("fp8-format").add(new Option(name, name));
  for (const scaling of data.scalings) $("fp8-scaling").add(new Option(scaling, scaling, false, scaling === "tensor"));
  for (const id of ["fp8-format", "fp8-scaling", "fp8-mean", "fp8-spread", "fp8-outlier"]) $(id).addEventListener("input", showFp8);
  for (const id of ["fp8-format", "fp8-history", "fp8-algo", "fp8-margin"]) $(id).addEventListener("input", resetFp8History);
  const step = (amax) => { fp8History.step(amax); showFp8History(); };
  $("fp8-step").addEventListener("click", () => step(fp8Amax()));
  $("fp8-spike").addEventListener("click", () => step(64 * fp8Amax()));
  $("fp8-inf").addEventListener("click", () => step(Infinity));
  $("fp8-reset").addEventListener("click", resetFp8History);
  showFp8();
  resetFp8History();
}

startBits();
$("ranges-exponent").addEventListener("input", showRanges);
showRanges();
startUlps();
fillFormats($("scaling-format"), "float16");
for (const id of ["scaling-format", "scaling-scale", "scaling-mean", "scaling-spread"]) $(id).addEventListener("input", showScaling);
showScaling();
startSimulator();
startMemory();
startFp8();
const agreement = check();
$("check").textContent = agreement.wrong.length
  ? `${agreement.wrong.length} of ${agreement.count} do not agree: ${agreement.wrong[0]}`
  : `${agreement.count} of ${agreement.count} in the shared table agree.`;
window.lab = { AmaxHistory, bits, check, decode, encode, fates, formats, fp8Loss, memory, neighbours, roundTo, simulate, survivesUpdate, ulp };
