"""A BERT finetuning script of 2018: a half model, FusedAdam that clips, FP16_Optimizer of apex.optimizers."""

import argparse

import torch
import torch.nn as nn

from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--loss_scale", type=float, default=0)
args = parser.parse_args()
args.learning_rate, args.warmup_proportion, args.gradient_accumulation_steps = 2e-3, 0.25, 2
torch.manual_seed(42)


def warmup_linear(x, warmup=0.002):
    return x / warmup if x < warmup else 1.0 - x


class BertForSequenceClassification(nn.Module):
    def __init__(self):
        super(BertForSequenceClassification, self).__init__()
        self.embeddings = nn.Embedding(30, 16)
        self.LayerNorm = BertLayerNorm(16, eps=1e-12)
        self.dense = nn.Linear(16, 16)
        self.classifier = nn.Linear(16, 2)

    def forward(self, input_ids, labels=None):
        hidden = self.LayerNorm(self.dense(self.embeddings(input_ids)))
        logits = self.classifier(torch.tanh(hidden.mean(1)))
        return nn.CrossEntropyLoss()(logits.view(-1, 2), labels.view(-1)) if labels is not None else logits


model = BertForSequenceClassification()
if args.fp16:
    model.half()
param_optimizer = list(model.named_parameters())
no_decay = ["bias", "LayerNorm.bias", "LayerNorm.weight"]
optimizer_grouped_parameters = [
    {"params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
from apex.optimizers import FP16_Optimizer, FusedAdam

optimizer = FusedAdam(
    optimizer_grouped_parameters, lr=args.learning_rate, bias_correction=False, max_grad_norm=1.0
)
if args.fp16:
    if args.loss_scale == 0:
        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
    else:
        optimizer = FP16_Optimizer(optimizer, static_loss_scale=args.loss_scale)

input_ids = torch.randint(0, 30, (32, 7))
label_ids = (input_ids[:, 0] > 14).long()
global_step, total = 0, 20
for step in range(total * args.gradient_accumulation_steps):
    loss = model(input_ids, label_ids)
    if args.gradient_accumulation_steps > 1:
        loss = loss / args.gradient_accumulation_steps
    if args.fp16:
        optimizer.backward(loss)
    else:
        loss.backward()
    if (step + 1) % args.gradient_accumulation_steps == 0:
        lr_this_step = args.learning_rate * warmup_linear(global_step / total, args.warmup_proportion)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr_this_step
        optimizer.step()
        optimizer.zero_grad()
        global_step += 1
        if global_step in (1, total):
            print("loss {:.4f}".format(loss.item() * args.gradient_accumulation_steps))
