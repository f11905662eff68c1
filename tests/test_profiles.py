"""A level, an alias, a file or an override becomes exactly the properties it says, or a clear error."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch

import amp
from amp import frontend
from amp.numerics import planning
from amp.profiles.fp8_recipe import FP8_KEYS, Fp8Recipe
from amp.profiles.keys import Key, OneOf, shown
from amp.profiles.levels import LEVELS, aliases, resolve
from amp.profiles.loss_scaling import SCALING_KEYS
from amp.profiles.options import Level, Overrides, SessionOptions
from amp.profiles.properties import OVERRIDE_KEYS, PROPERTY_KEYS, Properties
from amp.selftest import of_training
from tests.models import linear, sgd

TABLE = {
    #      cast_model_type, patch, type, keep_batchnorm_fp32, master_weights, loss_scale
    "O0": (torch.float32, False, None, None, False, 1.0),
    "O1": (None, True, torch.float16, None, None, "dynamic"),
    "O2": (torch.float16, False, None, True, True, "dynamic"),
    "O3": (torch.float16, False, None, False, False, 1.0),
    "O4": (None, True, torch.bfloat16, None, None, 1.0),
    "O5": (torch.bfloat16, False, None, True, True, 1.0),
    "O6": (None, True, torch.bfloat16, None, None, 1.0),
    "O7": (torch.bfloat16, False, None, True, True, 1.0),
    "O8": (None, True, torch.bfloat16, None, None, 1.0),
    "O9": (torch.bfloat16, False, None, True, True, 1.0),
}


def test_there_are_no_other_levels() -> None:
    assert list(LEVELS) == list(TABLE)
    assert list(of_training.LEVELS) == list(TABLE)
    assert sorted([*planning.FIRST, *planning._ELSE]) == sorted(TABLE)


@pytest.mark.parametrize("level", TABLE)
def test_levels_are_the_documented_ones(level: str) -> None:
    p = amp.load_profile(level)
    row = (
        p.cast_model_type,
        p.patch_torch_functions,
        p.patch_torch_functions_type,
        p.keep_batchnorm_fp32,
        p.master_weights,
        p.loss_scale,
    )
    assert row == TABLE[level]
    assert p.opt_level == level
    assert p.enabled
    assert p.brief


@pytest.mark.parametrize(
    ("alias", "level"), [("32-true", "O0"), ("16-mixed", "O1"), ("16-true", "O3"), ("bf16-mixed", "O4")]
)
def test_aliases(alias: str, level: str) -> None:
    assert amp.load_profile(alias) == amp.load_profile(level)


def test_dynamic_scaling_starts_as_in_apex() -> None:
    scaling = amp.load_profile("O2").loss_scaling
    assert (scaling.init, scaling.growth_factor, scaling.backoff_factor) == (2.0**16, 2.0, 0.5)
    assert (scaling.growth_interval, scaling.min, scaling.max) == (2000, None, 2.0**24)


def test_properties_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        amp.load_profile("O2").master_weights = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [*((x, "O2") for x in ("02", "o2", "2", 2)), *((x, "O0") for x in ("OO", "00", "0O"))],
)
def test_a_zero_for_a_letter_gets_a_hint(wrong: Any, meant: str) -> None:
    with pytest.raises(
        RuntimeError, match=rf"is not one of O0, .*did you mean '{meant}' \(letter O\)\?"
    ):
        amp.load_profile(wrong)


@pytest.mark.parametrize(
    ("wrong", "levels"),
    [
        ("bf16", "O4 O5"),
        ("bfloat16", "O4 O5"),
        (torch.bfloat16, "O4 O5"),
        ("fp16", "O1 O2 O3"),
        ("float16", "O1 O2 O3"),
        ("half", "O1 O2 O3"),
        (16, "O1 O2 O3"),
        ("fp32", "O0"),
        ("FP8", "O6 O7"),
        ("FP4", "O8 O9"),
        ("mixed", "O1 O4 O6 O8"),
        ("fp16-mixed", "O1"),
        ("bf16_mixed", "O4"),
        ("bf16-true", "O5"),
    ],
)
def test_a_number_format_is_led_to_its_levels(wrong: Any, levels: str) -> None:
    with pytest.raises(RuntimeError, match="is not one of O0, .*; did you mean 'O") as caught:
        amp.initialize(torch.nn.Linear(2, 2), opt_level=wrong)
    hint = str(caught.value).partition("did you mean ")[2]
    assert re.findall(r"'(O\d)' \(", hint) == levels.split()
    assert all(amp.load_profile(level).brief in hint for level in levels.split())


@pytest.mark.parametrize("wrong", ["O99", "fast", None, 3.5, b"O1", ["O1"]])
def test_unknown_levels_are_refused_with_what_is_allowed(wrong: Any) -> None:
    with pytest.raises(RuntimeError, match=f"is not one of {', '.join(LEVELS)}"):
        amp.load_profile(wrong)


# Overrides.


@pytest.mark.parametrize(
    ("level", "overrides", "expected"),
    [
        ("O2", {"loss_scale": "128.0"}, {"loss_scale": 128.0}),
        ("O2", {"loss_scale": 128}, {"loss_scale": 128.0}),
        ("O0", {"loss_scale": "dynamic"}, {"loss_scale": "dynamic"}),
        ("O2", {"keep_batchnorm_fp32": "False"}, {"keep_batchnorm_fp32": False}),
        ("O3", {"keep_batchnorm_fp32": "True"}, {"keep_batchnorm_fp32": True}),
        ("O2", {"master_weights": False}, {"master_weights": False}),
        ("O0", {"master_weights": True}, {"master_weights": True}),
        ("O2", {"cast_model_type": torch.bfloat16}, {"cast_model_type": torch.bfloat16}),
        ("O2", {"cast_model_type": "torch.bfloat16"}, {"cast_model_type": torch.bfloat16}),
        ("O2", {"cast_model_type": False}, {"cast_model_type": False}),
        ("O1", {"cast_model_type": torch.float32}, {"cast_model_type": torch.float32}),
        ("O1", {"cast_model_type": False}, {"cast_model_type": False}),
        ("O1", {"patch_torch_functions": False}, {"patch_torch_functions": False}),
        ("O1", {"patch_torch_functions_type": "float16"}, {"patch_torch_functions": True}),
        ("O2", {"keep_norm_fp32": True}, {"keep_norm_fp32": True}),
        ("O2", {"cast_model_outputs": "half"}, {"cast_model_outputs": torch.float16}),
        ("O2", {"loss_scale": None, "master_weights": None}, {"loss_scale": "dynamic"}),
    ],
)
def test_overrides_are_honoured(
    level: str, overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    p = resolve(level, overrides)
    assert {name: getattr(p, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("level", "overrides", "error", "text"),
    [
        (
            "O1",
            {"cast_model_type": torch.float16},
            RuntimeError,
            "cast_model_type=float16 does not fit O1",
        ),
        (
            "O4",
            {"cast_model_type": "bfloat16"},
            RuntimeError,
            "cast_model_type=bfloat16 does not fit O4",
        ),
        ("O1", {"keep_batchnorm_fp32": True}, RuntimeError, "keep_batchnorm_fp32=True does not fit O1"),
        ("O1", {"keep_batchnorm_fp32": False}, RuntimeError, "keep_batchnorm_fp32=False does not fit"),
        ("O4", {"master_weights": False}, RuntimeError, "master_weights=False does not fit O4"),
        ("O1", {"master_weights": True}, RuntimeError, "take opt_level='O2'"),
        ("O1", {"keep_norm_fp32": True}, RuntimeError, "keep_norm_fp32=True does not fit O1"),
        ("O0", {"patch_torch_functions": True}, RuntimeError, "functions cast only at opt_level='O1'"),
        ("O2", {"patch_torch_functions": True}, RuntimeError, "does not fit O2"),
        ("O3", {"patch_torch_functions": "yes"}, RuntimeError, "does not fit O3"),
        ("O2", {"patch_torch_functions_type": torch.float16}, RuntimeError, "does not fit O2"),
        ("O1", {"patch_torch_functions_type": "bfloat16"}, RuntimeError, r"or 'O4' \(bfloat16\)"),
        ("O2", {"keep_batchnorm_fp32": "maybe"}, AssertionError, "not one of True, False, None"),
        ("O2", {"keep_batchnorm_fp32": 1}, AssertionError, "not one of True, False, None"),
        ("O2", {"master_weights": "maybe"}, ValueError, "master_weights='maybe' is not one of"),
        (
            "O2",
            {"loss_scale": "abc"},
            ValueError,
            "loss_scale='abc' is not a number; allowed: 'dynamic'",
        ),
        ("O2", {"loss_scale": "Dynamic"}, ValueError, "loss_scale='Dynamic'"),
        ("O2", {"loss_scale": -1}, ValueError, "must be a finite number above 0"),
        ("O2", {"loss_scale": float("nan")}, ValueError, "finite number above 0"),
        ("O2", {"loss_scale": float("inf")}, ValueError, "finite number above 0"),
        ("O2", {"loss_scale": 0}, ValueError, "DeepSpeed's 0 is 'dynamic' here"),
        ("O2", {"loss_scale": [128]}, TypeError, "is a list; allowed"),
        (
            "O2",
            {"loss_scale": {"growth": 2}},
            TypeError,
            "no key 'growth'.*did you mean 'growth_factor'",
        ),
        ("O2", {"loss_scale": {"mode": "static"}}, ValueError, "no init"),
        (
            "O2",
            {"loss_scale": {"mode": "static", "init": 8, "hysteresis": 2}},
            ValueError,
            "does nothing",
        ),
        ("O2", {"loss_scale": {"min": 4, "min_loss_scale": 4}}, ValueError, "keep one"),
        ("O2", {"min_loss_scale": 8.0, "max_loss_scale": 4.0}, ValueError, "min=8.0 is above max=4.0"),
        ("O2", {"min_loss_scale": -1.0}, ValueError, "min_loss_scale=-1.0 must be"),
        (
            "O2",
            {"cast_model_type": "float8"},
            ValueError,
            "cast_model_type='float8' is not one of float16, ",
        ),
        ("O2", {"cast_model_type": torch.int8}, ValueError, "cast_model_type=torch.int8 is not one of"),
        ("O2", {"cast_model_type": 16}, TypeError, "cast_model_type=16 is not one of"),
        ("O2", {"loss_scale": {"growth_interval": float("inf")}}, ValueError, "must be an integer"),
        ("O2", {"keep_batchnorm": True}, TypeError, "did you mean 'keep_batchnorm_fp32'"),
    ],
)
def test_what_does_not_fit_is_refused_as_apex_refused_it(
    level: str, overrides: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        resolve(level, overrides)
    assert isinstance(caught.value, amp.AmpError)


def test_no_end_state_depends_on_the_order_of_overrides() -> None:
    one = {"cast_model_type": "bfloat16", "keep_batchnorm_fp32": False, "master_weights": False}
    other = dict(reversed(one.items()))
    assert resolve("O2", one) == resolve("O2", other)


# Files.


@pytest.fixture
def profile(tmp_path: Path) -> Any:
    def write(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_file_extends_a_level(profile: Any) -> None:
    path = profile("extends: O2\nkeep_norm_fp32: true\nbrief: mine\n")
    p = amp.load_profile(path)
    assert p.keep_norm_fp32 is True
    assert p.brief == "mine"
    assert (p.opt_level, p.cast_model_type) == ("O2", torch.float16)
    assert amp.load_profile(str(path)) == p


def test_a_file_extends_an_alias_and_a_file_beside_it(profile: Any) -> None:
    profile("extends: bf16-mixed\nloss_scale: 4\n", "base.yaml")
    p = amp.load_profile(profile("extends: base.yaml\ncast_model_outputs: float32\n"))
    assert (p.opt_level, p.loss_scale, p.cast_model_outputs) == ("O4", 4.0, torch.float32)


def test_a_file_may_extend_nothing(profile: Any) -> None:
    p = amp.load_profile(profile("cast_model_type: bfloat16\nmaster_weights: true\n"))
    assert (p.opt_level, p.cast_model_type, p.loss_scale) == (None, torch.bfloat16, 1.0)
    with pytest.raises(amp.AmpError, match=r":1: the file has no keys; write 'extends: O2'"):
        amp.load_profile(profile("# nothing yet\n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("keep_batchnorm_fp32: no", {"keep_batchnorm_fp32": False}),
        ("keep_batchnorm_fp32: off", {"keep_batchnorm_fp32": False}),
        ("keep_batchnorm_fp32: None", {"keep_batchnorm_fp32": None}),
        ("keep_batchnorm_fp32: ~", {"keep_batchnorm_fp32": None}),
        ("master_weights: yes", {"master_weights": True}),
        ("cast_model_type: no", {"cast_model_type": False}),
        ("loss_scale: 1e-3", {"loss_scale": 1e-3}),
        ("loss_scale: 1E+3", {"loss_scale": 1000.0}),
        ("loss_scale: 010", {"loss_scale": 10.0}),
        ("loss_scale: 0x10", {"loss_scale": 16.0}),
        ("loss_scale: .inf", None),
    ],
)
def test_yaml_says_what_it_looks_like(profile: Any, text: str, expected: dict[str, Any] | None) -> None:
    path = profile(f"extends: O2\n{text}\n")
    if expected is None:
        with pytest.raises(ValueError, match=r"mine.yaml:2: loss_scale="):
            amp.load_profile(path)
    else:
        p = amp.load_profile(path)
        assert {name: getattr(p, name) for name in expected} == expected


@pytest.mark.parametrize(
    "text",
    [
        "loss_scale: {mode: dynamic, init: 1024, growth_interval: 100, hysteresis: 2, min: 1, "
        "max: 65536}",
        "loss_scale: {initial_scale_power: 10, loss_scale_window: 100, hysteresis: 2, "
        "min_loss_scale: 1, max_loss_scale: 65536, loss_scale: 0}",
        "loss_scale: {initial-loss-scale: 1024, loss-scale-window: 1e2, hysteresis: 2, "
        "min-loss-scale: 1, max: 65536, loss_scale: null}",
        "loss_scale: {init_scale: 1024, growth_interval: 100, delayed_shift: 2, min: 1, max: 65536}",
    ],
)
def test_other_peoples_names_for_loss_scaling(profile: Any, text: str) -> None:
    scaling = amp.load_profile(profile(f"extends: O2\n{text}\n")).loss_scaling
    assert scaling == amp.LossScaling(
        init=1024.0, growth_interval=100, hysteresis=2, min=1.0, max=65536.0
    )


def test_a_static_scale_as_a_mapping(profile: Any) -> None:
    assert amp.load_profile(profile("loss_scale: {mode: static, init: 128}")).loss_scale == 128.0
    assert amp.load_profile(profile("loss_scale: {loss_scale: 64}")).loss_scale == 64.0


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("extends: O2\nmaster_weight: true", TypeError, ":2: .*did you mean 'master_weights'"),
        ("extends: O2\n\nmaster_weights: maybe", ValueError, ":3: master_weights='maybe'"),
        ("extends: O2\nkeep_batchnorm_fp32: maybe", AssertionError, ":2: keep_batchnorm_fp32='maybe'"),
        ("extends: O2\nloss_scale:\n  growth_interval: 0", ValueError, ":3: growth_interval=0"),
        ("extends: O2\nloss_scale:\n  grow: 0", TypeError, ":3: loss_scale has no key 'grow'"),
        ("brief: x\nextends: 02", RuntimeError, ":2: extends=2 is not one of .*did you mean 'O2'"),
        ("extends: none.yaml", FileNotFoundError, ":1: extends='none.yaml': there is no file"),
        ("extends: mine.yaml", ValueError, ":1: 'extends' goes in a circle: mine.yaml -> mine.yaml"),
        (
            "extends: O2\npatch_torch_functions: true",
            RuntimeError,
            ":2: patch_torch_functions=True does",
        ),
        ("extends: O1\nmaster_weights: on", RuntimeError, ":2: master_weights=True does not fit"),
        ("extends: O2\nextends: O3", ValueError, ":2: 'extends' was set on line 1 already"),
        ("opt_level: O2", TypeError, ":1: .*did you mean 'extends'"),
        ("loss_scale: {initial_scale_power: 2000}", ValueError, ":1: init=.*finite number above 0"),
        ("extends: O7\nfp8:\n  recipe: current\n  margin: 2", ValueError, ":4: fp8 has margin: 2"),
        (
            "extends: O1\nbuffer_dtype: fp32",
            RuntimeError,
            ":2: buffer_dtype=float32 does not fit O1: b",
        ),
        ("buffer_dtype: float32", RuntimeError, ":1: .*no buffer is cast there"),
        ("brief: x\nrules: [{tensor: a, cast: float32}]", RuntimeError, ":2: .*no parameter or buffer"),
        ("- O2", ValueError, ":1: expected a mapping"),
        ("extends: [O2", ValueError, ":1: not valid YAML"),
        ("brief: x\nloss_scale: !!python/object:os.system {}", ValueError, ":2: not valid YAML"),
    ],
)
def test_errors_in_a_file_name_file_and_line(
    profile: Any, text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"mine.yaml{message}") as caught:
        amp.load_profile(profile(text))
    assert isinstance(caught.value, amp.AmpError)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    for content in (b"\xff\xfe\x00", b"brief: \x00"):
        (tmp_path / "mine.yaml").write_bytes(content)
        with pytest.raises(ValueError, match="mine.yaml:1: not a text file in UTF-8"):
            amp.load_profile(tmp_path / "mine.yaml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"opt_level='.*none.yaml': there is no file"):
        amp.load_profile(str(tmp_path / "none.yaml"))


# A key of profiles is one place, and the rest is compared with it.


def docs_of(cls: type) -> dict[str, str]:
    """Return what a class's docstring says of its attributes."""
    text = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join(said.split()) for name, said in found}


