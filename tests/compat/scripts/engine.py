"""The way of DeepSpeed's engine: an `amp` block of a JSON file, accumulation, clipping, gradients averaged by hand."""

import json
import sys

import torch
import torch.nn as nn

try:
    from apex import amp

    APEX_INSTALLED = True
except ImportError:
    APEX_INSTALLED = False

AMP, AMP_ENABLED, AMP_ENABLED_DEFAULT = "amp", "enabled", False


def get_amp_enabled(param_dict):
    return param_dict[AMP].get(AMP_ENABLED, AMP_ENABLED_DEFAULT) if AMP in param_dict else False


def get_amp_params(param_dict):
    amp_params = dict(param_dict[AMP])
    amp_params.pop(AMP_ENABLED)
    return amp_params


class Engine(nn.Module):
    def __init__(self, model, optimizer, config):
        super(Engine, self).__init__()
        self.config = config
        self.gas = config["gradient_accumulation_steps"]
        self.micro_steps = 0
        self.amp_enabled = get_amp_enabled(config)
        self.module, self.optimizer = model, optimizer
        if self.amp_enabled:
            if not APEX_INSTALLED:
                raise RuntimeError("Unable to use amp, please install apex")
            self.module, self.optimizer = amp.initialize(model, optimizer, **get_amp_params(config))

    def forward(self, *inputs):
        return self.module(*inputs)

    def is_gradient_accumulation_boundary(self):
        return (self.micro_steps + 1) % self.gas == 0

    def backward(self, loss, retain_graph=False):
        loss = loss / self.gas
        if self.amp_enabled:
            # AMP requires delaying unscale when inside gradient accumulation boundaries
            delay_unscale = not self.is_gradient_accumulation_boundary()
            with amp.scale_loss(loss, self.optimizer, delay_unscale=delay_unscale) as scaled_loss:
                scaled_loss.backward(retain_graph=retain_graph)
        else:
            loss.backward(retain_graph=retain_graph)

    def step(self):
        if self.is_gradient_accumulation_boundary():
            if self.config.get("gradient_clipping", 0.0) > 0.0:
                params = amp.master_params(self.optimizer) if self.amp_enabled else self.module.parameters()
                torch.nn.utils.clip_grad_norm_(parameters=params, max_norm=self.config["gradient_clipping"])
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.micro_steps += 1

    def save_checkpoint(self, path):
        state = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, path)


with open(sys.argv[1]) as file:
    config = json.load(file)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
for i in range(5 * engine.gas):
    x = torch.randn(32, 8)
    loss = nn.functional.mse_loss(engine(x).float(), x.pow(2).mean(1, keepdim=True))
    engine.backward(loss)
    engine.step()
engine.save_checkpoint(sys.argv[2])
print("loss %.4f" % loss.item())
