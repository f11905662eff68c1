"""What one program of a compiled kernel does, read from its disassembly: NVIDIA's SASS, AMD's AMDGCN.

The instructions of a program with a full chunk are taken in the order in which they lie, each once.
Loops are left out: they take the odd elements at the end of a tensor, or count the steps of tensors.
So are functions for rare numbers, such as subnormal ones, with their calls, and what follows the first
exit: the last program's work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

THREAD_NUMBER = frozenset({"tid", "v0"})
"""Where a thread finds its number: what S2R reads on NVIDIA, the first vector register on AMD."""

FENCE = re.compile(r"MEMBAR|buffer_wbl2")
SPECIAL = re.compile(r"MUFU|F2F\b|v_(rcp|rsq|sqrt|exp|log)_")
"""Reciprocals, roots, exponentials, and conversions of FP64: there are fewer lanes for them."""

_OF_CALL = 8
"""How many instructions are at most jumped over with a call that is among them."""
_END = re.compile(r"EXIT|s_endpgm")
_SCALAR = re.compile(r"s_|buffer_(wbl2|inv)")


class Instruction(NamedTuple):
    """An instruction, with the registers that it writes and reads."""

    opcode: str
    writes: frozenset[str]
    reads: frozenset[str]
    access: str = ""  # of global memory: load, store or atomic
    size: int = 0  # bytes of the access, for one thread
    address: frozenset[str] = frozenset()  # the registers that the address is made from


class Body(NamedTuple):
    """What one program does. Addresses in tensors are those that follow from a thread's number."""

    loaded: int  # bytes, from tensors
    stored: int  # bytes, to tensors
    shared: int  # bytes, to and from tables and single numbers
    in_flight: int  # the most bytes of tensors that it is loading at a time
    waits: float  # nanoseconds for which a warp waits for loads and fences
    instructions: int  # that occupy the lanes: AMD's scalar ones run beside them
    special: int  # those of them that are SPECIAL


def _main_path(
    text: str, pattern: re.Pattern[str], read: Callable[..., Instruction]
) -> list[Instruction]:
    """Return the instructions that a program with a full chunk runs, each once."""
    found: list[tuple[Instruction, str]] = []  # with the label that it may jump to
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\.(L\w+):", line):
            labels[label[1]] = len(found)
        elif match := pattern.search(line):
            jump = re.search(r"(?:`\(|^)\.(L\w+)", match[2])
            found.append((read(*match.groups()), jump[1] if jump else ""))
    ends = {at for at, (instruction, _) in enumerate(found) if _END.match(instruction.opcode)}
    path: dict[int, Instruction] = {}
    calls = [at for at, (instruction, _) in enumerate(found) if instruction.opcode.startswith("CALL")]
    after_call = 0
    for at, (instruction, jump) in enumerate(found):
        target = labels.get(jump)
        if at < after_call:
            continue
        if target and instruction.opcode == "BRA" and target - at <= _OF_CALL:
            after_call = target if any(at < call < target for call in calls) else 0
        if at in ends or target in ends:
            break
        path[at] = instruction
        if target is not None and target <= at:  # that was a loop
            path = {i: x for i, x in path.items() if i < target}
    return list(path.values())


_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_SASS_ACCESS = {"LDG": "load", "STG": "store", "ATOMG": "atomic", "RED": "atomic"}
_SASS_SPILLED = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
_SASS_WITHOUT_RESULT = re.compile(r"ST|RED|BRA|BAR|EXIT|CALL|RET|BS|MEMBAR|CCTL|R2P|.*SETP")


def sass(text: str) -> list[Instruction]:
    """Return the instructions of a program with a full chunk from what `nvdisasm` prints."""
    return _main_path(text, _SASS, _sass_instruction)


