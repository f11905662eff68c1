// The loss scale's state machine: amp.kernels.update_scale.

const smallestScale = 2 ** -126;

class Scaler {
  constructor({ init = 2 ** 16, growth_factor = 2, backoff_factor = 0.5, growth_interval = 2000, hysteresis = 1,
    min = null, max = 2 ** 24 } = {}) {
    Object.assign(this, { growth_factor, backoff_factor, growth_interval, hysteresis });
    this.floor = min ?? smallestScale;
    this.scale = Math.fround(Math.min(init, max));
    this.ceiling = Math.max(max, this.scale);
    this.good = 0;
    this.left = hysteresis;
    this.trace = [];
  }

  step(overflow) {
    const before = this.scale;
    if (overflow) {
      this.good = 0;
      this.left = Math.max(this.left - 1, 0);
      if (this.left <= 0) {
        this.scale = Math.min(Math.fround(Math.max(before * this.backoff_factor, this.floor)), before);
      }
    } else {
      this.good += 1;
      if (this.good >= this.growth_interval) {
        this.scale = Math.max(Math.fround(Math.min(before * this.growth_factor, this.ceiling)), before);
        this.good = 0;
        this.left = this.hysteresis;
      }
    }
    this.trace.push({ step: this.trace.length, scale: before, overflow, next_scale: this.scale,
      good_steps: this.good, hysteresis_left: this.left });
  }
}

function simulate(steps, overflows, options) {
  const scaler = new Scaler(options);
  for (let i = 0; i < steps; i += 1) scaler.step(overflows.includes(i));
  return scaler.trace;
}

// Fates of numbers that are counted by their exponents: amp.numerics.Histogram.fates.

function fates(counts, fmt, log2Scale) {
  const lowest = fmt.min_exponent - fmt.mantissa_bits - (fmt.has_zero ? 1 : 1000);
  const found = { zero: 0, subnormal: 0, overflow: 0 };
  for (const [exponent, count] of counts) {
    const at = exponent + log2Scale;
    if (at < lowest) found.zero += count;
    if (lowest <= at && at < fmt.min_exponent && fmt.has_zero) found.subnormal += count;
    if (at > fmt.max_exponent) found.overflow += count;
  }
  return found;
}

function memory(params, optimizer, { activations = 0, world = 1, sharding = "none" } = {}) {
  const cut = ["none", "zero1", "zero2", "zero3"].indexOf(sharding);
  const share = (size, level) => (cut >= level ? Math.ceil(size / world) : size);
  return data.memory[optimizer].map((row) => {
    const terms = {
      weights: share(row.weights * params, 3),
      gradients: share(row.gradients * params, 2),
      masters: share(row.masters * params, 1),
      optimizer_state: share(row.optimizer_state * params, 1),
      activations: row.activations * activations,
      transient: row.transient * params,
    };
    const total = Object.values(terms).reduce((sum, term) => sum + term, 0);
    return { levels: row.levels, way: row.way, ...terms, total };
  });
}

// FP8: what quantization keeps, amp.numerics.fp8_losses.

function factorOf(amax, fmt) {
  if (!(amax < Infinity)) return NaN;
  return amax === 0 ? 1 : 2 ** Math.min(exponentOf(fmt.max / amax, formats.float32), 126);
}

function partOf(scaling) {
  const blocks = { "1x128": [1, 128], "128x128": [128, 128], "1x32": [1, 32] };
  return { tensor: [Infinity, Infinity], row: [1, Infinity], ...blocks }[scaling];
}

function quantize(rows, fmt, scaling) {
  const factors = new Map();
  const [down, across] = partOf(scaling) ?? [1, 1];
  const part = (i, j) => `${Math.floor(i / down)},${Math.floor(j / across)}`;
  if (scaling !== "none") {
    const amaxes = new Map();
    rows.forEach((row, i) => row.forEach((x, j) => {
      amaxes.set(part(i, j), Math.max(amaxes.get(part(i, j)) ?? 0, Math.abs(x)));
    }));
    for (const [key, amax] of amaxes) factors.set(key, factorOf(amax, fmt));
  }
  return rows.flatMap((row, i) => row.map((x, j) => {
    const factor = factors.get(part(i, j)) ?? 1;
    const scaled = x * factor;
    const kept = roundTo(Math.min(Math.max(scaled, -fmt.max), fmt.max), fmt);
    return { x, scaled, kept, value: kept / factor };
  }));
}

function fp8Loss(rows, fmt, scaling) {
  const found = quantize(rows, fmt, scaling);
  const counted = found.filter(({ x }) => x !== 0);
  const part = (isLost) => counted.filter(isLost).length / Math.max(counted.length, 1);
  const norm = found.reduce((sum, { x }) => sum + x * x, 0);
  const errors = counted.map(({ x, value }) => Math.abs(value - x) / Math.abs(x)).sort((a, b) => a - b);
  const usual = [...counted].sort((a, b) => Math.abs(a.x) - Math.abs(b.x))
    .slice(0, counted.length - Math.floor(counted.length / 50));
  const power = usual.reduce((sum, { x }) => sum + x * x, 0);
  const noise = usual.reduce((sum, { x, value }) => sum + (value - x) ** 2, 0);
  return {
    zero: part(({ kept }) => kept === 0),
    subnormal: part(({ kept }) => kept !== 0 && Math.abs(kept) < fmt.min_normal),
    saturated: part(({ scaled }) => Math.abs(scaled) > fmt.max),
    error: norm ? Math.sqrt(found.reduce((sum, { x, value }) => sum + (value - x) ** 2, 0) / norm) : 0,
    median: errors.length ? errors[Math.floor((errors.length - 1) / 2)] : 0,
    decibels: noise ? 10 * Math.log10(power / noise) : Infinity,
  };
}

// A delayed scale: amp.numerics.simulate_fp8.

class AmaxHistory {
  constructor(fmt, { amax_history = 16, amax_algo = "max", margin = 0 } = {}) {
    Object.assign(this, { fmt, amax_history, amax_algo, margin });
    this.past = [];
    this.trace = [];
  }

  step(given) {
    const amax = Math.fround(given);
    const known = this.amax_algo === "max" ? Math.max(0, ...this.past) : this.past[0] ?? 0;
    const current = factorOf(amax, this.fmt);
    const factor = known > 0 ? factorOf(known, this.fmt) * 2 ** -this.margin : current;
    const largest = amax * factor;
    if (amax > 0 && amax < Infinity) this.past = [amax, ...this.past].slice(0, this.amax_history);
    this.trace.push({ step: this.trace.length, amax, factor, current, largest, saturated: !(largest <= this.fmt.max) });
  }
}
