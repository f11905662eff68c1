// 4. Gradients times a scale.

function normalCdf(z) {
  // Abramowitz and Stegun 7.1.26; far more exact than a picture needs.
  const t = 1 / (1 + 0.3275911 * Math.abs(z) / Math.SQRT2);
  const poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  const erf = 1 - poly * Math.exp(-(z * z) / 2);
  return z < 0 ? (1 - erf) / 2 : (1 + erf) / 2;
}

// A million gradients by their exponents: log-normal.
function gradientCounts(mean, spread) {
  return Array.from({ length: 277 }, (_, i) => i - 149).map((e) =>
    [e, 1e6 * (normalCdf((e + 1 - mean) / spread) - normalCdf((e - mean) / spread))]);
}

// What the format loses: ranges of exponents, shaded.
function drawZones(chart, at, fmt, low, high) {
  const lowest = fmt.has_zero ? fmt.min_exponent - fmt.mantissa_bits - 1 : low;
  const zone = (from, to, look) => {
    if (at(to) > at(from)) chart.bar(at(from), chart.top, at(to), chart.bottom, { class: `zone ${look}` });
  };
  zone(low, lowest, "alarm");
  if (fmt.has_zero) zone(lowest, fmt.min_exponent, "soft");
  zone(fmt.max_exponent + 1, high, "alarm");
}

// A histogram of exponents over what a format holds, and an outline of how it was.
function drawExponents(id, fmt, counts, [low, high], { title, was = [] }) {
  const chart = new Chart(id, 280, { left: 44, right: 14, top: 34 });
  const at = linear([low, high], [chart.left, chart.right]);
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  const share = ([, count]) => (100 * count) / total;
  const top = Math.max(...[...counts, ...was].map(share)) * 1.05;
  const y = linear([0, top], [chart.bottom, chart.top]);
  drawZones(chart, at, fmt, low, high);
  chart.axisLeft(y, 0, top, "share, %", (value) => String(value), false);
  const inside = ([e]) => e >= low && e < high;
  for (const entry of counts.filter(inside)) {
    chart.bar(at(entry[0]) + 0.5, y(0), at(entry[0] + 1) - 0.5, y(share(entry)), { fill: "var(--accent)" });
  }
  const outline = was.filter(inside).map((entry) => `${at(entry[0])} ${y(share(entry))}H${at(entry[0] + 1)}`).join("L");
  if (outline) chart.add("path", { d: `M${outline}`, fill: "none", stroke: "var(--ink)", "stroke-dasharray": "3 3" });
  chart.powersBelow(at, low, high, title);
}

// Of the scales from 1 to 2^24, the one that loses least of a million gradients; null if each overflows.
function bestScale(counts, fmt) {
  let best = null;
  for (let p = 0; p <= 24; p += 1) {
    const lost = fates(counts, fmt, p); // of a million: a fraction of one counts as none
    const better = (key) => lost[key] < best[key] - 0.5;
    const alike = best !== null && Math.abs(lost.zero - best.zero) <= 0.5;
    if (lost.overflow < 1 && (best === null || better("zero") || (alike && better("subnormal")))) best = { p, ...lost };
  }
  return best && best.p;
}

function showScaling() {
  const values = read("scaling");
  if (!values) return;
  const fmt = formats[values.format];
  const counts = gradientCounts(values.mean, values.spread);
  const scaled = counts.map(([e, count]) => [e + values.scale, count]);
  const was = values.scale ? counts : [];
  drawExponents("scaling-chart", fmt, scaled, [-60, 40], { title: "gradient times the scale", was });
  const found = fates(counts, fmt, values.scale);
  const best = bestScale(counts, fmt);
  $("scaling-best").disabled = best === null;
  $("scaling-best").dataset.power = best;
  say("scaling-out",
    `Times ${shown(2 ** values.scale)} in ${fmt.name}: ${percent(found.zero, 1e6)} % become 0, ` +
    `${percent(found.subnormal, 1e6)} % are subnormal, ${percent(found.overflow, 1e6)} % overflow.`,
    best === null ? "Every scale overflows." : `Of the powers of 2, 2^{${best}} loses least.`);
}

function startScaling() {
  $("scaling-best").addEventListener("click", () => give("scaling-scale", $("scaling-best").dataset.power));
  onChange("scaling", showScaling);
  register(showScaling);
}

