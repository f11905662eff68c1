// 6. Memory.

const termColours = { weights: "accent", gradients: "mantissa", masters: "mark", optimizer_state: "soft",
  activations: "sign", transient: "dim" };
const nameOf = (row) => row.opt_level + (row.masters_kept === "split16" ? " split16" : "");
const gigabytes = (size) => (size / 1e9).toFixed(size < 1e12 ? 2 : 0);

function drawMemory(rows, limit) {
  const narrow = isNarrow("memory-chart");
  const step = 26;
  const chart = new Chart("memory-chart", 28 + rows.length * step + 56, { left: narrow ? 74 : 92, right: 62, top: 24 });
  const top = Math.max(...rows.map((row) => row.total), limit) / 1e9;
  const at = linear([0, top], [chart.left, chart.right]);
  rows.forEach((row, i) => {
    const y = 30 + i * step;
    let sum = 0;
    for (const [term, colour] of Object.entries(termColours)) {
      const [from, to] = [at(sum / 1e9), at((sum + row[term]) / 1e9)];
      if (to > from) chart.bar(from, y, to, y + 16, { fill: `var(--${colour})`, class: "part" });
      sum += row[term];
    }
    chart.text(0, y + 13, nameOf(row));
  });
  chart.line(at(limit / 1e9), 18, at(limit / 1e9), chart.bottom, { stroke: "var(--ink)", "stroke-dasharray": "6 4" });
  chart.text(at(limit / 1e9), 13, `${shown(limit / 1e9)} GB`, "middle");
  rows.forEach((row, i) => { // after the line, which they interrupt
    const look = row.total > limit ? "alarm halo" : "halo";
    chart.text(at(row.total / 1e9) + 6, 43 + i * step, gigabytes(row.total), "start", look);
  });
  chart.numbersBelow(at, 0, top, "GB in each process", false);
}

// The roles are said, because a style that makes a row a grid takes them away.
function tableRow(tag, texts, looks = []) {
  const cell = (text, i) => {
    const [name, role] = tag === "th" ? ["th", "columnheader"] : i === 0 ? ["th", "rowheader"] : ["td", "cell"];
    return element(name, { role, ...(looks[i] ? { class: looks[i] } : {}) }, text);
  };
  return element("tr", { role: "row" }, ...texts.map(cell));
}

function fillTable(id, head, rows) {
  $(id).setAttribute("role", "table");
  $(id).replaceChildren(element("thead", { role: "rowgroup" }, head), element("tbody", { role: "rowgroup" }, ...rows));
}

function fillMemoryTable(rows, limit) {
  const terms = Object.keys(termColours);
  const heads = ["GB", "total", "verdict", ...terms.map((term) => term.replace("optimizer_", ""))];
  const head = tableRow("th", heads, ["", "", "", ...terms.map((term) => termColours[term])]);
  fillTable("memory-table", head, rows.map((row) => {
    const fits = row.total <= limit;
    const verdict = fits ? "fits" : "too large";
    return tableRow("td", [nameOf(row), gigabytes(row.total), verdict, ...terms.map((term) => gigabytes(row[term]))],
      ["", "", fits ? "kept" : "lost"]);
  }));
}

function showMemory() {
  const values = read("memory");
  if (!values) return;
  const { params, optimizer, activations, world, sharding, gpu } = values;
  const rows = memory(params, optimizer, { activations, world, sharding });
  const limit = gpu * 1e9;
  drawMemory(rows, limit);
  fillMemoryTable(rows, limit);
  const fitting = rows.filter((row) => row.total <= limit).map(nameOf);
  say("memory-out", fitting.length ? `Fits in ${shown(gpu)} GB: ${fitting.join(", ")}.` : `Nothing fits in ${shown(gpu)} GB.`);
}

function startMemory() {
  presets("memory-presets", [["ResNet-50", "25557032"], ["BERT large", "335e6"], ["7 billion", "7e9"], ["70 billion", "70e9"],
    ["GPT-3", "175e9"]], (text) => give("memory-params", text));
  onChange("memory", showMemory);
  register(showMemory);
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
  const head = tableRow("th", ["a scale for", "become 0, %", "subnormal, %", "saturate, %", "error, %"]);
  fillTable("fp8-table", head, data.scalings.map((scaling) => {
    const { zero, subnormal, saturated, error } = fp8Loss(rows, fmt, scaling);
    const row = tableRow("td", [scaling, ...[zero, subnormal, saturated, error].map((part) => percent(part))]);
    row.className = scaling === values.scaling ? "chosen" : "";
    return row;
  }));
}

function startFp8() {
  onChange("fp8", showFp8);
  register(showFp8);
}

// 8. A delayed scale.

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
    if (saturated) chart.add("path", { d: `M${cx - 5} ${cy - 5}l10 10m0 -10l-10 10`, stroke: "var(--alarm)", "stroke-width": 3 });
    else chart.add("circle", { cx, cy, r: 4, fill: "var(--mark)" });
  }
  chart.numbersBelow(x, 0, end, "iteration");
}

function outcomeOf(last) {
  if (!last) return "No iteration yet.";
  const found = `Iteration ${last.step}: the largest magnitude is ${shown(last.amax, 4)}, the scale ${shown(last.factor)}; it`;
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
