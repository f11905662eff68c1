"""The way of Lightning 1.x: a precision plugin around apex, schedulers made anew, steps by optimizer."""

import sys

import torch
import torch.nn as nn
from apex import amp
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.head, self.helper = nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x):
        features = self.backbone(x)
        return self.head(features), self.helper(features)

    def training_step(self, batch, optimizer_idx):
        x, y = batch
        logits, helped = self(x)
        if optimizer_idx == 0:
            return nn.functional.cross_entropy(logits, y)
        return nn.functional.mse_loss(helped.squeeze(1), y.float())


class ApexMixedPrecisionPlugin:
    def __init__(self, amp_level="O2"):
        self.amp_level = amp_level

    def connect(self, model, optimizers, schedulers):
        model, optimizers = amp.initialize(model, optimizers, opt_level=self.amp_level)
        self.reinit_schedulers(optimizers, schedulers)
        return model, optimizers

    def backward(self, closure_loss, optimizer):
        with amp.scale_loss(closure_loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return closure_loss.detach()

    @staticmethod
    def reinit_schedulers(optimizers, schedulers):
        for scheduler in schedulers:
            for optimizer in optimizers:
                if scheduler.optimizer == optimizer:
                    state = scheduler.state_dict()
                    if isinstance(scheduler, ReduceLROnPlateau):
                        state.pop("optimizer", None)
                    mro = next(m for m in type(scheduler).__mro__ if m in (LRScheduler, ReduceLROnPlateau))
                    mro.__init__(scheduler, optimizer)
                    scheduler.load_state_dict(state)


torch.manual_seed(0)
module = Classifier()
first = torch.optim.Adam([*module.backbone.parameters(), *module.head.parameters()], lr=0.01)
optimizers = [first, torch.optim.SGD(module.helper.parameters(), lr=0.1)]
schedulers = [
    torch.optim.lr_scheduler.StepLR(optimizers[0], 5, gamma=0.5),
    ReduceLROnPlateau(optimizers[1], patience=2),
]
plugin = ApexMixedPrecisionPlugin(sys.argv[1])
module, optimizers = plugin.connect(module, optimizers, schedulers)
x = torch.randn(64, 4)
batch = (x, (x.sum(1) > 0).long())
history = []
for step in range(12):
    losses = []
    for idx, optimizer in enumerate(optimizers):
        for other in optimizers:
            other.zero_grad()
        loss = plugin.backward(module.training_step(batch, idx), optimizer)
        torch.nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 5.0)
        optimizer.step()
        losses.append(loss.item())
    schedulers[0].step()
    schedulers[1].step(losses[1])
    history.append(losses)
checkpoint = {"amp_scaling_state": amp.state_dict()}
amp.load_state_dict(checkpoint["amp_scaling_state"])
print("first {:.3f} {:.3f} last {:.3f} {:.3f}".format(*history[0], *history[-1]))
print("lr {} {}".format(optimizers[0].param_groups[0]["lr"], optimizers[1].param_groups[0]["lr"]))
