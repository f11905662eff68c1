"""Lightning 2: `Trainer(plugins=AmpPrecision("O2"))`, `Fabric(plugins=AmpPrecision("O2"))`."""

from amp.integrations import missing

try:
    from lightning.pytorch.plugins.precision import Precision
except ImportError as error:
    raise missing(__name__, "Lightning", "lightning") from error

from amp.integrations.lightning_precision import AmpPlugin


class AmpPrecision(AmpPlugin, Precision):
    """A precision plugin for `lightning.pytorch.Trainer` and `lightning.fabric.Fabric`.

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
