// 6. Memory.

const termColours = { weights: "accent", gradients: "mantissa", masters: "mark", optimizer_state: "soft",
  activations: "sign", transient: "dim" };
const termHeads = { weights: "weights", gradients: "grads", masters: "masters", optimizer_state: "state",
  activations: "kept", transient: "peak" };
const nameOf = (row) => `${row.levels.join(" ")}, ${row.way}`.replace("BF16 moments", "bfloat16").replace("packed moments", "packed16");
const gigabytes = (size) => (size / 1e9).toFixed(size < 1e12 ? 2 : 0);

function drawMemory(rows, limit) {
  const step = 42; // a bar, and its name above it
  const chart = new Chart("memory-chart", 28 + rows.length * step + 56, { left: 0, right: 62, top: 24 });
  const top = Math.max(...rows.map((row) => row.total), limit) / 1e9;
  const at = linear([0, top], [chart.left, chart.right]);
  rows.forEach((row, i) => {
    const y = 46 + i * step;
    let sum = 0;
    for (const [term, colour] of Object.entries(termColours)) {
      const [from, to] = [at(sum / 1e9), at((sum + row[term]) / 1e9)];
      if (to > from) chart.bar(from, y, to, y + 16, { fill: `var(--${colour})`, class: "part" });
      sum += row[term];
    }
  });
  chart.line(at(limit / 1e9), 18, at(limit / 1e9), chart.bottom, { stroke: "var(--ink)", "stroke-dasharray": "6 4" });
  chart.text(at(limit / 1e9), 13, `${shown(limit / 1e9)} GB`, "middle");
  rows.forEach((row, i) => { // after the line, which they interrupt
    const look = row.total > limit ? "alarm halo" : "halo";
    chart.text(at(row.total / 1e9) + 6, 59 + i * step, gigabytes(row.total), "start", look);
    chart.text(0, 41 + i * step, nameOf(row), "start", "halo");
  });
  chart.numbersBelow(at, 0, top, "GB in each process", false);
}

// The roles are said, because a style that makes a row a grid takes them away.
function tableRow(tag, texts, looks = []) {
  const cell = (text, i) => {
    const [name, role] = tag === "th" ? ["th", "columnheader"] : i === 0 ? ["th", "rowheader"] : ["td", "cell"];
    return element(name, { role, ...(looks[i] ? { class: looks[i] } : {}) }, ...nodes(text));
  };
  return element("tr", { role: "row" }, ...texts.map(cell));
}

function fillTable(id, head, rows) {
  $(id).setAttribute("role", "table");
  $(id).replaceChildren(element("thead", { role: "rowgroup" }, head), element("tbody", { role: "rowgroup" }, ...rows));
}

function fillMemoryTable(rows, limit) {
  const terms = Object.keys(termColours);
  const heads = ["GB", "total", "verdict", ...Object.values(termHeads)];
  const head = tableRow("th", heads, ["", "", "", ...terms.map((term) => termColours[term])]);
  fillTable("memory-table", head, rows.map((row) => {
    const fits = row.total <= limit;
    const verdict = fits ? "fits" : "too large";
    const sizes = terms.map((term) => gigabytes(row[term]));
    return tableRow("td", [nameOf(row), gigabytes(row.total), verdict, ...sizes], ["", "", fits ? "kept" : "lost"]);
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
  const fitting = rows.filter((row) => row.total <= limit);
  const level = data.first.find((each) => fitting.some((row) => row.levels.includes(each)));
  const place = `in ${shown(gpu)} GB`;
  if (!fitting.length) say("memory-out", `Nothing fits ${place}.`);
  else if (!level) {
    const others = fitting.map((row) => `${row.levels.join(" ")} with ${row.way}`).join(", ");
    say("memory-out", `None of ${data.first.join(", ")} fits ${place}; ${others} would.`);
  } else { // what reamp memory recommends
    const row = fitting.find(({ levels }) => levels.includes(level));
    say("memory-out", `${level} with ${row.way} fits ${place}, with ${gigabytes(limit - row.total)} GB to spare.`);
  }
}

function startMemory() {
  const models = [["ResNet-50", "25557032"], ["BERT large", "335e6"], ["7 billion", "7e9"], ["70 billion", "70e9"],
    ["GPT-3", "175e9"]];
  presets("memory-presets", models, (text) => give("memory-params", text));
  onChange("memory", showMemory);
  register(showMemory);
}
