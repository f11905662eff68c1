// The same arithmetic as amp.numerics: float64 inside, of which all formats here are parts.

const data = JSON.parse(document.getElementById("data").textContent, (key, value) =>
  ({ "#inf": Infinity, "#-inf": -Infinity, "#nan": NaN })[value] ?? value);
const formats = Object.fromEntries(data.formats.map((fmt) => [fmt.name, fmt]));

function exponentOf(magnitude, fmt) {
  if (!(magnitude > 0)) return fmt.min_exponent;
  if (magnitude === Infinity) return fmt.max_exponent + 1;
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, magnitude);
  const exponent = (view.getUint32(0) >>> 20) - 1023;
  return Math.min(Math.max(exponent, fmt.min_exponent), fmt.max_exponent + 1);
}

function quantumOf(magnitude, fmt) {
  return 2 ** (exponentOf(magnitude, fmt) - fmt.mantissa_bits);
}

function nearestEven(units) {
  const low = Math.floor(units);
  const rest = units - low;
  if (rest !== 0.5) return rest < 0.5 ? low : low + 1;
  return low % 2 === 0 ? low : low + 1;
}

function withSign(magnitude, x) {
  return x < 0 || Object.is(x, -0) ? -magnitude : magnitude;
}

function toGrid(x, fmt, mode) {
  const magnitude = Math.abs(x);
  if (!Number.isFinite(magnitude)) return fmt.signed ? x : magnitude;
  const quantum = quantumOf(magnitude, fmt);
  const units = magnitude / quantum;
  let rounded = (mode === "toward_zero" ? Math.floor(units) : nearestEven(units)) * quantum;
  if (!fmt.has_zero) {
    rounded = Math.max(rounded, fmt.min_normal);
    if (mode !== "toward_zero" && magnitude > fmt.min_normal && magnitude < 2 * fmt.min_normal) {
      rounded = 2 * fmt.min_normal;
    }
  }
  return fmt.signed ? withSign(rounded, x) : rounded;
}

function roundTo(x, fmt, mode = "nearest") {
  if (Number.isNaN(x)) return fmt.nan === "none" ? -0 : NaN;
  let rounded = toGrid(x, fmt, mode);
  if (Math.abs(rounded) > fmt.max) {
    const largest = withSign(fmt.max, rounded);
    const beyond = { inf: withSign(Infinity, rounded), nan: NaN, saturate: largest }[fmt.overflow];
    rounded = mode === "toward_zero" && Number.isFinite(x) ? largest : beyond;
  }
  return fmt.nan === "negative_zero" && rounded === 0 ? 0 : rounded;
}

function encode(value, fmt) {
  const ones = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1;
  if (Number.isNaN(value)) return fmt.nan_pattern;
  const magnitude = Math.abs(value);
  const exponent = exponentOf(magnitude, fmt);
  let pattern;
  if (fmt.has_inf && magnitude === Infinity) {
    pattern = ones - (2 ** fmt.mantissa_bits - 1);
  } else if (!fmt.has_zero) {
    pattern = exponent - fmt.min_exponent;
  } else {
    pattern = (exponent - fmt.min_exponent) * 2 ** fmt.mantissa_bits + magnitude / quantumOf(magnitude, fmt);
  }
  const negative = fmt.signed && (value < 0 || Object.is(value, -0));
  return pattern + (negative ? ones + 1 : 0);
}

function decode(pattern, fmt) {
  const unit = 2 ** fmt.mantissa_bits;
  const span = 2 ** (fmt.exponent_bits + fmt.mantissa_bits);
  const magnitude = pattern % span;
  const exponent = Math.floor(magnitude / unit);
  const mantissa = magnitude % unit;
  const negative = fmt.signed && pattern >= span;
  if (fmt.nan === "negative_zero" && pattern === fmt.nan_pattern) return NaN;
  if (fmt.nan === "all_ones" && magnitude === span - 1) return NaN;
  let value;
  if (fmt.has_inf && exponent === 2 ** fmt.exponent_bits - 1) {
    value = mantissa ? NaN : Infinity;
  } else {
    const normal = exponent > 0 || !fmt.has_zero;
    const power = exponent - fmt.bias + (normal ? 0 : 1) - fmt.mantissa_bits;
    value = (mantissa + (normal ? unit : 0)) * 2 ** power;
  }
  return negative ? -value : value;
}

function bits(x, fmt) {
  const value = roundTo(x, fmt);
  const pattern = encode(value, fmt);
  const span = 2 ** (fmt.exponent_bits + fmt.mantissa_bits);
  const exponent = Math.floor((pattern % span) / 2 ** fmt.mantissa_bits);
  const mantissa = pattern % 2 ** fmt.mantissa_bits;
  return {
    pattern, exponent, mantissa, value,
    sign: Math.floor(pattern / span),
    error: value - x,
    overflow: Number.isFinite(x) && Math.abs(toGrid(x, fmt)) > fmt.max,
    underflow: value === 0 && x !== 0 && Number.isFinite(x),
    subnormal: fmt.has_zero && exponent === 0 && mantissa !== 0 && Number.isFinite(value),
  };
}

function ulp(x, fmt) {
  if (!Number.isFinite(x)) return Math.abs(x);
  return quantumOf(Math.min(Math.abs(toGrid(x, fmt, "toward_zero")), fmt.max), fmt);
}

function above(x, fmt) {
  if (Number.isNaN(x) || x === Infinity) return NaN;
  const magnitude = Math.abs(x);
  if (x < -fmt.max) return -fmt.max;
  const quantum = quantumOf(magnitude, fmt);
  const low = Math.floor(magnitude / quantum) * quantum;
  if (x < 0) {
    if (low < magnitude) return -low + 0;
    const atPower = magnitude === 2 ** exponentOf(magnitude, fmt) && magnitude > fmt.min_normal;
    return -(magnitude - (atPower ? quantum / 2 : quantum)) + 0;
  }
  return low + quantum > fmt.max ? (fmt.has_inf ? Infinity : NaN) : low + quantum;
}

function neighbours(x, fmt) {
  let [below, next] = [-above(-x, fmt) + 0, above(x, fmt)];
  if (!fmt.signed) {
    if (x <= fmt.min_normal) below = NaN;
    if (x < fmt.min_normal) next = fmt.min_normal;
  }
  return [below, next];
}

function survivesUpdate(w, dw, fmt) {
  const weight = roundTo(w, fmt);
  const updated = roundTo(weight + dw, fmt);
  return updated !== weight && !(Number.isNaN(updated) && Number.isNaN(weight));
}
