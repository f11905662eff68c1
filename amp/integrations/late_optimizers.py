"""A model that is cast before its optimizers are known, as frameworks do, and is FP32 again at the end.

A framework loads a checkpoint, converts the model, wraps it in DDP and then asks for optimizers. The
FP32 values from before the cast are kept until then, so that the masters start from them, and are put
back when the framework is done with the model.
"""

import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import amp
from amp import active
from amp.errors import AmpRuntimeError
from amp.masters.master_values import put_values, values_of
from amp.session import Session
from amp.training.attachment import AttachedOptimizer
from amp.undo import Contents


class LateOptimizers:
    """The session of a framework's plugin.

    Args:
        opt_level, **options: as in `amp.initialize`.

    Attributes:
        session: what `cast` made; a closed one before, and after `end`.
    """

    def __init__(self, opt_level: Any, **options: Any) -> None:
        self._options: dict[str, Any] = {"opt_level": opt_level, **options}
        quiet: dict[str, Any] = {**self._options, "verbosity": 0}
        self.session = Session(**quiet)  # what is wrong with them is said now
        self.session.close()
        self._cast: list[Tensor] = []
        self._float32: dict[Tensor, Tensor] = {}
        """What cast tensors held before, until they have a master."""
        self._optimizers: list[weakref.ref[Any]] = []
        self._state: dict[str, Any] = {}

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that were attached and are alive."""
        return [found for reference in self._optimizers if (found := reference()) is not None]

    def cast(self, model: nn.Module) -> nn.Module:
        """Prepare a model whose optimizers come later.

        Raises:
            AmpError: as `amp.initialize`.
        """
        if active.session_of(model) is self.session:
            return model
        before = {tensor: tensor.data for tensor in chain(model.parameters(), model.buffers())}
        if self.session.closed:
            amp.initialize(model, **self._options)
            self.session = amp.get_session()
            if self._state:
                self.session.load_state_dict(self._state)
        else:
            self.session.initialize(model)
        cast = {x: data for x, data in before.items() if x.dtype is not data.dtype}
        self._cast += cast
        self._float32 |= cast
        return model

    def attach(self, optimizers: Sequence[Any], wrapped: nn.Module | None = None) -> None:
        """Prepare the optimizers, and let their masters start from the values before the cast.

        Args:
            optimizers: of the models.
            wrapped: the model in its wrapper. Under DDP the masters of all ranks become those of the
                first, as the weights have.

        Raises:
            AmpError: as `amp.initialize`.
        """
        session = self.running()
        optimizers = [each for each in optimizers if AttachedOptimizer.of(each) is None]
        session.initialize([], optimizers)
        self._optimizers = [*map(weakref.ref, self.optimizers), *map(weakref.ref, optimizers)]
        for tensor in [x for x in self._float32 if session.masters.master(x) is not None]:
            values = _of_first_rank(tensor, self._float32.pop(tensor), wrapped)
            put_values(tensor, _fitting(values, tensor))
        for parameter in chain.from_iterable(map(amp.master_params, optimizers)):
            self._float32.pop(parameter, None)  # without a master: what it holds is all there is
        self.write_back()

    def write_back(self) -> None:
        """Let the models have what the masters hold, if something else than a step has changed it.

        For who calls parts of a model, which do not look for that, and not the model. No host sync.
        """
        for attached in filter(None, map(AttachedOptimizer.of, self.optimizers)):
            attached.write_back.if_changed()

    def forget_float32(self) -> None:
        """Drop the values before the cast: there will be no optimizers."""
        self._float32.clear()

    def running(self) -> Session:
        """Return the open session.

        Raises:
            AmpRuntimeError: there is none.
        """
        if self.session.closed:
            raise AmpRuntimeError("the model has not been set up, or its session was closed")
        return self.session

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scalers, of the last session too. The host waits."""
        if not self.session.closed:
            self._state = dict(self.session.state_dict())
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, now or when a model is cast."""
        self._state = state
        if not self.session.closed:
            self.session.load_state_dict(state)

    def end(self) -> None:
        """Close the session. The model and the optimizers' state are FP32 then, with all their bits.

        Gradients are dropped. The host waits for the device.
        """
        if self.session.closed:
            return
        self.state_dict()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for tensor in self._cast:
            Contents(self._values_of(tensor), None).put_into(tensor)
        self._cast, self._float32, self._optimizers = [], {}, []
        self.session.close()

    def _values_of(self, tensor: Tensor) -> Tensor:
        """Return what a cast tensor stands for, float32, on its device."""
        masters, home = self.running().masters, tensor.device
        master = masters.master(tensor)
        if master is None:
            return _fitting(self._float32.get(tensor, tensor.data).to(home), tensor)
        tensor.data = tensor.data.to(master.device)  # a framework may have moved the model away
        return _fitting(values_of(tensor), tensor).to(home, copy=True)


def _fitting(values: Tensor, tensor: Tensor) -> Tensor:
    """Return float32 values where they round to what a tensor holds, and elsewhere what it holds."""
    return torch.where(
        values.to(tensor.dtype) == tensor.detach(), values.float(), tensor.detach().float()
    )


def _of_first_rank(tensor: Tensor, values: Tensor, wrapped: nn.Module | None) -> Tensor:
    """Return values as the first rank of a DDP has them, on the device of `tensor`."""
    values = values.to(tensor.device)
    if isinstance(wrapped, DistributedDataParallel) and not isinstance(tensor, DTensor):
        group: Any = wrapped.process_group
        values = values.clone()
        torch.distributed.broadcast(values, torch.distributed.get_global_rank(group, 0), group=group)
    return values
