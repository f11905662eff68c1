"""An image classifier of 2019: O0 to O3 as strings, SyncBN, apex's DDP, LARC or FusedSGD, checkpoints."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from apex import amp, optimizers
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import convert_syncbn_model
from apex.parallel.LARC import LARC

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", type=str)
parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
parser.add_argument("--loss-scale", type=str, default=None)
parser.add_argument("--larc", action="store_true")
parser.add_argument("--resume", default="")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--save", default="")
args = parser.parse_args()
args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
if args.distributed:
    torch.distributed.init_process_group(backend="gloo")

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
if args.larc:
    optimizer = LARC(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4))
else:
    optimizer = optimizers.FusedSGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
model, optimizer = amp.initialize(
    model,
    optimizer,
    opt_level=args.opt_level,
    keep_batchnorm_fp32=args.keep_batchnorm_fp32,
    loss_scale=args.loss_scale,
)
if args.distributed:
    model = DDP(model, delay_allreduce=True)
if args.resume:
    checkpoint = torch.load(args.resume)
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])


for epoch in range(args.epochs):
    for i in range(8):
        torch.manual_seed(100 + i)
        input, target = torch.randn(12, 1, 6, 6), torch.randint(0, 3, (12,))
        loss = F.cross_entropy(model(input), target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print("loss {:.4f}".format(loss.item()), "scale", amp._amp_state.loss_scalers[0]._loss_scale)
if args.save:
    torch.save(
        {
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        },
        args.save,
    )
