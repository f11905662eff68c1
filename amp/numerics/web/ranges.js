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
  const sum = `${shown(weight)} ${update < 0 ? "\u2212" : "+"} ${shown(Math.abs(update))} = ${shown(exact)}`;
  const [look, words] = counts ? ["kept", "The update counts."] : ["lost", "The update is lost."];
  const verdict = element("strong", { class: look }, words);
  say("ulps-out", [verdict, ...rich(` ${sum}, kept as ${shown(updated)}.`)],
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
