"""What other libraries call things, and what to write here instead: for errors about unknown names.

Each table maps what to write to the names, all of one library or several, that mean it.
"""

import difflib
import sys
from collections.abc import Iterable, Mapping

from amp.errors import did_you_mean

_BLOCK = "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
_OF_ATTRIBUTES = {
    "amp.initialize(model, optimizer, opt_level='O1') casts in the model's forward, and 'O4' does in "
    "bfloat16: no region is needed": "autocast autocast_mode autocast_model autocast_decorator",
    "opt_level='O6' of amp.initialize runs linear layers in FP8: no region or conversion is needed": (
        "fp8_autocast fp8_model_init quantized_model_init convert_to_float8_training float8 fp8"
    ),
    "the end of an amp.scale_loss block unscales the gradients: leave it out": "unscale_ unscale",
    f"a loss is scaled in a block: {_BLOCK}": "scale backward scaled_loss loss_scaler scaler",
    "call optimizer.step() after the amp.scale_loss block, whose end updates the scale": "step update",
    "amp.loss_scale() returns the scale": "get_scale get_loss_scale",
    "amp.initialize(model, optimizer, opt_level=...) prepares models and optimizers": (
        "prepare setup init convert wrap autocast_initialize half to_half Amp Accelerator Fabric "
        "Policy MixedPrecision MixedPrecisionPolicy MixedPrecisionPlugin network_to_half"
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
        "dtype precision mixed_precision half_dtype half_type compute_dtype param_dtype amp_dtype "
        "autocast_dtype torch_dtype fast_dtype target_dtype fp16 bf16 half bfloat16 float16 amp "
        "autocast use_amp mode policy plugin"
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
    "cast_model_outputs says it": "output_dtype out_dtype output_type outputs_dtype cast_outputs",
    "cast_model_inputs says it": "input_dtype cast_inputs cast_forward_inputs input_cast_type",
    "master_weights says it": (
        "masters master master_dtype fp32_master use_master_weights keep_master_weights "
        "keep_fp32_weights master_weight_dtype fp32_params"
    ),
    "keep_batchnorm_fp32 says it, and keep_norm_fp32 does for all norms": "keep_fp32 norm_dtype",
    "fp8 says it": "fp8_recipe recipe fp8_format fp8_enabled fp8_config float8 enable_fp8 use_fp8",
    "verbosity says it: 0 logs nothing": "log_level loglevel logging quiet silent print_level",
    "process_group says it": "group pg amax_reduction_group fp8_group",
    "clip after the amp.scale_loss block, with torch.nn.utils.clip_grad_norm_": (
        "max_grad_norm clip_grad clip_norm gradient_clipping gradient_clip_val clip_grad_norm max_norm"
    ),
    "make an amp.scale_loss block for each of these backwards, and step after the last": (
        "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accum_steps"
    ),
    "leave it out: schedulers and data loaders go on without a change": (
        "lr_scheduler scheduler schedulers dataloader data_loader training_data training_dataloader"
    ),
}
"""Keywords of functions that prepare models and optimizers, or make regions."""


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: meant for meant, names in table.items() for name in names.split()}


def hint_at_attribute(name: str, known: Iterable[str]) -> str:
    """Return, for an error, what to write instead of an attribute that `amp` does not have."""
    others = _by_name(_OF_ATTRIBUTES)
    near = "".join(difflib.get_close_matches(name, [*known, *others], n=1, cutoff=0.75))
    torch = sys.modules.get("torch")
    for place in ("torch", "torch.amp") if torch is not None and near != name else ():
        if name in vars(sys.modules.get(place, torch)):
            return f"; it is {place}.{name}"
    return f"; {others[near]}" if near in others else near and f"; did you mean '{near}'?"


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
