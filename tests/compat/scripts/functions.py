"""A script that tells amp of its own functions before `initialize`, by name and by decorator."""

import types

import torch
import torch.nn as nn
from apex import amp

ops = types.ModuleType("ops")
ops.seen = {}


def roi_pool(features, boxes, size=2):
    ops.seen["roi_pool"] = features.dtype
    return nn.functional.adaptive_avg_pool2d(features, size) * boxes.mean()


def correlation(a, b):
    ops.seen["correlation"] = (a.dtype, b.dtype)
    return a * b


ops.roi_pool, ops.correlation = roi_pool, correlation
amp.register_float_function(torch, "sigmoid")
amp.register_float_function(ops, "roi_pool")
amp.register_promote_function(ops, "correlation")


@amp.half_function
def fused_bias(x, weight):
    ops.seen["fused_bias"] = (x.dtype, weight.dtype)
    return x @ weight


@amp.float_function
def entropy(p):
    ops.seen["entropy"] = p.dtype
    return -(p * p.log()).sum()


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.weight = nn.Parameter(torch.randn(16, 1))

    def forward(self, x):
        features = self.conv(x)
        pooled = ops.correlation(ops.roi_pool(features, torch.ones(1)), features.mean())
        return torch.sigmoid(fused_bias(pooled.flatten(1), self.weight))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
criterion = nn.BCELoss()
x, y = torch.randn(8, 1, 6, 6), torch.randint(0, 2, (8, 1)).float()
for i in range(20):
    optimizer.zero_grad()
    output = model(x)
    loss = criterion(output, y) - 0.01 * entropy(output)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    if i == 0:
        first = loss.item()
for name in sorted(ops.seen):
    print(name, ops.seen[name])
print("better", loss.item() < first)
