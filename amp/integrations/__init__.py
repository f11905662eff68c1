"""Integrations with training frameworks, one module each, imported by name: none is a dependency.

Where a framework makes optimizers after it has converted the model, an integration calls `initialize`
twice, by `LateOptimizers`. Where the script makes them, `amp.initialize` comes first, as for Ignite and
timm.
"""


def missing(module: str, framework: str, extra: str) -> ImportError:
    """Return the error of a module whose framework is not installed.

    Args:
        module: the name of the module.
        framework: the framework that it needs.
        extra: the extra of the package `reamp` that installs it.
    """
    package = f"reamp[{extra}] @ git+https://github.com/reamp/reamp"
    return ImportError(f"{module} needs {framework}: pip install '{package}'")
