"""What `torch.jit.script` does in a session: it compiles original functions, and refuses cast modules.

It compiles source code, which does not show what a session casts. Torch has hooks for both cases, so
`torch.jit.script` itself is not patched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import _jit_internal
from torch.jit import _builtins

from amp.errors import AmpRuntimeError

_table_of_builtins: Any = _builtins._get_builtin_table  # has no type hints


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
    """Make scripted code that calls a wrapper call the original, until `forget`."""
    wrapper.__prepare_scriptable__ = lambda: original
    table = _table_of_builtins()
    if id(original) in table:
        table[id(wrapper)] = table[id(original)]
    if original in _jit_internal.boolean_dispatched:
        _jit_internal.boolean_dispatched[wrapper] = _jit_internal.boolean_dispatched[original]


def forget(wrappers: Iterable[Any]) -> None:
    """Undo `stand_for`: another function may later get the id of a wrapper."""
    for wrapper in wrappers:
        _table_of_builtins().pop(id(wrapper), None)
