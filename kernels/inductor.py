"""Functions of CPU tensors, compiled by torch's Inductor.

Inductor finds the compiler, keeps what it has compiled for later processes, and takes care that
several processes may do so at once. It is given a graph directly: `torch.compile` would take 90 us more
for each call, and what it made is lost when a session opens or closes, which resets Dynamo.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

logger = logging.getLogger("amp")

_CONFIG = {"cpp.dynamic_threads": True}
"""As many threads as torch has when the function is called, and not when it is compiled."""


def compile_for_cpu(function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]) -> Any:
    """Return a function that writes to its arguments, compiled; None, and say why, where that fails.

    The host works on it for some ten seconds, or two where an earlier process has done it.

    Args:
        function: of tensors alone, which it may write to; returns a list of tensors, perhaps empty.
        examples: arguments on the CPU; the compiled function takes any sizes, and these dtypes.
    """
    logger.warning(
        "compiling the optimizer step for this CPU with torch's Inductor: about ten seconds, or two if "
        "it was done before. AMP_KERNELS=reference leaves it out"
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's of itself, which a user may have made errors
            from torch._inductor import standalone_compile
            from torch.fx.experimental.proxy_tensor import make_fx

            graph: Any = make_fx(function, tracing_mode="symbolic")(*examples)
            return standalone_compile(graph, list(examples), options={"config_patches": _CONFIG})
    except Exception as error:  # of a compiler, a cache folder, a release of torch that is too old
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        logger.warning("it could not be compiled, so eager torch runs it, slower: %s", reason)
        return None
