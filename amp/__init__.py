"""Mixed-precision training for any PyTorch script in three lines, chosen by one word.

model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
"""

import importlib
import sys
from typing import Any

from amp.observer_makers import MAKERS as _MAKERS

__version__ = "0.1.0"

_NAMES = {
    "atomic_save": "save",
    "casting.regions": "disable_casts",
    "casting.registry": (
        "bfloat16_function float_function half_function promote_function "
        "register_bfloat16_function register_float_function register_half_function "
        "register_promote_function"
    ),
    "casting.sharded": "fsdp_policy",
    "dcp": "get_state_dict set_state_dict",
    "diagnosis.diagnose": "diagnose",
    "diagnosis.watching": "watch",
    "errors": "AmpError AmpWarning",
    "frontend": (
        "Stateful get_session history initialize load_state_dict loss_scale master_params "
        "scale_loss state_dict step_was_skipped"
    ),
    "grad_scaler": "GradScaler",
    "profiles.levels": "load_profile",
    "profiles.loss_scaling": "LossScaling",
    "profiles.properties": "Properties",
    "profiles.rules": "Rule",
    "scalar_log": "scalars",
    "session": "Session",
    "trials.checking": "check",
    "trials.comparing": "compare",
    "trials.cures": "doctor",
    "trials.explaining": "explain",
}
"""The public names, by the module that has them; `__init__.pyi` says the same to type checkers."""
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

_MODULES = (
    "compat diagnosis distributed errors fp16_utils integrations kernels numerics optimizers trials"
)
"""The public modules."""

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def _arm(session: Any) -> Any:
    """Return the observer of `diagnose="on_overflow"`, and import the tool only then."""
    from amp.diagnosis.arming import Armed

    return Armed(session)


_MAKERS["on_overflow"] = _arm


def __getattr__(name: str) -> Any:
    """Import a name, or a module of the package, when it is first used.

    Raises:
        AttributeError: there is none. The message says what to write instead, if that is known.
        ImportError: the same, in `from amp import name`, where Python drops the message of the other.
    """
    if name.startswith("_"):
        raise AttributeError(f"module 'amp' has no attribute '{name}'")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"amp.{_HOMES[name]}"), name)
    else:
        try:
            value = importlib.import_module(f"amp.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"amp.{name}":
                raise
            from amp.other_names import hint_at_attribute, no_such_name

            hint = hint_at_attribute(name, __dir__())
            raise no_such_name(__name__, __file__, name, hint, sys._getframe(1)) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES.split(), "__version__"])
