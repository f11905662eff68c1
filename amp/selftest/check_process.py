"""The process that runs checks, one after the other, and writes their results as lines of JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import torch
from torch import Tensor

from amp.selftest.check_registry import Outcome, SkipError, all_checks


def main(device: str, names: Sequence[str]) -> None:
    """Run the checks of these names on a device, in this order."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    with _only_ours() as stream:
        for name in names:
            print(json.dumps(_result(name, torch.device(device))), file=stream, flush=True)


@contextlib.contextmanager
def _only_ours() -> Iterator[TextIO]:
    """Yield standard output, and redirect all other writes to it to standard error."""
    with os.fdopen(os.dup(1), "w") as stream:
        os.dup2(2, 1)
        yield stream


def _result(name: str, device: torch.device) -> dict[str, Any]:
    before = time.perf_counter()
    result: dict[str, Any] = {"name": name, "status": "PASS", "text": "", "bits": ""}
    try:
        outcome = all_checks()[name].run(device) or Outcome()
        result |= {"text": outcome.figure, "bits": _digest(outcome.bits)}
    except SkipError as error:
        result |= {"status": "SKIP", "text": str(error)}
    except Exception as error:  # whatever is wrong is what is to be found
        result |= {"status": "FAIL", "text": f"{type(error).__name__}: {error}"}
    return {**result, "seconds": time.perf_counter() - before}


def _digest(tensors: Sequence[Tensor]) -> str:
    """Return a hash of all bits; NaNs are alike."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous()
        if values.is_floating_point() and values.element_size() > 1:
            values = torch.where(values.isnan(), torch.nan, values)
        digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
        digest.update(bytes(values.flatten().view(torch.uint8).tolist()))
    return digest.hexdigest() if tensors else ""


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
