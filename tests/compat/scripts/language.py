"""A language model of 2018: FP16_Optimizer, clipping, a schedule on the wrapper, its checkpoint."""

import io

import torch
import torch.nn as nn
from apex.fp16_utils import *
from apex.normalization import FusedLayerNorm

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.norm = FusedLayerNorm(8)
        self.decode = nn.Linear(8, 11)

    def forward(self, x):
        return self.decode(self.norm(self.rnn(self.embed(x))[0]))


model = network_to_half(Model())[1]
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2**10})
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
tokens = torch.randint(0, 11, (4, 9))
for i in range(10):
    optimizer.zero_grad()
    output = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(output.float().flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.backward(loss, update_master_grads=False)
    optimizer.update_master_grads()
    optimizer.clip_master_grads(0.25)
    optimizer.step()
    scheduler.step()
    print("%.4f" % to_python_float(loss), optimizer.loss_scale, optimizer.overflow)
file = io.BytesIO()
torch.save(optimizer.state_dict(), file)
file.seek(0)
optimizer.load_state_dict(torch.load(file))
