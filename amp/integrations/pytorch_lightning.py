"""`AmpPrecision` for `pytorch_lightning` and `lightning_fabric`; see `amp.integrations.lightning`."""

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
    """A precision plugin for `pytorch_lightning.Trainer` and `lightning_fabric.Fabric`.

    It replaces `precision=`, and is passed as a plugin: `plugins=[AmpPrecision("O2")]`.

    Args:
        opt_level: a level, an alias, or a path to a YAML profile.
        num_losses: how many losses have their own scale; select one by
            `manual_backward(loss, loss_id=1)`.
        verbosity: 0 logs nothing, not even skipped steps; 1 logs on rank 0 to the logger `amp`.
        **overrides: other arguments of `amp.initialize`, such as `loss_scale=1024.0`.

    Raises:
        AmpError: an argument is not valid.
    """
