"""The way of Lightning 1.x: a precision plugin around apex, schedulers made anew, a module with its own steps."""

import sys

import torch
import torch.nn as nn
from apex import amp
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

AMP_LEVEL = sys.argv[1]


class LightningModule(nn.Module):
    def training_step(self, batch, optimizer_idx):
        raise NotImplementedError


class Classifier(LightningModule):
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

    def configure_optimizers(self):
        first = torch.optim.Adam([*self.backbone.parameters(), *self.head.parameters()], lr=0.01)
        second = torch.optim.SGD(self.helper.parameters(), lr=0.1)
        schedulers = [
            torch.optim.lr_scheduler.StepLR(first, 5, gamma=0.5),
            ReduceLROnPlateau(second, patience=2),
        ]
        return [first, second], schedulers


class ApexMixedPrecisionPlugin:
    def __init__(self, amp_level="O2"):
        self.amp_level = amp_level
        self._connected = False

    def connect(self, model, optimizers, schedulers):
        model, optimizers = amp.initialize(model, optimizers, opt_level=self.amp_level)
        self.reinit_schedulers(optimizers, schedulers)
        self._connected = True
        return model, optimizers

    def master_params(self, optimizer):
        return amp.master_params(optimizer)

    def backward(self, closure_loss, optimizer):
        with amp.scale_loss(closure_loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return closure_loss.detach()

    @staticmethod
    def reinit_schedulers(optimizers, schedulers):
        for scheduler in schedulers:
            state = None
            for optimizer in optimizers:
                if scheduler.optimizer == optimizer:
                    for i, mro in enumerate(scheduler.__class__.__mro__):
                        if mro in (LRScheduler, ReduceLROnPlateau):
                            idx = i
                            state = scheduler.state_dict()
                            break
                    if isinstance(scheduler, ReduceLROnPlateau):
                        state.pop("optimizer", None)
                    scheduler.__class__.__mro__[idx].__init__(scheduler, optimizer)
                    if state is not None:
                        scheduler.load_state_dict(state)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["amp_scaling_state"] = amp.state_dict()

    def on_load_checkpoint(self, checkpoint):
        if "amp_scaling_state" in checkpoint:
            amp.load_state_dict(checkpoint["amp_scaling_state"])


torch.manual_seed(0)
module = Classifier()
optimizers, schedulers = module.configure_optimizers()
plugin = ApexMixedPrecisionPlugin(AMP_LEVEL)
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
        torch.nn.utils.clip_grad_norm_(list(plugin.master_params(optimizer)), 5.0)
        optimizer.step()
        losses.append(loss.item())
    schedulers[0].step()
    schedulers[1].step(losses[1])
    history.append(losses)
checkpoint = {}
plugin.on_save_checkpoint(checkpoint)
plugin.on_load_checkpoint(checkpoint)
print("first {:.3f} {:.3f} last {:.3f} {:.3f}".format(*history[0], *history[-1]))
print("lr {} {}".format(optimizers[0].param_groups[0]["lr"], optimizers[1].param_groups[0]["lr"]))
