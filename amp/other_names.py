"""What other libraries call things, and what to write here instead: for errors about unknown names.

Each table maps what to write to the names, all of one library or several, that mean it.
"""

import difflib
import functools
import inspect
import opcode
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import ParamSpec, TypeVar

from amp.errors import AmpTypeError, did_you_mean

P = ParamSpec("P")
T = TypeVar("T")

_BLOCK = "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
_OF_ATTRIBUTES = {
    "amp.initialize(model, optimizer, opt_level='O1') casts in the model's forward, and 'O4' does in "
    "bfloat16: no region is needed": "autocast autocast_mode autocast_model autocast_decorator",
    "opt_level='O6' of amp.initialize runs linear layers of torch.nn in FP8: no region or conversion "
    "is needed": (
        "fp8_autocast fp8_model_init quantized_model_init convert_to_float8_training float8 fp8 "
        "Float8Linear TransformerLayer"
    ),
    "the end of an amp.scale_loss block unscales the gradients: leave it out": "unscale_ unscale",
    f"a loss is scaled in a block: {_BLOCK}": (
        "scale backward manual_backward scaled_loss loss_scaler scaler"
    ),
    "call optimizer.step() after the amp.scale_loss block, whose end updates the scale": (
        "step update optimizer_step"
    ),
    "amp.loss_scale() returns the scale": "get_scale get_loss_scale",
    "the argument loss_scale of amp.initialize sets the scale": (
        "set_scale set_loss_scale init_scale reset_scale reset_loss_scale"
    ),
    "amp.step_was_skipped(optimizer) says whether its last step was skipped": (
        "skipped overflow has_overflow check_overflow found_inf optimizer_step_was_skipped"
    ),
    "make an amp.scale_loss block for each backward, and step after the last": (
        "accumulate gradient_accumulation no_sync sync_gradients"
    ),
    "save model.state_dict(), optimizer.state_dict() and amp.state_dict() with torch.save, and load "
    "each with its own load_state_dict": (
        "save_checkpoint load_checkpoint save_model load_model save_state load_state"
    ),
    "the argument opt_level of amp.initialize takes a level, such as 'O2', or the path of a YAML "
    "profile": ("opt_level opt_levels OptLevel get_opt_level set_opt_level precision mixed_precision"),
    "enabled=False in amp.initialize turns amp off, and amp.get_session().properties.enabled says "
    "whether it is on": "is_enabled enable disable",
    "amp.get_session(optimizer).close() ends what amp.initialize began": (
        "close end finish shutdown free_memory end_training"
    ),
    "amp.initialize returns the model itself, without a wrapper: leave it out": "unwrap_model unwrap",
    "call amp.initialize first, and wrap the model then: "
    "torch.nn.parallel.DistributedDataParallel(model)": (
        "DistributedDataParallel DDP parallel data_parallel"
    ),
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) converts a model": (
        "convert_syncbn_model SyncBatchNorm convert_sync_batchnorm"
    ),
    "torch.cuda.is_bf16_supported() says it": "is_bf16_supported is_bfloat16_supported",
    "did you mean 'half_function'?": "fp16_function float16_function",
    "did you mean 'bfloat16_function'?": "bf16_function",
    "did you mean 'register_bfloat16_function'?": "register_bf16_function",
    "did you mean 'register_half_function'?": "register_fp16_function register_float16_function",
    "amp.initialize(model, optimizer, opt_level=...) prepares models and optimizers": (
        "prepare setup init convert wrap autocast_initialize half to_half Amp Accelerator Fabric "
        "Policy MixedPrecision MixedPrecisionPolicy MixedPrecisionPlugin network_to_half "
        "AutocastKwargs GradScalerKwargs FP8RecipeKwargs init_distributed"
    ),
    "call torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm) after the "
    "amp.scale_loss block": "clip_grad_norm_ clip_grad_norm clip_grad_value_ clip_gradients clip_grad",
    "amp.fp16_utils has it": (
        "FP16_Optimizer FP16Model BN_convert_float convert_network convert_module prep_param_lists "
        "master_params_to_model_params model_grads_to_master_grads tofp16 DynamicLossScaler LossScaler"
    ),
    "amp.optimizers has it": ("FusedAdam FusedSGD FusedLAMB FusedNovoGrad FusedAdagrad FusedLion"),
    "amp.errors has it": (
        "AmpAssertionError AmpAttributeError AmpIndexError AmpNotImplementedError AmpRuntimeError "
        "AmpTypeError AmpValueError ProfileNotFoundError"
    ),
    "the argument fp8 of amp.initialize takes a recipe, such as fp8='delayed'": (
        "DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling NVFP4BlockScaling "
        "Float8LinearConfig Format recipe"
    ),
}
"""Names that scripts expect in the module `amp`."""

