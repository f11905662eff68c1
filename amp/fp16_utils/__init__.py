"""The names of `apex.fp16_utils`: manual half precision, on this library's scaler and masters."""

from amp.fp16_utils.loss_scaler import SAFE_GLOBALS as SAFE_GLOBALS
from amp.fp16_utils.loss_scaler import DynamicLossScaler as DynamicLossScaler
from amp.fp16_utils.loss_scaler import LossScaler as LossScaler
from amp.fp16_utils.optimizer import FP16_Optimizer as FP16_Optimizer
from amp.fp16_utils.util import BN_convert_float as BN_convert_float
from amp.fp16_utils.util import FP16Model as FP16Model
from amp.fp16_utils.util import clip_grad_norm as clip_grad_norm
from amp.fp16_utils.util import convert_module as convert_module
from amp.fp16_utils.util import convert_network as convert_network
from amp.fp16_utils.util import master_params_to_model_params as master_params_to_model_params
from amp.fp16_utils.util import model_grads_to_master_grads as model_grads_to_master_grads
from amp.fp16_utils.util import network_to_half as network_to_half
from amp.fp16_utils.util import prep_param_lists as prep_param_lists
from amp.fp16_utils.util import to_python_float as to_python_float
from amp.fp16_utils.util import tofp16 as tofp16

__all__ = [
    "SAFE_GLOBALS",
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
