"""The strategy that runs linear layers in FP8, and the choice of these layers.

A layer's class becomes a subclass with another `forward`. Patching `torch.nn.functional.linear` would
reach more layers, but could not tell them apart, to skip one or to keep its amax history.
"""

import functools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from amp.casting.module_rules import ruled_modules
from amp.casting.regions import cast_dtype
from amp.casting.sharded import gathered_dtypes
from amp.casting.strategy import Strategy
from amp.casting.subclassing import has_forward_of_its_own, restore_classes, subclass_of, swap_classes
from amp.distributed import is_sharded
from amp.dtypes import CASTABLE, LOW_PRECISION
from amp.errors import AmpRuntimeError, brief, first_few, warn
from amp.profiles.fp8_recipe import Fp8Recipe
from amp.profiles.properties import Properties
from amp.profiles.rules import Rule
from amp.state_checks import StateChecks
from amp.undo import Undo

if TYPE_CHECKING:
    from amp.casting.fp8_history import AmaxHistory
    from amp.casting.fp8_linear import Layer

MULTIPLES = {"mxfp8": 32, "block": 128}
"""The number that must divide both dimensions of a weight, by recipe; 16 for the other recipes."""


class Fp8Linears(Strategy):
    """Runs linear layers in FP8, on top of whatever else the level does to the model.

    Attributes:
        history: the amax history of `delayed`; None for the other recipes.
    """

    state_key = "fp8"

    def __init__(self, properties: Properties) -> None:
        super().__init__(properties)
        self._is_delayed = properties.fp8 is not None and properties.fp8.recipe == "delayed"
        self.history: AmaxHistory | None = None
        self._models = self._prepared = 0
        self._reached: list[str] = []
        self._missed: dict[str, list[str]] = {}
        self._loaded: Mapping[str, Any] | None = None
        self._idle: set[str] = set()

    @staticmethod
    def is_asked_for(properties: Properties) -> bool:
        """Whether amp is enabled: even without `fp8`, an earlier session's FP8 has to be removed."""
        return properties.enabled

    def check_model(self, model: nn.Module) -> None:
        """Raise AmpRuntimeError for a layer whose weight is sharded by tensor parallelism."""
        if self.properties.fp8 is None:
            return
        reached, _ = choose(model, self.properties.fp8, self.properties.rules)
        shards = gathered_dtypes(model)
        for name, module in reached.items():
            if is_sharded(_stored(module)) and _stored(module) not in shards:
                raise AmpRuntimeError(_cut(name))

    def begin(self, undo: Undo) -> None:
        """Forget what was logged about earlier models."""
        self._reached, self._missed, self._prepared = [], {}, 0
        skip = self.properties.fp8.skip if self.properties.fp8 else ()
        self._idle = set(skip) - {"first", "last", "tied"}

    def prepare_model(self, model: nn.Module, undo: Undo) -> None:
        """Run linear layers in FP8, and remove the FP8 of an earlier session."""
        recipe = self.properties.fp8
        taken = {
            module: vars(module)["_amp_fp8"] for module in model.modules() if "_amp_fp8" in vars(module)
        }
        undo.if_it_fails.append(functools.partial(_put_in, taken))
        _release(taken)
        if recipe is None:
            return
        reached, missed = choose(model, recipe, self.properties.rules)
        prefix = f"model {self._models}: " if self._models else ""
        self._models += 1
        self._prepared += 1
        names = [name for name, _ in model.named_modules()]
        self._idle = {each for each in self._idle if not any(fnmatchcase(n, each) for n in names)}
        self._reached += [prefix + name for name in reached]
        for reason, names in missed.items():
            self._missed.setdefault(reason, []).extend(prefix + name for name in names)
        self._add(reached, prefix, undo)

    def _add(self, reached: Mapping[str, nn.Linear], prefix: str, undo: Undo) -> None:
        from amp.casting.fp8_history import AmaxHistory
        from amp.casting.fp8_linear import FORMATS, Layer, Switch

        recipe = self.properties.fp8
        assert recipe is not None
        switch = Switch()
        undo.callback(setattr, switch, "on", False)
        names = [prefix + name for name in reached]
        first = 0
        if self._is_delayed and names:
            if self.history is None:
                self.history = AmaxHistory(recipe, FORMATS[recipe.format or "hybrid"])
            first = self.history.add(names, *[_stored(module).device for module in reached.values()])
            undo.if_it_fails.append(functools.partial(self.history.remove, len(names)))
        layers: dict[nn.Module, Layer] = {
            module: Layer(recipe, name, self.history, i, switch)
            for i, (name, module) in enumerate(zip(names, reached.values(), strict=True), start=first)
        }
        undo.callback(_release, layers)
        _put_in(layers)
        if self._loaded is not None and self.history is not None and names:
            if message := _unknown(self._loaded, names):
                warn(message)
            self.history.load_state_dict(self._loaded, first)

    def finish(self) -> str:
        """Return a log line with the layers in FP8; warn instead if there are none."""
        if self.properties.fp8 is None or not self._prepared:
            return ""
        missed = sum(map(len, self._missed.values()))
        reasons = "; ".join(f"{_listed(names)}: {why}" for why, names in self._missed.items())
        of = f"{len(self._reached)} of {len(self._reached) + missed} layers run in FP8"
        message = f"fp8={self.properties.fp8}: {of}" + (f". The others: {reasons}" if missed else "")
        if self._idle:
            warn(
                f"fp8 has skip: {', '.join(sorted(self._idle))}, which is the name of no module and no "
                "glob over names; write first, last, tied, a name, or a glob such as 'blocks.0.*'"
            )
        if not self._reached:
            nothing = "" if missed else ": the model has no linear layers"
            warn(message + nothing)
            return ""
        return message

    def state_dict(self) -> dict[str, Any]:
        """Return the amax history of `delayed`; an empty dict for the other recipes."""
        return {} if self.history is None else self.history.state_dict()

    @staticmethod
    def checked_state(state: dict[Any, Any], path: str, checks: StateChecks) -> dict[str, Any]:
        """Check a saved state, and return the names and the amax history of its layers."""
        expected = "a list of the names of layers, each once"
        names = checks.items(state, "names", path, expected)
        if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
            checks.fail(path, "names", brief(names), expected)
        expected = f"a contiguous float32 tensor [1 + amax_history, {3 * len(names)}], with values"
        amaxes = checks.entry(state, "amaxes", path, expected)
        shape = tuple(amaxes.shape) if isinstance(amaxes, Tensor) and not amaxes.is_nested else ()
        if len(shape) != 2 or shape[0] < 2 or shape[1] != 3 * len(names):
            checks.fail(path, "amaxes", brief(amaxes), expected)
        if amaxes.is_meta or amaxes.layout is not torch.strided or not amaxes.is_contiguous():
            checks.fail(path, "amaxes", f"{brief(amaxes)} on {amaxes.device}", expected)
        amaxes = checks.tensor_like(state, "amaxes", path, amaxes, torch.float32, low=0.0)
        if not isinstance(recipe := state.get("recipe", "delayed"), str) or recipe != "delayed":
            checks.fail(path, "recipe", brief(recipe), "'delayed', which alone is saved")
        for key in state.keys() - {"names", "amaxes", "recipe"}:
            checks.fail(path, key, "fp8 has no such entry", "only recipe, names and amaxes")
        return {"recipe": recipe, "names": list(names), "amaxes": amaxes}

    def differences(self, state: Mapping[str, Any] | None) -> str:
        """Return a message about layers whose amax history is not in the state, or an empty string."""
        if not self._is_delayed:
            return ""
        if not state:
            return (
                "the state_dict has no 'fp8', which fp8='delayed' resumes from; the amax history of "
                "all layers starts empty"
            )
        return _unknown(state, self.history.names if self.history is not None else ())

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load the history of layers that are prepared now, and keep it for those prepared later."""
        if state and self._is_delayed:
            self._loaded = state
            if self.history is not None:
                self.history.load_state_dict(state)


def _unknown(state: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a message about the layers that a state lacks, or an empty string."""
    missing = [name for name in names if name not in state["names"]]
    if not missing:
        return ""
    return (
        f"the state_dict has no FP8 entries of {_listed(missing)}; the amax history of these layers "
        "starts empty"
    )


