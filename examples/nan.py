"""A small script without amp, whose loss is NaN: `reamp doctor examples/nan.py` says why."""

import torch
from torch import nn


class Normalize(nn.Module):
    """Gives each row a mean of 0 and a variance of 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance)


torch.manual_seed(0)
first = nn.Linear(16, 64)
nn.init.constant_(first.bias, 40.0)
model = nn.Sequential(first, Normalize(), nn.GELU(), nn.Linear(64, 1)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(256, 16).bfloat16()
y = x.sum(1, keepdim=True)

for _ in range(20):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).float(), y.float())
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.3f}")
