"""The way of DeepSpeed's engine: an `amp` block of a JSON file, accumulation, clipping, a checkpoint."""

import json
import sys

import torch
import torch.nn as nn
from apex import amp


class Engine(nn.Module):
    def __init__(self, model, optimizer, config):
        super(Engine, self).__init__()
        self.gas, self.clipping = config["gradient_accumulation_steps"], config["gradient_clipping"]
        self.micro_steps = 0
        amp_params = dict(config["amp"])
        self.amp_enabled = amp_params.pop("enabled", False)
        self.module, self.optimizer = model, optimizer
        if self.amp_enabled:
            self.module, self.optimizer = amp.initialize(model, optimizer, **amp_params)

    def forward(self, *inputs):
        return self.module(*inputs)

    def is_gradient_accumulation_boundary(self):
        return (self.micro_steps + 1) % self.gas == 0

    def backward(self, loss, retain_graph=False):
        loss = loss / self.gas
        if not self.amp_enabled:
            loss.backward(retain_graph=retain_graph)
            return
        # AMP requires delaying unscale when inside gradient accumulation boundaries
        delay_unscale = not self.is_gradient_accumulation_boundary()
        with amp.scale_loss(loss, self.optimizer, delay_unscale=delay_unscale) as scaled_loss:
            scaled_loss.backward(retain_graph=retain_graph)

    def step(self):
        if self.is_gradient_accumulation_boundary():
            params = amp.master_params(self.optimizer) if self.amp_enabled else self.module.parameters()
            torch.nn.utils.clip_grad_norm_(parameters=params, max_norm=self.clipping)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.micro_steps += 1


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
torch.save({"module": engine.module.state_dict(), "optimizer": engine.optimizer.state_dict()}, sys.argv[2])
