"""Pairs of parameters and masters in order: one look finds what differs, and what to do then.

| differs since both last agreed       | then                                                       |
|--------------------------------------|------------------------------------------------------------|
| the dtype of a parameter             | FP32 of `.data =`: the master takes it, and the parameter  |
|                                      | is 16-bit again; any other dtype is refused                |
| one gradient                         | both get that of the side that changed; refused if both    |
|                                      | sides were given one                                       |
| `requires_grad` of one               | the side that changed is followed                          |
| version or address of a master       | the master is written to its parameter                     |
| its `.data` was taken, or a state    | the same, where the parameter is still what it was then    |
| dict got it                          |                                                            |
| the same of a lean pair's parameter, | the lower half is cleared where the upper half is not what |
| which is the master's upper half     | both halves round to                                       |
| values of a parameter                | not looked at: masters `merge` before each use of them     |

The look is taken before each forward (by `_BeforeForward` in `amp/session.py`), block and step, before
a method of an optimizer and after it, when a script asks for masters, and when a model is saved or
copied. The host does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from amp.casting.memory_checks import check_range
from amp.distributed import place_gradients, set_values
from amp.errors import AmpRuntimeError, warn
from amp.kernels import host_lists
from amp.kernels.host_lists import grads_of, store_grads
from amp.kernels.interrupts import without_grad
from amp.kernels.tensor_lists import TensorList, are_plain, local, local_shards
from amp.lazy import kernels
from amp.masters import lean
from amp.masters.pair import Pair, untraced
from amp.torch_versions import HAS_GRAD_DTYPE

Called = Callable[[Tensor], str]
"""Returns how to call a parameter in a message."""


def called_by_shape(parameter: Tensor) -> str:
    """Return how to call a parameter in a message if its name is not known."""
    return f"a parameter of shape {tuple(parameter.shape)}"


class Pairs:
    """Some pairs, in order.

    Args:
        pairs: the pairs.
        called: returns how to call a parameter in a message.

    Attributes:
        pairs: the pairs.
        masters, models: the masters, and the parameters of the model.
        are_plain: whether none is a DTensor, or of another class with its values elsewhere.
        are_whole: whether no master is lean.
        master_list, model_list: the same as `TensorList`s, of local shards; `now` makes them current.
    """

    def __init__(self, pairs: Iterable[Pair], called: Called = called_by_shape) -> None:
        self.pairs = list(pairs)
        self.masters: list[Any] = [pair.master for pair in self.pairs]
        self.models: list[Tensor] = [pair.parameter for pair in self.pairs]
        self.are_plain = are_plain([*self.masters, *self.models])
        self.master_list, self.model_list = map(TensorList, self._shards())
        self._dtypes = [pair.dtype for pair in self.pairs]
        self.are_whole = all(pair.low is None for pair in self.pairs)
        self._hold_values = self.are_whole and self.are_plain
        """Whether the masters themselves hold their values."""
        self._called = called
        self._part: Pairs | None = None

    # The look.

    def differences(self, at_grads: bool = True) -> list[Callable[[Pairs], None]]:
        """Return what to do about differences since both sides last agreed. Nothing is changed.

        Args:
            at_grads: whether both sides should have one gradient now.
        """
        pairs, lists = self.pairs, host_lists.lists
        found: list[Callable[[Pairs], None]] = []
        if not pairs:
            return found
        values = self.masters if self._hold_values else self._values()
        if lists.agree(pairs, self.masters, self.models, values, self._dtypes, at_grads):
            return found  # by one call
        if not lists.have_dtypes(self.models, self._dtypes):
            found.append(Pairs._take_dtypes)
        if at_grads:
            common = lists.read_slot(pairs, "grad")
            if not (lists.have_grads(self.masters, common) and lists.have_grads(self.models, common)):
                found.append(Pairs.follow_grads)
        trains = lists.read_slot(pairs, "trains")
        if not (lists.train(self.masters, trains) and lists.train(self.models, trains)):
            found.append(Pairs.follow_requires_grad)
        is_as_before = (
            lists.versions(values) == lists.read_slot(pairs, "version")
            and lists.are_at(values, lists.read_slot(pairs, "address"))
            and lists.are_same(lists.read_slot(pairs, "given"), [None] * len(pairs))
        )
        if not is_as_before:
            found.append(Pairs.write_changed)
        return found

    def resolve(self, found: Iterable[Callable[[Pairs], None]]) -> None:
        """Do what the result of a look says."""
        for act in found:
            act(self)

    # The table.

    def _take_dtypes(self) -> None:
        """Take over FP32 values that a script has assigned to `parameter.data`; refuse other dtypes.

        Values that the parameter had already are those of a cast. The host waits to know that.
        """
        cast = [pair for pair in self.pairs if pair.parameter.dtype is not pair.dtype]
        for pair in cast:
            if pair.parameter.dtype is not torch.float32:
                raise AmpRuntimeError(cast_text(self._called, pair.parameter, pair.dtype))
        given = [pair.parameter.detach() for pair in cast]
        if all(map(_are_equal, given, cast)):
            warn(
                f"{self._called(cast[0].parameter)} is {given[0].dtype} and was {cast[0].dtype} at "
                "amp.initialize, with the same values: the model was cast after it, by .float() or "
                ".to(). It is cast back, since masters have its FP32 values. Leave out the cast, or "
                "close the session before it: amp.get_session(optimizer).close()"
            )
        lean_halves = [x for x in cast if x.low is not None and x.dtype is torch.float16]
        check_range((self._called(x.parameter), x.parameter) for x in lean_halves)
        for pair, values in zip(cast, given, strict=True):
            set_values(pair.parameter, values.to(pair.dtype))
            pair.load(values)
            pair.note_agreement()

    def follow_requires_grad(self) -> None:
        """Freeze or unfreeze both sides, as the script has done with one."""
        for pair in self.pairs:
            ours, theirs = pair.master, pair.parameter
            if ours.requires_grad is not theirs.requires_grad:
                changed, other = (theirs, ours) if ours.requires_grad is pair.trains else (ours, theirs)
                other.requires_grad_(changed.requires_grad)
            pair.trains = ours.requires_grad

    def follow_grads(self) -> None:
        """Give both sides the gradient of the side that the script has changed.

        Those of DTensors may be summed over the ranks of the mesh, all of which call this.

        Raises:
            AmpRuntimeError: the script has given each side another one.
        """
        if not self.are_plain:
            place_gradients(self.models)
        both = zip(self.pairs, grads_of(self.masters), grads_of(self.models), strict=True)
        grads = [_changed(i, *each) for i, each in enumerate(both)]
        store_grads(self.masters, grads)
        self.show()

    def were_written(self) -> bool:
        """Whether a script has changed a master, with a trace, since both last agreed."""
        return self.are_whole and any(pair.was_written for pair in self.pairs)

    def write_changed(self) -> None:
        """Write masters that the script has changed to their parameters.

        Without a trace of a change they are written without one too: a graph that is still to be run
        backward stays valid if nothing was changed.
        """
        changed = [pair for pair in self.pairs if pair.has_changed and pair.has_memory]
        if self.are_whole:
            sources, targets = map(_to_write, changed), map(_where_to_write, changed)
            kernels.master_copy.master_copy(list(sources), list(targets))
        else:
            lean.clear_low([pair for pair in changed if pair.holder is pair.parameter])
        for pair in changed:
            pair.note_agreement()

    # Values.

    def now(self) -> Pairs:
        """Update the addresses of both lists, and return these pairs."""
        lists = [self.master_list, self.model_list]
        if not self.are_plain:  # a DTensor may have another shard
            both, are_same = zip(lists, self._shards(), strict=True), host_lists.lists.are_same
            lists = [known if are_same(x, known) else TensorList(x) for known, x in both]
        self.master_list, self.model_list = [known.now() for known in lists]
        return self

    def _shards(self) -> list[list[Tensor]]:
        """Return masters and parameters; of DTensors the shards that this rank holds."""
        both = [self.masters, self.models]
        return both if self.are_plain else list(map(local_shards, both))

    def _values(self) -> list[Tensor]:
        """Return what holds the values of masters, whole ones themselves; of DTensors the shards."""
        holders = host_lists.lists.read_slot(self.pairs, "holder")
        return holders if self.are_plain else local_shards(holders)

    def merge(self) -> None:
        """Let masters take what was written to parameters, in whatever way. No host sync.

        Call it when both sides agree in everything else. Lean masters need nothing while they are
        split: their upper half is the parameter. What has no memory is left out, and the step names it.
        """
        if not self.are_whole:
            lean.merge(lean.joined_of(self.pairs))
        elif self.pairs:
            if self.are_plain and kernels.master_copy.merge_in_cpp(self.models, self.masters):
                return
            some = self._comparable()
            kernels.master_copy.merge(some.model_list, some.master_list)

    @without_grad
    def differing(self) -> frozenset[Pair]:
        """Return the pairs of whole masters whose parameter is not its rounded master.

        The host waits for the device once, and once more if there are any.
        """
        some = self._comparable()
        models, masters = some.model_list, some.master_list
        if not models or not kernels.master_copy.differ(models, masters).item():
            return frozenset()
        both = zip(models, masters, strict=True)
        flags = [kernels.master_copy.differ([model], [master]) for model, master in both]
        found = torch.cat([flag.to(flags[0].device) for flag in flags]).tolist()
        return frozenset(compress(some.pairs, found))

    def check_devices(self) -> None:
        """Raise AmpRuntimeError if the model was moved after its masters were made."""
        if host_lists.lists.are_together(self.masters, self.models):
            return
        for master, parameter in zip(self.masters, self.models, strict=True):
            if master.device != parameter.device:
                raise AmpRuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} is on {parameter.device} and its "
                    f"FP32 master on {master.device}: the model was moved after amp.initialize. Move "
                    "it first."
                )

    def _comparable(self) -> Pairs:
        """Return the pairs that have memory, where they are now. Raise if they are on two devices."""
        self.check_devices()
        self.now()
        if self.master_list.has_memory and self.model_list.has_memory:
            return self
        return Pairs([pair for pair in self.pairs if pair.has_memory])

    def write_back(self) -> None:
        """Round the masters that train, or have a gradient, into their parameters. No host sync."""
        if not self.are_whole:
            lean.write_halves(lean.joined_of(self.pairs))
        elif not all(host_lists.lists.read_slot(self.pairs, "trains")):
            some = Pairs([pair for pair in self.pairs if pair.trains or pair.master.grad is not None])
            kernels.master_copy.master_copy(some.masters, some.models)
            some.note_agreement()
            return
        else:
            kernels.master_copy.master_copy(self.masters, self.models)
        self.note_agreement()

    def note_agreement(self) -> None:
        """Note that masters and parameters agree now."""
        lists, values = host_lists.lists, self.masters if self._hold_values else self._values()
        lists.write_slot(self.pairs, "version", lists.versions(values))
        lists.write_slot(self.pairs, "address", list(lists.addresses(values)))
        lists.write_slot(self.pairs, "given", [None] * len(self.pairs))

    # Gradients.

    def show(self, shown: list[Tensor] | None = None) -> None:
        """Give parameters the gradients of their masters, and note them.

        Args:
            shown: the gradients of all masters, if the caller knows them.
        """
        grads = grads_of(self.masters) if shown is None else shown
        host_lists.lists.write_slot(self.pairs, "grad", grads)
        if not HAS_GRAD_DTYPE:
            return
        if not host_lists.lists.take_any_grad(self.models):
            # `torch.utils.swap_tensors` has made others.
            store_grads(self.models)
            for model in self.models:
                model.grad_dtype = None
        store_grads(self.models, grads)

    def forget_grads(self) -> None:
        """Note that both sides have no gradient, or none yet."""
        host_lists.lists.write_slot(self.pairs, "grad", [None] * len(self.pairs))

    def only(self, chosen: Sequence[bool]) -> Pairs:
        """Return the chosen pairs alone; for the same ones, the same object again."""
        if all(chosen):
            return self
        pairs = list(compress(self.pairs, chosen))
        if self._part is None or not host_lists.lists.are_same(pairs, self._part.pairs):
            self._part = Pairs(pairs, self._called)
        return self._part


def _changed(index: int, pair: Pair, ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """Return the gradient that the script has given to a master, or to its parameter.

    Args:
        index: the number of the pair, for an error.
        pair: the pair.
        ours: the gradient of the master.
        theirs: that of the parameter.
    """
    common = pair.grad
    if ours is theirs or theirs is common or (theirs is None and ours is not common):
        return ours
    if ours is not common and ours is not None and not pair.is_shared:
        raise AmpRuntimeError(
            f"a parameter of shape {tuple(ours.shape)}, number {index} of those with a master, was "
            "given a gradient, and its master another one. Assign a gradient to one of the two: the "
            "parameter, or what amp.master_params(optimizer) yields"
        )
    return theirs if theirs is None else theirs.to(torch.float32)


def _are_equal(values: Tensor, pair: Pair) -> bool:
    """Whether FP32 values are the rounded values of a whole master."""
    if pair.low is not None:
        return False
    ours = local(pair.master).detach().to(device=values.device, dtype=pair.dtype)
    return torch.equal(ours.float(), local(values))


def _to_write(pair: Pair) -> Tensor:
    """Return the values of a changed master; its parameter's where that was written since `given`."""
    master, parameter = local(pair.master).detach(), local(pair.parameter).detach()
    before = pair.given  # once: another thread may be saving the model
    if before is None or pair.was_written:
        return master
    is_as_before = parameter.view(torch.int16) == before.view(torch.int16)
    return torch.where(is_as_before, master, parameter)


def _where_to_write(pair: Pair) -> Tensor:
    """Return the parameter of a changed master; without a trace of the change, an alias without one."""
    has_trace = local(pair.master)._version != pair.version
    return pair.parameter if has_trace else untraced(pair.parameter)


def cast_text(called: Called, parameter: Tensor, dtype: torch.dtype) -> str:
    """Return the message about a parameter that was cast after `initialize`."""
    return (
        f"{called(parameter)} is {parameter.dtype} and was {dtype} at "
        "amp.initialize: the model was cast after it, by .half(), .float() or .to(), or "
        ".data was given such values, as torch.nn.utils.vector_to_parameters does. Leave "
        "out the cast, or do it before; write FP32 values to amp.master_params(optimizer)"
    )
