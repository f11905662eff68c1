"""A step asks each tensor what it must know once: how often the library asks is counted, and bounded.

A question is whatever makes Python code of the library look into one tensor: reading or setting an
attribute (`dtype`, `grad`, `_version`), calling a method (`data_ptr()`, `numel()`), bound, unbound or
from C as in `map(Tensor.data_ptr, tensors)`, and a look-up by the tensor as a key, which calls its
`__hash__` or `__eq__`. What the object's address says (`is`, `id`, `type`) is none, nor is an operation
that is given the tensor, such as `torch._foreach_copy_`, which asks in C++ what it must. A question
that Python code of torch asks for the library (`isinstance` with a parameter's class) is the library's;
those of torch's optimizers are theirs.

The way is the one that a GPU takes, with launches that do nothing. What is asked when a block is
entered and left and in the step is counted. A step's tensors are, for each 16-bit parameter, the
user's two, the parameter and its gradient, and what is the library's own: the master and its moments.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp import distributed, kernels
from amp.kernels import host_lists, l2norm, launch_plans, stepping, update_scale
from amp.optimizers import FusedAdam
from tests.compiling import lists_in_cpp
from tests.levels import WITH_MASTERS

LIBRARY = tuple(f"{Path(path).resolve()}/" for path in (*amp.__path__, *kernels.__path__))
OPTIMIZERS_OF_TORCH = f"{Path(torch.optim.__file__).parent}/"
TENSORS = 12

_METHODS = {
    name: method
    for name in dir(Tensor)
    if isinstance(method := getattr(Tensor, name), (types.MethodDescriptorType, types.FunctionType))
    and (not name.startswith("__") or name in ("__len__", "__bool__", "__iter__"))
}
_AS_KEYS = {name: getattr(Tensor, name) for name in ("__hash__", "__eq__")}


def _is_asked_by_the_library(frame: FrameType | None) -> bool:
    while frame is not None:
        name = str(Path(frame.f_code.co_filename).resolve()) if frame.f_code else ""
        if name.startswith(LIBRARY):
            return True
        if name.startswith((OPTIMIZERS_OF_TORCH, __file__)):
            return False
        frame = frame.f_back
    return False


class Questions:
    """Counts what the library asks of some tensors.

    Attributes:
        of: what was asked, and how often, of each tensor that was named.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []
        self.of: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def name(self, name: str, tensor: Tensor | None) -> None:
        """Count what is asked of a tensor, under a name; several may have the same."""
        if tensor is not None:
            self._names[id(tensor)] = name
            self._kept.append(tensor)  # so that no other gets its id

    def asked(self, tensor: Any, question: str, frame: FrameType | None) -> None:
        """Note a question."""
        name = self._names.get(id(tensor))
        if name is not None and _is_asked_by_the_library(frame):
            self.of[name][question] += 1

    def most(self, kind: str) -> int:
        """Return the most questions that a tensor of this kind was asked."""
        counts = [asked.total() for name, asked in self.of.items() if name.split()[0] == kind]
        return max(counts, default=0)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count inside the block."""
        with pytest.MonkeyPatch.context() as patch:
            for name, method in {**_METHODS, **_AS_KEYS}.items():
                patch.setattr(Tensor, name, self._asking(name, method))
            patch.setattr(Tensor, "__getattribute__", self._attribute_read, raising=False)
            patch.setattr(Tensor, "__setattr__", self._attribute_set, raising=False)
            for module, name in ((host_lists, "_GRAD"), (distributed, "_DATA")):
                patch.setattr(module, name, _Slot(self, name, getattr(module, name)))
            before = sys.getprofile()
            sys.setprofile(self._called_from_c)
            try:
                yield
            finally:
                sys.setprofile(before)

    def _asking(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def ask(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.asked(tensor, name, sys._getframe(1))
            return method(tensor, *args, **kwargs)

        return ask

    @property
    def _attribute_read(self) -> Callable[[Any, str], Any]:
        def read(tensor: Any, name: str) -> Any:
            # Methods count when they are called. C looks for __torch_function__ in the class of a
            # master, as in that of any subclass.
            if name not in {*_METHODS, *_AS_KEYS, "__torch_function__"}:
                self.asked(tensor, name, sys._getframe(1))
            return object.__getattribute__(tensor, name)

        return read

    @property
    def _attribute_set(self) -> Callable[[Any, str, Any], None]:
        def assign(tensor: Any, name: str, value: Any) -> None:
            self.asked(tensor, f"{name} =", sys._getframe(1))
            object.__setattr__(tensor, name, value)

        return assign

    def _called_from_c(self, frame: FrameType, event: str, function: Any) -> None:
        """See methods that somebody has taken from the class before they were wrapped."""
        if event == "c_call" and isinstance(getattr(function, "__self__", None), Tensor):
            self.asked(function.__self__, function.__name__, frame)


class _Slot:
    """A descriptor of Tensor that the library has taken from the class, with its questions counted."""

    def __init__(self, questions: Questions, name: str, slot: Any) -> None:
        self._questions, self._name, self._slot = questions, name, slot

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        self._questions.asked(tensor, self._name, sys._getframe(1))
        return self._slot.__get__(tensor)

    def __set__(self, tensor: Any, value: Any) -> None:
        self._questions.asked(tensor, f"{self._name} =", sys._getframe(1))
        self._slot.__set__(tensor, value)


class Model(nn.Module):
    """Weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(3) for _ in range(TENSORS)])

    def forward(self) -> Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum()


