"""What people write who come from torch.amp, Lightning, Accelerate, DeepSpeed or TransformerEngine."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amp
from amp.compat.normalization import FusedLayerNorm
from amp.compat.parallel import LARC
from amp.other_names import _OF_ATTRIBUTES, _OF_KEYWORDS
from amp.profiles.properties import OVERRIDE_KEYS
from tests.models import run_backward

ANY: Any = amp
X = torch.ones(3, 4)
pytestmark = pytest.mark.filterwarnings("ignore:fp8=current. . of . layers run in FP8")
LEVELS = ["O0", "O1", "O2", "O4", "O5", "O6"]


def fresh() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def initialized(level: str = "O2") -> tuple[Any, Any]:
    return amp.initialize(*fresh(), opt_level=level, verbosity=0)


# Names.


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("autocast", "opt_level='O1') casts in the model's forward, and 'O4' does in bfloat16"),
        ("autocats", "opt_level='O1') casts in the model's forward, and 'O4' does in bfloat16"),
        ("initalize", "; did you mean 'initialize'?"),
        ("numeric", "; did you mean 'numerics'?"),
        ("fp8_autocast", "opt_level='O6' of amp.initialize runs linear layers of torch.nn in FP8"),
        ("unscale_", "the end of an amp.scale_loss block unscales the gradients: leave it out"),
        (
            "manual_backward",
            "a loss is scaled in a block: `with amp.scale_loss(loss, optimizer) as scaled",
        ),
        ("sync_gradients", "make an amp.scale_loss block for each backward, and step after the last"),
        ("AutocastKwargs", "amp.initialize(model, optimizer, opt_level=...) prepares models"),
        ("scale", "a loss is scaled in a block: `with amp.scale_loss(loss, optimizer) as scaled_loss"),
        ("update", "call optimizer.step() after the amp.scale_loss block"),
        ("prepare", "amp.initialize(model, optimizer, opt_level=...) prepares models"),
        ("clip_grad_norm_", "call torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max"),
        ("no_grad", "; it is torch.no_grad"),
        ("custom_fwd", "; it is torch.amp.custom_fwd"),
        ("FusedAdam", "; amp.optimizers has it"),
        ("FP16_Optimizer", "; amp.fp16_utils has it"),
        ("AmpRuntimeError", "; amp.errors has it"),
        ("set_loss_scale", "the argument loss_scale of amp.initialize sets the scale"),
        ("overflow", "amp.step_was_skipped(optimizer) says whether its last step was skipped"),
        ("optimizer_step", "call optimizer.step() after the amp.scale_loss block"),
        ("accumulate", "make an amp.scale_loss block for each backward, and step after the last"),
        ("save_checkpoint", "save model.state_dict(), optimizer.state_dict() and amp.state_dict()"),
        ("opt_levels", "the argument opt_level of amp.initialize takes a level, such as 'O2'"),
        ("is_enabled", "enabled=False in amp.initialize turns amp off"),
        ("free_memory", "amp.get_session(optimizer).close() ends what amp.initialize began"),
        ("unwrap_model", "amp.initialize returns the model itself, without a wrapper"),
        ("DistributedDataParallel", "call amp.initialize first, and wrap the model then: torch.nn."),
        ("convert_syncbn_model", "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) converts a"),
        ("is_bf16_supported", "torch.cuda.is_bf16_supported() says it"),
        ("fp16_function", "did you mean 'half_function'?"),
        ("bf16_function", "did you mean 'bfloat16_function'?"),
        ("register_bf16_function", "did you mean 'register_bfloat16_function'?"),
        ("register_fp16_function", "did you mean 'register_half_function'?"),
        ("TransformerLayer", "opt_level='O6' of amp.initialize runs linear layers of torch.nn in FP8"),
        ("DelayedScaling", "takes a recipe, such as fp8='delayed'"),
    ],
)
def test_a_name_of_another_library_says_what_to_write(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(meant)) as caught:
        getattr(amp, name)
    assert str(caught.value).startswith(f"module 'amp' has no attribute '{name}'; ")
    with pytest.raises(ImportError, match=re.escape(meant)) as imported:
        exec(f"from amp import {name}")
    assert str(imported.value).startswith(f"cannot import name '{name}' from 'amp'; ")
    assert not hasattr(amp, name)


@pytest.mark.parametrize("name", ["FusedAdamW", "AdamW", "DeepSpeedCPUAdam", "FusedLamb"])
def test_an_optimizer_that_does_not_exist_says_which_do(name: str) -> None:
    has = "FusedAdam is AdamW by default" if "Adam" in name else "it has FusedAdagrad, FusedAdam, Fused"
    text = f"'{name}'; {has}"
    with pytest.raises(AttributeError, match=f"^module 'amp.optimizers' has no attribute {text}"):
        getattr(amp.optimizers, name)
    imported = f"from 'amp.optimizers'{text.removeprefix(repr(name))}"
    with pytest.raises(ImportError, match=f"^cannot import name '{name}' {imported}"):
        exec(f"from amp.optimizers import {name}")


def test_a_name_that_means_nothing_gets_no_far_fetched_hint() -> None:
    with pytest.raises(AttributeError, match=r"^module 'amp' has no attribute 'nothing'$"):
        _ = ANY.nothing


def test_places_that_names_are_said_to_be_in_have_them() -> None:
    for meant, names in _OF_ATTRIBUTES.items():
        if meant.endswith(" has it"):
            place = getattr(amp, meant.split()[0].removeprefix("amp."))
            assert [name for name in names.split() if not hasattr(place, name)] == []


def test_a_name_is_in_one_row_and_is_not_one_of_ours() -> None:
    for table, ours in ((_OF_ATTRIBUTES, dir(amp)), (_OF_KEYWORDS, OVERRIDE_KEYS)):
        names = [name for names in table.values() for name in names.split()]
        assert len(names) == len(set(names))
        assert not set(names) & set(ours)


# Keywords.

BY_LEVEL = "; opt_level says it: 'O1' or 'O2' for float16, 'O4' or 'O5' for bfloat16, 'O6' or 'O7' for "
SCALE = "; loss_scale says it: 'dynamic', a number, or a mapping such as {'init': 1024, "


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(
            (name, BY_LEVEL)
            for name in ("dtype", "precision", "mixed_precision", "param_dtype", "fp16")
        ),
        ("config", "; opt_level takes the path of a YAML profile"),
        ("device_type", "; leave it out: models and tensors stay on the devices that they are on"),
        ("dynamic_loss_scale", SCALE),
        ("grad_scaler", SCALE),
        ("output_dtype", "; pass cast_model_outputs instead"),
        ("cast_forward_inputs", "; pass cast_model_inputs instead"),
        ("fp8_recipe", "; pass fp8 instead, such as fp8='delayed'"),
        ("fp4_recipe", "; pass fp4 instead, such as fp4='nvfp4'"),
        ("amax_history_len", "; it belongs under fp8, which takes a mapping such as {'recipe': 'del"),
        ("modules_to_not_convert", "; rules says it: [{'module': 'head', 'cast': 'float32'}] keeps"),
        (
            "initial_scale_power",
            "; it belongs under loss_scale, which takes a mapping such as {'initial",
        ),
        ("communication_data_type", "; pass reduce_dtype instead"),
        ("model_parameters", "; leave it out, and pass the optimizer of these parameters"),
        ("gradient_clip_val", "; clip after the amp.scale_loss block"),
        ("gradient_accumulation_steps", "; make an amp.scale_loss block for each of these backwards"),
        ("growth_interval", "; it belongs under loss_scale"),
        ("optlevel", "; did you mean 'opt_level'?"),
        ("level", "; did you mean 'opt_level'?"),
        ("verbose", "; did you mean 'verbosity'?"),
        ("reduce_type", "; did you mean 'reduce_dtype'?"),
        ("weight_dtype", BY_LEVEL),
        ("clipping", "; clip after the amp.scale_loss block, with"),
    ],
)
def test_a_keyword_of_another_library_says_which_argument_is_meant(name: str, meant: str) -> None:
    model, optimizer = fresh()
    with pytest.raises(TypeError, match=re.escape(f"keyword argument '{name}'{meant}")):
        ANY.initialize(model, optimizer, **{name: 1})
    assert model[0].weight.dtype is torch.float32
    if "It takes" not in meant and "'opt_level'" not in meant:
        with pytest.raises(TypeError, match=f"there is no property '{name}'.*{re.escape(meant)}"):
            ANY.Session("O2", **{name: 1})


@pytest.mark.parametrize("name", ["enabled", "num_losses", "verbosity", "process_group"])
def test_an_argument_of_initialize_in_a_file(tmp_path: Any, name: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"extends: O2\n{name}: 1\n")
    text = (
        f"p.yaml:2: there is no property '{name}'.*; it is an argument of amp.initialize, and no prop"
    )
    with pytest.raises(TypeError, match=text):
        amp.load_profile(path)


@pytest.mark.parametrize("name", [*amp.optimizers.__all__])
def test_a_keyword_of_an_optimizer_is_named(name: str) -> None:
    makes, parameters = getattr(amp.optimizers, name), [torch.ones(1, requires_grad=True)]
    assert "params" in inspect.signature(makes).parameters
    for wrong, meant in {
        "wd": "weight_decay",
        "clip_norm": "max_grad_norm",
        "learning_rate": "lr",
    }.items():
        text = rf"^{name}\(\) got an unexpected keyword argument '{wrong}'; did you mean '{meant}'\?"
        with pytest.raises(TypeError, match=text):
            makes(parameters, **{wrong: 1.0})
    with pytest.raises(TypeError, match="'foreach'; leave it out. It takes params, lr, "):
        makes(parameters, lr=1.0, foreach=True)


def test_the_mode_of_adam_is_named() -> None:
    class Mine(amp.optimizers.FusedAdam):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)

    with pytest.raises(TypeError, match=r"FusedAdam\(\) got .*'adamw'; did you mean 'adam_w_mode'\?"):
        Mine([torch.ones(1, requires_grad=True)], adamw=False)


def test_a_keyword_of_scale_loss_is_named() -> None:
    model, optimizer = initialized()
    for name, meant in {
        "optimizer": "optimizers",
        "delay_unscaling": "delay_unscale",
        "id": "loss_id",
    }.items():
        text = rf"scale_loss\(\) got an unexpected keyword argument '{name}'; did you mean '{meant}'\?"
        with pytest.raises(TypeError, match=text):
            ANY.scale_loss(model(X).sum(), **{name: optimizer})
    with pytest.raises(
        TypeError, match="'scaler'; leave it out. It takes loss, optimizers, loss_id, model, "
    ):
        ANY.scale_loss(model(X).sum(), optimizer, scaler=None)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: ANY.GradScaler(init_scal=4.0),
            r"GradScaler\(\) got .*'init_scal'; did you mean 'init_sca",
        ),
        (lambda: ANY.compare(fresh, print, level=["O1"]), "'level'; did you mean 'levels'"),
        (lambda: ANY.doctor(print, optimizers=None), "'optimizers'; did you mean 'optimizer'"),
        (lambda: ANY.diagnose(fresh()[0], optimizers=None), "'optimizers'; did you mean 'optimizer'"),
        (lambda: ANY.watch(model=fresh()[0]), "'model'; leave it out. It takes at$"),
        (
            lambda: ANY.load_state_dict(torch.amp.GradScaler("cpu").state_dict()),
            "into amp.GradScaler, or",
        ),
        (
            lambda: ANY.initialize(fresh()[0], lambda p: None),
            "got function. Pass an optimizer of the param",
        ),
        (lambda: ANY.initialize(fresh()[0], ([], [])), "got tuple$"),
        (lambda: ANY.initialize(*fresh(), opt_level="no"), "did you mean 'O0' "),
        (
            lambda: ANY.initialize(*fresh(), opt_level="transformer-engine"),
            "did you mean 'O6' .* or 'O7' ",
        ),
    ],
)
def test_what_other_functions_of_ours_say(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(amp.AmpError, match=text):
        call()


# Flags that are texts, as from a command line.


@pytest.mark.parametrize(
    "call",
    [
        lambda model, optimizer, flag: amp.scale_loss(model(X).sum(), optimizer, delay_unscale=flag),
        lambda model, optimizer, flag: amp.scale_loss(
            model(X).sum(), optimizer, delay_overflow_check=flag
        ),
        lambda model, optimizer, flag: amp.scalars(norms=flag),
        lambda model, optimizer, flag: amp.get_session().history(flag),
        lambda model, optimizer, flag: amp.compat.install(flag),
        lambda model, optimizer, flag: amp.fp16_utils.prep_param_lists(model, flag),
        lambda model, optimizer, flag: LARC(optimizer, clip=flag),
        lambda model, optimizer, flag: FusedLayerNorm(4, elementwise_affine=flag),
    ],
)
def test_a_text_is_no_flag(call: Any) -> None:
    model, optimizer = initialized()
    with pytest.raises(amp.AmpError, match="no"):
        call(model, optimizer, "no")


# What initialize returns, and what scale_loss takes.


@pytest.mark.parametrize("level", LEVELS)
def test_one_name_for_model_and_optimizer(level: str) -> None:
    both = initialized(level)
    assert both == (both[0], both[1])
    says = re.escape("amp.initialize returned (model, optimizer): write model, optimizer = amp.initial")
    with pytest.raises(TypeError, match=f"a tuple was called. {says}"):
        ANY.get_session(both[1]) and both(X)  # type: ignore[operator]
    with pytest.raises(AttributeError, match=f"a tuple has no attribute 'train'. {says}"):
        both.train()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=f"got a tuple. {says}"):
        amp.scale_loss(both[0](X).sum(), both)
    assert [type(each) for each in (copy.copy(both), pickle.loads(pickle.dumps(both)))] == [tuple] * 2
    assert type(amp.Session("O0").initialize(*fresh())) is type(both)


def test_one_name_too_many_for_a_model_alone() -> None:
    _, optimizer = ANY.initialize(
        nn.Sequential(nn.Linear(4, 2), nn.ReLU()), opt_level="O2", verbosity=0
    )
    text = r"got ReLU, a module. amp.initialize returned \(model, optimizer\): .* the model alone"
    with pytest.raises(TypeError, match=text):
        amp.scale_loss(X.sum(), optimizer)


class Output:
    """A model's output, as those of transformers."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            lambda loss: np.float32(3.0),
            "got numpy.float32. An array, such as loss.numpy(), has no graph: pass",
        ),
        (
            lambda loss: loss.detach().numpy(),
            "got numpy.ndarray. An array, such as loss.numpy(), has no graph",
        ),
        (
            lambda loss: {"loss": loss},
            "got dict. Pass the loss that is in it, as output.loss or output",
        ),
        (lambda loss: Output(loss), "got Output. Pass the loss that is in it, as output.loss or out"),
        (lambda loss: lambda: loss, "got function. Call it, and pass the loss that it returns"),
        (lambda loss: None, "got NoneType: the model or the criterion has returned nothing"),
        (
            lambda loss: [loss, loss],
            "got list. Pass their sum, or make a block for each, with another loss_id",
        ),
    ],
)
def test_a_loss_that_is_no_tensor(loss: Callable[[torch.Tensor], Any], text: str) -> None:
    model, optimizer = initialized()
    with pytest.raises(TypeError, match=re.escape(text)):
        amp.scale_loss(loss(model(X).sum()), optimizer)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_loss_of_several_numbers(level: str) -> None:
    model, optimizer = initialized(level)
    with pytest.raises(RuntimeError, match="implicitly created only for scalar") as caught:
        run_backward(model(X).sum(1), optimizer)
    (note,) = caught.value.__notes__
    assert note.startswith(
        "amp: the loss has the shape (3,): scale one number, as in amp.scale_loss(lo"
    )
    with amp.scale_loss(model(X).sum(1), optimizer) as scaled_loss:
        scaled_loss.backward(torch.ones(3))


