"""`import apex` that finds this library, where a script asks for it.

A finder on `sys.meta_path` answers for `apex` and what is in it. Each of its modules is a copy of the
names of one of ours. What is not here says so by name, and says what to use.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from amp.errors import AmpRuntimeError
from amp.fp16_utils.loss_scaler import SAFE_GLOBALS

MODULES: dict[str, str | None] = {
    "amp_C": "amp.compat.amp_c",
    "apex_C": "amp.compat.apex_c",
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
    "amp_C.multi_tensor_adagrad": "amp.optimizers.FusedAdagrad",
    "amp_C.multi_tensor_novograd": "amp.optimizers.FusedNovoGrad",
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
    "apex.normalization": "torch.nn.functional.layer_norm and rms_norm",
    "apex.optimizers.FusedMixedPrecisionLamb": "amp.optimizers.FusedLAMB at O2 or O5",
    "apex.parallel.distributed": "torch.distributed",
    "apex.parallel.multiproc": "torchrun",
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "Megatron-LM's own megatron.core",
}
"""What to use for parts of apex that are not here."""


_TOPS = ("apex", "amp_C", "apex_C")


class _Finder(metadata.DistributionFinder, Loader):
    """Finds and makes the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            # As packages all are asked for what `from module import name` does not find in them.
            return ModuleSpec(fullname, self, origin="reamp", is_package=True)
        if fullname.partition(".")[0] in _TOPS and "." in fullname:
            # Without a `name`, which would let `from apex import part` pass over this and its advice.
            raise ModuleNotFoundError(_missing(fullname))
        return None

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterator[metadata.Distribution]:
        """Yield apex, if it is asked for by name: scripts look at its version."""
        if context is not None and context.name == "apex":
            yield _Distribution()

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

        def no_such_part(name: str) -> Any:
            raise AttributeError(_missing(f"{module.__name__}.{name}"), name=name, obj=module)

        vars(module)["__getattr__"] = no_such_part


class _Distribution(metadata.Distribution):
    """apex as a distribution: its name, and a version of before amp was taken out of it."""

    def read_text(self, filename: str) -> str | None:
        return "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def _missing(name: str) -> str:
    return f"'{name}' is a part of apex that reamp does not have{_advice(name)}"


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
        others = [
            known for known in torch.serialization.get_safe_globals() if known not in SAFE_GLOBALS
        ]
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(others)


def _forget_modules() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in _TOPS:
            del sys.modules[name]
