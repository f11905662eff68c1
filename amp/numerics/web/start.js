const names = data.formats.map((fmt) => fmt.name);
for (const id of ["bits-format", "ulps-format", "scaling-format"]) fillSelect(id, names, "float16");
for (const id of ["fp8-format", "delayed-format"]) fillSelect(id, ["float8_e4m3fn", "float8_e5m2"], "float8_e4m3fn");
fillSelect("memory-optimizer", Object.keys(data.memory), "FusedAdam");
fillSelect("fp8-scaling", data.scalings, "tensor");

startFields();
for (const start of [startBits, startRanges, startUlps, startScaling]) start();
for (const start of [startSimulator, startMemory, startFp8, startFp4, startDelayed]) start();
redrawOnResize();
startAddress();

const agreement = check();
$("check").textContent = agreement.wrong.length
  ? `${agreement.wrong.length} of ${agreement.count} do not agree: ${agreement.wrong[0]}`
  : `${agreement.count} of ${agreement.count} in the shared table agree.`;
if (parent !== window) { // in a frame, whose page makes it as high as this one
  const tell = () => parent.postMessage({ labHeight: document.documentElement.getBoundingClientRect().height }, "*");
  new ResizeObserver(tell).observe(document.documentElement);
}
window.lab = { AmaxHistory, bits, check, decode, encode, exactDecimal, fates, formats, fp8Loss, hexFloat, memory, neighbours,
  parseNumber, roundTo, simulate, survivesUpdate, ulp };
