"""Hugging Face transformers: `AmpTrainer(model, args, train_dataset=data, opt_level="O2")`.

`AmpMixin` does the same for other classes that derive from `Trainer`.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amp.integrations import missing

try:
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    raise missing(__name__, "transformers", "huggingface") from error

from amp.integrations.accelerate import configure, end, prepare


@dataclass
class AmpTrainingArguments(TrainingArguments):
    """`TrainingArguments` with an opt level; `--opt_level O2` on a command line.

    Args:
        opt_level: a level, an alias, or a path to a YAML profile. The other arguments are those of
            `transformers.TrainingArguments`.
    """

    opt_level: str = field(default="O1", metadata={"help": "An opt level of amp or a YAML profile."})


class AmpMixin:
    """What comes before `Trainer`, or before a class that derives from it, to train at an opt level.

    The model is cast when `train` begins, and FP32 again, with all bits of its masters, when it ends;
    evaluation in between runs at the level, and later evaluation in FP32. Checkpoints hold FP32 weights
    and the scaler, and a resumed run is the uninterrupted one bit for bit.

    Args:
        opt_level: a level, an alias, or a path to a YAML profile; None is that of the arguments, or O1.
        amp_options: what else `amp.initialize` takes, such as `{"loss_scale": 1024.0}`.

    Raises:
        AmpRuntimeError: the arguments have `fp16=True` or `bf16=True`, which cast themselves.
    """

    args: Any
    accelerator: Any

    def __init__(
        self,
        *args: Any,
        opt_level: str | os.PathLike[str] | None = None,
        amp_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._opt_level, self._amp_options = opt_level, dict(amp_options or {})
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Let the Trainer's accelerator prepare models at the opt level."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        level: Any = self._opt_level or getattr(self.args, "opt_level", "O1")
        configure(self.accelerator, level, **self._amp_options)
        self.accelerator.prepare = functools.partial(prepare, self.accelerator)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and leave the model in FP32."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            end(self.accelerator)


class AmpTrainer(AmpMixin, Trainer):
    """transformers' `Trainer` at an opt level: `AmpTrainer(model, args, opt_level="O2", ...)`.

    The model is cast when `train` begins, and FP32 again when it ends; see `AmpMixin`.

    Args:
        opt_level: a level, an alias, or a path to a YAML profile; None is that of the arguments, or O1.
        amp_options: what else `amp.initialize` takes, such as `{"loss_scale": 1024.0}`. The other
            arguments are those of `transformers.Trainer`.

    Raises:
        AmpRuntimeError: the arguments have `fp16=True` or `bf16=True`, which cast themselves.
    """
