"""What hypothesis makes of valid input: one to three entries exchanged, removed, added or damaged.

`AMP_FUZZ_EXAMPLES=20000 pytest tests/fuzz` tries that many inputs in each test, other ones each time. A
failure prints the smallest input that hypothesis finds.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.tried import TRIED

Path = tuple[Any, ...]

BULK = int(os.environ.get("AMP_FUZZ_EXAMPLES", "0"))


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Return a decorator: so many examples, always the same; or as many as the environment says."""
    settings = hypothesis.settings(
        max_examples=BULK or examples,
        derandomize=not BULK,
        deadline=None,
        database=None,
        print_blob=bool(BULK),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )

    def decorate(test: Any) -> Any:
        check = test.hypothesis.inner_test

        @functools.wraps(check)
        def counted(*args: Any, **kwargs: Any) -> None:
            TRIED["inputs"] += 1
            check(*args, **kwargs)

        test.hypothesis.inner_test = counted
        return settings(test)

    return decorate


NUMBERS = (
    *(0, 1, -1, 3, 2**31, 2**64, 10**400, -(10**400), 10**5000, 0.5, -0.5, 1e39, -1e39, 1e308),
    *(math.nan, math.inf, -math.inf, True, False),
)
TENSORS: dict[str, Callable[[], Tensor]] = {
    "one": lambda: torch.tensor(1.0),
    "nan": lambda: torch.tensor(math.nan),
    "-1": lambda: torch.tensor(-1.0),
    "1e39": lambda: torch.tensor(1e39, dtype=torch.float64),
    "integer": lambda: torch.tensor(5),
    "bool": lambda: torch.tensor(True),
    "[1]": lambda: torch.ones(1),
    "[2]": lambda: torch.ones(2),
    "[0]": lambda: torch.ones(0),
    "[4, 4]": lambda: torch.ones(4, 4),
    "[4, 4] of nan": lambda: torch.full((4, 4), math.nan),
    "[4] of -1": lambda: torch.full((4,), -1.0),
    "complex": lambda: torch.ones(4, 4, dtype=torch.complex64),
    "sparse": lambda: torch.ones(4, 4).to_sparse(),
    "meta": lambda: torch.ones(4, 4, device="meta"),
    "[] on meta": lambda: torch.ones((), device="meta"),
    "integers": lambda: torch.ones(4, 4, dtype=torch.int64),
    "expanded": lambda: torch.ones(1).expand(4, 4),
    "overlapping": lambda: torch.arange(20.0).as_strided((4, 4), (1, 1)),
    "transposed": lambda: torch.arange(16.0).view(4, 4).t(),
    "a negative view": lambda: torch._neg_view(torch.full((4, 4), -1.0)),
    "zeros": lambda: torch._efficientzerotensor((4, 4)),
    "float8": lambda: torch.ones(4, 4).to(torch.float8_e4m3fn),
    "large": lambda: torch.full((4, 4), 1e300, dtype=torch.float64),
    "parameter": lambda: nn.Parameter(torch.ones(4)),
    "of a graph": lambda: torch.ones(4, 4, requires_grad=True) * 2,
}
OTHERS: dict[str, Any] = {
    "None": None,
    "text": "x",
    "no text": "",
    "a number as text": "nan",
    "bytes": b"abc",
    "a list": [1.0, 2.0],
    "an empty list": [],
    "a tuple": (1,),
    "a dict": {"a": 1},
    "an empty dict": {},
    "a set": {1},
    "complex number": 1j,
    "a type": int,
    "a dtype": torch.float16,
}
JUNK = (
    st.sampled_from(NUMBERS)
    | st.sampled_from(list(OTHERS)).map(OTHERS.__getitem__)
    | st.sampled_from(list(TENSORS)).map(lambda name: TENSORS[name]())
)
KEYS = st.sampled_from(["x", 0, 7, 1.5, None, "exp_avg", "exp_avg_sq", "step", "loss_scaler1"])


def paths_of(value: Any, above: Path = ()) -> Iterator[Path]:
    """Yield the paths to everything inside a value, and to itself."""
    yield above
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    for key, inner in pairs:
        yield from paths_of(inner, (*above, key))


def at(value: Any, path: Path) -> Any:
    """Return what is at a path."""
    for key in path:
        value = value[key]
    return value


def changed(value: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """Return the same with what is at a path changed; what leads there is copied."""
    if not path:
        return change(value)
    if isinstance(value, tuple):
        return tuple(changed(list(value), path, change))
    copied = value.copy()
    copied[path[0]] = changed(copied[path[0]], path[1:], change)
    return copied


def without(value: Any, key: Any) -> Any:
    """Return a container without one of its items."""
    if isinstance(value, dict):
        return {each: inner for each, inner in value.items() if each != key}
    return type(value)(inner for i, inner in enumerate(value) if i != key)


def damaged(value: Any, number: float) -> Any:
    """Return a floating-point tensor whose last element is a number; anything else as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return value
    copied = value.detach().to_dense().clone() if not value.is_meta else value
    if not copied.is_meta and copied.dtype is not torch.float8_e4m3fn:
        copied.view(-1)[-1] = number
    return copied


@st.composite
def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """Draw a valid value with one to three things wrong."""
    value = valid
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        paths = list(paths_of(value))
        path = draw(st.sampled_from(paths))
        how = draw(st.sampled_from(["exchange", "exchange", "remove", "add", "other", "damage"]))
        if how == "exchange":
            new = draw(JUNK)
            value = changed(value, path, lambda _, new=new: new)
        elif how == "other":
            new = at(value, draw(st.sampled_from(paths)))
            value = changed(value, path, lambda _, new=new: new)
        elif how == "damage":
            number = draw(st.sampled_from([math.nan, -math.inf, -5.0]))
            value = changed(value, path, lambda old, number=number: damaged(old, number))
        elif how == "remove" and path:
            value = changed(value, path[:-1], lambda old, key=path[-1]: without(old, key))
        elif isinstance(at(value, path), dict):
            new = {draw(KEYS): draw(JUNK)}
            value = changed(value, path, lambda old, new=new: {**old, **new})
    return value


def bits(value: Any) -> Any:
    """Return what is equal for two values that are equal bit for bit."""
    if isinstance(value, Tensor):
        tensor = value.detach().contiguous().reshape(-1)
        return value.dtype, tuple(value.shape), bytes(tensor.view(torch.uint8).tolist())
    if isinstance(value, dict):
        return [(key, bits(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return [bits(inner) for inner in value]
    return repr(value)


def model() -> nn.Sequential:
    """Return the model of these tests, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))


def groups(net: nn.Module) -> Sequence[dict[str, Any]]:
    """Return two groups of parameters: matrices, and vectors."""
    parameters = list(net.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "lr": 0.02},
    ]