_OF_KEYWORDS = {
    "{level} says it: 'O1' or 'O2' for float16, 'O4' or 'O5' for bfloat16, 'O6' or 'O7' for FP8": (
        "dtype precision mixed_precision half_dtype half_type compute_dtype param_dtype weight_dtype "
        "amp_dtype autocast_dtype torch_dtype fast_dtype target_dtype fp16 bf16 half bfloat16 float16 "
        "amp autocast use_amp mode policy plugin"
    ),
    "{level} takes the path of a YAML profile": (
        "config config_file config_path config_params ds_config cfg conf yaml profile settings kwargs"
    ),
    "leave it out: models and tensors stay on the devices that they are on": (
        "device device_type devices accelerator local_rank"
    ),
    "leave it out: casts of weights are not cached beyond what torch.autocast does": (
        "cache_enabled weights_cache"
    ),
    "loss_scale says it: 'dynamic', a number, or a mapping such as {{'init': 1024, 'growth_interval': "
    "500}}": (
        "scaler grad_scaler gradscaler loss_scaler scale dynamic_loss_scale static_loss_scale dynamic "
        "dynamic_loss_args dynamic_loss_scaling loss_scale_config init_loss_scale scaling_factor"
    ),
    "pass cast_model_outputs instead, such as torch.float32": (
        "output_dtype out_dtype output_type outputs_dtype cast_outputs"
    ),
    "pass cast_model_inputs instead, True or False": (
        "input_dtype cast_inputs cast_forward_inputs input_cast_type"
    ),
    "pass master_weights instead, True or False": (
        "masters master master_dtype fp32_master use_master_weights keep_master_weights "
        "keep_fp32_weights master_weight_dtype fp32_params"
    ),
    "pass keep_batchnorm_fp32 instead, or keep_norm_fp32 for all norms": "keep_fp32 norm_dtype",
    "pass fp8 instead, such as fp8='delayed'": (
        "fp8_recipe recipe fp8_format fp8_enabled fp8_config float8 enable_fp8 use_fp8"
    ),
    "pass fp4 instead, such as fp4='nvfp4'": (
        "fp4_recipe fp4_format fp4_enabled fp4_config enable_fp4 use_fp4"
    ),
    "it belongs under fp8, which takes a mapping such as {{'recipe': 'delayed', 'amax_history': "
    "1024}}": ("amax_history amax_history_len amax_algo amax_compute_algo margin reduce_amax"),
    "rules says it: [{{'module': 'head', 'cast': 'float32'}}] keeps a module in FP32": (
        "fp32_modules keep_fp32_modules keep_in_fp32_modules skip_modules exclude exclude_modules "
        "modules_to_not_convert ignored_modules llm_int8_skip_modules"
    ),
    "it belongs under loss_scale, which takes a mapping such as {{'initial_scale_power': 16}}": (
        "initial_scale_power"
    ),
    "pass reduce_dtype instead, such as torch.float32": (
        "communication_data_type gradient_dtype grad_reduce_dtype all_reduce_dtype"
    ),
    "leave it out, and pass the optimizer of these parameters": (
        "model_parameters model_params parameters params"
    ),
    "verbosity says it: 0 logs nothing": "log_level loglevel logging quiet silent print_level",
    "pass process_group instead": "group pg amax_reduction_group fp8_group",
    "clip after the amp.scale_loss block, with torch.nn.utils.clip_grad_norm_": (
        "max_grad_norm clip_grad clip_norm gradient_clipping gradient_clip_val clip_grad_norm max_norm "
        "clipping"
    ),
    "make an amp.scale_loss block for each of these backwards, and step after the last": (
        "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accum_steps"
    ),
    "leave it out: schedulers and data loaders go on without a change": (
        "lr_scheduler scheduler schedulers dataloader data_loader training_data training_dataloader"
    ),
}
"""Keywords of functions that prepare models and optimizers, or make regions."""

