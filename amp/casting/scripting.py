"""What `torch.jit.script` finds in a session: torch's own functions, and no module that is cast.

It compiles source, which does not say what a session casts. Both are told it in ways that torch has for
that, so that `torch.jit.script` itself is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import _jit_internal
from torch.jit import _builtins

from amp.errors import AmpRuntimeError

_table_of_builtins: Any = _builtins._get_builtin_table  # which has no types


class NotScriptable:
    """The `__prepare_scriptable__` of a module that a session casts."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> NoReturn:
        """Raise AmpRuntimeError."""
        raise AmpRuntimeError(
            f"torch.jit.script cannot compile this {self._name}: amp casts as it runs, and its source "
            "does not say so. Use torch.jit.trace, torch.export or torch.compile, or script it after "
            "amp.get_session().close()."
        )


def stand_for(wrapper: Any, original: Any) -> None:
    """Let compiled code that calls a wrapper call the original, until `forget`."""
    wrapper.__prepare_scriptable__ = lambda: original
    table = _table_of_builtins()
    if id(original) in table:
        table[id(wrapper)] = table[id(original)]
    if original in _jit_internal.boolean_dispatched:
        _jit_internal.boolean_dispatched[wrapper] = _jit_internal.boolean_dispatched[original]


def forget(wrappers: Iterable[Any]) -> None:
    """Take back what `stand_for` did: another function may get the id of one."""
    for wrapper in wrappers:
        _table_of_builtins().pop(id(wrapper), None)
