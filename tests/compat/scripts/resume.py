"""A script of 2019 that goes on from its checkpoint: amp's state, masters by hand, FP16_Optimizer's own."""

import sys

import torch
import torch.nn as nn
from apex import amp
from apex.fp16_utils import FP16_Optimizer

torch.manual_seed(1)
checkpoint = torch.load(sys.argv[1], map_location="cpu")
model = nn.Linear(3, 2)
if "amp" in checkpoint:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", num_losses=2)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    print([s.loss_scale() for s in amp._amp_state.loss_scalers], amp._amp_state.loss_scalers[1]._unskipped)
    masters = list(amp.master_params(optimizer))
else:
    model = model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True, verbose=False)
    optimizer.load_state_dict(checkpoint["optimizer"])
    print(optimizer.loss_scale, optimizer.overflow)
    masters = [p for group in optimizer.param_groups for p in group["params"]]
print([p.tolist() for p in masters], [optimizer.state[p]["momentum_buffer"].sum().item() for p in masters])