def check_table(page: str, cls: type, keys: Mapping[str, Key], header: str) -> list[dict[str, str]]:
    """Compare the table under a header with the keys of a class, and return its rows."""
    text = (Path(__file__).parents[1] / "docs" / page).read_text()
    lines = text[text.index(header) :].partition("\n\n")[0].splitlines()
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    found = [dict(zip(heads, row, strict=True)) for row in rows]
    assert [row["key"].strip("`") for row in found] == list(keys)
    for row, key in zip(found, keys.values(), strict=True):
        said = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", row["meaning"])
        assert said == "see below" or f"{said}." == docs_of(cls)[key.field]
        assert row.get("also known as", "") == ", ".join(f"`{name}`" for name in key.aliases)
        if isinstance(key.parse, OneOf) and "values" in row:
            for word in row["values"].split(", "):
                key.parse(key.name, word)
    return found


def test_the_tables_of_keys_in_the_docs_are_the_keys() -> None:
    check_table("profiles.md", Properties, PROPERTY_KEYS, "| key | values | meaning |")
    header = "| key | default | also known as | meaning |"
    for row in check_table("profiles.md", amp.LossScaling, SCALING_KEYS, header):
        default = getattr(amp.LossScaling(), row["key"].strip("`"))
        shown = f"{default:.15g}" if isinstance(default, float) else str(default).lower()
        assert row["default"] == shown
    header = "| key | values | default | also known as | meaning |"
    for row in check_table("fp8.md", Fp8Recipe, FP8_KEYS, header):
        name = row["key"].strip("`")
        recipe: Any = "nvfp4" if row["meaning"].startswith(("FP4: ", "`nvfp4`: ")) else "delayed"
        default = getattr(Fp8Recipe(recipe=recipe), name)
        shown = ", ".join(default) if name == "skip" else str(default).lower()
        assert row["default"] == {"recipe": "current", "format": "by recipe"}.get(name, shown)


