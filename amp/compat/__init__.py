"""The names of NVIDIA's apex, for scripts that import apex: see `install` and `python -m amp run`."""

from amp.compat.alias import install, uninstall

__all__ = ["install", "uninstall"]
