// 1. Bits.

// What to type for a pattern: the number, or the pattern itself where the number means another one.
function textOf(pattern, fmt) {
  const value = decode(pattern, fmt);
  if (encode(roundTo(value, fmt), fmt) !== pattern) return hexPattern(pattern, fmt);
  return plainText(value);
}

function plainText(value) {
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
  const normal = exponent > 0 || !fmt.has_zero;
  return { unit, exponent, mantissa: pattern % unit, sign: Math.floor(pattern / span), normal };
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
  const fraction = [` × (${normal ? 1 : 0} + `, coloured("mantissa", String(mantissa)), `/${unit})`];
  const significand = fmt.mantissa_bits ? fraction : [];
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
    const typed = $("bits-number").value;
    const isPattern = /^\s*0x[0-9a-f]+\s*$/i.test(typed) && Number(typed) < 2 ** before.bits;
    if (isPattern) $("bits-number").value = plainText(decode(Number(typed), before));
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
