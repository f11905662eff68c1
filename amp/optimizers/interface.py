"""What the parts of a fused optimizer know of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from amp.profiles.properties import StateDtype

if TYPE_CHECKING:
    from amp.kernels.rule import Moment, UpdateRule


class Fused(Protocol):
    """A `FusedOptimizer`, whose documentation describes these."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    state: Any
    _ranges: tuple[str, ...]
    _required: tuple[str, ...]
    _scalars: tuple[str, ...]
    _uncounted_steps: int | None
    _goes_by_norms: bool

    @property
    def max_grad_norm(self) -> float | None: ...  # noqa: D102

    @property
    def state_dtype(self) -> StateDtype | None: ...  # noqa: D102

    @property
    def kept_dtype(self) -> torch.dtype | None: ...  # noqa: D102

    def _rule(self, group: Mapping[str, Any] | None = None) -> UpdateRule: ...

    def _moments(self, group: Mapping[str, Any] | None = None) -> dict[str, Moment]: ...

    def _kept(self, group: Mapping[str, Any] | None = None) -> Iterable[str]: ...

    def _of_tensor(self, one: Any, clip: Tensor | None, inputs: Any) -> Tensor | None: ...

    def _check_group(self, group: Mapping[str, Any]) -> None: ...

    def _from_group(self, group: dict[str, Any], state: Mapping[Any, dict[str, Any]]) -> None: ...
