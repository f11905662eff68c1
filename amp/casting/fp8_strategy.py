"""The strategy that runs linear layers in FP8 or FP4, and the choice of these layers.

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

from amp.casting.fp8_switch import Switch
from amp.casting.matching_rules import ruled_modules, ruled_tensors
from amp.casting.regions import cast_dtype
from amp.casting.sharded import modules_of_fsdp2, params_of_fsdp2, reshard, specs_when_gathered
from amp.casting.strategy import Strategy
from amp.casting.subclassing import has_forward_of_its_own, restore_classes, subclass_of, swap_classes
from amp.distributed import groups_of_meshes, is_sharded
from amp.dtypes import CASTABLE, LOW_PRECISION
from amp.errors import AmpRuntimeError, AmpValueError, brief, first_few, warn
from amp.names import bare_names
from amp.own_tensors import own_tensors
from amp.profiles.fp8_recipe import (
    FP4,
    LARGEST_SEED,
    MULTIPLES,
    SKIP_WORDS,
    Counted,
    Fp8Recipe,
    counted,
    is_small,
)
from amp.profiles.properties import Properties
from amp.profiles.rules import Rule
from amp.state_checks import StateChecks
from amp.undo import Undo

if TYPE_CHECKING:
    from amp.casting.fp4_draws import Draws
    from amp.casting.fp8_gather import GatheredWeight
    from amp.casting.fp8_history import AmaxHistory
    from amp.casting.fp8_linear import Layer


class Fp8Linears(Strategy):
    """Runs linear layers in FP8 or FP4, on top of the level's other changes to the model.

    Attributes:
        history: the amax history of `delayed`; None for the other recipes.
        draws: the counts of random draws, where gradients are rounded stochastically; or None.
        switch: the `Switch` that all layers share.
        small: how many of them are too small to gain, see `is_small`.
    """

    state_key = "fp8"

    def __init__(self, properties: Properties) -> None:
        super().__init__(properties)
        self.history: AmaxHistory | None = None
        self.draws: Draws | None = None
        self.switch = Switch(properties.fp8 is not None and properties.fp8.forward == "high")
        self._models = self._prepared = self.small = 0
        self._reached: list[str] = []
        self._missed: dict[str, list[str]] = {}
        self._loaded: Mapping[str, Any] | None = None
        self._idle: set[str] = set()

    @staticmethod
    def is_asked_for(properties: Properties) -> bool:
        """Whether amp is enabled: even without `fp8`, an earlier session's FP8 has to be removed."""
        return properties.enabled

    def check_model(self, model: nn.Module) -> None:
        """Raise AmpRuntimeError for a layer that tensor parallelism has cut in a way unknown to FP8."""
        from amp.casting.fp8_shards import split_of

        recipe = self.properties.fp8
        if recipe is None:
            return
        reached, _ = choose(model, recipe, self.properties.rules)
        for name, spec in _cut(model, reached).items():
            shape = reached[name].out_features, reached[name].in_features
            split_of(name, recipe, spec.mesh, spec.placements, shape)
        for module, param in _travelling(model, recipe, reached).items():
            _check_travelling(next(name for name in reached if reached[name] is module), param)

    def begin(self, undo: Undo) -> None:
        """Forget what was logged about earlier models."""
        self._reached, self._missed, self._prepared, self.small = [], {}, 0, 0
        skip = self.properties.fp8.skip if self.properties.fp8 else ()
        self._idle = {x for x in skip if x not in SKIP_WORDS and counted(x) is None}

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
        undo.if_it_fails.append(functools.partial(setattr, self, "_models", self._models))
        self._models += 1
        self._prepared += 1
        names = [name for name, _ in model.named_modules()]
        self._idle = {each for each in self._idle if not any(fnmatchcase(n, each) for n in names)}
        self._reached += [prefix + name for name in reached]
        self.small += sum(_is_small(module, recipe) for module in reached.values())
        for reason, names in missed.items():
            self._missed.setdefault(reason, []).extend(prefix + name for name in names)
        self._add(model, reached, prefix, undo)
        if self.history is not None:
            before = self.history.groups_of_meshes
            undo.if_it_fails.append(
                functools.partial(setattr, self.history, "groups_of_meshes", before)
            )
            cut = [_stored(reached[name]) for name in _cut(model, reached)]
            self.history.groups_of_meshes = (*before, *groups_of_meshes(cut))

    def _gather(
        self, model: nn.Module, reached: Mapping[str, nn.Linear], undo: Undo
    ) -> "Mapping[nn.Module, GatheredWeight]":
        """Let the weights of layers travel in FP8, if the recipe says so."""
        from amp.casting.fp8_gather import Gathers

        recipe = self.properties.fp8
        assert recipe is not None
        params = _travelling(model, recipe, reached)
        if not params:
            if recipe.all_gather and reached:
                warn("fp8 has all_gather: True, and FSDP2's fully_shard has sharded no layer in FP8")
            return {}
        reshard(model)
        groups = groups_of_meshes([param.sharded_param for param in params.values()])
        gathers = Gathers(recipe, params, groups)
        undo.callback(gathers.close)
        undo.callback(reshard, model)
        disable: Any = torch.compiler.disable  # as FSDP2 does with its own hooks
        attach = disable(gathers.attach)
        for module in modules_of_fsdp2(model):
            undo.callback(module.register_forward_pre_hook(attach, prepend=True).remove)
        gathers.attach()
        return gathers.weights

    def _switch_off(self, undo: Undo) -> None:
        """Turn FP8 off as the session closes; do nothing if `initialize` has failed."""
        if undo.is_for_close:
            self.switch.on = False

    def _add(self, model: nn.Module, reached: Mapping[str, nn.Linear], prefix: str, undo: Undo) -> None:
        from amp.casting.fp4_draws import Draws
        from amp.casting.fp8_history import AmaxHistory
        from amp.casting.fp8_linear import FORMATS, KeptWeight, LastFactor, Layer

        recipe = self.properties.fp8
        assert recipe is not None
        undo.callback(self._switch_off, undo)
        names = [prefix + name for name in reached]
        linears = [(prefix, x) for x, module in model.named_modules() if isinstance(module, nn.Linear)]
        bare_of = bare_names(linears)
        bare = [prefix + bare_of[prefix, name] for name in reached]
        first = 0
        if names and recipe.recipe == "delayed" and self.history is None:
            self.history = AmaxHistory(recipe, FORMATS[recipe.format or "hybrid"])
        if names and recipe.draws and self.draws is None:
            self.draws = Draws(recipe)
        kept = self._kept
        if names and kept is not None:
            undo.if_it_fails.append(functools.partial(vars(kept).update, dict(vars(kept))))
            first = kept.add(bare, *[_stored(module).device for module in reached.values()])
        gathered = self._gather(model, reached, undo)
        alike = Layer(recipe, "", self.switch, self.history, self.draws)
        guesses = recipe.recipe == "current" and recipe.power_of_2_scales
        layers: dict[nn.Module, Layer] = {
            module: alike._replace(
                name=name,
                number=i,
                guess=LastFactor() if guesses else None,
                kept=KeptWeight() if recipe.keep_weights == "step" else None,
                gathered=gathered.get(module),
            )
            for i, (name, module) in enumerate(zip(names, reached.values(), strict=True), start=first)
        }
        undo.callback(_release, layers)
        _put_in(layers)
        if self._loaded is not None and kept is not None and names:
            if message := _unknown(self._loaded, bare):
                warn(message)
            kept.load_state_dict(self._loaded, first)

    @property
    def _kept(self) -> "AmaxHistory | Draws | None":
        """The state that layers keep from one step to the next, and a checkpoint has."""
        return self.history or self.draws

    @property
    def _entry(self) -> str | None:
        """The entry of a state that has it, or None."""
        recipe = self.properties.fp8
        if recipe is None or not (recipe.draws or recipe.recipe == "delayed"):
            return None
        return "draws" if recipe.draws else "amaxes"

    def summary(self) -> str:
        """Return a log line with the layers in FP8; warn instead if there are none."""
        if self.properties.fp8 is None or not self._prepared:
            return ""
        missed = sum(map(len, self._missed.values()))
        reasons = "; ".join(f"{_listed(names)}: {why}" for why, names in self._missed.items())
        recipe, reached = self.properties.fp8, len(self._reached)
        of = f"{reached} of {reached + missed} layers run in {recipe.number_format}"
        message = f"fp8={recipe}: {of}" + (f". The others: {reasons}" if missed else "")
        message += f". {self.small_said}" if self.small else ""
        if self._idle:
            warn(
                f"fp8 has skip: {', '.join(sorted(self._idle))}, which is the name of no module and no "
                "glob over names; write first, last, tied, small, 'last 2', 'last 15%', a name, or a "
                "glob such as 'blocks.0.*'"
            )
        if not self._reached:
            nothing = "" if missed else ": the model has no linear layers"
            warn(message + nothing)
            return ""
        return message

    @property
    def small_said(self) -> str:
        """A sentence on the layers that are too small to gain, or an empty string."""
        recipe = self.properties.fp8
        if recipe is None or not self.small:
            return ""
        which = "1 is" if self.small == 1 else f"{self.small} are"
        skip = ", ".join(("small", *recipe.skip))
        return (
            f"{which} too small to be faster in {recipe.number_format} by what torchao measured on an "
            f"H100: fp8={{'skip': '{skip}'}} leaves out such layers"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the amax history of `delayed`, or of FP4 the counts and `forward`; else an empty dict.

        `forward` is None where the outputs are computed as the profile says.
        """
        recipe, state = self.properties.fp8, {} if self._kept is None else self._kept.state_dict()
        if recipe is None or not recipe.is_fp4:
            return state
        forward = "high" if self.switch.forward_is_high else "fp4"
        own = {"recipe": recipe.recipe, "forward": None if forward == recipe.forward else forward}
        return state | own

    @staticmethod
    def checked_state(state: dict[Any, Any], path: str, checks: StateChecks) -> dict[str, Any]:
        """Check a saved state; return it, with the entries of layers by their bare names too."""
        recipe = state.get("recipe", "delayed")
        if not isinstance(recipe, str) or recipe not in ("delayed", *FP4):
            checks.fail(path, "recipe", brief(recipe), f"one of {', '.join(('delayed', *FP4))}")
        checked: dict[str, Any] = {"recipe": recipe}
        if recipe in FP4:
            if "forward" in state:  # an earlier version has saved none
                checked["forward"] = forward = state["forward"]
                if not (forward is None or (isinstance(forward, str) and forward in _FORWARDS)):
                    checks.fail(path, "forward", brief(forward), "fp4, high or None")
            if state.keys() != {"recipe", "forward"}:  # those of gradients rounded to nearest
                checked["seed"] = checks.count(state, "seed", path, LARGEST_SEED)
                draws = checks.mapping(state, "draws", path, "the counts of layers by their names")
                within = f"{path}['draws']"
                if odd := [name for name in draws if not isinstance(name, str)]:
                    checks.fail(within, odd[0], brief(odd[0]), "names of layers")
                counts = {name: checks.count(draws, name, within) for name in draws}
                checked["draws"] = _by_bare_names_too(counts)
        else:
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
            places = {name: i for i, name in enumerate(names)}
            checked |= {"names": _by_bare_names_too(places), "amaxes": amaxes}
        for key in state.keys() - checked.keys():
            checks.fail(path, key, "fp8 has no such entry", f"only {', '.join(checked)}")
        return checked

    def differences(self, state: Mapping[str, Any] | None) -> str:
        """Return a message about layers that are not in the state, or an empty string."""
        recipe = self.properties.fp8
        if self._entry is None or recipe is None:
            return ""
        if not state or self._entry not in state:
            of = f" of {state['recipe']}" if state else ""
            missing = "no 'fp8'" if not state else f"an 'fp8'{of}"
            return (
                f"the state_dict has {missing}, and fp8='{recipe.recipe}' resumes from its own; "
                f"{_ANEW[self._entry]}"
            )
        if recipe.draws and state["seed"] != recipe.seed:
            return (
                f"the state_dict was saved with seed {state['seed']} of fp8, and this session has "
                f"{recipe.seed}: gradients are rounded by other random bits"
            )
        return _unknown(state, self._kept.names if self._kept is not None else ())

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load the entries of layers that are prepared now, and keep the others for later layers."""
        recipe = self.properties.fp8
        if state and recipe is not None and recipe.is_fp4 and "forward" in state:
            self.switch.forward_is_high = (state["forward"] or recipe.forward) == "high"
        if state and self._entry in state:
            self._loaded = state
            if self._kept is not None:
                self._kept.load_state_dict(state)


_ANEW = {
    "amaxes": "the amax history of all layers starts empty",
    "draws": "all layers draw from the beginning, so gradients are rounded by other random bits",
}
"""What a message says about layers that a state lacks, by the state's entry."""


_FORWARDS = "fp4", "high"
"""The values of `forward`."""


def _by_bare_names_too(of_layers: dict[str, int]) -> dict[str, int]:
    """Return a state's entries by the layers' names, and by their names without those of wrappers.

    An earlier version has saved names with them.
    """
    parted = [name.rpartition(": ") for name in of_layers]  # from the second model of a session on
    bare = bare_names((number, own) for number, _, own in parted)
    found = {
        number + colon + bare[number, own]: of_layers[number + colon + own]
        for number, colon, own in parted
    }
    return found | of_layers


def _unknown(state: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a message about the layers that a state lacks, or an empty string."""
    known = state.get("draws", state.get("names", ()))
    missing = [name for name in names if name not in known]
    if not missing:
        return ""
    anew = _ANEW["draws" if "draws" in state else "amaxes"].replace("all", "these")
    return f"the state_dict has no FP8 entries of {_listed(missing)}; {anew}"


def set_forward(fp8: Fp8Linears | None, forward: str) -> None:
    """Compute outputs of layers in FP4, or in half precision: the values of the key `forward`.

    Raises:
        AmpValueError: it is another word.
        AmpRuntimeError: no layers run in FP4.
    """
    recipe = None if fp8 is None else fp8.properties.fp8
    if fp8 is None or recipe is None or not recipe.is_fp4:
        raise AmpRuntimeError(
            f"set_fp4_forward is for layers in FP4, and this session has fp8={recipe or 'none'}. Take "
            "opt_level='O8' or 'O9', or fp4=True on top of a half-precision level"
        )
    if forward not in _FORWARDS:
        raise AmpValueError(f"forward={brief(forward)} is not one of {', '.join(_FORWARDS)}")
    fp8.switch.forward_is_high = forward == "high"


# Which layers.


def choose(
    model: nn.Module, recipe: Fp8Recipe, rules: Sequence[Rule]
) -> tuple[dict[str, nn.Linear], dict[str, list[str]]]:
    """Return the layers to run in FP8, by name, and the names of the others, by the reason."""
    modules = dict(model.named_modules())
    linears = [module for module in modules.values() if isinstance(module, nn.Linear)]
    others = [module for module in modules.values() if not isinstance(module, nn.Linear)]
    tied = {id(tensor) for module in others for _, tensor in own_tensors(module)}
    unused = {module.out_proj for module in others if isinstance(module, nn.MultiheadAttention)}
    ruled, ruled_weights = ruled_modules(model, rules), ruled_tensors(model, rules)
    counted_out = _counted_out(model, linears, recipe)
    number_format = recipe.number_format
    reached: dict[str, nn.Linear] = {}
    missed: dict[str, list[str]] = {}
    for name, module in modules.items():
        why = None
        if isinstance(module, nn.Linear):
            words = {"first": module is linears[0], "last": module is linears[-1]}
            words["tied"] = id(_stored(module)) in tied
            words["small"] = _is_small(module, recipe)
            words |= {item: module in found for item, found in counted_out.items()}
            if module in unused:
                why = "nn.MultiheadAttention multiplies by itself"
            elif module in ruled:
                why = f"the rule for '{ruled[module].pattern}'"
            elif (rule := ruled_weights.get(_stored(module))) is not None and rule.kind == "tensor":
                why = f"the rule for '{rule.pattern}'"
            else:
                why = _skipped(name, words, recipe) or _obstacle(module, recipe)
            if why is None:
                reached[name] = module
        elif isinstance(module, torch.jit.ScriptModule) and module.original_name == "Linear":
            why = "torch.jit has compiled it"
        elif type(module).__name__ == "Conv1D" and not isinstance(module, _ConvNd):
            why = "Hugging Face's Conv1D multiplies by addmm"
        elif isinstance(module, (_ConvNd, nn.Bilinear)):
            why = f"there are no {number_format} kernels for convolutions and nn.Bilinear"
        if why is not None:
            missed.setdefault(why, []).append(name)
    return reached, missed


def _counted_out(
    model: nn.Module, linears: Sequence[nn.Module], recipe: Fp8Recipe
) -> dict[str, set[nn.Module]]:
    """Return the modules that items of `skip` such as `last 15%` mean.

    They count the children of the longest list of modules of one class, as the blocks of a transformer
    are; or linear layers, if there is no such list.
    """
    counts = {item: found for item in recipe.skip if (found := counted(item)) is not None}
    if not counts:
        return {}
    lists = [list(x) for x in model.modules() if isinstance(x, (nn.ModuleList, nn.Sequential))]
    lists = [each for each in lists if len(each) > 1 and len({type(x) for x in each}) == 1]
    blocks = max(lists, key=len, default=list(linears))
    return {item: _end_of(blocks, count) for item, count in counts.items()}


def _end_of(blocks: Sequence[nn.Module], counted: Counted) -> set[nn.Module]:
    """Return all modules in the first or the last ones of some blocks."""
    count = counted.of(len(blocks))
    chosen = blocks[:count] if counted.end == "first" else blocks[len(blocks) - count :]
    return {module for block in chosen for module in block.modules()}


def _is_small(module: nn.Linear, recipe: Fp8Recipe) -> bool:
    return is_small(recipe.recipe, module.out_features, module.in_features)


def _skipped(name: str, words: Mapping[str, bool], recipe: Fp8Recipe) -> str | None:
    for pattern in recipe.skip:
        if words.get(pattern, False) or (pattern not in words and fnmatchcase(name, pattern)):
            return f"skip: {pattern}"
    return None


def _obstacle(module: nn.Linear, recipe: Fp8Recipe) -> str | None:
    """Return why a linear layer cannot run in FP8, or None."""
    cls = type(module)
    if has_forward_of_its_own(module) or cls.forward is not nn.Linear.forward:
        return f"{cls.__name__} has another forward"
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


def _cut(model: nn.Module, layers: Mapping[str, nn.Linear]) -> dict[str, Any]:
    """Return, by name, the layers that tensor parallelism has cut, with mesh and placements."""
    gathered = specs_when_gathered(model)
    stored = {name: _stored(module) for name, module in layers.items()}
    specs = {
        name: gathered[weight] if weight in gathered else getattr(weight, "_spec", None)
        for name, weight in stored.items()
    }
    return {name: spec for name, spec in specs.items() if spec is not None}


def _travelling(
    model: nn.Module, recipe: Fp8Recipe, layers: Mapping[str, nn.Linear]
) -> dict[nn.Module, Any]:
    """Return FSDP2's parameters that are to be gathered in FP8, by the layer."""
    if not recipe.all_gather:
        return {}
    params = params_of_fsdp2(model)
    return {
        module: params[module, "weight"] for module in layers.values() if (module, "weight") in params
    }


def _check_travelling(name: str, param: Any) -> None:
    """Raise AmpRuntimeError if FSDP2 cannot gather a weight in FP8."""
    reasons = {
        "tensor parallelism has cut it too": param.is_dtensor,
        "its shards are kept on the CPU": param.offload_to_cpu,
        "it is sharded in another dimension than the first": param.fsdp_placement.dim != 0,
        "reshard_after_forward is a number": param.post_forward_mesh_info
        not in (None, param.mesh_info),
    }
    for why, holds in reasons.items():
        if holds:
            raise AmpRuntimeError(
                f"the weight of '{name}' cannot be gathered in FP8, because {why}. Leave out "
                f"all_gather, or keep the layer out of FP8, by fp8={{'skip': ['{name}']}}"
            )


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
        if is_sharded(weight) and not is_sharded(input):
            return nn.functional.linear(input, weight, self.bias)  # torch says what is wrong
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
