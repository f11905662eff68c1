// 8. FP4: what quantization keeps, amp.kernels.quantize_fp4 in blocks of 1x16.

const { signs, rounds, multipliers, weyl } = data.fp4;
const { float4_e2m1fn: e2m1, float8_e4m3fn: e4m3 } = formats;

// Four random words: amp.kernels.philox.
function philox(counter, key) {
  const word = (x) => BigInt.asUintN(32, x);
  let [a, b, c, d] = counter.map(BigInt);
  for (let i = 0; i < rounds; i += 1) {
    const [low, high] = weyl.map((step, j) => word(BigInt(key[j]) + BigInt(i) * BigInt(step)));
    const [ofA, ofC] = [a * BigInt(multipliers[0]), c * BigInt(multipliers[1])];
    [a, b, c, d] = [(ofC >> 32n) ^ b ^ low, word(ofC), (ofA >> 32n) ^ d ^ high, word(ofA)];
  }
  return [a, b, c, d].map(Number);
}

// The bytes of a block in a call of a layer; the 1 is for an operand by column, as in a weight's gradient.
function randomBytes(block, call, name = 0, key = [0, 0]) {
  return philox([block, call, name, 1], key).flatMap((word) => [0, 8, 16, 24].map((shift) => (word >>> shift) & 255));
}

function hadamard(numbers) {
  let y = numbers.map((x, i) => x * signs[i % 16]);
  for (const half of [1, 2, 4, 8]) {
    y = y.map((x, i) => Math.fround(i & half ? y[i - half] - x : x + y[i + half]));
  }
  return y.map((x) => roundTo(Math.fround(x * 0.25), formats.bfloat16));
}

// A tensor's numbers times their scales. All is FP32.
function scaleFp4(numbers) {
  const round = Math.fround;
  const largestOf = (some) => some.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
  const below = (x, most) => Math.min(round(x), most);
  const largest = largestOf(numbers);
  const found = largest === 0 ? 1 : below(e2m1.max * e4m3.max / largest, formats.float32.max);
  const encode = found === 0 ? 1 : found;
  const outer = round(1 / encode);
  return numbers.map((x, i) => {
    const amax = largestOf(numbers.slice(i - (i % 16), i - (i % 16) + 16));
    const scale = roundTo(below(amax * round(encode * round(1 / e2m1.max)), e4m3.max), e4m3);
    const factor = below(1 / round(scale * outer), formats.float32.max);
    return { x, scale, outer, scaled: round(x * factor) };
  });
}

// One of them in E2M1: rounded to nearest, or by a random byte.
function roundFp4({ scaled, scale, outer }, byte = null) {
  const size = Math.min(Math.abs(scaled), e2m1.max);
  let kept = size;
  if (byte === null) kept = roundTo(size, e2m1);
  else {
    const raised = Math.fround(size + (byte / 256) * quantumOf(size, e2m1));
    const step = quantumOf(raised, e2m1);
    kept = Math.min(Math.floor(raised / step) * step, e2m1.max);
  }
  kept = withSign(kept, scaled);
  return { kept, value: Math.fround(Math.fround(kept * scale) * outer) };
}

// The figure: a gradient's block, a tensor that has it, and a block of an input.

const fp4Places = Array.from({ length: 16 }, (_, i) => i);
const fp4Input = fp4Places.map((i) => Math.fround(normalAt((((9 * i + 1) % 16) + 0.5) / 16)));
const fp4Drawn = [];

function fp4Gradient({ mean, spread, outlier }) {
  return fp4Places.map((i) => Math.fround((i % 5 && i % 5 !== 3 ? 1 : -1) *
    2 ** (mean + spread * normalAt((((5 * i) % 16) + 0.5) / 16) + (i === 5 ? outlier : 0))));
}

// The block in a tensor that has another one, with one number. A block with a scale of 0 is lost.
function inTensor(numbers, largest, transform) {
  const found = scaleFp4(transform([...numbers, largest, ...Array(15).fill(0)])).slice(0, 16);
  return found.map((each) => (each.scale ? each : { ...each, scaled: 0 }));
}

function toNearest(scaled) {
  const last = scaled.map((each) => roundFp4(each));
  return { last, mean: last.map(({ value }) => value) };
}

// The last draw, and the mean of all.
function atRandom(scaled, draws) {
  const known = scaled.map(() => []); // by bytes
  let last;
  const sums = Array(16).fill(0);
  for (let call = 0; call < draws; call += 1) {
    fp4Drawn[call] ??= randomBytes(0, call);
    last = scaled.map((each, i) => (known[i][fp4Drawn[call][i]] ??= roundFp4(each, fp4Drawn[call][i])));
    last.forEach(({ value }, i) => { sums[i] += value; });
  }
  return { last, mean: sums.map((sum) => sum / draws) };
}

const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

const inCodes = (x, { scale, outer }) => (scale ? x / (scale * outer) : 0);

