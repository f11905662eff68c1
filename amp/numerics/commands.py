"""The commands of `python -m amp` about numbers: `bits`, `ranges`, `ulp`, `simulate`, and the rest."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pickle
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp.errors import AmpValueError
from amp.numerics import lab, plots
from amp.numerics.crises import crises
from amp.numerics.formats import FORMATS, as_format
from amp.numerics.fp8 import fp8_losses, simulate_fp8
from amp.numerics.memory import TERMS, Footprint, footprints
from amp.numerics.rounding import bits, neighbours, survives_update, ulp
from amp.numerics.scaling import GRADIENT_FORMATS, gradient_survival, simulate_scaler
from amp.numerics.text import Printer, gigabytes, plain

COMMON = ("float32", *GRADIENT_FORMATS)


def add_commands(commands: Any) -> None:
    """Add the parsers of these commands to those of the program."""
    parser = _parser(
        *(commands, "bits", _bits, "show how formats write a number, and what is lost"),
        "reamp bits 3.14159\nreamp bits 1e-8 --format fp16 --format e4m3\nreamp bits 70000 --json",
    )
    parser.add_argument("number", type=_number, help="such as 3.14159, -1e-8, 0x1p-24, inf")
    _add_formats(parser)

    parser = _parser(
        *(commands, "ranges", _ranges, "list the formats: their range, precision, and overflow"),
        "reamp ranges\nreamp ranges --plot ranges.svg",
        plot=True,
    )

    parser = _parser(
        *(commands, "ulp", _ulp, "show the numbers next to a number, and whether updates survive"),
        "reamp ulp 1.0\nreamp ulp 1024 --format bf16\nreamp ulp 1.0 --update 5e-5",
    )
    parser.add_argument("number", type=_number, help="the number to look at")
    parser.add_argument("--update", type=_number, help="what is added to the number")
    _add_formats(parser)

    parser = _parser(
        *(commands, "simulate", _simulate, "run the loss scaler over overflows"),
        "reamp simulate --steps 20 --overflows 10 --init 32768 --growth-interval 5\n"
        "reamp simulate --steps 8000 --overflows 100,5000 --plot scale.png",
        plot=True,
    )
    parser.add_argument("--steps", type=int, default=20, help="iterations (20)")
    parser.add_argument("--overflows", type=_integers, default=[], help="which overflow: 10,11,15")
    parser.add_argument("--init", type=_number, default=2.0**16, help="first scale (65536)")
    parser.add_argument(
        "--growth-factor",
        type=_number,
        default=2.0,
        help="factor after --growth-interval good iterations (2)",
    )
    parser.add_argument(
        "--backoff-factor", type=_number, default=0.5, help="factor after an overflow (0.5)"
    )
    parser.add_argument(
        "--growth-interval",
        type=int,
        default=2000,
        help="good iterations in a row before growth (2000)",
    )
    parser.add_argument(
        "--hysteresis", type=int, default=1, help="overflows before the scale goes down (1)"
    )
    parser.add_argument("--min", type=_number, default=None, help="floor")
    parser.add_argument("--max", type=_number, default=2.0**24, help="ceiling (2**24)")

    parser = _parser(
        *(commands, "simulate-fp8", _simulate_fp8, "scale a tensor for FP8, and a tensor over time"),
        "reamp simulate-fp8\nreamp simulate-fp8 activations.pt --format e5m2\n"
        "reamp simulate-fp8 --amaxes 1,1,40,1,1,1 --amax-history 3 --plot fp8.png",
        plot=True,
    )
    parser.add_argument("file", nargs="?", help="tensors that torch.save wrote, in lists and dicts")
    parser.add_argument("--mean", type=_number, default=-4.0, help="without a file: mean log2 (-4)")
    parser.add_argument("--spread", type=_number, default=3.0, help="standard deviation of log2 (3)")
    parser.add_argument("--outlier", type=_number, default=1024.0, help="one row in 64 times it (1024)")
    parser.add_argument("--amaxes", type=_numbers, help="the largest magnitude of each iteration")
    parser.add_argument("--amax-history", type=int, default=16, help="how many it looks back on (16)")
    parser.add_argument("--amax-algo", default="max", help="max or most_recent (max)")
    parser.add_argument("--margin", type=int, default=0, help="powers of 2 to stay below (0)")
    _add_formats(parser, "e4m3, or e5m2 as for gradients (e4m3)", default="float8_e4m3fn")

    parser = _parser(
        *(commands, "survival", _survival, "say what each loss scale would do to gradients"),
        "reamp survival gradients.pt\nreamp survival --mean -24 --spread 5 --plot survival.png",
        plot=True,
    )
    parser.add_argument("file", nargs="?", help="tensors that torch.save wrote, in lists and dicts")
    parser.add_argument("--mean", type=_number, default=-22.0, help="without a file: mean log2 (-22)")
    parser.add_argument("--spread", type=_number, default=5.0, help="standard deviation of log2 (5)")
    parser.add_argument("--count", type=int, default=100_000, help="how many (100000)")
    _add_formats(parser, "the format of the table and the picture (fp16)", default="float16")

    parser = _parser(
        *(commands, "memory", _memory, "say what training keeps in memory at each level"),
        "reamp memory --params 7B --optimizer adamw\n"
        "reamp memory --params 175B --world-size 64 --sharding zero3 --gpu-memory 80",
        plot=True,
    )
    parser.add_argument(
        "--params", type=_count, required=True, help="parameters, such as 350M, 7B or 7e9"
    )
    parser.add_argument("--optimizer", default="adamw", help="adamw, sgd-momentum, FusedAdam, ...")
    parser.add_argument("--activations", type=_count, default=0.0, help="numbers kept for backward")
    parser.add_argument(
        "--linear-inputs", type=_count, default=0.0, help="more of them, which linear layers keep"
    )
    parser.add_argument("--world-size", type=int, default=1, help="processes (1)")
    parser.add_argument("--sharding", default="none", help="none, zero1, zero2, zero3, fsdp2")
    parser.add_argument("--gpu-memory", type=_number, help="GB of 10**9 bytes: say what fits")

    _parser(
        *(commands, "crises", _crises, "run the three crises of half precision, and their cures"),
        "reamp crises",
    )

    parser = _parser(
        *(commands, "lab", _lab, "write the lab, a page with eight figures, or serve it"),
        "reamp lab\nreamp lab --out numerics.html\nreamp lab --serve",
        as_json=False,
    )
    parser.add_argument("--out", help="where to write it (lab.html)")
    parser.add_argument("--serve", action="store_true", help="serve it, and open it, instead")
    parser.add_argument("--port", type=int, default=0, help="where to serve it (a free one)")
    parser.add_argument("--no-browser", action="store_true", help="serve it, and open nothing")


def _parser(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], None],
    text: str,
    examples: str,
    plot: bool = False,
    as_json: bool = True,
) -> argparse.ArgumentParser:
    lines = "\n".join(f"  {line}" for line in examples.splitlines())
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if as_json:
        parser.add_argument("--json", action="store_true", help="write JSON")
    if plot:
        parser.add_argument("--plot", metavar="FILE", help="draw a PNG or SVG file")
    parser.set_defaults(run=run)
    return parser


def _add_formats(
    parser: argparse.ArgumentParser,
    text: str = "a format; may be repeated",
    default: str | None = None,
) -> None:
    """Add `--format`, for one format with a default, or for any number of them."""
    parser.add_argument(
        "--format",
        type=_format,
        action="append" if default is None else "store",
        default=None if default is None else as_format(default),
        help=text,
    )


def _format(text: str) -> Any:
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
    """Read how many there are: 350M, 1.5T and 7e9."""
    digits, factor = text, 1
    if text[-1:].lower() in _THOUSANDS:
        digits, factor = text[:-1], _THOUSANDS[text[-1].lower()]
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


def _emit_json(value: Any) -> None:
    print(json.dumps(plain(value), indent=1))


def _fields(pattern: int, fmt: Any) -> str:
    text = f"{pattern:0{fmt.bits}b}"
    magnitude = fmt.exponent_bits + fmt.mantissa_bits
    cuts = (0, fmt.bits - magnitude, fmt.bits - fmt.mantissa_bits, fmt.bits)
    parts = [text[start:end] for start, end in itertools.pairwise(cuts)]
    return " ".join(part for part in parts if part)


def _bits(arguments: argparse.Namespace) -> None:
    rows = []
    for fmt in arguments.format or [FORMATS[name] for name in COMMON]:
        found = bits(arguments.number, fmt)
        notes = [name for name in ("overflow", "underflow", "subnormal") if getattr(found, name)]
        rows.append((fmt, found, notes))
    if arguments.json:
        _emit_json(
            [{"format": fmt.name, "bits": _fields(b.pattern, fmt), **b._asdict()} for fmt, b, _ in rows]
        )
        return
    printer = Printer()
    printer.table(
        ("format", "sign, exponent, mantissa", "value", "error", ""),
        [(f.name, _fields(b.pattern, f), b.value, b.error, ", ".join(n)) for f, b, n in rows],
        alarming=4,
    )


def _ranges(arguments: argparse.Namespace) -> None:
    if arguments.plot is not None:
        plots.plot_ranges(arguments.plot)
    rows = [
        {
            "format": f.name,
            "bits": f.bits,
            "bias": f.bias,
            "max": f.max,
            "min_normal": f.min_normal,
            "min_subnormal": f.min_subnormal,
            "ulp_at_1": f.ulp_at_1,
            "decimal_digits": round(f.decimal_digits, 2),
            "overflow": f.overflow,
        }
        for f in FORMATS.values()
    ]
    if arguments.json:
        _emit_json(rows)
        return
    printer = Printer()
    header = ("format", "bits", "bias", "max", "min normal", "min subnormal", "ulp at 1", "digits")
    printer.table((*header, "overflow"), [tuple(row.values()) for row in rows])
    printer.line()
    for f in FORMATS.values():
        low, high = round(math.log2(f.min_subnormal)), f.max_exponent
        start, length = (low + 150) // 4, max((high - low) // 4, 1)
        printer.line(f"{f.name:16} {' ' * start}{printer.block * length}")
    printer.line(f"{'':16} 2**-149{'':22}1 = 2**0{'':25}2**127")


def _ulp(arguments: argparse.Namespace) -> None:
    rows = []
    for fmt in arguments.format or [FORMATS[name] for name in COMMON]:
        value = bits(arguments.number, fmt).value
        found = neighbours(value, fmt)
        row = {
            "format": fmt.name,
            "value": value,
            "ulp": ulp(value, fmt),
            "below": found.below,
            "above": found.above,
        }
        if arguments.update is not None:
            updated = bits(value + arguments.update, fmt).value
            row |= {"updated": updated, "survives": survives_update(value, arguments.update, fmt)}
        rows.append(row)
    if arguments.json:
        _emit_json(rows)
        return
    if arguments.update is not None:
        for row in rows:
            row["survives"] = "yes" if row["survives"] else "lost"
    Printer().table(tuple(rows[0]), [tuple(row.values()) for row in rows])


def _simulate(arguments: argparse.Namespace) -> None:
    names = ("init", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min", "max")
    trace = simulate_scaler(
        overflows=arguments.overflows,
        steps=arguments.steps,
        **{name: getattr(arguments, name) for name in names},
    )
    if arguments.plot is not None:
        plots.plot_trace(trace, arguments.plot)
    if arguments.json:
        _emit_json([step._asdict() for step in trace])
        return
    printer = Printer()
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


def _simulate_fp8(arguments: argparse.Namespace) -> None:
    if arguments.file is not None:
        tensors = list(_load(Path(arguments.file)))
    else:
        if not 0 < arguments.outlier < math.inf:
            raise AmpValueError(f"--outlier {arguments.outlier:g}: give a finite number above 0")
        x = _log_normal(arguments, 256 * 512).float().view(256, 512)
        x[::64] *= arguments.outlier
        tensors = [x]
    names = ("amax_history", "amax_algo", "margin")
    losses = fp8_losses(tensors, [arguments.format])
    history = simulate_fp8(
        _AMAXES if arguments.amaxes is None else arguments.amaxes,
        arguments.format,
        **{name: getattr(arguments, name) for name in names},
    )
    if arguments.plot is not None:
        plots.plot_fp8(tensors, history, arguments.plot, arguments.format)
    if arguments.json:
        _emit_json({"losses": [x._asdict() for x in losses], "history": [x._asdict() for x in history]})
        return
    printer = Printer()
    printer.line(f"{sum(x.numel() for x in tensors):,} numbers in {arguments.format.name}")
    rows = [
        (x.scaling, *(f"{part:.2%}" for part in (x.zero, x.subnormal, x.saturated, x.error)))
        for x in losses
    ]
    printer.table(("scale for", "become 0", "subnormal", "saturate", "error"), rows)
    printer.line()
    printer.line(f"delayed: {arguments.amax_algo} of the last {arguments.amax_history}")
    largest = arguments.format.max
    printer.table(
        ("iteration", "amax", "times", "of the range", "", ""),
        [
            (
                *(x.step, f"{x.amax:.4g}", x.factor, f"{x.largest / largest:.2%}"),
                *("saturates" if x.saturated else "", printer.bar(x.largest / largest, 24)),
            )
            for x in history
        ],
        alarming=4,
    )


_AMAXES = [2.0 ** (4 - step / 6) * (64 if step == 20 else 1) for step in range(40)]
"""Activations that become smaller, and an outlier among them."""


def _log_normal(arguments: argparse.Namespace, count: int) -> Tensor:
    """Return float64 `[count]`, by `--mean` and `--spread`."""
    if not (0 < arguments.spread <= 100 and abs(arguments.mean) <= 1000):
        raise AmpValueError(
            f"--mean {arguments.mean:g} --spread {arguments.spread:g}: give a mean of log2 from "
            "-1000 to 1000, and a spread above 0 and at most 100"
        )
    generator = torch.Generator("cpu").manual_seed(0)
    normal = torch.randn(count, generator=generator, dtype=torch.float64, device="cpu")
    return torch.exp2(arguments.mean + arguments.spread * normal)


def _survival(arguments: argparse.Namespace) -> None:
    if arguments.file is not None:
        grads = list(_load(Path(arguments.file)))
    else:
        if not 1 <= arguments.count <= 10**8:
            raise AmpValueError(f"--count {arguments.count}: give 1 to 100000000")
        grads = [_log_normal(arguments, arguments.count)]
    formats = dict.fromkeys([*GRADIENT_FORMATS, arguments.format.name])
    found = gradient_survival(grads, formats=list(formats))
    if arguments.plot is not None:
        plots.plot_survival(found, arguments.plot, arguments.format)
    if arguments.json:
        _emit_json(dataclasses.asdict(found))
        return
    printer = Printer()
    one = found.formats[arguments.format.name]
    printer.line(
        f"{found.count:,} gradients other than 0 in {arguments.format.name}"
        f" ({found.zeros:,} are 0, {found.not_finite:,} inf or NaN)"
    )
    rows = [
        (f"2**{round(math.log2(scale))}", *(f"{part:.2%}" for part in parts), printer.bar(parts[0], 30))
        for scale, *parts in zip(found.scales, one.zero, one.subnormal, one.overflow, strict=True)
    ]
    printer.table(("scale", "become 0", "subnormal", "overflow", ""), rows)
    for name, survival in found.formats.items():
        best = "none: something overflows at every scale"
        if survival.recommended is not None:
            best = f"{survival.recommended:g}"
        printer.line(f"loses least in {name}: {best}")


def _load(path: Path) -> Iterator[Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise AmpValueError(f"there is no file {str(path)!r}") from None
    except Exception as error:  # whatever the bytes of a file that is none make of torch.load
        reason = type(error).__name__
        if isinstance(error, pickle.UnpicklingError):
            reason = "it is none, or holds more than tensors, lists and dicts"
        raise AmpValueError(
            f"{str(path)!r} is no file of tensors that torch.save wrote: {reason}"
        ) from None

    def inside(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value
        elif isinstance(value, dict):
            for item in value.values():
                yield from inside(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from inside(item)

    tensors = list(inside(loaded))
    if not tensors:
        raise AmpValueError(f"{str(path)!r} holds no floating-point tensors")
    yield from tensors


def _memory(arguments: argparse.Namespace) -> None:
    rows = footprints(
        arguments.params,
        arguments.optimizer,
        activations=arguments.activations,
        linear_inputs=arguments.linear_inputs,
        world_size=arguments.world_size,
        sharding=arguments.sharding,
    )
    limit = arguments.gpu_memory
    if limit is not None and not limit > 0:
        raise AmpValueError(f"--gpu-memory {limit:g}: give the GB of one GPU, such as 80")
    if arguments.plot is not None:
        plots.plot_memory(rows, arguments.plot, limit)
    if arguments.json:
        fits = {} if limit is None else {"gpu_memory": limit * 1e9}
        _emit_json([dataclasses.asdict(r) | {"total": r.total} | _fits(r, limit) | fits for r in rows])
        return
    printer = Printer()
    printer.line(f"{arguments.params:,.0f} parameters, {arguments.optimizer}, GB of one process")
    header = ["level", "masters", *(term.removesuffix("_state") for term in TERMS), "total"]
    table = []
    for r in rows:
        sizes = [getattr(r, term) for term in (*TERMS, "total")]
        row = [r.opt_level, r.masters_kept, *map(gigabytes, sizes)]
        if limit is not None:
            row.append("fits" if _fits(r, limit)["fits"] else "too large")
        table.append(row)
    header += [] if limit is None else [f"in {limit:g} GB"]
    printer.table(header, table)


def _fits(row: Footprint, limit: float | None) -> dict[str, bool]:
    return {} if limit is None else {"fits": row.total <= limit * 1e9}


def _lab(arguments: argparse.Namespace) -> None:
    if arguments.serve:
        lab.serve(arguments.port, browser=not arguments.no_browser)
    else:
        print(f"wrote {lab.write(arguments.out)}: open it in a browser")


def _crises(arguments: argparse.Namespace) -> None:
    found = crises()
    if arguments.json:
        _emit_json([crisis._asdict() for crisis in found])
        return
    printer = Printer()
    rows = [(c.name, c.exact, c.broken, c.cured, c.cure) for c in found]
    printer.table(("crisis", "exact", "in float16", "cured", "by"), rows)
    for crisis in found:
        printer.line()
        printer.line(crisis.code)
