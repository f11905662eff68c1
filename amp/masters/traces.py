"""What shows that a parameter was written since it last equalled its rounded master."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from amp.kernels.tensor_lists import local

Trace = tuple[int, int]
"""The version of a parameter, and the address of its values."""

UNSEEN = -1, 0
"""The trace of a parameter that is to be compared with its master."""


def trace_of(parameter: Tensor) -> Trace:
    """Return the trace of a parameter now."""
    return parameter._version, local(parameter).data_ptr()


class Traces:
    """The trace that each parameter had when it and its master last agreed, by the master.

    Attributes:
        suspicions: how often `suspect` was called.
    """

    def __init__(self) -> None:
        self.suspicions = 0
        self._noted: dict[int, Trace] = {}
        self._new: dict[int, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {}
        """What `agree` noted and `_merged` has not merged yet, by the id of the list of ids."""

    @property
    def _merged(self) -> dict[int, Trace]:
        """All traces, by the id of the master.

        `agree` is called at each step and this is read rarely, so new traces are merged here.
        """
        while self._new:
            oldest = self._new.pop(next(iter(self._new), 0), None)
            if oldest is not None:  # else a signal handler has been here meanwhile
                ids, versions, addresses = oldest
                self._noted.update(zip(ids, zip(versions, addresses, strict=True), strict=True))
        return self._noted

    def of(self, master: Tensor) -> Trace:
        """Return the trace that the parameter of a master had."""
        return self._merged[id(master)]

    def note(self, master: Tensor, trace: Trace) -> None:
        """Note that the parameter of a master has this trace, and that they agree."""
        self._merged[id(master)] = trace

    def agree(self, ids: Sequence[int], versions: Sequence[int], addresses: Sequence[int]) -> None:
        """Note that the parameters of the masters with these ids agree with them."""
        if not ids:
            return  # nothing to note
        self._new.pop(id(ids), None)  # the last note counts
        self._new[id(ids)] = ids, versions, addresses

    def forget(self, masters: Iterable[Tensor]) -> None:
        """Let the parameters of masters be compared with them at the next look."""
        self._merged.update(dict.fromkeys(map(id, masters), UNSEEN))

    def suspect(self, masters: Iterable[Tensor]) -> None:
        """Do `forget`, because a write may have left no trace."""
        self.suspicions += 1
        self.forget(masters)

    def remove(self, master: Tensor) -> None:
        """Remove a master that is released."""
        self._merged.pop(id(master), None)
