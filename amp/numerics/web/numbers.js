// 1. Bits.

// What to type for a pattern: the number, or the pattern itself where the number means another one.
function textOf(pattern, fmt) {
  const value = decode(pattern, fmt);
  if (encode(roundTo(value, fmt), fmt) !== pattern) return hexPattern(pattern, fmt);
  if (!Number.isFinite(value)) return notFinite(value);
  return Object.is(value, -0) ? "-0" : String(value);
}

function readBits() {
  const { format, number } = read("bits");
  const fmt = formats[format];
  try {
    const typed = parsePattern(number, fmt);
    const x = typed === null ? parseNumber(number) : decode(typed, fmt);
    return { fmt, x, pattern: typed ?? encode(roundTo(x, fmt), fmt) };
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    complain($("bits-number"), error.message);
    return null;
  }
}

function partsOf(pattern, fmt) {
  const unit = 2 ** fmt.mantissa_bits;
  const span = unit * 2 ** fmt.exponent_bits;
  const exponent = Math.floor((pattern % span) / unit);
  return { unit, exponent, mantissa: pattern % unit, sign: Math.floor(pattern / span), normal: exponent > 0 || !fmt.has_zero };
}

const fieldOf = (position, fmt) =>
  position < fmt.mantissa_bits ? "mantissa" : position < fmt.mantissa_bits + fmt.exponent_bits ? "exponent" : "sign";

function showBitRow(pattern, fmt) {
  const row = $("bits-row");
  const focused = [...row.children].indexOf(document.activeElement);
  const digits = [...pattern.toString(2).padStart(fmt.bits, "0")];
  row.dataset.bits = fmt.bits;
  row.replaceChildren(...digits.map((digit, i) => {
    const position = fmt.bits - 1 - i;
    const field = fieldOf(position, fmt);
    const first = i > 0 && field !== fieldOf(position + 1, fmt) ? " first" : "";
    const button = element("button", { type: "button", class: field + first, tabindex: i === Math.max(focused, 0) ? 0 : -1,
      "aria-pressed": digit === "1", "aria-label": `${field} bit ${position} is ${digit}` }, digit);
    button.addEventListener("click", () => flip(position));
    return button;
  }));
  if (focused >= 0) row.children[Math.min(focused, fmt.bits - 1)].focus();
}

const coloured = (field, text) => element("span", { class: field }, text);

function power(...children) {
  const caret = (text) => element("span", { class: "caret" }, text);
  return element("sup", {}, caret("^("), ...children, caret(")"));
}

// The formula that the bits stand for, each part in the colour of its field.
function formulaOf(pattern, fmt) {
  const { unit, exponent, mantissa, sign, normal } = partsOf(pattern, fmt);
  const value = decode(pattern, fmt);
  if (!Number.isFinite(value)) return [`This pattern is set aside for ${shown(value)}.`];
  const shownSign = fmt.signed ? ["(\u22121)", power(coloured("sign", String(sign))), " × "] : [];
  const scale = ["2", power(coloured("exponent", String(normal ? exponent : 1)), ` \u2212 ${fmt.bias}`)];
  const significand = fmt.mantissa_bits ? [` × (${normal ? 1 : 0} + `, coloured("mantissa", String(mantissa)), `/${unit})`] : [];
  return [...shownSign, ...scale, ...significand, ...rich(` = ${shown(value)}`)];
}

function showFieldKey(pattern, fmt) {
  const { exponent, mantissa, sign } = partsOf(pattern, fmt);
  const numbers = { sign, exponent, mantissa };
  const sizes = { sign: fmt.signed ? 1 : 0, exponent: fmt.exponent_bits, mantissa: fmt.mantissa_bits };
  $("bits-key").replaceChildren(...Object.keys(sizes).filter((field) => sizes[field]).map((field) =>
    element("li", {}, element("i", { class: `swatch ${field}` }),
      `${field}, ${sizes[field]} bit${sizes[field] > 1 ? "s" : ""}: ${numbers[field]}`)));
}

