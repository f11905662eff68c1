// Every number of the shared table, by these functions and by the library's.

const same = (a, b) => Object.is(a, b) || a === b || (Number.isNaN(a) && Number.isNaN(b));
const within = (relative, absolute = 0) => (a, b) => same(a, b) || Math.abs(a - b) <= relative * Math.abs(b) + absolute;
const near = within(1e-6, 64);
const alike = within(1e-9);

function checkNumbers(vectors, compare) {
  const keys = ["pattern", "sign", "exponent", "mantissa", "value", "overflow", "underflow", "subnormal"];
  for (const v of vectors) {
    const fmt = formats[v.format];
    const found = bits(v.x, fmt);
    const [below, next] = neighbours(v.x, fmt);
    for (const key of keys) compare(`${v.format} ${v.x} ${key}`, found[key], v[key]);
    compare(`${v.format} ${v.x} decoded`, decode(v.pattern, fmt), v.value);
    compare(`${v.format} ${v.x} ulp`, ulp(v.x, fmt), v.ulp);
    compare(`${v.format} ${v.x} below`, below, v.below);
    compare(`${v.format} ${v.x} above`, next, v.above);
    compare(`${v.format} ${v.x} survives`, survivesUpdate(v.x, v.update, fmt), v.survives);
  }
}

function checkTraces(vectors, compare) {
  for (const v of vectors) {
    simulate(v.steps, v.overflows, v.options).forEach((step, i) => {
      compare(`step ${i}`, step.next_scale, v.scales[i]);
      compare(`step ${i} good`, step.good_steps, v.good[i]);
    });
  }
}

function checkFates(vectors, counts, compare) {
  for (const v of vectors) {
    const found = fates(counts, formats[v.format], v.log2_scale);
    for (const key of ["zero", "subnormal", "overflow"]) compare(`${v.format} ${key}`, found[key], v[key]);
  }
}

function checkMemory(vectors, compare) {
  for (const v of vectors) {
    memory(v.params, v.optimizer, v.options).forEach((row, i) => {
      for (const key of Object.keys(v.rows[i])) compare(`memory ${key}`, row[key], v.rows[i][key], near);
    });
  }
}

function checkFp8(vectors, compare) {
  for (const v of vectors) {
    for (const loss of v.losses) {
      const found = fp8Loss(v.x, formats[loss.format], loss.scaling);
      for (const key of Object.keys(found)) {
        compare(`${loss.format} ${loss.scaling} ${key}`, found[key], loss[key], alike);
      }
    }
  }
}

function checkFp4(vectors, compare) {
  for (const v of vectors) {
    const numbers = v.hadamard ? hadamard(v.x) : v.x;
    scaleFp4(numbers).forEach((each, i) => {
      const block = Math.floor(i / 16);
      const byte = v.key ? randomBytes(block, v.call, v.name, v.key)[i % 16] : null;
      const found = { number: each.x, scale: each.scale, outer: each.outer, byte, ...roundFp4(each, byte) };
      for (const key of Object.keys(v.rows[i])) compare(`FP4 ${v.x[i]} ${key}`, found[key], v.rows[i][key]);
    });
  }
}

function checkHistories(vectors, compare) {
  for (const v of vectors) {
    const history = new AmaxHistory(formats[v.format], v.options);
    v.amaxes.forEach((amax, i) => {
      history.step(amax);
      for (const key of Object.keys(v.steps[i])) {
        compare(`${v.format} iteration ${i} ${key}`, history.trace[i][key], v.steps[i][key], alike);
      }
    });
  }
}

function check(vectors = data.vectors) {
  const wrong = [];
  let count = 0;
  const compare = (what, ours, theirs, agree = same) => {
    count += 1;
    if (!agree(ours, theirs)) wrong.push(`${what}: ${ours} here, ${theirs} in the library`);
  };
  checkNumbers(vectors.numbers, compare);
  checkTraces(vectors.traces, compare);
  checkFates(vectors.fates, vectors.counts, compare);
  checkMemory(vectors.memory, compare);
  checkFp8(vectors.fp8, compare);
  checkFp4(vectors.fp4, compare);
  checkHistories(vectors.histories, compare);
  return { count, wrong };
}