def _sass_instruction(opcode: str, text: str) -> Instruction:
    name = opcode.partition(".")[0]
    width = re.search(r"\.(?:[US](8|16)|(64|128|256))\b", opcode)
    bits = int(width[1] or width[2]) if width else 32
    count = 2 if name == "CS2R" or ".WIDE" in opcode else max(bits // 32, 1)
    result, _, sources = re.sub(r"^(U?P[\dT],\s*)+", "", text).partition(",")
    if _SASS_WITHOUT_RESULT.match(name):
        result, sources = "", text
    if spilled := _SASS_SPILLED.search(text):  # a place on the stack stands for a register
        kept = frozenset(f"L{int(spilled[1] or '0', 16) + 4 * i}" for i in range(count))
        if name == "LDL":
            return Instruction(opcode, writes=_sass_registers(result, count), reads=kept)
        return Instruction(opcode, kept, _sass_registers(_SASS_SPILLED.sub("", text), count))
    return Instruction(
        opcode,
        writes=_sass_registers(result, count),
        reads=_sass_registers(sources, count if name == "STG" else 1),
        access=_SASS_ACCESS.get(name, ""),
        size=bits // 8,
        address=_sass_registers(" ".join(re.findall(r"\[.*?\]", text))),
    )


def _sass_registers(text: str, count: int = 1) -> frozenset[str]:
    names = {"tid"} if "SR_TID" in text else set()
    for kind, first, is_pair in re.findall(r"\b(U?R)(\d+)(\.64)?", text):
        names |= {f"{kind}{int(first) + i}" for i in range(2 if is_pair else count)}
    return frozenset(names)


_AMD = re.compile(r"^\s+([a-z]\w+)\s*([^;]*)")
_AMD_ACCESS = re.compile(
    r"(s|buffer|global|flat)_(load|store|atomic)_(?:[us]?(short|byte)|dword(?:x(\d+))?|b(\d+))?"
)
_AMD_WITHOUT_RESULT = re.compile(
    r"\w+_store_|ds_write|s_(cmp|bitcmp|c?branch|waitcnt|barrier|nop|endpgm)|buffer_(wbl2|inv)"
)


def amdgcn(text: str) -> list[Instruction]:
    """Return the instructions of a program with a full chunk from the assembly that Triton makes."""
    # Before this jump arguments are loaded, for firmware that does not preload them.
    before, _, after = text.partition("s_branch .LBB0_0\n")
    return _main_path(after or before, _AMD, _amd_instruction)


def _amd_instruction(opcode: str, text: str) -> Instruction:
    operands = re.split(r",\s*", text.strip())
    is_silent_atomic = "atomic" in opcode and "sc0" not in text
    results = 0 if is_silent_atomic or _AMD_WITHOUT_RESULT.match(opcode) else 1
    instruction = Instruction(
        opcode, _amd_registers(operands[:results]), _amd_registers(operands[results:])
    )
    if not (match := _AMD_ACCESS.match(opcode)):
        return instruction
    space, kind, narrow, words, bits = match.groups()
    size = {"short": 2, "byte": 1}.get(narrow) or (int(bits) // 8 if bits else 4 * int(words or 1))
    data = 1 if space in ("global", "flat") and not results else 0
    address = _amd_registers(operands[:data] + operands[data + 1 :])
    return instruction._replace(access=kind, size=size, address=address)


def _amd_registers(operands: list[str]) -> frozenset[str]:
    text = " ".join(operands)
    names = {f"{kind}{n}" for kind, n in re.findall(r"\b([vs])(\d+)\b", text)}
    for kind, first, last in re.findall(r"\b([vs])\[(\d+):(\d+)\]", text):
        names |= {f"{kind}{n}" for n in range(int(first), int(last) + 1)}
    return frozenset(names)


def body(path: Iterable[Instruction], threads: int, near: float, far: float) -> Body:
    """Return what one program does, issued in order, where a warp waits for a load at its first use.

    Args:
        path: from `sass` or `amdgcn`.
        threads: of the program.
        near: nanoseconds until a table's entry is there, or a fence has passed.
        far: nanoseconds until an element of a tensor is there.
    """
    loaded = stored = shared = most = instructions = special = 0
    clock = 0.0
    of_thread = THREAD_NUMBER
    ready: dict[str, float] = {}
    pending: list[tuple[float, int]] = []
    for opcode, writes, reads, access, size, address in path:
        instructions += _SCALAR.match(opcode) is None
        special += SPECIAL.match(opcode) is not None
        clock = max([clock, *(ready[name] for name in reads if name in ready)])
        clock += near if FENCE.match(opcode) else 0.0
        ready = {name: at for name, at in ready.items() if name not in writes}
        in_tensor = bool(address & of_thread)
        of_thread = of_thread | writes if reads & of_thread else of_thread - writes
        if not access:
            continue
        arrival = clock + (far if in_tensor else near)
        ready.update(dict.fromkeys(writes, arrival))
        if not in_tensor:
            shared += size
        elif access == "load":
            loaded += size * threads
            pending = [(at, n) for at, n in pending if at > clock] + [(arrival, size * threads)]
            most = max(most, sum(n for _, n in pending))
        else:
            stored += size * threads
    return Body(loaded, stored, shared, most, clock, instructions, special)
