"""What the BERT scripts of NVIDIA did to apex's insides to resume with FP32 masters."""

import sys

import torch
import torch.nn as nn
from apex import amp
from apex.amp import _amp_state
from apex.optimizers import FusedLAMB

path = sys.argv[1]


def prepare():
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = FusedLAMB(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic")
    amp._amp_state.loss_scalers[0]._loss_scale = 2**12
    return model, optimizer


def train(model, optimizer, steps):
    for i in steps:
        torch.manual_seed(i)
        loss = model(torch.randn(4, 6)).square().mean()
        with amp.scale_loss(loss, optimizer, delay_overflow_check=False) as scaled_loss:
            scaled_loss.backward()
        had_overflow = amp._amp_state.loss_scalers[0]._unskipped == 0
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        assert not had_overflow


model, optimizer = prepare()
train(model, optimizer, range(4))
torch.save(
    {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "master params": list(amp.master_params(optimizer)),
        "scale": _amp_state.loss_scalers[0].loss_scale(),
    },
    path,
)
train(model, optimizer, range(4, 8))
expected = [p.detach().clone() for p in amp.master_params(optimizer)]

checkpoint = torch.load(path, map_location="cpu")
model, optimizer = prepare()
optimizer._lazy_init_maybe_master_weights()
optimizer._amp_stash.lazy_init_called = True
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
for param, saved_param in zip(amp.master_params(optimizer), checkpoint["master params"]):
    param.data.copy_(saved_param.data)
assert len(optimizer._amp_stash.all_fp16_params) == 2
train(model, optimizer, range(4, 8))
for resumed, p in zip(amp.master_params(optimizer), expected):
    assert torch.equal(resumed, p)
print("resumed at", checkpoint["scale"])
