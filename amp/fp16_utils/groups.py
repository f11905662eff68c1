"""Which parameters of an optimizer are masters of which, by the names that apex had for them."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from amp.training.attachment import AttachedOptimizer


class MasterGroups:
    """The trainable parameters of an optimizer that a session has, group by group."""

    def _optimizer_of_groups(self) -> Any:
        """Return the optimizer."""
        raise NotImplementedError

    def _groups(self) -> list[list[tuple[Tensor, Tensor | None]]]:
        """Return what is stepped of each group, with the model's parameter of each master."""
        optimizer = self._optimizer_of_groups()
        attached = AttachedOptimizer.of(optimizer)
        if attached is None:
            return []
        model = attached.masters.model
        groups = [[(p, model(p)) for p in group["params"]] for group in optimizer.param_groups]
        return [[pair for pair in group if _model(*pair).requires_grad] for group in groups]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The 16-bit parameters of each group."""
        return [[model for _, model in group if model is not None] for group in self._groups()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of those."""
        return [[stepped for stepped, model in group if model is not None] for group in self._groups()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The other parameters of each group."""
        return [[stepped for stepped, model in group if model is None] for group in self._groups()]

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The parameters of `fp16_groups`."""
        return list(itertools.chain.from_iterable(self.fp16_groups))

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The parameters of `fp32_from_fp16_groups`."""
        return list(itertools.chain.from_iterable(self.fp32_from_fp16_groups))

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters of `fp32_from_fp32_groups`."""
        return list(itertools.chain.from_iterable(self.fp32_from_fp32_groups))


def _model(stepped: Tensor, model: Tensor | None) -> Tensor:
    return stepped if model is None else model