_OF_ARGUMENTS = {
    "optimizers": "optimizer optim opt",
    "loss_id": "id num loss_index loss_number",
    "delay_unscale": "accumulate accumulating",
    "adam_w_mode": "adamw adamw_mode use_adamw decoupled decoupled_weight_decay",
    "lr": "learning_rate base_lr alpha",
    "betas": "beta1 beta2 b1 b2 beta_1 beta_2",
    "eps": "epsilon",
    "weight_decay": "wd decay l2 weight_decay_rate",
    "max_grad_norm": "max_norm clip_grad clip_norm clip_grad_norm gradient_clip_val",
    "optimizer": "optimizers",
    "levels": "level opt_level opt_levels",
    "set_grad_none": "set_to_none set_grads_to_none",
    "state_dtype": "moment_dtype exp_avg_dtype optim_bits",
}
"""Keywords of functions that scale a loss, and of optimizers, by the argument that they mean here."""


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: meant for meant, names in table.items() for name in names.split()}


def hint_at_attribute(
    name: str, known: Iterable[str], places: tuple[str, ...] = ("torch", "torch.amp")
) -> str:
    """Return, for an error, what to write instead of an attribute that does not exist.

    Args:
        name: the attribute.
        known: those that the object has.
        places: modules that may have it.
    """
    others = _by_name(_OF_ATTRIBUTES)
    near = "".join(difflib.get_close_matches(name, [*known, *others], n=1, cutoff=0.75))
    torch = sys.modules.get("torch")
    for place in places if torch is not None and near != name else ():
        if name in vars(sys.modules.get(place, torch)):
            return f"; it is {place}.{name}"
    return f"; {others[near]}" if near in others else near and f"; did you mean '{near}'?"


def no_such_name(
    module: str, path: str, name: str, hint: str, caller: FrameType
) -> AttributeError | ImportError:
    """Return the error about a name that a module does not have.

    Args:
        module: the module's name.
        path: the module's file.
        name: the name that it does not have.
        hint: the end of the message.
        caller: the frame that asked for the name. For its `from module import name` this is an
            ImportError, because Python drops the message of another error there.
    """
    if caller.f_code.co_code[caller.f_lasti] == opcode.opmap["IMPORT_FROM"]:
        return ImportError(f"cannot import name '{name}' from '{module}'{hint}", name=name, path=path)
    return AttributeError(f"module '{module}' has no attribute '{name}'{hint}")


def hint_at_keyword(name: str, known: Iterable[str], level: str) -> str:
    """Return, for an error, what to write instead of a keyword or key that does not exist.

    Args:
        name: the keyword.
        known: those that exist.
        level: the keyword, or the key of a file, that names a level.
    """
    meant = _by_name(_OF_KEYWORDS).get(name)
    if meant is not None:
        return f"; {meant.format(level=level)}"
    words = [{"bn": "batchnorm"}.get(word, word) for word in name.split("_")]
    return did_you_mean("_".join(words), known, cutoff=0.7)


def unknown_keyword(called: str, name: str, takes: Iterable[str]) -> AmpTypeError:
    """Return the error about a keyword that a function, or a class, does not take.

    Args:
        called: the function.
        name: the keyword.
        takes: the arguments that there are.
    """
    takes = list(takes)
    meant = _by_name(_OF_ARGUMENTS).get(name)
    hint = f"; did you mean '{meant}'?" if meant in takes else did_you_mean(name, takes, cutoff=0.7)
    hint = hint or f"; leave it out. It takes {', '.join(takes)}"
    return AmpTypeError(f"{called}() got an unexpected keyword argument '{name}'{hint}")


def names_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function, or an `__init__`, whose errors shall say what an unknown keyword means."""
    takes = inspect.signature(function).parameters
    if "takes" in vars(function) or any(x.kind is x.VAR_KEYWORD for x in takes.values()):
        return function

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs.keys() - takes.keys():
            called = function.__qualname__.removesuffix(".__init__")
            raise unknown_keyword(called, name, [each for each in takes if each != "self"])
        return function(*args, **kwargs)

    vars(checked)["takes"] = takes
    return checked