SAMPLES: tuple[Any, ...] = (
    *(None, True, False, torch.float16, torch.bfloat16, torch.float32, 2.0, {"init": 2.0}),
    *("float32", "True", "dynamic", "kahan", "on_overflow", "current", {"recipe": "current"}, ["x"]),
    *({"except": ["x"]}, [{"op": "torch.mm", "cast": None}], (), (amp.Rule("module", "x", None),)),
    *(amp.LossScaling(), Fp8Recipe(), "nvfp4", {"recipe": "nvfp4"}, Fp8Recipe(recipe="nvfp4")),
)


def is_of(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, as a type checker sees it."""
    if get_origin(hint) in (Union, UnionType):
        return any(is_of(value, each) for each in get_args(hint))
    if get_origin(hint) is Literal:
        return any(value == each and type(value) is type(each) for each in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float))
    origin = get_origin(hint) or hint
    return isinstance(value, origin) and not (origin is Sequence and isinstance(value, str))


def test_initialize_takes_every_key_as_its_field_does_and_says_so() -> None:
    """Its parameters, their types for a checker and its docstring have these keys, and no others."""
    names = OVERRIDE_KEYS.keys() - {"enabled"}
    types, of_fields = get_type_hints(Overrides), get_type_hints(Properties)
    assert types.keys() == names
    parameters = inspect.signature(amp.initialize).parameters
    own = parameters.keys() - names - {"models", "optimizers", "enabled", "opt_level", "others"}
    assert own == SessionOptions.__annotations__.keys() - names
    text = (inspect.getdoc(amp.initialize) or "").partition("Args:")[2].partition("Returns:")[0]
    described = re.findall(r"^    (?:    - `)?(\w+)`?: \S", text, re.MULTILINE)
    assert sorted(described) == sorted((names | parameters.keys()) - {"others"})
    for name in names:
        key = OVERRIDE_KEYS[name]
        if name in parameters:
            assert eval(parameters[name].annotation, dict(vars(frontend))) == types[name], name
        with pytest.raises(amp.AmpError, match=f"^{name}="):
            amp.initialize(linear(), **{name: object()})  # type: ignore[call-overload]
        taken = [None]
        for value in SAMPLES:
            with suppress(amp.AmpError):
                key.parse(key.name, value)
                taken.append(value)
        held = [value for value in SAMPLES if is_of(value, of_fields.get(key.field, float))]
        others = [value for value in taken if not isinstance(value, (str, torch.dtype))]
        for value in (*held, *others):  # words and dtypes are spellings of the others
            assert is_of(value, types[name]), (name, value)
        for arm in get_args(types[name]):
            if get_origin(arm) is Literal:
                for word in get_args(arm):
                    key.parse(key.name, word)
                    taken.append(word)
            assert any(is_of(value, arm) for value in taken), (name, arm)


def test_the_levels_that_a_type_checker_knows_are_the_levels_and_their_aliases() -> None:
    assert sorted(get_args(Level)) == sorted([*LEVELS, *aliases()])


def test_the_table_of_levels_in_the_docs_is_what_they_resolve_to() -> None:
    page = (Path(__file__).parents[1] / "docs" / "profiles.md").read_text()
    shown_keys = ("cast_model_type", "keep_batchnorm_fp32", "master_weights", "loss_scale")
    for level in LEVELS:
        p = amp.load_profile(level)
        names = ", ".join(f"`{name}`" for name, its_level in aliases().items() if its_level == level)
        cells = [shown(getattr(p, key)) for key in shown_keys]
        patches = f"{p.patch_torch_functions}"
        if p.patch_torch_functions_type:
            patches += f" ({shown(p.patch_torch_functions_type)})"
        row = (level, names, cells[0], patches, *cells[1:])
        assert f"| {' | '.join(row)} |".replace("|  |", "| |") in page


# Through initialize.


def test_initialize_takes_apexs_parameters_in_apexs_order() -> None:
    names = list(inspect.signature(amp.initialize).parameters)
    expected = "models optimizers enabled opt_level cast_model_type patch_torch_functions"
    expected += " keep_batchnorm_fp32 master_weights loss_scale cast_model_outputs num_losses verbosity"
    assert names[:14] == f"{expected} min_loss_scale max_loss_scale".split()


def test_scale_bounds_of_a_call_win_over_the_profile_and_defaults_do_not(profile: Any) -> None:
    path = profile("extends: O2\nloss_scale: {init: 4194304, max: 1048576, min: 2}\n")
    model = linear()
    amp.initialize(model, sgd(model), opt_level=path)
    assert amp.loss_scale() == 1048576.0
    model = linear()
    amp.initialize(model, sgd(model), opt_level=path, max_loss_scale=1024.0)
    assert amp.loss_scale() == 1024.0
    scaling = amp.get_session().properties.loss_scaling
    assert (scaling.min, scaling.max) == (2.0, 1024.0)


# FP8.


SAME: dict[str, tuple[Any, Any]] = {
    "current in Transformer Engine": ("Float8CurrentScaling", "current"),
    "delayed": ("DelayedScaling", {"recipe": "delayed"}),
    "block": ("blockwise", {"fp8_recipe": "Float8BlockScaling"}),
    "mxfp8": ("MXFP8BlockScaling", "mxfp8"),
    "torchao's": ("tensorwise", {"round_scales_to_power_of_2": True}),
    "torchao's third": ("rowwise_with_gw_hp", "rowwise_gw_hp"),
    "a format alone": ("hybrid", {"fp8_format": "HYBRID"}),
    "Megatron's": (
        {"fp8_recipe": "delayed", "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent"},
        {"recipe": "delayed", "amax_history": 1, "amax_algo": "most_recent"},
    ),
    "Megatron's weights": ({"fp8_wgrad": False}, {"grad_weight": "high"}),
    "Megatron's layers": ({"first_last_layers_bf16": True}, {"skip": ["first", "last"]}),
    "kept weights": ({"keep_fp8_transpose_cache": True}, {"keep_weights": True}),
    "weights quantized again": ({"force_recompute_fp8_weight_in_bwd": True}, {"keep_weights": False}),
    "an all-gather": ({"enable_fsdp_float8_all_gather": True}, {"all_gather": True}),
    "accelerate's": (
        {"use_autocast_during_eval": False, "margin": 2, "recipe": "DelayedScaling"},
        {"eval": "high", "margin": "2", "recipe": "delayed"},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_other_libraries_words_for_fp8(name: str) -> None:
    one, other = SAME[name]
    found = resolve("O4", {"fp8": one}).fp8
    assert found == resolve("O4", {"fp8": other}).fp8
    assert isinstance(found, Fp8Recipe)


@pytest.mark.parametrize("value", [False, "none", "off", None])
def test_fp8_can_be_switched_off(value: Any) -> None:
    assert (resolve("O6", {"fp8": value}).fp8 is None) is (value is not None)


@pytest.mark.parametrize(
    ("level", "fp8", "error", "text"),
    [
        ("O0", "current", RuntimeError, "fp8=current does not fit O0.*'O6' or 'O7'"),
        ("O4", "curent", ValueError, "fp8='curent' is not one of current, delayed.*did you mean"),
        ("O4", 8, TypeError, "fp8=8 is a int; allowed: one of current"),
        ("O4", {"recepi": "current"}, TypeError, "fp8 has no key 'recepi'.*did you mean 'recipe'"),
        ("O4", {"margin": 1}, ValueError, "margin: 1, which does nothing under current; leave"),
        ("O4", {"amax_history": 4}, ValueError, "or take recipe: delayed"),
        ("O4", {"recipe": "mxfp8", "power_of_2_scales": False}, ValueError, "scales are powers of 2"),
        ("O4", {"recipe": "rowwise_gw_hp", "grad_weight": "fp8"}, ValueError, "does nothing"),
        ("O4", {"recipe": "delayed", "amax_history": 0}, ValueError, "amax_history=0 must be"),
        ("O4", {"recipe": "delayed", "margin": -1}, ValueError, "margin=-1 must be an integer of"),
        ("O4", {"skip": 3}, TypeError, "skip=3 is a int; give a list"),
        ("O4", {"skip": [3]}, TypeError, "skip=3 is not a name or a glob"),
        ("O4", {"recipe": "delayed", "fp8_recipe": "delayed"}, ValueError, "which are one thing"),
        ("O4", {"fp8_wgrad": True, "grad_weight": "fp8"}, ValueError, "which are one thing"),
        ("O4", {"recipe": "rowwise", "all_gather": True}, ValueError, "or take recipe: current"),
        ("O4", {"recipe": "rowwise_gw_hp", "keep_weights": True}, ValueError, "has other scales"),
        ("O4", {"recipe": "delayed", "keep_weights": "step"}, ValueError, "take keep_weights: True"),
        ("O4", {"all_gather": True, "keep_weights": True}, ValueError, "FSDP2 frees a gathered weight"),
        ("O4", {"eval": "high", "all_gather": True}, ValueError, "all_gather: True and eval: high"),
    ],
)
def test_fp8_that_makes_no_sense(level: str, fp8: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        resolve(level, {"fp8": fp8})


def test_levels_with_fp8_are_the_levels_below_but_for_it() -> None:
    for level, below in (("O6", "O4"), ("O7", "O5")):
        found, expected = amp.load_profile(level), amp.load_profile(below)
        assert found.fp8 == Fp8Recipe()
        same = replace(found, fp8=None, opt_level=below, brief=expected.brief)
        assert same == expected