// 5. The loss scale.

let timer = null;

function readScaler() {
  const found = read("sim");
  if (!found) return null;
  const { init, interval, growth, backoff, hysteresis, steps, overflows } = found;
  const options = { init: 2 ** init, growth_interval: interval, growth_factor: growth, backoff_factor: backoff, hysteresis };
  return { steps, overflows, trace: simulate(steps, overflows, options), options };
}

// A vertical axis of powers of 2 that has room for all of some powers.
function powersAxis(chart, powers, title) {
  const [low, high] = [Math.floor(Math.min(...powers)) - 1, Math.ceil(Math.max(...powers)) + 1];
  const y = linear([low, high], [chart.bottom, chart.top]);
  chart.axisLeft(y, low, high, title, (power) => minus(`2^{${power}}`));
  return y;
}

// A line that is level within each step, with a gap where there is no height.
function drawSteps(chart, x, heights) {
  const path = heights.map((height, i) =>
    Number.isNaN(height) ? "" : `${Number.isNaN(heights[i - 1] ?? NaN) ? "M" : "L"}${x(i)} ${height}H${x(i + 1)}`).join("");
  if (path) chart.add("path", { d: path, fill: "none", stroke: "var(--accent)", "stroke-width": 2.5 });
}

function drawCross(chart, x, y) {
  chart.add("path", { d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`, stroke: "var(--alarm)", "stroke-width": 3 });
}

function drawScale(trace, first) {
  const chart = new Chart("sim-chart", 260, { left: 44, right: 14, top: 34 });
  const scales = [trace.at(-1)?.next_scale ?? first, ...trace.map((step) => step.scale)].map(Math.log2);
  const y = powersAxis(chart, scales, "loss scale");
  const end = Math.max(trace.length, 20);
  const x = linear([0, end], [chart.left, chart.right]);
  drawSteps(chart, x, trace.map((step) => y(Math.log2(step.scale))));
  for (const { step, scale, overflow } of trace) {
    if (!overflow) continue;
    drawCross(chart, x(step + 0.5), y(Math.log2(scale)));
  }
  chart.numbersBelow(x, 0, end, "step");
}

function eventOf(last) {
  if (!last) return "no step yet";
  if (last.overflow) return `step ${last.step} overflowed and was skipped`;
  return `step ${last.step} was good${last.next_scale > last.scale ? ", and the scale grows" : ""}`;
}

function showScaler() {
  const found = readScaler();
  if (!found) return;
  const { steps, trace, options } = found;
  const last = trace.at(-1);
  drawScale(trace, options.init);
  for (const id of ["sim-step", "sim-overflow"]) $(id).disabled = steps >= Number($("sim-steps").dataset.max);
  say("sim-out", `Scale ${shown(last ? last.next_scale : new Scaler(options).scale)}; ${eventOf(last)}.`,
    `${trace.length} steps, ${trace.filter(({ overflow }) => overflow).length} skipped, ` +
    `${last ? last.good_steps : 0} good since the scale moved.`);
}

function stepScaler(overflow) {
  const found = readScaler();
  if (!found) return;
  const { steps, overflows } = found;
  if (steps >= Number($("sim-steps").dataset.max)) {
    play(false);
    return;
  }
  const others = overflows.filter((i) => i !== steps);
  $("sim-overflows").value = (overflow ? [...others, steps] : others).sort((a, b) => a - b).join(", ");
  give("sim-steps", String(steps + 1));
}

function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => stepScaler(Math.random() < 0.04), 150) : null;
  $("sim-play").setAttribute("aria-pressed", String(on));
  $("sim-out").setAttribute("aria-live", on ? "off" : "polite");
  $("sim-play").textContent = on ? "Pause" : "Play";
}

function startSimulator() {
  $("sim-step").addEventListener("click", () => stepScaler(false));
  $("sim-overflow").addEventListener("click", () => stepScaler(true));
  $("sim-play").addEventListener("click", () => play(timer === null));
  $("sim-reset").addEventListener("click", () => {
    play(false);
    $("sim-overflows").value = "";
    give("sim-steps", "0");
  });
  onChange("sim", showScaler);
  register(showScaler);
}