@pytest.fixture
def launches_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the way of a GPU, with lists in C++, and leave out what the GPU would do."""
    monkeypatch.setattr(host_lists, "lists", lists_in_cpp())
    for module in (l2norm, launch_plans, update_scale):
        monkeypatch.setattr(module, "launch", lambda *args, **kwargs: None)
    for module in (launch_plans, update_scale):
        monkeypatch.setattr(module, "uses_triton", lambda device, backend=None: True)
    for module in (launch_plans, stepping):
        monkeypatch.setattr(module, "takes_at_once", lambda lists, backend=None: False)
    monkeypatch.setattr(launch_plans.Elementwise, "run_in_cpp", lambda *_, **__: False)
    monkeypatch.setattr(update_scale, "is_on_host", lambda tensor: False)
    places = functools.lru_cache(launch_plans._places.__wrapped__)
    monkeypatch.setattr(launch_plans, "_places", places)


def count(level: str, optimizer_class: Any, blocks: int) -> Questions:
    """Return what the sixth iteration asks: nothing is new in it but the gradients."""
    model = Model()
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, loss_scale={"init": 2.0}, verbosity=0)
    for _ in range(5):
        iterate(model, optimizer, blocks, Questions())
    questions = Questions()
    iterate(model, optimizer, blocks, questions)
    return questions


def iterate(model: Model, optimizer: Any, blocks: int, questions: Questions) -> None:
    stepped = optimizer.param_groups[0]["params"]
    for i, (weight, master) in enumerate(zip(model.weights, stepped, strict=True)):
        questions.name(f"parameter {i}", weight)
        if master is not weight:
            questions.name(f"master {i}", master)
        for name, value in optimizer.state.get(master, {}).items():
            questions.name(f"{name} {i}", value)
    for _ in range(blocks):
        block = amp.scale_loss(model(), optimizer)
        with questions.counted():
            scaled_loss = block.__enter__()
        scaled_loss.backward()
        for i, weight in enumerate(model.weights):
            questions.name(f"gradient {i}", weight.grad)
        with questions.counted():
            block.__exit__(None, None, None)
    with questions.counted():
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.usefixtures("launches_do_nothing")
@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_fused_step_asks_little_of_what_is_the_users(level: str, blocks: int) -> None:
    """Of a parameter its gradient, once in each block; of gradients nothing."""
    questions = count(level, FusedAdam, blocks)
    assert questions.most("parameter") == blocks, questions.of
    assert questions.most("gradient") == 0, questions.of


@pytest.mark.usefixtures("launches_do_nothing")
@pytest.mark.parametrize("blocks", [1, 2])
def test_and_hardly_anything_of_what_is_its_own(blocks: int) -> None:
    questions = count("O2", FusedAdam, blocks)
    # Has anybody changed its gradient, or given it one, before the block and before the step? Where is
    # it now? Are its values as they were? Each block gives it the gradient of its parameter.
    assert questions.most("master") <= 7 + 8 * blocks, questions.of
    assert all(questions.most(name) <= 1 for name in ("exp_avg", "exp_avg_sq", "step")), questions.of


PLANTED: dict[str, str] = {
    "an attribute": "tensor.dtype",
    "an attribute by name": "getattr(tensor, 'shape')",
    "an attribute from C": "list(map(operator.attrgetter('device'), [tensor]))",
    "an attribute that is set": "tensor.requires_grad = True",
    "a method": "tensor.data_ptr()",
    "an unbound method": "Tensor.numel(tensor)",
    "an unbound method from C": "list(map(Tensor.is_contiguous, [tensor]))",
    "a method taken from the class before": "size(tensor)",
    "a slot taken from the class before": "grads_of([tensor])",
    "a look-up": "{}.get(tensor)",
    "a question of a helper of torch's": "isinstance(tensor, nn.Buffer)",
}


@pytest.mark.parametrize("question", PLANTED)
def test_the_count_sees_each_kind_of_question(question: str) -> None:
    tensor = nn.Parameter(torch.ones(3))
    names = {
        "Tensor": Tensor,
        "operator": operator,
        "size": torch.Tensor.size,
        "grads_of": host_lists.grads_of,
        "nn": nn,
        "tensor": tensor,
    }
    for path, expected in ((f"{LIBRARY[0]}planted.py", 1), (__file__, 0)):
        ask = compile(PLANTED[question], path, "exec")
        if not expected and "grads_of" in PLANTED[question]:
            continue  # it is the library's own
        questions = Questions()
        questions.name("parameter 0", tensor)
        with questions.counted():
            exec(ask, names)
        assert (questions.most("parameter") > 0) is bool(expected), questions.of


def test_nothing_of_the_count_is_left_on_the_class() -> None:
    before = dict(vars(Tensor))
    with Questions().counted():
        assert vars(Tensor)["data_ptr"] is not before.get("data_ptr")
    assert dict(vars(Tensor)) == before
