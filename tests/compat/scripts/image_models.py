"""The way of timm's train script of 2020: a scaler object around amp, EMA copies, clipping of three kinds."""

import argparse
import copy

import torch
import torch.nn as nn

try:
    from apex import amp
    has_apex = True
except ImportError:
    amp = None
    has_apex = False

parser = argparse.ArgumentParser()
parser.add_argument("--clip-mode", default="norm", choices=["norm", "value", "agc"])
parser.add_argument("--clip-grad", type=float, default=None)
parser.add_argument("--second-order", action="store_true")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--update-freq", type=int, default=1)
parser.add_argument("--apex-amp-level", default="O1")
args = parser.parse_args()
assert has_apex


def unitwise_norm(x, norm_type=2.0):
    return x.norm(norm_type) if x.ndim <= 1 else x.norm(norm_type, dim=tuple(range(1, x.ndim)), keepdim=True)


def adaptive_clip_grad(parameters, clip_factor=0.01, eps=1e-3, norm_type=2.0):
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    for p in parameters:
        if p.grad is None:
            continue
        p_data = p.detach()
        g_data = p.grad.detach()
        max_norm = unitwise_norm(p_data, norm_type=norm_type).clamp_(min=eps).mul_(clip_factor)
        grad_norm = unitwise_norm(g_data, norm_type=norm_type)
        clipped_grad = g_data * (max_norm / grad_norm.clamp(min=1e-6))
        new_grads = torch.where(grad_norm < max_norm, g_data, clipped_grad)
        p.grad.detach().copy_(new_grads)


def dispatch_clip_grad(parameters, value, mode="norm", norm_type=2.0):
    if mode == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, value, norm_type=norm_type)
    elif mode == "value":
        torch.nn.utils.clip_grad_value_(parameters, value)
    else:
        adaptive_clip_grad(parameters, value, norm_type=norm_type)


class ApexScaler:
    state_dict_key = "amp"

    def __call__(
        self,
        loss,
        optimizer,
        clip_grad=None,
        clip_mode="norm",
        parameters=None,
        create_graph=False,
        need_update=True,
    ):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                dispatch_clip_grad(amp.master_params(optimizer), clip_grad, mode=clip_mode)
            optimizer.step()

    def state_dict(self):
        if "state_dict" in amp.__dict__:
            return amp.state_dict()

    def load_state_dict(self, state_dict):
        if "load_state_dict" in amp.__dict__:
            amp.load_state_dict(state_dict)


class ModelEmaV2(nn.Module):
    def __init__(self, model, decay=0.5):
        super(ModelEmaV2, self).__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    def update(self, model):
        with torch.no_grad():
            for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
                ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


torch.manual_seed(42)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
if args.fused:
    from apex.optimizers import FusedAdam

    optimizer = FusedAdam(model.parameters(), lr=1e-2, adam_w_mode=True, weight_decay=0.05)
else:
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9, momentum=0.9, eps=1e-3)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.apex_amp_level)
loss_scaler = ApexScaler()
model_ema = ModelEmaV2(model)
x, target = torch.randn(20, 3, 8, 8), torch.arange(20) % 5
losses = []
for i in range(12):
    loss = nn.functional.cross_entropy(model(x), target, label_smoothing=0.1) / args.update_freq
    need_update = (i + 1) % args.update_freq == 0
    loss_scaler(
        loss,
        optimizer,
        clip_grad=args.clip_grad,
        clip_mode=args.clip_mode,
        parameters=model.parameters(),
        create_graph=args.second_order,
        need_update=need_update,
    )
    if need_update:
        optimizer.zero_grad()
        model_ema.update(model)
    losses.append(loss.item() * args.update_freq)
with torch.no_grad():
    of_ema = nn.functional.cross_entropy(model_ema.module(x), target).item()
loss_scaler.load_state_dict(loss_scaler.state_dict())
print("first {:.4f} last {:.4f} ema {:.4f}".format(losses[0], losses[-1], of_ema))
