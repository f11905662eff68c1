"""Number formats, loss scales and memory: what mixed precision is about, to look at and plan with."""

from amp.numerics.formats import FORMATS as FORMATS
from amp.numerics.formats import Format as Format
from amp.numerics.formats import describe as describe
from amp.numerics.memory import Footprint as Footprint
from amp.numerics.memory import footprint as footprint
from amp.numerics.memory import footprints as footprints
from amp.numerics.rounding import Bits as Bits
from amp.numerics.rounding import Neighbours as Neighbours
from amp.numerics.rounding import bits as bits
from amp.numerics.rounding import decode as decode
from amp.numerics.rounding import neighbours as neighbours
from amp.numerics.rounding import round_to as round_to
from amp.numerics.rounding import survives_update as survives_update
from amp.numerics.rounding import ulp as ulp
from amp.numerics.scaling import FormatSurvival as FormatSurvival
from amp.numerics.scaling import GradientSurvival as GradientSurvival
from amp.numerics.scaling import ScalerStep as ScalerStep
from amp.numerics.scaling import gradient_survival as gradient_survival
from amp.numerics.scaling import simulate_scaler as simulate_scaler
