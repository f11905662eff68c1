"""A session for frameworks that cast a model before its optimizers exist, and want FP32 at the end.

A framework loads a checkpoint, converts the model, wraps it in DDP and then creates optimizers. The
FP32 values from before the cast are kept until then, so that the masters start from them, and are
restored when the framework is done with the model.
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
from amp.kernels.tensor_lists import local
from amp.masters.fp32_values import put_values, values_of
from amp.session import Session
from amp.training.attached_optimizer import AttachedOptimizer
from amp.undo import Contents


class LateOptimizers:
    """The session of a framework's plugin.

    Args:
        opt_level: as in `amp.initialize`.
        **options: as in `amp.initialize`.

    Attributes:
        session: the session that `cast` opened; a closed one before `cast` and after `end`.
    """

    def __init__(self, opt_level: Any, **options: Any) -> None:
        self._options: dict[str, Any] = {"opt_level": opt_level, **options}
        quiet: dict[str, Any] = {**self._options, "verbosity": 0}
        self.session = Session(**quiet)  # raises now if an option is not valid
        self.session.close()
        self._cast: list[Tensor] = []
        self._float32: dict[Tensor, tuple[Tensor, int]] = {}
        """Values of tensors before the cast, and versions after it, until they have a master."""
        self._optimizers: list[weakref.ref[Any]] = []
        self._state: dict[str, Any] = {}

    @property
    def optimizers(self) -> list[Any]:
        """The attached optimizers that are still alive."""
        return [found for reference in self._optimizers if (found := reference()) is not None]

    def cast(self, model: nn.Module) -> nn.Module:
        """Prepare a model whose optimizers come later.

        Raises:
            AmpError: as in `amp.initialize`.
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
        cast = [x for x, data in before.items() if x.dtype is not data.dtype]
        self._cast += cast
        self._float32 |= {x: (before[x], local(x)._version) for x in cast}
        return model

    def attach(self, optimizers: Sequence[Any], wrapped: nn.Module | None = None) -> None:
        """Prepare the optimizers, whose masters start from the values before the cast.

        Args:
            optimizers: the optimizers of the models. An empty list says that there will be none.
            wrapped: the model in its wrapper. Under DDP all ranks get the masters of the first rank, as
                DDP does with the weights.

        Raises:
            AmpError: as in `amp.initialize`.
        """
        session = self.running()
        new = [each for each in optimizers if AttachedOptimizer.of(each) is None]
        session.initialize([], new)
        self._optimizers = [*map(weakref.ref, self.optimizers), *map(weakref.ref, new)]
        for tensor in [x for x in self._float32 if session.masters.pair(x) is not None]:
            values = _of_first_rank(tensor, self._float32.pop(tensor)[0], wrapped)
            put_values(tensor, _fitting(values, tensor))
        for parameter in chain.from_iterable(map(amp.master_params, new)):
            self._float32.pop(parameter, None)  # without a master, training changes the parameter
        if not optimizers:
            self._float32.clear()
        self.write_back()

    def write_back(self) -> None:
        """Write the masters to the models, if something other than a step has changed the masters.

        Calling the model does that too, but calling its parts does not. The host does not wait for the
        device.
        """
        for attached in filter(None, map(AttachedOptimizer.of, self.optimizers)):
            attached.gradients.reconcile("forward")

    def running(self) -> Session:
        """Return the open session.

        Raises:
            AmpRuntimeError: there is none.
        """
        if self.session.closed:
            raise AmpRuntimeError("the model has not been set up, or its session was closed")
        return self.session

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the session, or of the last one if it is closed. The host waits."""
        if not self.session.closed:
            self._state = dict(self.session.state_dict())
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `state_dict`, now or when a model is cast."""
        self._state = state
        if not self.session.closed:
            self.session.load_state_dict(state)

    def end(self) -> None:
        """Close the session. Weights and optimizer state become FP32, with the masters' full values.

        Gradients are dropped. The host waits for the device. After an error, call it again.
        """
        if not self.session.closed:
            self.state_dict()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            memory = self.session.masters.memory
            memory.note(self._cast)
            while self._cast:
                tensor = self._cast[-1]
                data = memory.cast(tensor, torch.float32, self._values_of(tensor))
                Contents(data, None).put_into(tensor)
                self._cast.pop()
            self._float32, self._optimizers = {}, []
        self.session.close()

    def _values_of(self, tensor: Tensor) -> Tensor:
        """Return the full-precision values of a cast tensor, float32, on its device."""
        masters, home = self.running().masters, tensor.device
        pair = masters.pair(tensor)
        if pair is None:
            now, (before, version) = tensor.detach(), self._float32.get(tensor, (tensor.data, -1))
            if local(tensor)._version == version:  # else a script has written the present values
                before = before.to(home)
                now = before if torch.equal(before.to(tensor.dtype), now) else now
            return now.float()
        tensor.data = tensor.data.to(pair.master.device)  # a framework may have moved the model away
        return _fitting(values_of(tensor), tensor).to(home, copy=True)


def _fitting(values: Tensor, tensor: Tensor) -> Tensor:
    """Return `values` as float32 where they round to the tensor's elements; elsewhere its elements."""
    return torch.where(
        values.to(tensor.dtype) == tensor.detach(), values.float(), tensor.detach().float()
    )


def _of_first_rank(tensor: Tensor, values: Tensor, wrapped: nn.Module | None) -> Tensor:
    """Return the values of the first rank of a DDP, on the device of `tensor`."""
    values = values.to(tensor.device)
    if isinstance(wrapped, DistributedDataParallel) and not isinstance(tensor, DTensor):
        group: Any = wrapped.process_group
        values = values.clone()
        torch.distributed.broadcast(values, torch.distributed.get_global_rank(group, 0), group=group)
    return values