function copied(text, what) {
  const button = element("button", { type: "button", class: "link", "aria-label": `Copy ${what}` }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  return [element("code", {}, text), " ", button];
}

function showBitFacts(x, pattern, fmt) {
  const value = decode(pattern, fmt);
  const [below, next] = neighbours(value, fmt);
  const step = ulp(value, fmt);
  const off = value - x;
  const steps = Number.isFinite(off) && off ? `, ${shown(Number((off / step).toPrecision(3)))} ulp` : "";
  const side = (number) => (Number.isNaN(number) ? "none" : shown(number));
  const facts = [
    ["Exact value", copied(exactDecimal(value), "the exact value"), "exact"],
    ["Bits", copied(hexPattern(pattern, fmt), "the bits"), "hex"],
    ["In C", copied(hexFloat(value), "the number as C writes it"), "c"],
    ["Error", rich(`${shown(off)}${steps}`), "error"],
    ["One ulp", rich(Number.isFinite(value) ? `2^{${minus(String(Math.log2(step)))}} = ${shown(step)}` : "none"), "ulp"],
    ["Neighbours", rich(`${side(below)} and ${side(next)}`), "neighbours"],
  ];
  $("bits-facts").replaceChildren(...facts.flatMap(([name, parts, key]) =>
    [element("dt", {}, name), element("dd", { id: `bits-${key}` }, ...parts)]));
  for (const [id, number] of [["bits-down", below], ["bits-up", next]]) $(id).disabled = Number.isNaN(number);
}

function showBits() {
  const found = readBits();
  if (!found) return;
  const { fmt, x, pattern } = found;
  const value = decode(pattern, fmt);
  const notes = ["overflow", "underflow"].filter((key) => bits(x, fmt)[key]);
  if (bits(value, fmt).subnormal) notes.push("subnormal, an exponent of 0 counts as 1");
  if (Number.isNaN(x) && !Number.isNaN(value)) notes.push("the format has no NaN");
  showBitRow(pattern, fmt);
  showFieldKey(pattern, fmt);
  $("bits-formula").replaceChildren(...formulaOf(pattern, fmt));
  say("bits-out", `${fmt.name} holds ${shown(value)}${notes.length ? `: ${notes.join(", ")}` : ""}`);
  showBitFacts(x, pattern, fmt);
}

function setPattern(pattern, fmt) {
  give("bits-number", textOf(pattern, fmt));
}

function flip(position) {
  const { fmt, pattern } = readBits() ?? {};
  if (fmt) setPattern(pattern + (Math.floor(pattern / 2 ** position) % 2 ? -1 : 1) * 2 ** position, fmt);
}

function stepUlp(way) {
  const { fmt, pattern } = readBits() ?? {};
  if (!fmt) return;
  const next = neighbours(decode(pattern, fmt), fmt)[way > 0 ? 1 : 0];
  if (!Number.isNaN(next)) setPattern(encode(next, fmt), fmt);
}

function moveInRow(event) {
  const buttons = [...$("bits-row").children];
  const at = buttons.indexOf(document.activeElement);
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: buttons.length - 1 }[event.key];
  if (to === undefined || at < 0) return;
  const next = buttons[Math.min(Math.max(to, 0), buttons.length - 1)];
  buttons[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
  event.preventDefault();
}

// Bits that were typed are a number when the format changes: its own bits may not fit there.
function keepNumber() {
  let before = formats[$("bits-format").value];
  $("bits-format").addEventListener("input", () => {
    try {
      const pattern = parsePattern($("bits-number").value, before);
      const value = pattern === null ? null : decode(pattern, before);
      if (value !== null) $("bits-number").value = Number.isFinite(value) ? String(value) : notFinite(value);
    } catch { /* what does not fit is said beside the field */ }
    before = formats[$("bits-format").value];
  });
}

function startBits() {
  presets("bits-presets", [["π", String(Math.PI)], ["0.1", "0.1"], ["1/3", "1/3"], ["10^{\u22128}", "1e-8"],
    ["1 + 5 × 10^{\u22125}", "1.00005"], ["2^{\u221224}", "2^-24"], ["65504", "65504"], ["65520", "65520"], ["448", "448"],
    ["\u22120", "-0"], ["inf", "inf"], ["nan", "nan"]], (text) => give("bits-number", text));
  $("bits-down").addEventListener("click", () => stepUlp(-1));
  $("bits-up").addEventListener("click", () => stepUlp(1));
  $("bits-number").addEventListener("keydown", (event) => {
    const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (way) stepUlp(way);
    if (way) event.preventDefault();
  });
  $("bits-row").addEventListener("keydown", moveInRow);
  keepNumber();
  onChange("bits", showBits);
  showBits();
}

// 2. Ranges.

// What becomes of a positive number: a kind, and a few words.
function fateOf(x, fmt) {
  const found = bits(x, fmt);
  if (found.overflow) return ["too large", `becomes ${shown(found.value)}`];
  if (found.underflow) return ["too small", "becomes 0"];
  if (!fmt.has_zero && x < fmt.min_normal) return ["too small", `becomes 2^{${minus(String(fmt.min_exponent))}}`];
  if (!found.subnormal) return ["normal", `kept to ${fmt.mantissa_bits + 1} bit${fmt.mantissa_bits ? "s" : ""}`];
  const left = Math.floor(Math.log2(found.value)) - (fmt.min_exponent - fmt.mantissa_bits) + 1;
  return ["subnormal", `kept to ${left} of ${fmt.mantissa_bits + 1} bits`];
}

function drawRange(chart, fmt, y, at) {
  const [start, normal, end] = [Math.log2(fmt.min_subnormal), fmt.min_exponent, Math.log2(fmt.max)].map(at);
  chart.line(chart.left, y + 7, chart.right, y + 7);
  if (normal > start) chart.bar(start, y, normal, y + 14, { fill: "var(--soft)" });
  chart.bar(normal, y, end, y + 14, { fill: "var(--accent)" });
}

function showRanges() {
  const values = read("ranges");
  if (!values) return;
  const x = values.magnitude;
  const narrow = isNarrow("ranges-chart");
  const step = narrow ? 42 : 27;
  const chart = new Chart("ranges-chart", 30 + 9 * step + 56, { left: narrow ? 4 : 130, right: narrow ? 12 : 130, top: 24 });
  const at = linear([-152, 130], [chart.left, chart.right]);
  data.formats.forEach((fmt, i) => {
    const y = 30 + i * step;
    const [kind, words] = fateOf(x, fmt);
    drawRange(chart, fmt, narrow ? y + 18 : y, at);
    chart.text(0, y + 12, fmt.name, "start", "code");
    chart.text(chart.width, y + 12, words, "end", kind.startsWith("too") ? "alarm" : "");
  });
  chart.line(at(Math.log2(x)), 20, at(Math.log2(x)), chart.bottom, { stroke: "var(--mark)", "stroke-width": 2 });
  chart.text(at(Math.log2(x)), 14, shown(x, 4), "middle", "mark");
  chart.powersBelow(at, -150, 125, "magnitude");
  sayFates(x);
}

function sayFates(x) {
  const lines = new Map();
  for (const fmt of data.formats) {
    const [kind, words] = fateOf(x, fmt);
    const lost = kind.startsWith("too");
    const title = lost ? `${kind}, ${words}` : kind;
    lines.set(title, [...(lines.get(title) ?? []), lost ? fmt.name : `${fmt.name} (${words})`]);
  }
  say("ranges-out", ...[...lines].map(([title, names]) =>
    [element("strong", {}, ...rich(`${title[0].toUpperCase()}${title.slice(1)}: `)), `${names.join(", ")}.`]));
}

function startRanges() {
  presets("ranges-presets", [["a gradient of 10^{\u22128}", "1e-8"], ["exp(12)", String(Math.exp(12))], ["65504", "65504"],
    ["448", "448"], ["2^{\u2212130}", "2^-130"]], (text) => give("ranges-magnitude", text));
  onChange("ranges", showRanges);
  register(showRanges);
}

// 3. Ulps.

const ulpsView = { from: 0, to: 1, left: 0, right: 1 }; // what the number line shows, for the pointer

function readUlps() {
  const values = read("ulps");
  if (!values) return null;
  const fmt = formats[values.format];
  const weight = Math.min(roundTo(values.weight, fmt) || fmt.min_subnormal, fmt.max);
  return { fmt, weight, update: values.update * (values.negative ? -1 : 1) };
}

// Up to five neighbours of a number on either side, it among them.
function numbersAround(weight, fmt) {
  const numbers = [weight];
  for (const side of [0, 1]) {
    let x = weight;
    for (let i = 0; i < 5; i += 1) {
      x = neighbours(x, fmt)[side];
      if (!Number.isFinite(x)) break;
      numbers.push(x);
    }
  }
  return numbers.sort((a, b) => a - b);
}

function drawNumberLine(chart, at, numbers, weight, fmt) {
  const [below, next] = neighbours(weight, fmt).map((x) => (Number.isFinite(x) ? x : weight));
  chart.bar(at((below + weight) / 2), 12, at((weight + next) / 2), 96, { class: "zone alarm" });
  chart.line(0, 80, chart.width, 80, { stroke: "var(--edge)", "stroke-width": 2 });
  for (const x of numbers) {
    chart.line(at(x), 68, at(x), 92, { stroke: "var(--ink)", "stroke-width": x === weight ? 3 : 1.5 });
  }
  for (const x of new Set([numbers[0], numbers.at(-1)])) {
    if (x !== weight) chart.text(at(x), 112, shown(x), "middle", "dim");
  }
  chart.text(at(weight), 132, `weight ${shown(weight)}`, "middle", "accent");
  chart.text(chart.width / 2, 158, `the numbers that ${fmt.name} holds`, "middle");
}

function drawUpdate(chart, at, weight, exact, updated) {
  const side = Math.sign(at(exact) - at(weight)) || 1;
  chart.line(at(weight), 34, at(exact), 34, { stroke: "var(--mark)", "stroke-width": 3 });
  chart.line(at(exact), 34, at(exact), 68, { stroke: "var(--mark)", "stroke-dasharray": "3 3" });
  chart.add("circle", { cx: at(weight), cy: 80, r: 11, fill: "var(--accent)", "data-drag": "weight" });
  chart.add("path", { d: `M${at(exact) + side * 11} 34l${-side * 18} -11v22z`, fill: "var(--mark)", "data-drag": "update" });
  if (updated !== null) {
    chart.add("circle", { cx: at(updated), cy: 80, r: 5.5, fill: "var(--soft)", stroke: "var(--panel)", "stroke-width": 1.5,
      "pointer-events": "none" });
  }
}

function showUlps() {
  const found = readUlps();
  if (!found) return;
  const { fmt, weight, update } = found;
  const numbers = numbersAround(weight, fmt);
  const margin = (numbers.at(-1) - numbers[0] || Math.abs(weight)) / 20;
  const chart = new Chart("ulps-chart", 168);
  Object.assign(ulpsView, { from: numbers[0] - margin, to: numbers.at(-1) + margin, left: chart.left, right: chart.right });
  const at = linear([ulpsView.from, ulpsView.to], [chart.left, chart.right]);
  const exact = weight + update;
  const updated = roundTo(exact, fmt);
  const inside = updated >= ulpsView.from && updated <= ulpsView.to;
  drawNumberLine(chart, at, numbers, weight, fmt);
  drawUpdate(chart, at, weight, exact, inside ? updated : null);
  const counts = survivesUpdate(weight, update, fmt);
  say("ulps-out",
    [element("strong", { class: counts ? "kept" : "lost" }, counts ? "The update counts." : "The update is lost."),
      ...rich(` ${shown(weight)} ${update < 0 ? "\u2212" : "+"} ${shown(Math.abs(update))} = ${shown(exact)}, kept as ${shown(updated)}.`)],
    `One ulp of ${shown(weight)} in ${fmt.name} is ${shown(ulp(weight, fmt))}; what is less than half of it rounds away.`);
}

function drag(kind, event) {
  const box = $("ulps-chart").getBoundingClientRect();
  const { from, to, left, right } = ulpsView;
  const x = from + ((event.clientX - box.left - left) / (right - left)) * (to - from);
  const { fmt, weight } = readUlps() ?? {};
  if (!fmt) return;
  if (kind === "weight" && x > 0) give("ulps-weight", String(roundTo(Math.min(x, fmt.max), fmt) || fmt.min_subnormal));
  if (kind === "update" && x !== weight) {
    $("ulps-negative").checked = x < weight;
    give("ulps-update", String(Number(Math.abs(x - weight).toPrecision(3))));
  }
}

function startUlps() {
  const chart = $("ulps-chart");
  let dragging = null;
  chart.addEventListener("pointerdown", (event) => {
    dragging = event.target.dataset?.drag ?? null;
    if (!dragging) return;
    chart.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  chart.addEventListener("pointermove", (event) => { if (dragging) drag(dragging, event); });
  for (const end of ["pointerup", "pointercancel"]) chart.addEventListener(end, () => { dragging = null; });
  onChange("ulps", showUlps);
  register(showUlps);
}
