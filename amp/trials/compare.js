"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const run = data.levels.filter((level) => Object.keys(level.losses).length);

// Numbers that are not finite come as words.
const number = (x) => ({ inf: Infinity, "-inf": -Infinity, nan: NaN })[x] ?? x;

function short(x, digits = 2) {
  const value = number(x);
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value).replace("Infinity", "inf");
  const rounded = Number(value.toPrecision(digits));
  return rounded && Math.abs(rounded) < 1e-3 ? rounded.toExponential() : String(rounded);
}

const percent = (x) => (x === null ? "–" : `${(100 * number(x)).toFixed(1)} %`);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function table(holder, header, rows) {
  const head = element("tr", {}, ...header.map((text) => element("th", { scope: "col" }, text)));
  const cell = (value) => (value instanceof Node ? value : element("td", {}, value));
  holder.replaceChildren(
    element("thead", {}, head),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell)))),
  );
}

// 1. What was found.

byId("about").textContent = `${data.steps} steps on ${data.device}, seed ${data.seed}; compared with the same run in ${data.reference}.`;
byId("recommended").textContent = `Recommended: ${data.recommended ?? "none"}.`;
byId("reason").textContent = data.reason;

table(
  byId("levels-table"),
  ["level", "", "loss gap", "allowed", "gradient error", "median of modules", "skipped", "stand still"],
  data.levels.map((level) => {
    const found = run.includes(level) ? "worse" : "not run";
    const verdict = level.healthy ? ["healthy", "good"] : [found, "bad"];
    const skipped = level.scale_search ? `${level.skipped}, and ${level.scale_search} for the scale` : `${level.skipped}`;
    return [
      level.level, element("td", { class: verdict[1] }, verdict[0]), short(level.loss_gap), short(level.loss_gap_allowed),
      short(level.gradient_error), short(level.median_error), skipped, percent(level.still),
    ];
  }),
);
for (const level of data.levels) {
  for (const each of [...level.problems, ...level.remarks]) {
    const mark = level.healthy ? ", healthy: " : ": ";
    byId("problems").append(element("li", {}, element("b", {}, level.level), mark + each.what));
  }
}
byId("notes").append(...data.notes.map((note) => element("li", {}, note)));

// 2. The loss. Lines differ in colour and in dashes.

