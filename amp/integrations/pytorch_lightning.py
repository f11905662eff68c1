"""The same as `amp.integrations.lightning`, for `pytorch_lightning` and `lightning_fabric`."""

from __future__ import annotations

try:
    from pytorch_lightning.plugins.precision import Precision
except ImportError:
    try:  # `lightning_fabric` can be installed alone
        from lightning_fabric.plugins.precision import Precision
    except ImportError as error:
        raise ImportError(
            "amp.integrations.pytorch_lightning needs pytorch_lightning or lightning_fabric: "
            "pip install pytorch-lightning. For `import lightning` take amp.integrations.lightning"
        ) from error

from amp.integrations.lightning_precision import AmpPlugin


class AmpPrecision(AmpPlugin, Precision):  # pyright: ignore[reportGeneralTypeIssues]
    """A precision plugin for `pytorch_lightning.Trainer` and `lightning_fabric.Fabric`."""
