"""Number formats, loss scales and memory: what mixed precision is about, to look at and plan with."""

from amp.numerics.formats import FORMATS as FORMATS
from amp.numerics.formats import Format as Format
from amp.numerics.formats import describe as describe
from amp.numerics.rounding import Bits as Bits
from amp.numerics.rounding import Neighbours as Neighbours
from amp.numerics.rounding import bits as bits
from amp.numerics.rounding import decode as decode
from amp.numerics.rounding import neighbours as neighbours
from amp.numerics.rounding import round_to as round_to
from amp.numerics.rounding import survives_update as survives_update
from amp.numerics.rounding import ulp as ulp