# Which layers.


def choose(
    model: nn.Module, recipe: Fp8Recipe, rules: Sequence[Rule]
) -> tuple[dict[str, nn.Linear], dict[str, list[str]]]:
    """Return the layers to run in FP8, by name, and the names of the others, by the reason."""
    modules = dict(model.named_modules())
    linears = [module for module in modules.values() if isinstance(module, nn.Linear)]
    others = [module for module in modules.values() if not isinstance(module, nn.Linear)]
    tied = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    unused = {module.out_proj for module in others if isinstance(module, nn.MultiheadAttention)}
    ruled = ruled_modules(model, rules)
    reached: dict[str, nn.Linear] = {}
    missed: dict[str, list[str]] = {}
    for name, module in modules.items():
        why = None
        if isinstance(module, nn.Linear):
            words = {"first": module is linears[0], "last": module is linears[-1]}
            words["tied"] = id(_stored(module)) in tied
            if module in unused:
                why = "nn.MultiheadAttention multiplies by itself"
            elif module in ruled:
                why = f"the rule for '{ruled[module].pattern}'"
            else:
                why = _skipped(name, words, recipe) or _obstacle(module, recipe)
            if why is None:
                reached[name] = module
        elif type(module).__name__ == "Conv1D" and not isinstance(module, _ConvNd):
            why = "Hugging Face's Conv1D multiplies by addmm"
        elif isinstance(module, (_ConvNd, nn.Bilinear)):
            why = "there are no FP8 kernels for convolutions and nn.Bilinear"
        if why is not None:
            missed.setdefault(why, []).append(name)
    return reached, missed


