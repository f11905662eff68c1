"""A 16-bit parameter of a model and its FP32 master, and their state when they last agreed.

The parameter is its master, rounded. In whatever way a script writes to the parameter, the next step
goes on from the written values, because masters take over what differs before each step
(`amp.kernels.master_copy`). So a pair does not record values of parameters. A write to a master shows
in its version or its address; one through its `.data` shows in neither, but a `Master` notes that its
`.data` was taken.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from amp.kernels.interrupts import Changes
from amp.kernels.tensor_lists import has_no_memory, local
from amp.lazy import kernels

_DATA: Any = Tensor.data


class Master(nn.Parameter):
    """The FP32 master of a 16-bit parameter, which tells its pair when its `.data` is taken.

    It has the attributes of the parameter. Of a DTensor the master is a DTensor: `.data` of one shows
    in the version of its shard. A copy or a pickle of it is an ordinary parameter.
    """

    __slots__ = ("_pair",)

    _pair: weakref.ref[Pair]

    @property
    def data(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values, as an alias whose writes raise no version."""
        pair = getattr(self, "_pair", lambda: None)()
        if pair is not None and not torch.compiler.is_compiling():
            pair.note_given()
        return _DATA.__get__(self)

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        object.__setattr__(plain, "__dict__", self.__dict__)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]


def register_master() -> None:
    """Let torch's optimizers update masters together, as those of `nn.Parameter` and DTensor."""
    if Master not in _foreach_supported_types:
        _foreach_supported_types.append(Master)


class Pair:
    """A parameter and its master.

    Attributes:
        parameter: the 16-bit parameter of the model.
        master: its FP32 master, in the optimizers' groups.
        low: the low half of a lean master (`amp.kernels.split`); None of a whole one.
        holder: what holds the master's values: the master, or where a lean one is split the parameter,
            which is their upper half.
        dtype: the parameter's, which it keeps as long as the session is open.
        users: the optimizers that hold the master.
        version, address: of the holder's values, when both last agreed.
        trains: whether both required a gradient then.
        grad: the gradient that both had then, or will have when the block is left.
        given: the parameter's values when a script first got the master since then, by its `.data` or
            in a state dict, and could write to it without a trace; else None.
    """

    __slots__ = (
        *("parameter", "master", "low", "holder", "dtype", "users", "trains", "grad"),
        *("version", "address", "given", "__weakref__"),
    )

    def __init__(self, parameter: Tensor, master: Tensor) -> None:
        self.parameter, self.dtype = parameter, parameter.dtype
        self.master = self.holder = master
        self.low: Any = None
        self.users: list[object] = []
        self.trains, self.grad = master.requires_grad, master.grad
        self.note_agreement()
        if isinstance(master, Master):
            master._pair = weakref.ref(self)

    # Whether both agree.

    def note_agreement(self) -> None:
        """Note that the parameter has the values of its rounded master."""
        values = local(self.holder)
        self.version, self.address = values._version, values.data_ptr()
        self.given: Tensor | None = None

    def note_given(self) -> None:
        """Note that a script gets the master, and may write to it without a trace. No host sync."""
        if self.given is None:
            values = local(self.parameter).detach()
            self.given = values if has_no_memory(values) else values.clone()

    @property
    def was_written(self) -> bool:
        """Whether a script has changed the master, with a trace, since both last agreed."""
        values = local(self.holder)
        return values._version != self.version or values.data_ptr() != self.address

    @property
    def has_changed(self) -> bool:
        """Whether a script has changed the master, or may have, since both last agreed."""
        return self.given is not None or self.was_written

    @property
    def has_memory(self) -> bool:
        """Whether both sides have memory."""
        return not any(map(has_no_memory, map(local, (self.parameter, self.master))))

    @property
    def is_shared(self) -> bool:
        """Whether several optimizers hold the master."""
        return len(self.users) > 1

    # Values.

    def values(self) -> Tensor:
        """Return the master's values, float32; in new memory if it is split now. No host sync."""
        if self.holder is self.master:
            return self.master.detach()
        values = torch.empty_like(self.parameter, dtype=torch.float32, requires_grad=False)
        kernels.split.join([self.parameter], [self.low], [values])
        return values

    def load(self, values: Tensor) -> Tensor:
        """Set the values of both, and return those that the parameter was given. No host sync.

        A new version would mean a change by the script, so the master gets none. An interrupt cannot
        leave the two different.
        """
        parameter, changes, weights = self.parameter, Changes(), values
        if self.low is None:
            changes.add(lambda: _DATA.__get__(self.master).copy_(values.detach()))
        else:
            wide = values.detach().to(device=parameter.device, dtype=torch.float32)
            weights = parameter.detach().clone()
            changes.add(lambda: kernels.split.split([wide], [weights], [self.low]))
        changes.add(lambda: _DATA.__get__(parameter).copy_(weights))
        changes.make()
        return weights


def untraced(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor's values, a DTensor's shard, whose writes raise no version."""
    return _DATA.__get__(local(tensor))  # type: ignore[no-any-return]
