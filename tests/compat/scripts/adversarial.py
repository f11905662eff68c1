"""Adversarial training of 2020: gradients of inputs, random restarts, and a gradient penalty."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O2", type=str, choices=["O0", "O1", "O2"])
parser.add_argument("--loss-scale", default="1.0", type=str, choices=["1.0", "dynamic"])
parser.add_argument("--master-weights", action="store_true")
parser.add_argument("--attack", default="fgsm", choices=["fgsm", "penalty"])
args = parser.parse_args()
torch.manual_seed(0)
epsilon, alpha = torch.full((1, 1, 1), 0.1), torch.full((1, 1, 1), 0.125)
lower_limit, upper_limit = torch.full((1, 1, 1), -1.0), torch.full((1, 1, 1), 1.0)


def clamp(X, lower_limit, upper_limit):
    return torch.max(torch.min(X, upper_limit), lower_limit)


class PreActBlock(nn.Module):
    def __init__(self, planes):
        super(PreActBlock, self).__init__()
        self.bn = nn.BatchNorm2d(planes)
        self.conv = nn.Conv2d(planes, planes, 3, padding=1, bias=False)

    def forward(self, x):
        return self.conv(F.relu(self.bn(x))) + x


model = nn.Sequential(
    nn.Conv2d(1, 4, 3), PreActBlock(4), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)
)
model.train()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
amp_args = dict(opt_level=args.opt_level, loss_scale=args.loss_scale, verbosity=False)
if args.opt_level == "O2":
    amp_args["master_weights"] = args.master_weights
model, opt = amp.initialize(model, opt, **amp_args)
criterion = nn.CrossEntropyLoss()
scheduler = torch.optim.lr_scheduler.CyclicLR(
    opt, base_lr=0.0, max_lr=0.1, step_size_up=4, step_size_down=4
)


def batches(n):
    for _ in range(n):
        y = torch.randint(0, 2, (16,))
        yield (torch.rand(16, 1, 8, 8) * 0.5 + 0.5 * y.view(-1, 1, 1, 1).float() - 0.5), y


def pgd(X, y, steps=3):
    delta = torch.zeros_like(X).uniform_(-0.1, 0.1).requires_grad_()
    for _ in range(steps):
        loss = F.cross_entropy(model(X + delta), y)
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        grad = delta.grad.detach()
        delta.data = clamp(delta.data + 0.025 * torch.sign(grad), -epsilon, epsilon)
        delta.grad.zero_()
    return delta.detach()


delta = torch.zeros(16, 1, 8, 8)
delta.requires_grad = True
losses = []
for X, y in batches(8):
    if args.attack == "fgsm":
        delta.data.uniform_(-0.1, 0.1)
        delta.data = clamp(delta, lower_limit - X, upper_limit - X)
        loss = F.cross_entropy(model(X + delta[: X.size(0)]), y)
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        grad = delta.grad.detach()
        assert grad.dtype == torch.float32 and grad.abs().sum() > 0
        delta.data = clamp(delta + alpha * torch.sign(grad), -epsilon, epsilon)
        delta.data[: X.size(0)] = clamp(delta[: X.size(0)], lower_limit - X, upper_limit - X)
        loss = criterion(model(X + delta.detach()), y)
        opt.zero_grad()
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        opt.step()
        delta.grad.zero_()
    else:
        X.requires_grad_()
        output = model(X)
        (gradient,) = torch.autograd.grad(
            outputs=output, inputs=X, grad_outputs=torch.ones_like(output), create_graph=True, only_inputs=True
        )
        penalty = ((gradient.view(16, -1).norm(2, dim=1) - 1) ** 2).mean()
        loss = criterion(output, y) + 0.1 * penalty
        opt.zero_grad()
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        assert all(p.grad is not None for p in amp.master_params(opt))
        opt.step()
    scheduler.step()
    losses.append(loss.item())

model.eval()
(X, y) = next(batches(1))
delta = pgd(X, y)
with torch.no_grad():
    clean, attacked = criterion(model(X), y).item(), criterion(model(X + delta), y).item()
print("first {:.4f} last {:.4f} clean {:.4f} attacked {:.4f}".format(losses[0], losses[-1], clean, attacked))