def _skipped(name: str, words: Mapping[str, bool], recipe: Fp8Recipe) -> str | None:
    for pattern in recipe.skip:
        if words.get(pattern, False) or (pattern not in words and fnmatchcase(name, pattern)):
            return f"skip: {pattern}"
    return None


def _obstacle(module: nn.Linear, recipe: Fp8Recipe) -> str | None:
    """Return why a linear layer cannot run in FP8, or None."""
    cls = type(module)
    if has_forward_of_its_own(module) or cls.forward is not nn.Linear.forward:
        return f"{cls.__name__} has a forward of its own"
    if _stored(module).dtype not in CASTABLE:
        return f"the weight is {_stored(module).dtype}"
    multiple = MULTIPLES.get(recipe.recipe, 16)
    sizes = module.in_features, module.out_features
    if any(size % multiple or not size for size in sizes):
        return f"dimensions that are no multiples of {multiple}"
    return None


def _stored(module: nn.Linear) -> Tensor:
    """Return the weight, or the parameter from which a parametrization computes it."""
    weight = module._parameters.get("weight")
    return next(module.parameters()) if weight is None else weight


def _listed(names: Sequence[str]) -> str:
    return first_few(names, lambda name: name or "the model itself", most=3)


# How they run.


def _fp8_class(base: Any) -> Any:
    """Return a subclass of a linear layer's class whose forward is in FP8."""

    def forward(self: Any, input: Tensor) -> Tensor:
        layer: Layer | None = getattr(self, "_amp_fp8", None)
        if layer is None or not layer.runs(self.training) or input.is_nested:
            return base.forward(self, input)  # type: ignore[no-any-return]
        weight = self.weight  # once: a parametrization computes it each time
        dtype = _computed_in(input, weight)
        if dtype is None or input.shape[-1:] != (self.in_features,):
            return nn.functional.linear(input, weight, self.bias)
        if is_sharded(weight):
            raise AmpRuntimeError(_cut(layer.name))
        return layer.run(input, weight, self.bias, dtype, self.training)

    return subclass_of(base, forward=forward)


def _computed_in(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """Return the half precision in which a layer would compute at this point, or None."""
    if x.dtype not in CASTABLE or weight.dtype not in CASTABLE:
        return None
    own = weight.dtype if weight.dtype in LOW_PRECISION else None
    return cast_dtype(x.device.type) or own


def _put_in(layers: Mapping[nn.Module, Any]) -> None:
    """Make modules run in FP8."""
    swap_classes(layers, _fp8_class)
    for module, layer in layers.items():
        vars(module)["_amp_fp8"] = layer


def _release(layers: Mapping[nn.Module, Any]) -> None:
    """Remove FP8 from modules, unless another session has put them in FP8 since."""
    own = [module for module, layer in layers.items() if vars(module).get("_amp_fp8") is layer]
    restore_classes(own)
    for module in own:
        del vars(module)["_amp_fp8"]


def _cut(name: str) -> str:
    return (
        f"the weight of '{name}' is a DTensor of tensor parallelism, which FP8 does not support. "
        "Keep it out, by fp8={'skip': ['" + name + "']}, or take opt_level='O4' or 'O5'"
    )