const colours = ["--ink", "--exponent", "--sign", "--mantissa", "--mark", "--soft", "--alarm", "--dim"];
const dashes = ["", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 4"];
const look = (i) => `stroke: var(${colours[i % colours.length]}); stroke-dasharray: ${dashes[i % dashes.length] || "none"}`;
const shown = new Set(run.map((level) => level.level));
const names = Object.keys(data.reference_losses);
byId("loss-name").append(...names.map((name) => element("option", { value: name }, name)));

for (const [i, level] of run.entries()) {
  const sample = drawn("svg", { width: 28, height: 10, "aria-hidden": "true", style: "width: 28px; display: inline" });
  sample.append(drawn("line", { x1: 0, x2: 28, y1: 5, y2: 5, "stroke-width": 2.5, style: look(i) }));
  const box = element("input", { type: "checkbox" });
  box.checked = true;
  box.addEventListener("change", () => {
    if (box.checked) shown.add(level.level);
    else shown.delete(level.level);
    drawLoss();
  });
  byId("loss-levels").append(element("label", {}, box, sample, level.level));
}

function linesOf(name, kind) {
  const reference = data.reference_losses[name].map(number);
  return run.map((level) => {
    const losses = (level.losses[name] ?? []).map(number);
    return kind === "value" ? losses : losses.map((loss, i) => Math.abs(loss - reference[i]));
  });
}

function scaleOf(values, log) {
  const at = (x) => (log ? Math.log10(x) : x);
  let [low, high] = [Math.min(...values.map(at)), Math.max(...values.map(at))];
  if (log) [low, high] = [Math.floor(low), Math.ceil(high)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const decades = Math.ceil((high - low) / 6);
  if (log && decades) {
    const powers = Array.from({ length: Math.floor((high - low) / decades) + 1 }, (_, i) => low + i * decades);
    return { y: (x) => 275 - (255 * (at(x) - low)) / (high - low), ticks: powers.map((power) => 10 ** power) };
  }
  const ticks = Array.from({ length: 5 }, (_, i) => low + ((high - low) * i) / 4);
  return { y: (x) => 275 - (255 * (at(x) - low)) / (high - low), ticks: ticks.map((t) => (log ? 10 ** t : t)) };
}

function drawLoss() {
  const [name, kind] = [byId("loss-name").value, byId("loss-kind").value];
  const log = kind === "gap";
  const lines = linesOf(name, kind);
  const fits = (x) => Number.isFinite(x) && (!log || x > 0);
  const values = lines.filter((_, i) => shown.has(run[i].level)).flat().filter(fits);
  const chart = byId("loss-chart");
  chart.replaceChildren();
  if (!values.length) {
    byId("loss-out").textContent = log ? "No run that is shown differs from the reference." : "Nothing is shown.";
    return;
  }
  const { y, ticks } = scaleOf(values, log);
  const last = Math.max(data.steps - 1, 1);
  const x = (step) => 120 + (560 * step) / last;
  for (const tick of ticks) {
    chart.append(drawn("line", { x1: 120, x2: 680, y1: y(tick), y2: y(tick), style: "stroke: var(--line)" }));
    chart.append(drawn("text", { x: 112, y: y(tick) + 4, "text-anchor": "end", class: "dim small" }, short(tick, log ? 1 : 3)));
  }
  for (const step of [0, Math.round(last / 2), last]) {
    chart.append(drawn("text", { x: x(step), y: 300, "text-anchor": "middle", class: "dim small" }, `step ${step}`));
  }
  lines.forEach((line, i) => {
    if (!shown.has(run[i].level)) return;
    let path = "";
    let pen = "M";
    line.forEach((value, step) => {
      path += fits(value) ? `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}` : "";
      pen = fits(value) ? "L" : "M";
    });
    chart.append(drawn("path", { d: path, fill: "none", "stroke-width": 2, style: look(i), "data-level": run[i].level }));
  });
  const ends = run.filter((level) => shown.has(level.level)).map((level) => {
    const losses = level.losses[name] ?? [];
    return `${level.level} ${short(losses[losses.length - 1], 5)}`;
  });
  byId("loss-out").textContent = `Last loss: ${ends.join(", ")}; ${data.reference} ${short(data.reference_losses[name].at(-1), 5)}.`;
}

byId("loss-name").addEventListener("change", drawLoss);
byId("loss-kind").addEventListener("change", drawLoss);
drawLoss();

// 3. A heat map: the darker, the further off, from 1e-4 to 1.

function heatOf(error) {
  if (error === null || error === undefined) return 0;
  if (!Number.isFinite(error)) return 1;
  return Math.min(Math.max((Math.log10(error || 1e-12) + 4) / 4, 0), 1);
}

function drawModules() {
  const names = [...new Set(run.flatMap((level) => level.modules.map((each) => each.module)))];
  const found = new Map(run.map((level) => [level, new Map(level.modules.map((each) => [each.module, each]))]));
  const rows = names.map((name) => {
    const cells = run.map((level) => found.get(level).get(name));
    const heats = cells.map((each) => heatOf(number(each?.error ?? null)));
    return { name, cells, heats, worst: Math.max(...heats) };
  });
  if (byId("modules-order").value === "worst") rows.sort((a, b) => b.worst - a.worst).splice(20);
  table(
    byId("modules-table"),
    ["module", ...run.map((level) => level.level)],
    rows.map(({ name, cells, heats }) => [
      name,
      ...cells.map((each, i) => {
        const style = `background: color-mix(in srgb, var(--alarm) ${Math.round(60 * heats[i])}%, transparent)`;
        return element("td", { style, class: each?.stands_out ? "out" : "" }, short(each?.error ?? null, 2));
      }),
    ]),
  );
  byId("modules-hint").textContent = "|g − r| / |r| at the first step, where the weights are the same. A frame marks what is too large. A dash is a gradient of 0. Colours run from clear to full for 0.0001 to 1.";
}

byId("modules-order").addEventListener("change", drawModules);
drawModules();

// 4. Time and memory.

const elsewhere = data.device === "cpu" ? " On a GPU they differ: half precision is usually faster there." : "";
byId("cost-about").textContent = `Measured on ${data.device}.${elsewhere}`;

const parts = ["weights", "gradients", "optimizer_state", "activations", "peak", "total"]
  .filter((part) => run.some((level) => level.memory[part]));
const largest = Math.max(...run.flatMap((level) => parts.map((part) => level.memory[part] ?? 0)));
const [unit, bytes] = largest < 1e6 ? ["KB", 1e3] : ["MB", 1e6];
const inUnits = (size) => (size === undefined ? "–" : (size / bytes).toFixed(1));
table(
  byId("cost-table"),
  ["level", "ms a step", ...parts.map((part) => `${part.replace("_", " ")}, ${unit}`)],
  run.map((level) => [
    level.level,
    level.seconds === null ? "–" : (1e3 * level.seconds).toFixed(1),
    ...parts.map((part) => inUnits(level.memory[part])),
  ]),
);

const slowest = Math.max(...run.map((level) => level.seconds ?? 0)) || 1;
const costs = byId("cost-chart");
costs.setAttribute("viewBox", `0 0 720 ${28 * run.length + 8}`);
run.forEach((level, i) => {
  const width = (520 * (level.seconds ?? 0)) / slowest;
  costs.append(drawn("text", { x: 0, y: 28 * i + 20 }, level.level.slice(-12)));
  costs.append(drawn("rect", { x: 110, y: 28 * i + 6, width, height: 18, style: "fill: var(--accent)" }));
  const text = level.seconds === null ? "" : `${(1e3 * level.seconds).toFixed(1)} ms`;
  costs.append(drawn("text", { x: 118 + width, y: 28 * i + 20, class: "small" }, text));
});
