"""FP32 numbers in fewer bits, rounded stochastically: formulas that all backends share.

Each formula has operators of float32 and int32 blocks, and calls a few functions that it is given:
`bits` and `number` reinterpret float32 as int32 and back, `whole` and `real` convert, `least` and
`most` are the minimum and maximum, `if_less(x, y, one, other)` is one where x < y, and `if_number(x,
one, other)` where x is not NaN; `inverse(s)` is 1 / s, rounded to nearest. So Triton, plain torch and
the loop in C++ run one source, and give the same bits.

**Random bits.** An element's are a hash of the tensor's key, which depends on its seed and step, and of
the element's index in the whole tensor, so they are the same however the tensor is divided. Elements
are counted in the order of the memory if the tensor has no gaps, so a tensor in channels-last has other
bits than a contiguous one. Elements that are 2^32 apart have the same bits.

    key = mixed(mixed(seed) + step)         x = mixed(index + key)          in int32, which wraps

A second moment is rounded by the upper 20 of these 32 bits, the ratio of a first one by the lower 20,
and a master by the lower 8. What two of them share decides on one of them in one case of 2^12.

**Steps** are counted in float32, which adds 1 up to 2^24. From there on each step makes the count the
next float32 number, whose pattern is the `step` of the key, so each step has its own bits.

**Two moments in 16 bits.** The second moment v is kept as s = sqrt(v), a number of 9 bits with 3 bits
of mantissa, from 2^-40 to 1.75 * 2^23; the first moment m as its ratio to the stored s, 7 bits: a sign,
and abs(m / s) + 1/4 with 3 bits of mantissa, at most 59.75. A second moment that is not 0 never becomes
0, and what is too large becomes the largest. There are no scales that elements share.

**Masters in 16 more bits or in 8 (`split16`, `split24`).** See `amp.kernels.split`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels import update_scale
from amp.kernels.language import WITHOUT_FMA, constant, jit, plain, tl

TO_NEAREST = -0x7FF7FF80
"""In place of random bits: rounds to nearest."""
NEAREST = constant(TO_NEAREST)


@jit
def mixed(x):
    """Return a hash of int32 that looks random.

    Source: the hash `lowbias32` of Wellons' hash-prospector (public domain), without its first shift.
    """
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * -0x7B935975
    return x ^ (x >> 16 & 0xFFFF)


@jit
def step_after(step, bits, number, if_less):
    """Return the counts of steps after one more step, float32; see **Steps**."""
    return if_less(step, 16777216.0, step + 1.0, number(bits(step) + 1))


@jit
def step_of_key(t, bits, whole, if_less):
    """Return the steps for keys, int32, of their counts."""
    return if_less(16777216.0, t, bits(t), whole(t))


@jit
def bfloat16_bits(value, noise, bits, if_number):
    """Return float32 values in bfloat16, as int32; `noise` has 16 random bits."""
    pattern = if_number(value, bits(value), 0x7FC00000)  # one of all NaN
    return pattern + noise >> 16  # inf stays inf: its lower bits are 0


@jit
def inverse(s):
    """Return 1 / s, rounded to nearest, of numbers with 3 bits of mantissa, by Newton's method."""
    guess = (0x7EF15E7A - s.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    for _ in tl.static_range(3):
        if WITHOUT_FMA:
            guess = guess * (2.0 - s * guess)
        else:
            guess = tl.fma(guess, tl.fma(-s, guess, 1.0), guess)
    return guess


@jit
def packed(m, v, x, sqrt, inverse, bits, number, least, most, if_less, if_number):
    """Return the words of two moments, int32, of which the lower half counts; `x` has random bits.

    Where v is NaN, m is too.
    """
    root = bits(sqrt(v))
    # From the code 1, which is 696 << 20, to the code 511.
    s = most(least(root + (x >> 12 & 0xFFFFF), 0x4B6FFFFF), 0x2B800000) & -0x100000
    ratio = m * inverse(number(s))
    sign, size = bits(ratio) >> 31, bits(ratio) & 0x7FFFFFFF
    above = least(bits(number(size) + 0.25), 0x42700000)
    magnitude = above + (x & 0xFFFFF) - (1000 << 20) >> 20
    word = s - 0x2B700000 >> 13 | (magnitude ^ sign) - sign & 127
    return if_number(ratio, if_less(root, 1, 0, word), -64)


@jit
def unpacked(word, bits, number, most, if_less):
    """Return the two moments of words, int32."""
    code, ratio = word >> 7 & 511, word << 25 >> 25
    s = number(if_less(code, 1, 0, code + 695 << 20))
    size = most(ratio, 0 - ratio)
    above = number(if_less(size, 64, size + 1000 << 20, 0x7FC00000))
    return number(bits((above - 0.25) * s) | ratio & -0x80000000), s * s


@jit
def joined(high, low, number, if_less, BITS):
    """Return the masters of bfloat16 weights, given as int32, and of low halves of BITS bits."""
    rounded = high << 16
    pattern = rounded + (low << 16 - BITS)
    # The user may have written a zero: old low bits must not give it another sign, and make it NaN.
    return number(if_less(pattern ^ rounded, 0, rounded, pattern))


@jit
def parted(master, x, bits, if_number, BITS):
    """Return bfloat16 weights and low halves, int32, of masters; `x` has random bits if BITS is 8.

    Of a weight the lower 16 bits count, and of a low half the lower BITS.
    """
    pattern = if_number(master, bits(master), 0x7FC00000)  # one of all NaN
    if BITS == 8:
        pattern = pattern + (x & 0xFF)  # inf and NaN stay so: their lower bits are 0
    return pattern + 0x8000 >> 16, pattern >> 16 - BITS


@jit
def joined_half(high, low, bits, number, real, least, most, if_less, BITS):
    """Return the masters of float16 weights, given as int32, and of low halves of BITS bits.

    The bits of a normal float16, shifted left by 13, become FP32's by adding 112 << 23.
    """
    size = high & 0x7FFF
    word = most((size << 16) + (low << 16 - BITS), 0)  # a zero has no low bits: see `joined`
    if BITS == 8:
        # For a subnormal float16 these bits give an x that is too large, as FP32's numbers lead with a
        # 1: 2 * x - 2^-14 is right. For others it is not less than x. So no choice is needed.
        twice = (word >> 3) + 0x38800000
        pattern = least(bits(number(twice) - 2.0**-14), twice - 0x800000)
    else:
        normal = (size << 13) + low + 0x38000000
        pattern = if_less(word, 0x4000000, bits(real(word) * 2.0**-40), normal)
    inf = 0x7C008000 - (1 << 16 - BITS)  # with the largest low half; what is more is NaN
    pattern = if_less(word, inf, pattern, 0x7F800000)
    pattern = if_less(word, inf + 1, pattern, 0x7FC00000)
    return number(pattern | high & -0x80000000)


@jit
def parted_half(master, x, bits, number, real, whole, least, if_less, BITS):
    """Return float16 weights and low halves, int32, of masters, as `parted` does for bfloat16."""
    size, sign = bits(master) & 0x7FFFFFFF, bits(master) & -0x80000000
    smaller = number(least(size, 0x39000000))  # 2^-13
    if BITS == 8:
        # The weight, the low half and 8 bits to round; the limit gives inf with the largest low half.
        word = least(size, 0x47800FE0) - 0x38000000 << 3
        word = if_less(size, 0x38800000, whole(smaller * 2.0**40), word)
        word = if_less(size, 0x7F800001, word, 0x7E000000)
        word = word + (x & 0xFF) | sign
        return word + 0x8000 >> 16, word >> 8
    units = smaller * 2.0**24  # of float16's smallest number
    down = whole(units)
    left = units - real(down)
    up = down + whole(left + left)
    small = whole(left * 65536.0 + 0.5) - (up - down << 16)
    normal = size - 0x38000000
    high = least(if_less(normal, 0x800000, up, normal + 0x1000 >> 13), 0x7C00)
    low = least(if_less(normal, 0x800000, small, normal - (high << 13)), 0x7FFF)
    high = if_less(size, 0x7F800001, high, 0x7E00)
    return high | sign >> 16, if_less(size, 0x7F800001, low, 0)


# Outside of Triton.


class Functions(NamedTuple):
    """The functions that formulas call, for float32 and int32 tensors and stand-ins."""

    bits: Callable[[Any], Any]
    number: Callable[[Any], Any]
    real: Callable[[Any], Any]
    whole: Callable[[Any], Any]
    least: Callable[[Any, int], Any]
    most: Callable[[Any, Any], Any]
    if_less: Callable[[Any, Any, Any, Any], Any]
    if_number: Callable[[Any, Any, Any], Any]
    sqrt: Callable[[Any], Any]
    inverse: Callable[[Any], Any]


def _sqrt(x: Any) -> Any:
    """Return square roots. On the CPU torch's own are not all rounded to nearest, except in FP64."""
    device = getattr(x, "tensors", [x])[0].device  # of a group of tensors
    if device.type != "cpu" or not update_scale.has_float64(device):
        return x.sqrt()
    return x.to(torch.float64).sqrt().to(x.dtype)


IN_TORCH = Functions(
    bits=lambda x: x.view(torch.int32),
    number=lambda x: x.view(torch.float32),
    real=lambda x: x.float(),
    whole=lambda x: x.int(),
    least=lambda x, y: torch.clamp(x, max=y),
    most=lambda x, y: torch.clamp(x, min=y),
    if_less=lambda x, y, one, other: torch.where(x < y, one, other),
    if_number=lambda x, one, other: torch.where(x == x, one, other),
    sqrt=_sqrt,
    inverse=lambda x: 1.0 / x,
)


EXACT = 2.0**24
"""Up to this number of steps their count is the number."""


def next_steps(steps: Tensor) -> Tensor:
    """Return counts of steps, float32, after one more step."""
    of = IN_TORCH
    return plain(step_after)(steps, of.bits, of.number, of.if_less)  # type: ignore[no-any-return]


def after_one(step: float) -> float:
    """Return a count of steps after one more step."""
    return float(next_steps(torch.tensor(step, dtype=torch.float32, device="cpu")))


def keys_of(seeds: Sequence[int], t: float) -> Tensor:
    """Return the keys of the random bits of tensors at step t, int32 `[n]`, on the CPU."""
    step = int(t)
    if t > EXACT:  # as in `step_of_key`
        step = int(torch.tensor(t, dtype=torch.float32, device="cpu").view(torch.int32))
    return plain(mixed)(plain(mixed)(torch.tensor(seeds, dtype=torch.int32, device="cpu")) + step)  # type: ignore[no-any-return]


def pack(m: Any, v: Any, x: Any, of: Functions = IN_TORCH) -> Any:
    """Return the words of two moments, int32; see `packed`."""
    functions = of.sqrt, of.inverse, of.bits, of.number, of.least, of.most, of.if_less, of.if_number
    return plain(packed)(m, v, x, *functions)


def unpack(word: Any, of: Functions = IN_TORCH) -> tuple[Any, Any]:
    """Return the two moments of words, int32."""
    found: tuple[Any, Any] = plain(unpacked)(word, of.bits, of.number, of.most, of.if_less)
    return found


def join_halves(high: Any, low: Any, is_half: bool, width: int, of: Functions = IN_TORCH) -> Any:
    """Return the masters of weights, float16 if `is_half`, and their low halves of `width` bits."""
    if is_half:
        return plain(joined_half)(
            high, low, of.bits, of.number, of.real, of.least, of.most, of.if_less, width
        )
    return plain(joined)(high, low, of.number, of.if_less, width)


def part_halves(master: Any, x: Any, is_half: bool, width: int, of: Functions = IN_TORCH) -> Any:
    """Return weights and low halves, int32, of masters; the arguments are those of `join_halves`."""
    if is_half:
        functions = of.bits, of.number, of.real, of.whole, of.least, of.if_less
        return plain(parted_half)(master, x, *functions, width)
    return plain(parted)(master, x, of.bits, of.if_number, width)