@pytest.mark.parametrize("call", [amp.check, amp.explain])
def test_a_list_where_one_model_is_meant(call: Any) -> None:
    text = "takes one model, and got a list of 2: pass one of them, and call it again for the next"
    with pytest.raises(TypeError, match=text):
        call([fresh()[0], fresh()[0]], X, opt_level="O2")


# What comes out of a session, and goes into it.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_session_is_not_pickled(level: str, how: Any) -> None:
    model, optimizer = initialized(level)
    with pytest.raises(
        TypeError, match=r"neither pickled nor copied: .* Save amp.state_dict\(\), model"
    ):
        how(amp.get_session())
    copy.deepcopy(model)
    pickle.dumps(optimizer)


@pytest.mark.parametrize(
    "name", ["loss_scale", "los_scale", "opt_level", "verbosity", "models", "step"]
)
def test_an_attribute_of_a_session_is_not_set(name: str) -> None:
    initialized()
    meant = {
        "loss_scale": r"pass loss_scale=\.\.\. to amp.initialize; session.scalers\[0\].set_sc",
        "los_scale": "did you mean 'loss_scale'?",
        "opt_level": "pass opt_level=",
        "verbosity": "pass verbosity=",
        "step": "call optimizer.step",
    }
    with pytest.raises(
        AttributeError,
        match=f"^session.{name} cannot be set{'; ' * (name in meant)}{meant.get(name, '$')}",
    ):
        setattr(amp.get_session(), name, 128)
    amp.get_session().scalers[0].set_scale(128.0)
    assert amp.loss_scale() == 128


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("of", ["optimizer", "model"])
def test_zero_grad_after_the_backward_is_named(level: str, of: str) -> None:
    model, optimizer = initialized(level)
    loss = model(X).sum()
    text = r"as after .detach\(\), or zero_grad\(\) was called after the backward. Call it before the "
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            (model if of == "model" else optimizer).zero_grad()
    assert [bool(re.search(text, str(each.message))) for each in said] == [True]
    is_known = level in ("O1", "O2")  # where the block watches for a backward, as it scales the loss
    assert ("no backward was run" in str(said[0].message)) is not is_known


@pytest.mark.filterwarnings("ignore:.*quant")
@pytest.mark.parametrize("level", LEVELS)
def test_a_quantized_model(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    text = "the model is quantized: '0' is a DynamicQuantizedLinear, and no parameter is left to cast"
    with pytest.raises(amp.AmpError, match=text):
        amp.initialize(quantized, opt_level=level, verbosity=0)
    amp.initialize(nn.ReLU(), opt_level=level, verbosity=0)
    with_more = nn.Sequential(quantized, nn.Linear(2, 2))
    amp.initialize(with_more, opt_level=level, verbosity=0)
