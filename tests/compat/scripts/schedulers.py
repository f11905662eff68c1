"""A transformer-xl of 2019: schedules of every kind on a patched optimizer, batch chunks, memories, clipping."""

import argparse

import torch
import torch.nn as nn
import torch.optim as optim
from apex import amp
from apex.optimizers import FusedAdam

parser = argparse.ArgumentParser()
parser.add_argument("--scheduler", default="cosine", choices=["cosine", "inv_sqrt", "dev_perf", "constant"])
parser.add_argument("--optim", default="adam")
parser.add_argument("--apex-amp-opt-level", default="O2")
args = parser.parse_args()
args.lr, args.warmup_step, args.max_step, args.batch_chunk = 0.02, 4, 16, 2
torch.manual_seed(1111)


class MemTransformerLM(nn.Module):
    def __init__(self, n_token, d_model):
        super(MemTransformerLM, self).__init__()
        self.word_emb = nn.Embedding(n_token, d_model)
        self.q, self.kv = nn.Linear(d_model, d_model, bias=False), nn.Linear(d_model, 2 * d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model)
        self.crit = nn.Linear(d_model, n_token)

    def init_mems(self):
        param = next(self.parameters())
        return torch.empty(0, dtype=param.dtype, device=param.device)

    def forward(self, data, target, mems):
        if mems is None:
            mems = self.init_mems()
        h = self.word_emb(data)
        c = torch.cat([mems, h], 0) if mems.size(0) > 0 else h
        k, v = torch.chunk(self.kv(c), 2, -1)
        score = torch.einsum("ibd,jbd->ijb", (self.q(h), k)) / 4.0
        mask = torch.triu(h.new_ones(h.size(0), c.size(0)), 1 + c.size(0) - h.size(0)).bool()[:, :, None]
        prob = torch.softmax(score.float().masked_fill(mask, -float("inf")).type_as(score), 1)
        out = self.layer_norm(h + torch.einsum("ijb,jbd->ibd", (prob, v)))
        logit = torch.nn.functional.log_softmax(self.crit(out).view(-1, 17), dim=-1)
        return -logit.gather(1, target.view(-1, 1)).squeeze(1), c[-8:].detach()


model = MemTransformerLM(17, 16)
if args.optim == "adam":
    optimizer = FusedAdam(model.parameters(), lr=args.lr, weight_decay=0.01)
else:
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.apex_amp_opt_level)

if args.scheduler == "cosine":
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_step - args.warmup_step, 0.001)
elif args.scheduler == "inv_sqrt":

    def lr_lambda(step):
        return 1.0 / (step**0.5) if step > args.warmup_step else step / (args.warmup_step**1.5)

    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lr_lambda)
elif args.scheduler == "dev_perf":
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)

tokens = torch.arange(17).repeat(9)[: 9 * 4 * 4].view(36, 4)
mems = [None for _ in range(args.batch_chunk)]
for train_step in range(1, args.max_step + 1):
    for param in model.parameters():
        param.grad = None
    data = tokens[:8] if train_step % 2 else tokens[8:16]
    target = tokens[1:9] if train_step % 2 else tokens[9:17]
    train_loss = 0.0
    for i in range(args.batch_chunk):
        data_i = torch.chunk(data, args.batch_chunk, 1)[i].contiguous()
        target_i = torch.chunk(target, args.batch_chunk, 1)[i].contiguous()
        loss, mems[i] = model(data_i, target_i, mems[i])
        loss = loss.float().mean().type_as(loss) / args.batch_chunk
        with amp.scale_loss(loss, optimizer, delay_unscale=(i < args.batch_chunk - 1)) as scaled_loss:
            scaled_loss.backward()
        train_loss += loss.float().item()
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.25)
    optimizer.step()
    if args.scheduler in ["cosine", "constant"]:
        if train_step < args.warmup_step:
            optimizer.param_groups[0]["lr"] = args.lr * train_step / args.warmup_step
        elif args.scheduler == "cosine":
            scheduler.step(train_step - args.warmup_step)
    elif args.scheduler == "inv_sqrt":
        scheduler.step()
    elif args.scheduler == "dev_perf" and train_step % 4 == 0:
        scheduler.step(train_loss)
    print("| step {} | lr {:.6f} | loss {:.5f}".format(train_step, optimizer.param_groups[0]["lr"], train_loss))
    assert norm.item() > 0
