"""The commands of `python -m amp` about numbers: `bits`, `ranges`, `ulp`, `simulate` and others."""

import argparse
import dataclasses
import math
import pickle
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp.errors import AmpValueError
from amp.numerics import lab
from amp.numerics.crises import crises
from amp.numerics.formats import FORMATS, Format, as_format
from amp.numerics.fp8_simulation import fp8_losses, simulate_fp8
from amp.numerics.memory import TERMS
from amp.numerics.planning import (
    Row,
    Transformer,
    answer,
    as_bytes,
    as_gpu,
    check_options,
    check_shape,
    least_gpus,
    recommended,
    rows_of,
)
from amp.numerics.rounding import Bits, bits, neighbours, survives_update, ulp
from amp.numerics.scaling import GRADIENT_FORMATS, gradient_survival, simulate_scaler
from amp.terminal.command import argument, command
from amp.terminal.text import WIDTH, Printer, bytes_in_words, unit_of

COMMON = [FORMATS[name] for name in ("float32", *GRADIENT_FORMATS)]


def _format(text: str) -> Format:
    try:
        return as_format(text)
    except AmpValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(text: str) -> float:
    try:
        return float.fromhex(text) if text.lower().lstrip("+-").startswith("0x") else float(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, such as 3.14159 or 1e-8") from None


_THOUSANDS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def _count(text: str) -> float:
    """Parse a count such as 350M, 1.5T or 7e9."""
    factor = _THOUSANDS.get(text[-1:].lower(), 1)
    digits = text if factor == 1 else text[:-1]
    try:
        return float(Decimal(digits) * factor)  # exact: 1.1B is a whole number
    except InvalidOperation:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a count: give a number such as 7e9, or one with K, M, B or T after it, "
            "such as 350M, 7B or 1.5T"
        ) from None


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers, such as 10,15") from None


def _numbers(text: str) -> list[float]:
    return [_number(part) for part in text.split(",") if part]


def _file_or_numbers(mean: float, spread: float) -> tuple[Any, ...]:
    """Return the arguments of a command that reads tensors, or makes log-normal numbers."""
    return (
        argument("file", "tensors that torch.save wrote, in lists and dicts", type=Path, nargs="?"),
        argument("--mean", f"without a file: mean log2 ({mean:g})", type=_number, default=mean),
        argument("--spread", f"standard deviation of log2 ({spread:g})", type=_number, default=spread),
    )


