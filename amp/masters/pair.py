"""A 16-bit parameter of a model and its FP32 master, and what both were like when they last agreed.

The parameter is the truth, and its master holds the value that it rounds. However other code writes to
the parameter, the next step goes on from there, because masters take over what differs before each step
(`amp.kernels.master_copy`). So nothing has to be known about the values of parameters. A write to a
master shows in its version or its address; one through its `.data` shows in neither, but a `Master`
notes that its `.data` was taken.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from amp.kernels.tensor_lists import has_no_memory, local

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
        pair = getattr(self, "_pair", _no_pair)()
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


def _no_pair() -> None:
    return None


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
        dtype: the parameter's, which it keeps as long as the session is open.
        dtype_before: what it had before `initialize` has cast it; None if that has not.
        users: the optimizers that hold the master.
        version, address: of the master's values, when both last agreed; where these are in two halves,
            of the parameter, which is the upper one.
        trains: whether both required a gradient then.
        grad: the gradient that both had then, or will have when the block is left.
        given: the parameter's values when other code first got the master since then, by its `.data` or
            in a state dict, and could write to it without a trace; else None.
        is_joined: whether the master of a lean pair holds FP32 values now.
    """

    __slots__ = (
        *("parameter", "master", "low", "dtype", "dtype_before", "users", "is_joined"),
        *("version", "address", "trains", "grad", "given", "__weakref__"),
    )

    def __init__(
        self, parameter: Tensor, master: Tensor, low: Tensor | None, dtype_before: torch.dtype | None
    ) -> None:
        self.parameter, self.master, self.low = parameter, master, low
        self.dtype, self.dtype_before = parameter.dtype, dtype_before
        self.users: list[object] = []
        self.is_joined = False
        self.trains = master.requires_grad
        self.grad = master.grad
        self.note_agreement()
        if isinstance(master, Master):
            master._pair = weakref.ref(self)

    def note_agreement(self) -> None:
        """Note that the parameter has the values of its rounded master."""
        is_split = self.low is not None and not self.is_joined
        values = local(self.parameter if is_split else self.master)
        self.version, self.address = values._version, values.data_ptr()
        self.given: Tensor | None = None

    def note_given(self) -> None:
        """Note that other code gets the master, and may write to it without a trace. No host sync."""
        if self.given is None:
            values = local(self.parameter).detach()
            self.given = values if has_no_memory(values) else values.clone()

    @property
    def was_written(self) -> bool:
        """Whether other code has changed the master, with a trace, since both last agreed."""
        is_split = self.low is not None and not self.is_joined
        values = local(self.parameter if is_split else self.master)
        return values._version != self.version or values.data_ptr() != self.address

    @property
    def has_changed(self) -> bool:
        """Whether other code has changed the master, or may have, since both last agreed."""
        return self.given is not None or self.was_written

    @property
    def is_shared(self) -> bool:
        """Whether several optimizers hold the master."""
        return len(self.users) > 1
