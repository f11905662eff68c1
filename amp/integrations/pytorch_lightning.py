"""The same as `amp.integrations.lightning`, for scripts that import `pytorch_lightning`."""

from __future__ import annotations

try:
    from pytorch_lightning.plugins.precision import Precision
except ImportError as error:
    raise ImportError(
        "amp.integrations.pytorch_lightning needs Lightning: pip install 'reamp[lightning]'"
    ) from error

from amp.integrations.lightning_precision import AmpPlugin


class AmpPrecision(AmpPlugin, Precision):
    """A precision plugin for `pytorch_lightning.Trainer` and `lightning_fabric.Fabric`."""