_FORMATS = argument("--format", "a format; may be repeated", type=_format, action="append")


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the given options of these names; the others keep the defaults of the called function."""
    given = vars(arguments).items()
    return {name: value for name, value in given if name in names and value is not None}


@command("bits", argument("number", "such as 3.14159, -1e-8, 0x1p-24, inf", type=_number), _FORMATS)
def _bits(arguments: argparse.Namespace, printer: Printer) -> Any:
    """Show how formats write a number, and what is lost.

    reamp bits 3.14159
    reamp bits 1e-8 --format fp16 --format e4m3
    reamp bits 70000 --json
    """
    data, rows = [], []
    for fmt in arguments.format or COMMON:
        found = bits(arguments.number, fmt)
        fields = _fields(found, fmt)
        notes = [name for name in ("overflow", "underflow", "subnormal") if getattr(found, name)]
        data.append({"format": fmt.name, "bits": fields, **found._asdict()})
        rows.append((fmt.name, fields, found.value, found.error, ", ".join(notes)))
    printer.table(("format", "sign, exponent, mantissa", "value", "error", ""), rows, alarming=4)
    return data


def _fields(found: Bits, fmt: Format) -> str:
    """Return the sign, exponent and mantissa in binary, without fields of no bits."""
    widths = (int(fmt.signed), fmt.exponent_bits, fmt.mantissa_bits)
    fields = zip((found.sign, found.exponent, found.mantissa), widths, strict=True)
    return " ".join(f"{field:0{width}b}" for field, width in fields if width)


@command("ranges")
def _ranges(arguments: argparse.Namespace, printer: Printer) -> Any:
    """List the formats: their range, precision, and overflow.

    reamp ranges
    """
    names = ("bits", "bias", "max", "min_normal", "min_subnormal", "ulp_at_1")
    rows = []
    for f in FORMATS.values():
        row = {"format": f.name} | {name: getattr(f, name) for name in names}
        rows.append(row | {"decimal_digits": round(f.decimal_digits, 2), "overflow": f.overflow})
    header = ("format", *(name.replace("_", " ") for name in names), "digits", "above")
    exact = [row | {"max": f"{row['max']:.5g}"} for row in rows]  # 65504
    printer.table(header, [tuple(row.values()) for row in exact], widest=WIDTH)
    printer.line()
    for f in FORMATS.values():
        low, high = round(math.log2(f.min_subnormal)), f.max_exponent
        start, length = (low + 150) // 5, max((high - low) // 5, 1)
        printer.line(f"{f.name:16} {' ' * start}{printer.block * length}")
    printer.line(f"{'':16} 2**-149{'1 = 2**0':>23}{'2**127':>25}")
    return rows


@command(
    "ulp",
    argument("number", "the number to look at", type=_number),
    argument("--update", "what is added to the number", type=_number),
    _FORMATS,
)
def _ulp(arguments: argparse.Namespace, printer: Printer) -> Any:
    """Show the numbers next to a number, and whether updates survive.

    reamp ulp 1.0
    reamp ulp 1024 --format bf16
    reamp ulp 1.0 --update 5e-5
    """
    data, rows = [], []
    for fmt in arguments.format or COMMON:
        value = bits(arguments.number, fmt).value
        near = neighbours(value, fmt)._asdict()
        entry = {"format": fmt.name, "value": value, "ulp": ulp(value, fmt), **near}
        shown = {}
        if arguments.update is not None:
            survives = survives_update(value, arguments.update, fmt)
            entry |= {"updated": bits(value + arguments.update, fmt).value, "survives": survives}
            shown = {"survives": "yes" if survives else "lost"}
        data.append(entry)
        rows.append(entry | shown)
    printer.table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    return data


_MOST_STEPS = 10**6


@command(
    "simulate",
    argument("--steps", "iterations (20)", type=int, default=20),
    argument("--overflows", "which overflow: 10,11,15", type=_integers, default=[]),
    argument("--init", "first scale (65536)", type=_number),
    argument("--growth-factor", "factor after --growth-interval good iterations (2)", type=_number),
    argument("--backoff-factor", "factor after an overflow (0.5)", type=_number),
    argument("--growth-interval", "good iterations in a row before growth (2000)", type=int),
    argument("--hysteresis", "overflows before the scale goes down (1)", type=int),
    argument("--min", "floor", type=_number),
    argument("--max", "ceiling (2**24)", type=_number),
)
def _simulate(arguments: argparse.Namespace, printer: Printer) -> Any:
    """Run the loss scaler over overflows.

    reamp simulate --steps 20 --overflows 10 --init 32768 --growth-interval 5
    reamp simulate --steps 8000 --overflows 100,5000
    """
    names = ("init", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min", "max")
    scaling = _given(arguments, *names)
    if arguments.steps > _MOST_STEPS:
        raise AmpValueError(f"--steps {arguments.steps}: give at most {_MOST_STEPS}")
    trace = simulate_scaler(overflows=arguments.overflows, steps=arguments.steps, **scaling)
    exponents = [math.log2(step.next_scale) for step in trace]
    low, high = min(exponents, default=0.0) - 1, max(exponents, default=0.0)
    rows = []
    for i, (step, exponent) in enumerate(zip(trace, exponents, strict=True)):
        changed = step.next_scale != step.scale
        if len(trace) > 60 and not (changed or step.overflow or i in (0, len(trace) - 1)):
            continue
        bar = printer.bar((exponent - low) / (high - low), 24)
        event = "overflow, skipped" if step.overflow else "grows" if changed else ""
        rows.append((step.step, step.scale, step.next_scale, step.good_steps, event, bar))
    printer.table(("step", "scale", "after it", "good", "", "log2"), rows, alarming=4)
    return [step._asdict() for step in trace]


_AMAXES = [2.0 ** (4 - step / 6) * (64 if step == 20 else 1) for step in range(40)]
"""Amaxes of shrinking activations, with one outlier."""


@command(
    "simulate-fp8",
    *_file_or_numbers(mean=-4.0, spread=3.0),
    argument("--outlier", "one row in 64 times it (1024)", type=_number, default=1024.0),
    argument("--amaxes", "the largest magnitude of each iteration", type=_numbers, default=_AMAXES),
    argument("--amax-history", "how many it looks back on (16)", type=int, default=16),
    argument("--amax-algo", "max or most_recent (max)", default="max"),
    argument("--margin", "powers of 2 to stay below (0)", type=int, default=0),
    argument("--format", "e4m3, or e5m2 as for gradients (e4m3)", type=_format, default="e4m3"),
)
def _simulate_fp8(arguments: argparse.Namespace, printer: Printer) -> Any:
    """Scale a tensor for FP8 and FP4, and a tensor over time.

    reamp simulate-fp8
    reamp simulate-fp8 activations.pt --format e5m2
    reamp simulate-fp8 --amaxes 1,1,40,1,1,1 --amax-history 3
    """
    if arguments.file is not None:
        tensors = _load(arguments.file)
    else:
        if not 0 < arguments.outlier < math.inf:
            raise AmpValueError(f"--outlier {arguments.outlier:g}: give a finite number above 0")
        x = _log_normal(arguments, 256 * 512).float().view(256, 512)
        x[::64] *= arguments.outlier
        tensors = [x]
    fmt = arguments.format
    losses = fp8_losses(tensors, [fmt, "e2m1"])
    recipe = _given(arguments, "amax_history", "amax_algo", "margin")
    history = simulate_fp8(arguments.amaxes, fmt, **recipe)
    printer.line(f"{sum(x.numel() for x in tensors):,} numbers in {fmt.name}, and in FP4 (E2M1)")
    rows = []
    for each in losses:
        shares = [f"{part:.2%}" for part in (each.zero, each.subnormal, each.saturated, each.median)]
        of_fp4 = {"1x16": "nvfp4 1x16", "1x32": "mxfp4 1x32"}
        name = each.scaling if each.format == fmt.name else of_fp4[each.scaling]
        rows.append((name, *shares, f"{each.decibels:.1f}"))
    printer.table(("scale for", "become 0", "subnormal", "saturate", "median error", "dB"), rows)
    printer.line("dB: numbers above their errors, without the largest of each 50")
    printer.line(f"\ndelayed: {arguments.amax_algo} of the last {arguments.amax_history}")
    steps = []
    for step in history:
        part = step.largest / fmt.max
        event, bar = "saturates" if step.saturated else "", printer.bar(part, 24)
        steps.append((step.step, f"{step.amax:.4g}", step.factor, f"{part:.2%}", event, bar))
    printer.table(("iteration", "amax", "times", "of the range", "", ""), steps, alarming=4)
    return {"losses": [x._asdict() for x in losses], "history": [x._asdict() for x in history]}


def _log_normal(arguments: argparse.Namespace, count: int) -> Tensor:
    """Return log-normal numbers with `--mean` and `--spread`, float64 `[count]`."""
    if not (0 < arguments.spread <= 100 and abs(arguments.mean) <= 1000):
        raise AmpValueError(
            f"--mean {arguments.mean:g} --spread {arguments.spread:g}: give a mean of log2 from "
            "-1000 to 1000, and a spread above 0 and at most 100"
        )
    generator = torch.Generator("cpu").manual_seed(0)
    normal = torch.randn(count, generator=generator, dtype=torch.float64, device="cpu")
    return torch.exp2(arguments.mean + arguments.spread * normal)


@command(
    "survival",
    *_file_or_numbers(mean=-22.0, spread=5.0),
    argument("--count", "how many (100000)", type=int, default=100_000),
    argument("--format", "the format of the table (fp16)", type=_format, default="float16"),
)
def _survival(arguments: argparse.Namespace, printer: Printer) -> Any:
    """Say what each loss scale would do to gradients.

    reamp survival gradients.pt
    reamp survival --mean -24 --spread 5
    """
    if arguments.file is not None:
        grads = _load(arguments.file)
    else:
        if not 1 <= arguments.count <= 10**8:
            raise AmpValueError(f"--count {arguments.count}: give 1 to 100000000")
        grads = [_log_normal(arguments, arguments.count)]
    fmt = arguments.format
    found = gradient_survival(grads, formats=list(dict.fromkeys([*GRADIENT_FORMATS, fmt.name])))
    others = f"{found.zeros:,} are 0, {found.not_finite:,} inf or NaN"
    printer.line(f"{found.count:,} gradients other than 0 in {fmt.name} ({others})")
    one = found.formats[fmt.name]
    rows = [
        (f"2**{round(math.log2(scale))}", *(f"{part:.2%}" for part in parts), printer.bar(parts[0], 30))
        for scale, *parts in zip(found.scales, one.zero, one.subnormal, one.overflow, strict=True)
    ]
    printer.table(("scale", "become 0", "subnormal", "overflow", ""), rows)
    for name, survival in found.formats.items():
        scale = survival.recommended
        best = "none: something overflows at every scale" if scale is None else f"{scale:g}"
        printer.line(f"loses least in {name}: {best}")
    return dataclasses.asdict(found)


def _load(path: Path) -> list[Tensor]:
    """Return the floating-point tensors in the nested lists and dicts of a file."""
    name = repr(str(path))
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise AmpValueError(f"there is no file {name}") from None
    except Exception as error:  # torch.load raises many kinds for a file of another kind
        reason = type(error).__name__
        if isinstance(error, pickle.UnpicklingError):
            reason = "it is another file, or holds more than tensors, lists and dicts"
        raise AmpValueError(f"{name} is no file of tensors that torch.save wrote: {reason}") from None
    tensors = [x for x in tree_leaves(loaded) if isinstance(x, Tensor) and x.is_floating_point()]
    if not tensors:
        raise AmpValueError(f"{name} holds no floating-point tensors")
    return tensors


@command(
    "memory",
    argument("--params", "parameters, such as 350M, 7B or 7e9", type=_count),
    argument("--optimizer", "adamw, sgd-momentum, FusedAdam, ... (adamw)", default="adamw"),
    argument("--gpu", "T4, A100, H100, ...: what fits there", type=as_gpu),
    argument("--gpu-memory", "such as 80GB: what fits there", type=as_bytes),
    argument("--model", "gpt: count its activations, with the sizes below", choices=["gpt"]),
    argument("--layers", "blocks of the model", type=int),
    argument("--width", "numbers for each token", type=int),
    argument("--sequence", "tokens of a sequence", type=int),
    argument("--batch", "sequences of a batch", type=int),
    argument("--checkpointing", "blocks keep only their inputs", action="store_true"),
    argument("--no-flash", "attention keeps its scores", action="store_true"),
    argument("--script", "count the parameters and activations of a script's first step"),
    argument("--activations", "instead, the numbers kept for backward", type=_count),
    argument("--linear-inputs", "besides, the numbers that linear layers keep", type=_count),
    argument("--world-size", "processes (1)", type=int),
    argument("--sharding", "none, zero1, zero2, zero3, fsdp2"),
)
def _memory(arguments: argparse.Namespace, printer: Printer) -> Any:
    """Say what training keeps in memory at each level, and what fits.

    reamp memory --params 7B --gpu-memory 80GB
    reamp memory --params 7B --gpu H100 --world-size 8 --sharding fsdp2
    reamp memory --model gpt --layers 24 --width 2048 --sequence 2048 --batch 4
    reamp memory --gpu T4 --script train.py
    """
    options = _given(arguments, "activations", "linear_inputs", "world_size", "sharding")
    limit, gpu, model = arguments.gpu_memory, arguments.gpu, None
    limit = gpu.memory if limit is None and gpu is not None else limit
    if limit is not None and not 0 < limit < math.inf:
        raise AmpValueError(f"--gpu-memory {limit / 1e9:g}: give the GB of one GPU, such as 80GB")
    params = arguments.params
    check_options(vars(arguments))
    if arguments.model is not None:
        check_shape(vars(arguments))
        sizes = (arguments.layers, arguments.width, arguments.sequence, arguments.batch)
        model = Transformer(*sizes, checkpointing=arguments.checkpointing, flash=not arguments.no_flash)
        options["linear_inputs"], options["activations"] = model.activations
        params = model.parameters if params is None else params
    elif arguments.script is not None:
        from amp.trials.scripts import memory_of

        params, options["activations"] = memory_of(arguments.script)
    if params is None:
        raise AmpValueError("give --params, as in --params 7B, or --model gpt, or --script train.py")
    found = list(rows_of(params, arguments.optimizer, gpu, **options))
    terms = [x for x in TERMS if any(getattr(row.footprint, x) for row in found)]
    header = ["level", "optimizer", *(_SHORT.get(term, term) for term in terms), "total"]
    header += [] if limit is None else ["fits"]
    unit, of = unit_of(most := max(row.footprint.total for row in found))
    digits = 1 if most >= 100 * of else 2
    data, rows = [], []
    for (levels, _, footprint), way in zip(found, _ways(found), strict=True):
        sizes_of = [f"{getattr(footprint, x) / of:,.{digits}f}" for x in (*terms, "total")]
        row = [" ".join(levels), way, *sizes_of]
        for level in levels:
            entry = dataclasses.asdict(footprint) | {"opt_level": level, "total": footprint.total}
            if limit is not None:
                entry |= {"fits": footprint.total <= limit, "gpu_memory": limit}
            data.append(entry)
        rows.append(row if limit is None else [*row, "fits" if footprint.total <= limit else "-"])
    printer.line(f"{params:,.0f} parameters, {arguments.optimizer}, {unit} of one process")
    printer.table(header, rows, widest=WIDTH)
    printer.line()
    has_activations = any(options.get(name) for name in ("activations", "linear_inputs"))
    if model is not None:
        caches = (f"{bytes_in_words(model.cache(size))} in {8 * size} bits" for size in (2, 1))
        held = bytes_in_words(2 * params)
        printer.line(f"inference: weights of {held} in 16 bits, and a KV cache of")
        printer.line(" or ".join(caches))
    said = [] if limit is None else list(answer(found, limit, has_activations))
    if limit is not None and recommended(found, limit) is None:
        if model is not None and not model.checkpointing:
            inputs, others = dataclasses.replace(model, checkpointing=True).activations
            least = bytes_in_words(2 * (inputs + others))
            said.append(f"With --checkpointing they take about {least}.")
        count = least_gpus(params, arguments.optimizer, limit, options)
        if count is not None and arguments.world_size is None:
            level = "O5" if gpu is None or gpu.runs("O5") else "O2"
            said.append(f"{level} fits on {count} such GPUs: --world-size {count} --sharding fsdp2.")
    if not has_activations:
        said.append("Activations are not counted: give --model, --script or --activations.")
    printer.line(fill(" ".join(said), WIDTH))
    return data


def _ways(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the optimizer of each row in few words: the name once, and what is kept below it."""
    above = ""
    for row in rows:
        name, *kept = row.optimizer.split(", ")
        kept = [_SHORT.get(word, word) for word in kept]
        yield f"+ {', '.join(kept)}" if kept and name == above else ", ".join([name, *kept])
        above = name


_SHORT = {
    "optimizer_state": "moments",
    "gradients": "grads",
    "activations": "kept",
    "transient": "peak",
    "BF16 moments": "bfloat16",
    "packed moments": "packed16",
}
"""Words of the table of `memory`: `kept` is kept for backward, and `peak` for a moment."""


@command("crises")
def _crises(arguments: argparse.Namespace, printer: Printer) -> Any:
    """Run the three crises of half precision, and their cures.

    reamp crises
    """
    found = crises()
    printer.table(("crisis", "exact", "in float16", "cured", "by"), [crisis[:5] for crisis in found])
    for crisis in found:
        printer.line(f"\n{crisis.code}")
    return [crisis._asdict() for crisis in found]


@command(
    "lab",
    argument("--out", "where to write it (lab.html)"),
    as_json=False,
)
def _lab(arguments: argparse.Namespace, printer: Printer) -> Any:
    """Write the lab, a page with nine figures.

    reamp lab
    reamp lab --out numerics.html
    """
    printer.line(f"wrote {lab.write(arguments.out)}: open it in a browser")


COMMANDS = (_bits, _ranges, _ulp, _simulate, _simulate_fp8, _survival, _memory, _crises, _lab)
"""The commands of this module, in the order of `--help`."""
