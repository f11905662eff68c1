"""Lightning 2: `Trainer(plugins=AmpPrecision("O2"))`, `Fabric(plugins=AmpPrecision("O2"))`."""

from __future__ import annotations

try:
    from lightning.pytorch.plugins.precision import Precision
except ImportError as error:
    raise ImportError(
        "amp.integrations.lightning needs Lightning: "
        "pip install 'reamp[lightning] @ git+https://github.com/reamp/reamp'"
    ) from error

from amp.integrations.lightning_precision import AmpPlugin


class AmpPrecision(AmpPlugin, Precision):
    """A precision plugin for `lightning.pytorch.Trainer` and `lightning.fabric.Fabric`."""
