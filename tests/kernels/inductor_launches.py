"""What Inductor would launch on an H100 for a compiled model, found without one.

The model is traced on the CPU. The graphs of its forward and backward are then moved to a pretended
device, and Inductor writes its code for them, which is read and not run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.device_interface
import torch._inductor.scheduler
import triton
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import view_to_reshape
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget

H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    gcnArchName=None,
)
DRIVER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0
)
LAUNCH = r"(triton_\w+)\.run\(|(?:extern_kernels|torch\.ops\.amp)\.(\w+)[.\w]*\("


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Let Inductor find an H100."""
    interface = torch._dynamo.device_interface.CudaInterface
    found: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "get_device_properties": lambda *_: H100,
            "_get_device_properties": lambda *_: H100,
            "get_device_capability": lambda *_: (9, 0),
            "_lazy_init": lambda: None,
        },
        interface: {"current_device": staticmethod(lambda: 0)},
        interface.Worker: {"get_device_properties": staticmethod(lambda *_: H100)},
        torch.version: {"cuda": "12.9"},
        torch._inductor.scheduler: {"has_triton": lambda *_: True},
        triton.runtime.driver: {"_active": DRIVER},
    }
    with pytest.MonkeyPatch.context() as patch:
        for owner, attributes in found.items():
            for name, value in attributes.items():
                patch.setattr(owner, name, value, raising=False)
        yield


def launches(model: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
    """Return the names of the kernels and operators that a forward and a backward of a model start."""
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        [outputs] = [node.args[0] for node in graph.graph.nodes if node.op == "output"]
        values = [getattr(x, "meta", {}).get("val") for x in outputs]
        like = [(v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else None for v in values]
        return make_boxed_func(
            lambda *_: [y and torch.empty_strided(*y[:2], dtype=y[2]).zero_() for y in like]
        )

    def partition(graph: Any, inputs: Any, **options: Any) -> Any:
        joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    compiled = torch.compile(lambda: model(x), backend=backend, fullgraph=True)
    compiled().sum().backward()
    bodies = [code[code.index("def call(") :] for code in map(_code_of, graphs)]
    return [kernel or operator for body in bodies for kernel, operator in re.findall(LAUNCH, body)]


def _code_of(graph: Any) -> str:
    """Return what Inductor writes for a graph that was traced on the CPU, on the pretended device."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    device = torch.device("cuda", 0)

    def moved(value: Tensor) -> FakeTensor:
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(mode, meta, device)

    for node in graph.graph.nodes:
        node.meta["val"] = tree_map_only(Tensor, moved, node.meta.get("val"))
        node.meta.pop("tensor_meta", None)
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with pretended(), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        view_to_reshape(graph)
        post_grad_passes(graph, True)
        lowering = GraphLowering(graph, shape_env=mode.shape_env)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            code = lowering.codegen()[0]
    return str(getattr(code, "value", code))
