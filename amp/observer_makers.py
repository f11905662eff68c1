"""A table of functions that make the observers of properties, such as that of `diagnose`.

Observers belong to tools, which a session does not import. `amp/__init__.py`, which may, fills the
table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp.observers import Observer

MAKERS: dict[str, Callable[[Any], Observer]] = {}
"""A function that makes an observer of a session, by the value of the property `diagnose`."""
