"""Making `import apex` find this library, for scripts that ask for it.

A finder on `sys.meta_path` provides `apex` and its modules. Each has the names of one of this library's
modules. An import of a missing part raises an error that names it, and a replacement.
"""

import contextlib
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

from amp.errors import AmpRuntimeError, truth_of
from amp.fp16_utils.loss_scaler import SAFE_GLOBALS

_TABLE = (
    ("compat.amp_c", "amp_C", ""),
    ("compat.amp_c", "apex.multi_tensor_apply", "multi_tensor_apply"),
    ("compat.apex_c", "apex_C", ""),
    ("compat.apex_amp", "apex.amp", "amp frontend"),
    ("compat.applier", "apex.amp._initialize", ""),
    ("compat.handle", "apex.amp.handle", ""),
    ("compat.handle", "apex.amp.opt", ""),
    ("compat.lists", "apex.amp.lists", ""),
    ("compat.lists.functional_overrides", "apex.amp.lists.functional_overrides", ""),
    ("compat.lists.tensor_overrides", "apex.amp.lists.tensor_overrides", ""),
    ("compat.lists.torch_overrides", "apex.amp.lists.torch_overrides", ""),
    ("compat.normalization", "apex.normalization", "fused_layer_norm"),
    ("compat.optimizers", "apex.contrib.optimizers", "fp16_optimizer fused_adam fused_lamb fused_sgd"),
    ("compat.optimizers", "apex.optimizers", "fp16_optimizer fused_adam fused_lamb fused_sgd"),
    ("compat.optimizers", "apex.optimizers", "fused_adagrad fused_novograd"),
    ("compat.parallel", "apex.parallel", "LARC distributed optimized_sync_batchnorm sync_batchnorm"),
    ("compat.state", "apex.amp._amp_state", ""),
    ("compat.state", "apex.amp.scaler", ""),
    ("fp16_utils", "apex.fp16_utils", "fp16_optimizer fp16util loss_scaler"),
)
"""A module of `amp`, the module of apex that gets its names, and parts of that with the same names."""

MODULES: dict[str, str | None] = {"apex": None, "apex.contrib": None}
"""apex's modules, each with the module of `amp` that has its names."""
for _ours, _module, _parts in _TABLE:
    for _name in (_module, *(f"{_module}.{part}" for part in _parts.split())):
        MODULES[_name] = f"amp.{_ours}"

