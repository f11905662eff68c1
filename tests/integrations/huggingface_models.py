"""Small transformers and data for them."""

from __future__ import annotations

from tests.integrations import importing  # noqa: F401  # before the frameworks

# isort: split

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from amp.integrations.huggingface import AmpTrainer
from tests.integrations.comparing import options_for

transformers.logging.set_verbosity_error()

_SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


class Tokens(Dataset[dict[str, Tensor]]):
    """Rows of 12 tokens."""

    def __init__(self, n: int = 32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(3, 50, (n, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = self.rows[i]
        return {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}


def gpt2(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = GPT2Config(
        vocab_size=50,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
        **drops,
    )
    return GPT2LMHeadModel(config)


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SMALL))


def bert() -> Any:
    torch.manual_seed(0)
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**_SMALL, **drops))


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert}


def arguments(folder: Path, cls: Any = TrainingArguments, **options: Any) -> Any:
    quiet: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "dataloader_pin_memory": False,
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_steps": 6,
        "save_strategy": "no",
        "seed": 0,
    }
    return cls(**{**quiet, **options})


def trainer(model: Any, args: Any, level: str | None, cls: Any = AmpTrainer, **scale: Any) -> Any:
    data: dict[str, Any] = {"train_dataset": Tokens(), "eval_dataset": Tokens(8)}
    if level is None:
        return Trainer(model, args, **data)
    options = options_for(level)
    if "loss_scale" in options:
        options["loss_scale"].update(scale)
    return cls(model, args, opt_level=level, amp_options=options, **data)


def logged(of: Any, name: str) -> list[float]:
    return [row[name] for row in of.state.log_history if name in row]
