"""Other people's training loops: a module for each, imported by name, so that none is a dependency."""


def missing(module: str, framework: str, extra: str) -> ImportError:
    """Return the error of a module whose framework is not installed.

    Args:
        module: the name of the module.
        framework: what it needs.
        extra: what of reamp to install with it.
    """
    package = f"reamp[{extra}] @ git+https://github.com/reamp/reamp"
    return ImportError(f"{module} needs {framework}: pip install '{package}'")
