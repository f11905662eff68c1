"""Hugging Face transformers: `AmpTrainer(model, args, train_dataset=data, opt_level="O2")`.

`AmpMixin` does the same for other subclasses of `Trainer`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amp.integrations import missing

try:
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    raise missing(__name__, "transformers", "huggingface") from error

from amp.integrations.accelerate import configure, end, prepare
from amp.profiles.options import OptLevel


@dataclass
class AmpTrainingArguments(TrainingArguments):
    """`TrainingArguments` with an opt level, `--opt_level O2` on a command line.

    Args:
        opt_level: a level, an alias, or a path to a YAML profile. The other arguments are those of
            `transformers.TrainingArguments`.
    """

    opt_level: str = field(default="O1", metadata={"help": "An opt level of amp or a YAML profile."})


class AmpMixin:
    """A mixin to put before `Trainer` or a subclass of it, to train at an opt level.

    The model is cast when `train` begins, and becomes FP32, with the full values of its masters, when
    it ends. Evaluation in between runs at the level, and later evaluation in FP32. Checkpoints have
    FP32 weights and the scaler, and a resumed run is bitwise the same as an uninterrupted one.

    Args:
        opt_level: a level, an alias, or a path to a YAML profile; None uses `args.opt_level`, or O1.
        amp_options: other arguments of `amp.initialize`, such as `{"loss_scale": 1024.0}`.

    Raises:
        AmpRuntimeError: `args` has `fp16=True` or `bf16=True`, with which the Trainer casts itself.
    """

    args: Any
    accelerator: Any

    def __init__(
        self,
        *args: Any,
        opt_level: OptLevel | None = None,
        amp_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._opt_level, self._amp_options = opt_level, dict(amp_options or {})
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's accelerator prepare models at the opt level."""
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

    The model is cast when `train` begins, and becomes FP32 when it ends; see `AmpMixin`.

    Args:
        opt_level: a level, an alias, or a path to a YAML profile; None uses `args.opt_level`, or O1.
        amp_options: other arguments of `amp.initialize`, such as `{"loss_scale": 1024.0}`. The other
            arguments are those of `transformers.Trainer`.

    Raises:
        AmpRuntimeError: `args` has `fp16=True` or `bf16=True`, with which the Trainer casts itself.
    """
