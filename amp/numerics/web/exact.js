// Numbers as they are typed, and as they are written without any rounding.

const typedForms = "3.14159, 1e-8, 1/3, 2^-24, 0x1p-24, inf or nan";
const decimalForm = String.raw`(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?`;
const powerForm = new RegExp(String.raw`^(?:(${decimalForm})\s*[×*]\s*)?(2|10)(?:\^|\*\*)([+-]?\d+(?:\.\d+)?)$`);

// m * 2^e of integers, rounded once to float64.
function ldexp(m, e) {
  const dropped = Math.max(m.toString(2).length - 53, -1074 - e, 0);
  if (dropped > 0) {
    const unit = 1n << BigInt(dropped);
    const rest = 2n * (m % unit);
    m /= unit;
    if (rest > unit || (rest === unit && m % 2n === 1n)) m += 1n;
    e += dropped;
  }
  return m === 0n ? 0 : Number(m) * 2 ** Math.min(e, 1024);
}

function parseHexFloat(whole, fraction, exponent) {
  const m = BigInt(`0x${whole}${fraction}` === "0x" ? "0" : `0x${whole}${fraction}`);
  return ldexp(m, Number(exponent) - 4 * fraction.length);
}

function parseMagnitude(text) {
  if (/^inf(inity)?$/.test(text)) return Infinity;
  if (new RegExp(`^${decimalForm}$`).test(text)) return Number(text);
  const hex = text.match(/^0x([0-9a-f]*)\.?([0-9a-f]*)p([+-]?\d+)$/);
  if (hex && (hex[1] || hex[2])) return parseHexFloat(...hex.slice(1));
  const power = text.match(powerForm);
  if (!power) return undefined;
  const [, factor = "1", base, exponent] = power;
  const isDecimal = base === "10" && Number.isInteger(Number(exponent)) && !factor.includes("e");
  return isDecimal ? Number(`${factor}e${exponent}`) : Number(factor) * Number(base) ** Number(exponent);
}

function parseSigned(text) {
  const sign = text.startsWith("-") ? -1 : 1;
  const magnitude = parseMagnitude(text.replace(/^[+-]\s*/, ""));
  return magnitude === undefined ? undefined : sign * magnitude;
}

// The number that a text means. Throws a RangeError that says what is allowed.
function parseNumber(text) {
  const plain = text.trim().toLowerCase().replaceAll("\u2212", "-");
  if (/^[+-]?nan$/.test(plain)) return NaN;
  const parts = plain.split("/").map((part) => parseSigned(part.trim()));
  if (parts.length > 2 || parts.includes(undefined)) {
    const problem = plain === "" ? "Nothing is typed" : `“${text}” is not a number`;
    throw new RangeError(`${problem}; try ${typedForms}.`);
  }
  if (parts.length === 1) return parts[0];
  if (parts[1] === 0) throw new RangeError(`“${text}” divides by 0; write inf for an infinity.`);
  return parts[0] / parts[1];
}

// The pattern that 0x3c00 means, or null where a text is no such form.
function parsePattern(text, fmt) {
  const plain = text.trim().toLowerCase();
  if (!/^0x[0-9a-f]+$/.test(plain)) return null;
  const pattern = BigInt(plain);
  if (pattern >= 1n << BigInt(fmt.bits)) {
    throw new RangeError(`“${text}” has more than the ${fmt.bits} bits of ${fmt.name}.`);
  }
  return Number(pattern);
}

// The finite |x| as m * 2^e, m an integer.
function integerAndExponent(x) {
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, Math.abs(x));
  const pattern = view.getBigUint64(0);
  const exponent = Number(pattern >> 52n);
  const fraction = pattern & ((1n << 52n) - 1n);
  return exponent === 0 ? [fraction, -1074] : [fraction | (1n << 52n), exponent - 1075];
}

const signOf = (x) => (x < 0 || Object.is(x, -0) ? "-" : "");

function notFinite(x) {
  return Number.isNaN(x) ? "nan" : `${signOf(x)}inf`;
}

// All decimal digits of x: a float of any format has finitely many.
function exactDecimal(x) {
  if (!Number.isFinite(x)) return notFinite(x);
  let [m, e] = integerAndExponent(x);
  while (m !== 0n && m % 2n === 0n && e < 0) [m, e] = [m / 2n, e + 1];
  if (m === 0n) return `${signOf(x)}0`;
  if (e >= 0) return `${signOf(x)}${m << BigInt(e)}`;
  const digits = String(m * 5n ** BigInt(-e)).padStart(1 - e, "0");
  return `${signOf(x)}${digits.slice(0, e)}.${digits.slice(e)}`;
}

// As C's %a writes it: 0x1.92p+1.
function hexFloat(x) {
  if (!Number.isFinite(x)) return notFinite(x);
  let [m, e] = integerAndExponent(x);
  if (m === 0n) return `${signOf(x)}0x0p+0`;
  const length = m.toString(2).length;
  e += length - 1;
  const hex = ((m << BigInt(53 - length)) & ((1n << 52n) - 1n)).toString(16).padStart(13, "0").replace(/0+$/, "");
  return `${signOf(x)}0x1${hex ? `.${hex}` : ""}p${e < 0 ? "-" : "+"}${Math.abs(e)}`;
}

const hexPattern = (pattern, fmt) => `0x${pattern.toString(16).padStart(Math.ceil(fmt.bits / 4), "0")}`;

// For eyes: at most `digits` significant digits, powers marked as in 10^{-8}.
function shown(x, digits = 9) {
  if (!Number.isFinite(x)) return minus(notFinite(x));
  if (Object.is(x, -0)) return minus("-0");
  const text = String(x).length <= digits + 3 ? String(x) : String(Number(x.toPrecision(digits)));
  const [factor, exponent] = text.split("e");
  return minus(exponent === undefined ? factor : `${factor}\u00a0×\u00a010^{${Number(exponent)}}`);
}

const minus = (text) => text.replaceAll("-", "\u2212");
const percent = (part, whole = 1) => ((100 * part) / whole).toFixed(2);
