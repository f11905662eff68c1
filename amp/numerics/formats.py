"""The number formats of mixed precision, each defined by a few integers.

Sources: IEEE 754-2019; OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); OCP Microscaling
Formats 1.0 (E8M0, E2M1); Noune et al. 2022 (the fnuz variants).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from amp.dtypes import DTYPES, dtype_name
from amp.errors import AmpTypeError, AmpValueError, did_you_mean

Overflow = Literal["inf", "nan", "saturate"]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: torch's name of the format.
        exponent_bits: the number of bits of the exponent.
        mantissa_bits: the number of bits of the mantissa, without the implicit leading one.
        bias: the number that is subtracted from the exponent field.
        has_inf: whether there are infinities; then the highest exponent is reserved for inf and NaN.
        nan: which patterns are NaN: as in IEEE 754 (`ieee`), all ones apart from the sign
            (`all_ones`), the pattern of negative zero (`negative_zero`), or none (`none`).
        signed: whether there is a sign bit.
        has_zero: whether exponent field 0 is for zero and subnormal numbers, or for normal numbers too.
        overflow: the result of torch's cast for a number that is too large.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_inf: bool = False
    nan: Literal["ieee", "all_ones", "negative_zero", "none"] = "ieee"
    signed: bool = True
    has_zero: bool = True
    overflow: Overflow = "inf"

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype, or None if there is none with one number for each element."""
        dtype = getattr(torch, self.name, None)
        return dtype if isinstance(dtype, torch.dtype) else None

    @property
    def bits(self) -> int:
        """The number of bits in all."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest finite number."""
        reserved = self.has_inf or (self.nan == "all_ones" and self.mantissa_bits == 0)
        return (1 << self.exponent_bits) - 1 - reserved - self.bias

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return (1 if self.has_zero else 0) - self.bias

    @property
    def max(self) -> float:
        """The largest finite number."""
        below_two = 2 if self.nan == "all_ones" and self.mantissa_bits else 1
        return (2.0 - below_two * self.ulp_at_1) * 2.0**self.max_exponent

    @property
    def min_normal(self) -> float:
        """The smallest positive normal number, which has full precision."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def ulp_at_1(self) -> float:
        """The distance from 1 to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def decimal_digits(self) -> float:
        """The precision of a normal number in decimal digits: `log10(2) * (mantissa_bits + 1)`."""
        return (self.mantissa_bits + 1) * math.log10(2)

    @property
    def nan_pattern(self) -> int:
        """The bit pattern of NaN. Raises AmpValueError for a format without NaN."""
        if self.nan == "negative_zero":
            return 1 << (self.bits - 1)
        if self.nan == "none":
            raise AmpValueError(f"{self.name} has no NaN")
        ones = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        return ones if self.nan == "all_ones" else ones - (1 << max(self.mantissa_bits - 1, 0)) + 1


_ALL = (
    Format("float32", 8, 23, 127, has_inf=True),
    Format("float16", 5, 10, 15, has_inf=True),
    Format("bfloat16", 8, 7, 127, has_inf=True),
    Format("float8_e4m3fn", 4, 3, 7, nan="all_ones", overflow="saturate"),
    Format("float8_e5m2", 5, 2, 15, has_inf=True),
    Format("float8_e4m3fnuz", 4, 3, 8, nan="negative_zero", overflow="nan"),
    Format("float8_e5m2fnuz", 5, 2, 16, nan="negative_zero", overflow="nan"),
    Format("float8_e8m0fnu", 8, 0, 127, nan="all_ones", signed=False, has_zero=False, overflow="nan"),
    Format("float4_e2m1fn", 2, 1, 1, nan="none", overflow="saturate"),
)
FORMATS = {fmt.name: fmt for fmt in _ALL}
"""The formats by name, widest first."""

_ALIASES = {
    **{name: dtype_name(dtype) for name, dtype in DTYPES.items()},
    **dict.fromkeys(("e4m3", "float8_e4m3", "fp8_e4m3"), "float8_e4m3fn"),
    **dict.fromkeys(("e5m2", "fp8_e5m2"), "float8_e5m2"),
    "e4m3fnuz": "float8_e4m3fnuz",
    "e5m2fnuz": "float8_e5m2fnuz",
    "e8m0": "float8_e8m0fnu",
    **dict.fromkeys(("e2m1", "fp4"), "float4_e2m1fn"),
}


def as_format(value: object) -> Format:
    """Return the format that a name, a torch dtype or a `Format` means.

    Args:
        value: such as `"float16"`, `"fp16"`, `"e4m3"`, `torch.float8_e5m2`.

    Raises:
        AmpValueError: there is no such format.
        AmpTypeError: `value` is neither a name, a dtype nor a `Format`.
    """
    if isinstance(value, Format):
        return value
    if not isinstance(value, (str, torch.dtype)):
        raise AmpTypeError(f"{value!r} is a {type(value).__name__}, not the name of a number format")
    name = str(value).strip().lower().removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in FORMATS:
        raise AmpValueError(
            f"{str(value)!r} is not a number format: {', '.join(FORMATS)}"
            f"{did_you_mean(name, (*FORMATS, *_ALIASES))}"
        )
    return FORMATS[name]


def describe(fmt: str | torch.dtype | Format) -> Format:
    """Return a format by its name or dtype, with its bits, bias, range, precision and overflow.

        >>> describe("float16").max
        65504.0

    Raises:
        AmpValueError: there is no such format.
    """
    return as_format(fmt)