_LAMB = "amp_C.multi_tensor_lamb, which does both stages, or amp.optimizers.FusedLAMB"
_SHARDED = "with a model that torch.distributed.fsdp.fully_shard has cut"
_ADAM = f"amp.optimizers.FusedAdam {_SHARDED}, or in ZeroRedundancyOptimizer at O0, O1, O3 and O4,"
_SHARDED_LAMB = f"amp.optimizers.FusedLAMB {_SHARDED},"
REPLACEMENTS = {
    "amp_C.multi_tensor_adagrad": "amp.optimizers.FusedAdagrad",
    "amp_C.multi_tensor_lamb_stage1_cuda": _LAMB,
    "amp_C.multi_tensor_lamb_stage2_cuda": _LAMB,
    "amp_C.multi_tensor_novograd": "amp.optimizers.FusedNovoGrad",
    "apex.RNN": "torch.nn.RNN, LSTM and GRU",
    "apex.amp.rnn_compat": "torch.nn.RNN, LSTM and GRU, whose inputs amp casts,",
    "apex.contrib.clip_grad": "torch.nn.utils.clip_grad_norm_",
    "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "torch.nn.BatchNorm2d",
    "apex.contrib.layer_norm": "torch.nn.LayerNorm",
    "apex.contrib.multihead_attn": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.optimizers.DistributedFusedAdam": _ADAM,
    "apex.contrib.optimizers.DistributedFusedLAMB": _SHARDED_LAMB,
    "apex.contrib.optimizers.distributed_fused_adam": _ADAM,
    "apex.contrib.optimizers.distributed_fused_lamb": _SHARDED_LAMB,
    "apex.contrib.sparsity": (
        "torch.ao.pruning.WeightNormSparsifier(sparse_block_shape=(1, 4), zeros_per_block=2)"
    ),
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
"""Replacements for parts of apex that this library does not have."""


_TOPS = ("apex", "amp_C", "apex_C")


class _Finder(metadata.DistributionFinder, Loader):
    """Finds and makes the modules in `MODULES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            # All are packages, so that a missing name of `from module import name` is looked up here.
            return ModuleSpec(fullname, self, origin="reamp", is_package=True)
        if fullname.partition(".")[0] in _TOPS and "." in fullname:
            # Without `name=`: with it, `from apex import part` would hide this error and its advice.
            raise ModuleNotFoundError(_missing(fullname))
        return None

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterator[metadata.Distribution]:
        """Yield apex's distribution if asked for by name, because scripts look at its version."""
        if context is not None and context.name == "apex":
            yield _Distribution()

    def exec_module(self, module: ModuleType) -> None:
        # Parts first: LARC and _amp_state name both a module and an object, and the object has to win.
        for name in MODULES:
            if name.rpartition(".")[0] == module.__name__:
                importlib.import_module(name)
        source = MODULES[module.__name__]
        if source is not None:
            ours = importlib.import_module(source)
            # Not what ours has imported: apex.amp.frontend is a part of apex.amp.
            names = {k: v for k, v in vars(ours).items() if not isinstance(v, ModuleType)}
            names = {k: v for k, v in names.items() if not k.startswith("__")}
            vars(module).update(names, __doc__=ours.__doc__, __all__=_public(ours))

        def no_such_part(name: str) -> Any:
            raise AttributeError(_missing(f"{module.__name__}.{name}"), name=name, obj=module)

        vars(module)["__getattr__"] = no_such_part


class _Distribution(metadata.Distribution):
    """The metadata of apex: its name, and a version from before apex removed amp."""

    def read_text(self, filename: str) -> str | None:
        return "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def _public(module: ModuleType) -> list[str]:
    """Return the names of `from module import *`: `__all__`, or else the public names it defines."""
    own = [k for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


def _missing(name: str) -> str:
    """Return the error message for a missing part of apex, with its replacement."""
    uses = [use for part, use in REPLACEMENTS.items() if f"{name}.".startswith(f"{part}.")]
    advice = f"; use {uses[0]} instead" if uses else ""
    return f"'{name}' is a part of apex that reamp does not have{advice}"


_FINDER = _Finder()
_installed = contextlib.ExitStack()
"""The changes of `install` that `uninstall` undoes."""


def install(replace: bool = False) -> None:
    """Make `import apex` find this library, in this process. Idempotent.

    `torch.load` then reads old checkpoints of `FP16_Optimizer`, by `amp.fp16_utils.SAFE_GLOBALS`.

    Args:
        replace: whether to do so even if a real apex is installed, or has been imported.

    Raises:
        AmpRuntimeError: there is a real apex, and `replace` is False. Nothing is changed.
    """
    if _FINDER in sys.meta_path:
        return
    if not truth_of("replace", replace) and (
        sys.modules.get("apex") or importlib.util.find_spec("apex")
    ):
        raise AmpRuntimeError(
            "a real apex is installed here, and amp.compat.install() does not stand in for it unasked: "
            "uninstall it, or call amp.compat.install(replace=True)"
        )
    _forget_modules()
    sys.meta_path.insert(0, _FINDER)
    _installed.enter_context(torch.serialization.safe_globals(SAFE_GLOBALS))


def take_the_place_of(module: str) -> None:
    """Install the alias, and import `module` through it, which replaces the calling module."""
    install(replace=True)
    importlib.import_module(module)


def uninstall() -> None:
    """Undo `install`. Names that were imported already stay. Idempotent."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
        _forget_modules()
        _installed.close()


def _forget_modules() -> None:
    for name in sys.modules.copy():
        if name.partition(".")[0] in _TOPS:
            del sys.modules[name]
