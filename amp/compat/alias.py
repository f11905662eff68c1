"""`import apex` that finds this library, where a script asks for it.

A finder on `sys.meta_path` answers for `apex` and what is in it. Each of its modules is a copy of the
names of one of ours. What is not here says so by name, and says what to use.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from amp.errors import AmpRuntimeError
from amp.fp16_utils.loss_scaler import SAFE_GLOBALS

MODULES: dict[str, str | None] = {
    "amp_C": "amp.compat.amp_c",
    "apex": None,
    "apex.amp": "amp.compat.apex_amp",
    "apex.amp.amp": "amp.compat.apex_amp",
    "apex.amp.frontend": "amp.compat.apex_amp",
    "apex.amp._amp_state": "amp.compat.state",
    "apex.amp.handle": "amp.compat.handle",
    "apex.amp.lists": "amp.compat.lists",
    "apex.amp.lists.functional_overrides": "amp.compat.lists.functional_overrides",
    "apex.amp.lists.tensor_overrides": "amp.compat.lists.tensor_overrides",
    "apex.amp.lists.torch_overrides": "amp.compat.lists.torch_overrides",
    "apex.amp.opt": "amp.compat.handle",
    "apex.amp.scaler": "amp.compat.state",
    "apex.contrib": None,
    "apex.contrib.optimizers": "amp.compat.optimizers",
    "apex.contrib.optimizers.fp16_optimizer": "amp.compat.optimizers",
    "apex.contrib.optimizers.fused_adam": "amp.compat.optimizers",
    "apex.contrib.optimizers.fused_lamb": "amp.compat.optimizers",
    "apex.contrib.optimizers.fused_sgd": "amp.compat.optimizers",
    "apex.fp16_utils": "amp.fp16_utils",
    "apex.fp16_utils.fp16_optimizer": "amp.fp16_utils",
    "apex.fp16_utils.fp16util": "amp.fp16_utils",
    "apex.fp16_utils.loss_scaler": "amp.fp16_utils",
    "apex.multi_tensor_apply": "amp.compat.amp_c",
    "apex.multi_tensor_apply.multi_tensor_apply": "amp.compat.amp_c",
    "apex.normalization": "amp.compat.normalization",
    "apex.normalization.fused_layer_norm": "amp.compat.normalization",
    "apex.optimizers": "amp.compat.optimizers",
    "apex.optimizers.fp16_optimizer": "amp.compat.optimizers",
    "apex.optimizers.fused_adagrad": "amp.compat.optimizers",
    "apex.optimizers.fused_adam": "amp.compat.optimizers",
    "apex.optimizers.fused_lamb": "amp.compat.optimizers",
    "apex.optimizers.fused_novograd": "amp.compat.optimizers",
    "apex.optimizers.fused_sgd": "amp.compat.optimizers",
    "apex.parallel": "amp.compat.parallel",
    "apex.parallel.LARC": "amp.compat.parallel",
    "apex.parallel.distributed": "amp.compat.parallel",
    "apex.parallel.optimized_sync_batchnorm": "amp.compat.parallel",
    "apex.parallel.sync_batchnorm": "amp.compat.parallel",
}
"""apex's modules, and what holds their names here."""

REPLACEMENTS = {
    "apex.RNN": "torch.nn.RNN, LSTM and GRU",
    "apex.contrib.clip_grad": "torch.nn.utils.clip_grad_norm_",
    "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "torch.nn.BatchNorm2d",
    "apex.contrib.layer_norm": "torch.nn.LayerNorm",
    "apex.contrib.multihead_attn": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.xentropy": "torch.nn.functional.cross_entropy",
    "apex.fused_dense": "torch.nn.Linear",
    "apex.mlp": "torch.nn.Sequential of torch.nn.Linear and an activation",
    "apex.optimizers.FusedMixedPrecisionLamb": "amp.optimizers.FusedLAMB at O2 or O5",
    "apex.parallel.multiproc": "torchrun",
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "Megatron-LM's own megatron.core",
}
"""What to use for parts of apex that are not here."""


class _Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
            return ModuleSpec(fullname, self, origin="reamp", is_package=is_package)
        if fullname.startswith("apex."):
            # Without a `name`, which would let `from apex import part` pass over this and its advice.
            raise ModuleNotFoundError(
                f"'{fullname}' is a part of apex that reamp does not have{_advice(fullname)}"
            )
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # Its parts first: LARC and _amp_state are names of a module and of what is in it.
        for name in MODULES:
            if name.rpartition(".")[0] == module.__name__:
                importlib.import_module(name)
        source = MODULES[module.__name__]
        if source is not None:
            ours = importlib.import_module(source)
            vars(module).update({k: v for k, v in vars(ours).items() if not k.startswith("__")})
            module.__doc__ = ours.__doc__
            vars(module)["__all__"] = ours.__all__


def _advice(name: str) -> str:
    """Return what to use for a part of apex that is not here."""
    for part, replacement in REPLACEMENTS.items():
        if f"{name}.".startswith(f"{part}."):
            return f"; use {replacement} instead"
    return ""


_FINDER = _Finder()


def install(replace: bool = False) -> None:
    """Make `import apex` find this library, in this process. Idempotent.

    `torch.load` then reads old checkpoints of `FP16_Optimizer`, by `amp.fp16_utils.SAFE_GLOBALS`.

    Args:
        replace: whether to do so where a real apex is installed, or has been imported.

    Raises:
        AmpRuntimeError: there is a real apex, and `replace` is False. Nothing has been changed then.
    """
    if _FINDER in sys.meta_path:
        return
    real = sys.modules.get("apex")
    found = real is not None or importlib.util.find_spec("apex") is not None
    if found and not replace:
        raise AmpRuntimeError(
            "a real apex is installed here, and amp.compat.install() does not stand in for it unasked: "
            "uninstall it, or call amp.compat.install(replace=True)"
        )
    _forget_modules()
    sys.meta_path.insert(0, _FINDER)
    torch.serialization.add_safe_globals(SAFE_GLOBALS)


def uninstall() -> None:
    """Undo `install`. What has been imported stays what it is. Idempotent."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
        _forget_modules()


def _forget_modules() -> None:
    for name in list(sys.modules):
        if name in ("apex", "amp_C") or name.startswith("apex."):
            del sys.modules[name]
