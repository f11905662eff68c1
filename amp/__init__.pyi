"""What `amp` has, for type checkers: its names are imported when they are first asked for."""

from amp.atomic_save import save as save
from amp.casting.regions import disable_casts as disable_casts
from amp.casting.registry import bfloat16_function as bfloat16_function
from amp.casting.registry import float_function as float_function
from amp.casting.registry import half_function as half_function
from amp.casting.registry import promote_function as promote_function
from amp.casting.registry import register_bfloat16_function as register_bfloat16_function
from amp.casting.registry import register_float_function as register_float_function
from amp.casting.registry import register_half_function as register_half_function
from amp.casting.registry import register_promote_function as register_promote_function
from amp.casting.sharded import fsdp_policy as fsdp_policy
from amp.dcp import get_state_dict as get_state_dict
from amp.dcp import set_state_dict as set_state_dict
from amp.diagnosis.diagnose import diagnose as diagnose
from amp.diagnosis.watching import watch as watch
from amp.errors import AmpError as AmpError
from amp.errors import AmpWarning as AmpWarning
from amp.frontend import Stateful as Stateful
from amp.frontend import get_session as get_session
from amp.frontend import history as history
from amp.frontend import initialize as initialize
from amp.frontend import load_state_dict as load_state_dict
from amp.frontend import loss_scale as loss_scale
from amp.frontend import master_params as master_params
from amp.frontend import scale_loss as scale_loss
from amp.frontend import state_dict as state_dict
from amp.frontend import step_was_skipped as step_was_skipped
from amp.grad_scaler import GradScaler as GradScaler
from amp.profiles.levels import load_profile as load_profile
from amp.profiles.loss_scaling import LossScaling as LossScaling
from amp.profiles.properties import Properties as Properties
from amp.profiles.rules import Rule as Rule
from amp.scalar_log import scalars as scalars
from amp.session import Session as Session
from amp.trials.checking import check as check
from amp.trials.comparing import compare as compare
from amp.trials.cures import doctor as doctor
from amp.trials.explaining import explain as explain

from . import (
    compat as compat,
)
from . import (
    diagnosis as diagnosis,
)
from . import (
    distributed as distributed,
)
from . import (
    errors as errors,
)
from . import (
    fp16_utils as fp16_utils,
)
from . import (
    integrations as integrations,
)
from . import (
    kernels as kernels,
)
from . import (
    numerics as numerics,
)
from . import (
    optimizers as optimizers,
)
from . import (
    trials as trials,
)

__version__: str

__all__ = [
    "AmpError",
    "AmpWarning",
    "GradScaler",
    "LossScaling",
    "Properties",
    "Rule",
    "Session",
    "Stateful",
    "bfloat16_function",
    "check",
    "compare",
    "diagnose",
    "disable_casts",
    "doctor",
    "explain",
    "float_function",
    "fsdp_policy",
    "get_session",
    "get_state_dict",
    "half_function",
    "history",
    "initialize",
    "load_profile",
    "load_state_dict",
    "loss_scale",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "save",
    "scalars",
    "scale_loss",
    "set_state_dict",
    "state_dict",
    "step_was_skipped",
    "watch",
]
