// 7. FP8.

const fp8Shape = { rows: 32, columns: 128 };
const fp8Normal = Array.from({ length: 4096 }, (_, i) =>
  normalAt((((1597 * i * (i + 1) / 2) % 4096) + 0.5) / 4096)); // a normal distribution, shuffled

function normalAt(share) {
  let [low, high] = [-5, 5];
  while (high - low > 1e-9) {
    const middle = (low + high) / 2;
    if (normalCdf(middle) < share) low = middle;
    else high = middle;
  }
  return low;
}

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
  return [...counts];
}

function showFp8() {
  const values = read("fp8");
  if (!values) return;
  const fmt = formats[values.format];
  const rows = fp8Rows(values.mean, values.spread, values.outlier);
  const counts = exponents(quantize(rows, fmt, values.scaling).map(({ scaled }) => scaled));
  drawExponents("fp8-chart", fmt, counts, [-40, 30], { title: "number times its scale" });
  const head = tableRow("th", ["a scale for", "become 0, %", "subnormal, %", "saturate, %", "median error, %"]);
  fillTable("fp8-table", head, data.scalings.map((scaling) => {
    const { zero, subnormal, saturated, median } = fp8Loss(rows, fmt, scaling);
    const row = tableRow("td", [scaling, ...[zero, subnormal, saturated, median].map((part) => percent(part))]);
    row.className = scaling === values.scaling ? "chosen" : "";
    return row;
  }));
}

function startFp8() {
  onChange("fp8", showFp8);
  register(showFp8);
}

// 9. A delayed scale.

// Activations that become smaller, not evenly, over the iterations.
function amaxAt(i, { outliers, infs }) {
  if (infs.includes(i)) return Infinity;
  return 2 ** (4 - i / 6 + Math.sin(i)) * (outliers.includes(i) ? 64 : 1);
}

function delayedTrace(values) {
  const options = { amax_history: values.history, amax_algo: values.algo, margin: values.margin };
  const history = new AmaxHistory(formats[values.format], options);
  for (let i = 0; i < values.steps; i += 1) history.step(amaxAt(i, values));
  return history.trace;
}

function drawDelayed(trace, fmt) {
  const chart = new Chart("delayed-chart", 280, { left: 44, right: 14, top: 34 });
  const largest = ({ factor }) => Math.log2(fmt.max / factor);
  const amaxes = trace.filter((step) => step.amax < Infinity).map((step) => Math.log2(step.amax));
  const y = powersAxis(chart, [0, ...amaxes, ...trace.map(largest).filter(Number.isFinite)], "magnitude");
  const end = Math.max(trace.length, 20);
  const x = linear([0, end], [chart.left, chart.right]);
  drawSteps(chart, x, trace.map((step) => y(largest(step))));
  for (const { step, amax, saturated } of trace) {
    const [cx, cy] = [x(step + 0.5), y(Math.log2(amax))];
    if (saturated) drawCross(chart, cx, cy);
    else chart.add("circle", { cx, cy, r: 4, fill: "var(--mark)" });
  }
  chart.numbersBelow(x, 0, end, "iteration");
}

function outcomeOf(last) {
  if (!last) return "No iteration yet.";
  const { step, amax, factor } = last;
  const found = `Iteration ${step}: the largest magnitude is ${shown(amax, 4)}, the scale ${shown(factor)}; it`;
  if (last.amax === Infinity) return `${found} makes the result NaN, and does not enter the history.`;
  return `${found} ${last.saturated ? `is cut off, where a scale of its own would be ${shown(last.current)}` : "fits"}.`;
}

function showDelayed() {
  const values = read("delayed");
  if (!values) return;
  const trace = delayedTrace(values);
  drawDelayed(trace, formats[values.format]);
  const full = values.steps >= Number($("delayed-steps").dataset.max);
  for (const id of ["delayed-step", "delayed-spike", "delayed-inf"]) $(id).disabled = full;
  say("delayed-out", outcomeOf(trace.at(-1)),
    `${trace.length} iterations, ${trace.filter(({ saturated }) => saturated).length} too large.`);
}

// One more iteration, whose number is put on a list, or on none.
function stepDelayed(list) {
  const values = read("delayed");
  if (!values) return;
  for (const name of ["outliers", "infs"]) {
    const others = values[name].filter((i) => i !== values.steps);
    $(`delayed-${name}`).value = (name === list ? [...others, values.steps] : others).sort((a, b) => a - b).join(", ");
  }
  give("delayed-steps", String(values.steps + 1));
}

function startDelayed() {
  $("delayed-step").addEventListener("click", () => stepDelayed(null));
  $("delayed-spike").addEventListener("click", () => stepDelayed("outliers"));
  $("delayed-inf").addEventListener("click", () => stepDelayed("infs"));
  $("delayed-reset").addEventListener("click", () => {
    for (const name of ["outliers", "infs"]) $(`delayed-${name}`).value = "";
    give("delayed-steps", "0");
  });
  onChange("delayed", showDelayed);
  register(showDelayed);
}
