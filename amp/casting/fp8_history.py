"""The amax history of `delayed` scaling: the largest magnitudes of the last iterations.

Each linear layer has three entries, for its input, its weight and the gradient of its output. An
iteration only raises its own amaxes, so modules that are called twice, micro-batches and recomputation
need no special case. The history advances once, when `scale_loss` (or `GradScaler.update`, or a step
without either) ends the backward. Gradients are recorded unscaled, so they stay valid when the loss
scale changes.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp.distributed import ProcessGroup, reduce_largest, without_contained
from amp.errors import AmpRuntimeError
from amp.kernels.fp8 import Seen, factor_of
from amp.kernels.interrupts import at_once, without_grad
from amp.profiles.fp8_recipe import Fp8Recipe

INPUT, WEIGHT, GRADIENT = range(3)
"""The entries of a layer."""


_NEW = 16
"""For how many iterations after layers were added their factors may be unknown."""


class AmaxHistory:
    """The largest magnitudes in the layers of a session, and the scale factors that follow from them.

    Attributes:
        names: the layers' names, in the order of their entries.
        amaxes: float32 `[1 + amax_history, 3 * layers]`: this iteration so far, then the earlier
            iterations, newest first. 0 means no value.
        groups_of_data: returns the process groups whose ranks see different data.
        groups_of_meshes: those whose ranks hold parts of the layers.
        iteration: how many iterations have ended.
        is_new: whether factors may still be unknown, so that layers are scaled by their own amaxes. It
            is True for a number of iterations, because these may overflow, and the host does not wait
            to know.
        ended_in_block: whether a block has ended the iteration that the next step belongs to.
    """

    def __init__(self, recipe: Fp8Recipe, formats: Sequence[torch.dtype]) -> None:
        assert recipe.amax_history is not None
        self.recipe = recipe
        self.names: list[str] = []
        self.amaxes = torch.zeros(1 + recipe.amax_history, 0, dtype=torch.float32, device="cpu")
        self._factors = self.amaxes[0]  # float32 `[3 * layers]`; 0 where no amax is known yet
        self.groups_of_data: Callable[[], Sequence[ProcessGroup]] = tuple
        self.groups_of_meshes: tuple[ProcessGroup, ...] = ()
        self.is_new = True
        self._new_until = _NEW
        self.ended_in_block = False
        self._formats = formats
        self.iteration = 0
        self._loss_scale = torch.ones((), dtype=torch.float32, device="cpu")
        self._is_scaled = False
        self._viewed = self._factors, self.amaxes, self._loss_scale
        self._views: dict[int, tuple[Tensor, Seen]] = {}  # of these three

    def add(self, names: Sequence[str], *devices: torch.device) -> int:
        """Add entries for layers on these devices, and return the index of the first new layer.

        The lists and tensors are new ones: setting the old attributes again removes the entries.

        Raises:
            AmpRuntimeError: the layers are on several devices.
        """
        first = len(self.names)
        different = dict.fromkeys([*([self.amaxes.device] if self.names else []), *devices])
        if len(different) > 1:
            raise AmpRuntimeError(
                f"linear layers are on {', '.join(map(str, different))}, and fp8='delayed' keeps the "
                "amax history of all layers in one tensor. Take fp8='current', which has no history"
            )
        self._move(devices[0])
        more = self.amaxes.new_zeros(len(self.amaxes), 3 * len(names))
        self.amaxes = torch.cat([self.amaxes, more], 1)
        self.names = [*self.names, *names]
        self.is_new, self._new_until = True, self.iteration + _NEW
        self._refresh()
        return first

    def factor(self, layer: int, entry: int, device: torch.device) -> Tensor:
        """Return the factor of an entry, float32 `[]`."""
        return self.factor_and_seen(layer, entry, device)[0]

    def factor_and_seen(self, layer: int, entry: int, device: torch.device) -> tuple[Tensor, Seen]:
        """Return the factor of an entry, float32 `[]`, and where its amax is recorded."""
        if self._factors.device != device:  # the model has been moved
            self._move(device)
        at = 3 * layer + entry
        if torch.compiler.is_compiling():
            return self._factors[at], self._seen_at(at)
        of = self._factors, self.amaxes, self._loss_scale
        if not all(map(operator.is_, of, self._viewed)):
            self._viewed, self._views = of, {}
        if at not in self._views:
            self._views[at] = self._factors[at], self._seen_at(at)
        return self._views[at]

    def _seen_at(self, at: int) -> Seen:
        return Seen(self.amaxes[0, at], self._loss_scale if at % 3 == GRADIENT else None)

    def _move(self, device: torch.device) -> None:
        self.amaxes, self._factors = self.amaxes.to(device), self._factors.to(device)
        self._loss_scale = self._loss_scale.to(device)

    def see(self, layer: int, entry: int, amax: Tensor) -> None:
        """Raise this iteration's amax of an entry. The host does not wait for the device."""
        self._seen_at(3 * layer + entry).see(amax)

    def begin(self, loss_scale: Tensor | None) -> None:
        """Set the loss scale that the factors of gradients are for: float32 `[]`, or None for 1.

        The host does not wait for the device.
        """
        if loss_scale is not None or self._is_scaled:
            self._is_scaled = loss_scale is not None
            self._loss_scale.copy_(torch.ones(()) if loss_scale is None else loss_scale)
            self._refresh()

    @property
    def seen(self) -> Tensor:
        """The amaxes of this iteration so far, float32 `[3 * layers]`."""
        return self.amaxes[0]

    def groups(self) -> list[ProcessGroup]:
        """Return the process groups whose ranks share their amaxes."""
        return [*self.groups_of_meshes, *self.groups_of_data()]

    def share(self, groups: Iterable[ProcessGroup]) -> None:
        """Reduce this iteration's amaxes by maximum over process groups, `groups` included."""
        if self.recipe.reduce_amax:
            reduce_largest([self.seen], without_contained([*groups, *self.groups()]))

    @without_grad
    def end(self, *, in_block: bool = False) -> None:
        """End an iteration: its amaxes enter the history, except those that are 0 or not finite.

        The host does not wait for the device.

        Args:
            in_block: whether a `scale_loss` block ends it; then the step after it does not.
        """
        seen, past = self.seen, self.amaxes[1:]
        is_known = (seen > 0) & (seen < torch.inf)
        moved = torch.where(is_known, torch.cat([seen[None], past[:-1]]), past)
        new = torch.cat([torch.zeros_like(seen)[None], moved])
        iteration = self.iteration + 1
        counted = {
            "ended_in_block": in_block,
            "iteration": iteration,
            "is_new": iteration < self._new_until,
        }
        at_once(
            functools.partial(torch._foreach_copy_, [self.amaxes], [new]),
            functools.partial(vars(self).update, counted),
        )
        self._refresh()

    @without_grad
    def _refresh(self) -> None:
        """Compute the factors from the history."""
        past = self.amaxes[1:]
        amax = past.amax(0) if self.recipe.amax_algo == "max" else past[0]
        are_gradients = torch.arange(len(amax), device=amax.device) % 3 == GRADIENT
        amax = torch.where(are_gradients, amax * self._loss_scale, amax)
        power_of_2 = bool(self.recipe.power_of_2_scales)
        of_values, _, of_gradients = [factor_of(amax, each, power_of_2) for each in self._formats]
        factors = torch.where(are_gradients, of_gradients, of_values)
        factors = torch.where(amax > 0, factors * 2.0 ** -(self.recipe.margin or 0), 0.0)
        if factors.shape == self._factors.shape and factors.device == self._factors.device:
            self._factors.copy_(factors)  # in place: compiled code holds this tensor
        else:
            self._factors = factors

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present history.

        The host does not wait for the device.
        """
        amaxes, loss_scale = self.amaxes.clone(), self._loss_scale.clone()
        before = {
            name: getattr(self, name)
            for name in ("iteration", "is_new", "ended_in_block", "_is_scaled")
        }

        def put_back() -> None:
            self.amaxes.copy_(amaxes)
            self._loss_scale.copy_(loss_scale)
            vars(self).update(before)
            self._refresh()

        return put_back

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        """Return the recipe, the names of the layers, and a copy of the amaxes."""
        return {"recipe": self.recipe.recipe, "names": list(self.names), "amaxes": self.amaxes.clone()}

    def load_state_dict(self, state: Mapping[str, Any], first: int = 0) -> None:
        """Load the entries of layers, for the layers from index `first` on.

        Args:
            state: has `amaxes`, and `names` with the index of each name.
            first: the first index.
        """
        saved, at = state["amaxes"].to(self.amaxes), state["names"]
        rows = min(len(saved), len(self.amaxes))
        for i, name in list(enumerate(self.names))[first:]:
            if name in at:
                self.amaxes[:, 3 * i : 3 * i + 3] = 0.0
                self.amaxes[:rows, 3 * i : 3 * i + 3] = saved[:rows, 3 * at[name] : 3 * at[name] + 3]
        self._refresh()