function drawBlock(scaled, { last, mean }) {
  const chart = new Chart("fp4-chart", 360, { left: 30, right: 8, top: 34 });
  const y = linear([-6.6, 6.6], [chart.bottom, chart.top]);
  const x = linear([0.5, 16.5], [chart.left, chart.right]);
  for (let pattern = 0; pattern < 16; pattern += 1) {
    const value = decode(pattern, e2m1);
    chart.line(chart.left, y(value), chart.right, y(value));
    if (Number.isInteger(value) && !Object.is(value, -0)) {
      chart.text(chart.left - 8, y(value) + 4, shown(value), "end", "dim");
    }
  }
  chart.text(0, 12, "number divided by its scales");
  const wide = x(2) - x(1);
  scaled.forEach((each, i) => {
    const [from, middle] = [x(i + 1) - 0.42 * wide, x(i + 1) + 0.08 * wide];
    chart.bar(from, y(0), middle, y(each.scaled), { fill: "var(--accent)" });
    chart.bar(middle, y(0), middle + 0.3 * wide, y(last[i].kept), { fill: "var(--soft)" });
    chart.add("circle", { cx: (from + middle) / 2, cy: y(inCodes(mean[i], each)), r: 4, fill: "var(--mark)",
      stroke: "var(--panel)" });
  });
  chart.line(chart.left, y(0), chart.right, y(0), { stroke: "var(--edge)" });
  chart.numbersBelow(x, 1, 16, "place in the block");
}

function fillFp4Tables(scaled, { last, mean }, products, rounding) {
  const head = tableRow("th", ["number", "divided by scales", "in E2M1", "mean of draws"]);
  fillTable("fp4-table", head, scaled.map((each, i) =>
    tableRow("td", [each.x, each.scaled, last[i].kept, inCodes(mean[i], each)].map((x) => shown(x + 0, 4)))));
  const columns = tableRow("th", ["product", "as it is", "with Hadamard"]);
  const [plain, turned] = products;
  fillTable("fp4-products", columns, ["before FP4", "nearest", "stochastic, mean"].map((name, i) => {
    const row = tableRow("td", [name, shown(plain[i], 4), shown(turned[i], 4)]);
    row.className = name.startsWith(rounding) ? "chosen" : "";
    return row;
  }));
}

// The block, perhaps transformed: what rounding makes of it, and of its product with the input's.
function fp4Way(values, transform) {
  const scaled = inTensor(fp4Gradient(values), 2 ** values.largest, transform);
  const input = transform(fp4Input);
  const ways = { nearest: toNearest(scaled), stochastic: atRandom(scaled, values.draws) };
  const products = [scaled.map(({ x }) => x), ways.nearest.mean, ways.stochastic.mean].map((block) => dot(block, input));
  return { scaled, ...ways, products };
}

function sayFp4(scaled, { last, mean }, draws) {
  const numbers = scaled.map(({ x }) => x);
  const error = (found) => {
    const off = found.map((value, i) => value - numbers[i]);
    return `${percent(Math.sqrt(dot(off, off) / dot(numbers, numbers)))} %`;
  };
  const { scale, outer } = scaled[0];
  const lost = last.filter(({ value }) => value === 0).length;
  const cut = scaled.filter((each) => Math.abs(each.scaled) > e2m1.max).length;
  say("fp4-out", `The block's scale is ${shown(scale)}, the tensor's ${shown(outer, 4)}.`,
    `Of 16 numbers ${lost} become 0${cut ? `, and ${cut} are cut off at 6, as their scale was rounded down` : ""}.`,
    `The error is ${error(last.map(({ value }) => value))} of the block's norm` +
    (draws ? `; that of the mean of ${draws} is ${error(mean)}.` : ", each time."));
}

function showFp4() {
  const values = read("fp4");
  if (!values) return;
  const ways = [(numbers) => numbers, hadamard].map((transform) => fp4Way(values, transform));
  const chosen = ways[Number(values.hadamard)];
  const drawn = chosen[values.rounding];
  drawBlock(chosen.scaled, drawn);
  sayFp4(chosen.scaled, drawn, values.rounding === "stochastic" && values.draws);
  fillFp4Tables(chosen.scaled, drawn, ways.map(({ products }) => products), values.rounding);
  for (const id of ["fp4-draw", "fp4-more"]) $(id).disabled = values.draws >= Number($("fp4-draws").dataset.max);
}

function startFp4() {
  const most = Number($("fp4-draws").dataset.max);
  const more = (count) => give("fp4-draws", String(Math.min((numberOf($("fp4-draws")) ?? 0) + count, most)));
  $("fp4-draw").addEventListener("click", () => more(1));
  $("fp4-more").addEventListener("click", () => more(100));
  $("fp4-reset").addEventListener("click", () => give("fp4-draws", "1"));
  onChange("fp4", showFp4);
  register(showFp4);
}
