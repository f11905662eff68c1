"""The master of a parameter, found by the parameter's memory, as `p.detach()` and `p.data` have it."""

from collections.abc import Iterable

from torch import Tensor

from amp.kernels.tensor_lists import are_plain


class Addresses:
    """Where the parameters of masters are.

    Args:
        pairs: masters, each with its parameter.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._pairs = [pair for pair in pairs if are_plain(pair)]
        self._sizes = {parameter.numel() for _, parameter in self._pairs}
        self._addresses: list[int] = []
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def master_at(self, values: Tensor) -> Tensor | None:
        """Return the master of the parameter that has the memory of `values`, in the same shape."""
        if values.numel() not in self._sizes:
            return None
        try:
            address = values.data_ptr()
        except RuntimeError:  # it has no memory of its own: a sparse one, or one under vmap
            return None
        master, parameter = self._known.get(address, (None, values))
        if master is None or parameter.data_ptr() != address:
            addresses = [parameter.data_ptr() for _, parameter in self._pairs]
            if addresses != self._addresses:  # they move when a model does
                self._addresses = addresses
                self._known = dict(zip(addresses, self._pairs, strict=True))
            master, parameter = self._known.get(address, (None, values))
        is_as_it_is = values.shape == parameter.shape and values.stride() == parameter.stride()
        return master if address and is_as_it_is else None
