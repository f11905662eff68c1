"""Makers of the observers that properties ask for: tools have these, and a session knows no tool.

The package itself fills the table, in `amp/__init__.py`: it stands above the tools and may name them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp.observers import Observer

MAKERS: dict[str, Callable[[Any], Observer]] = {}
"""By the value of the property `diagnose`: what makes an observer of a session."""
