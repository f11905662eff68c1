"""Scripts written for apex, run without an edit by `python -m amp run`."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp
from amp import compat
from amp.errors import AmpRuntimeError
from amp.optimizers import FusedAdam
from tests.processes import ROOT, run_python

SCRIPTS = Path(__file__).parent / "scripts"


def run(*arguments: Any, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m amp run`, and expect an exit status."""
    finished = run_python("-m", "amp", "run", *arguments, **environment)
    assert finished.returncode == status, finished.stderr
    return finished


@pytest.mark.parametrize(
    "level", ["O1", *(pytest.param(level, marks=pytest.mark.slow) for level in ("O0", "O2", "O3"))]
)
def test_a_classifier(level: str) -> None:
    options = ["--keep-batchnorm-fp32", "True"] if level == "O3" else []
    scale = ["--loss-scale", "128.0"] if level != "O1" else []
    lines = run(SCRIPTS / "classify.py", "--opt-level", level, *options, *scale).stdout.splitlines()
    losses = [line for line in lines if line.startswith("loss")]
    assert len(losses) == 8
    assert losses[0].endswith("scale 65536.0" if level == "O1" else "scale 128.0")


def test_a_classifier_with_larc_after_two_dashes() -> None:
    assert run("--", SCRIPTS / "classify.py", "--opt-level", "O2", "--larc").stdout.count("loss") == 8


def test_a_classifier_resumes(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    run(SCRIPTS / "classify.py", "--opt-level", "O2", "--save", file)
    first = torch.load(file, weights_only=True)
    assert first["amp"]["loss_scaler0"]["unskipped"] == 8
    resumed = run(SCRIPTS / "classify.py", "--opt-level", "O2", "--resume", file)
    whole = run(SCRIPTS / "classify.py", "--opt-level", "O2", "--epochs", "2")
    lines = [line for line in whole.stdout.splitlines() if line.startswith("loss")]
    assert [line for line in resumed.stdout.splitlines() if line.startswith("loss")] == lines[8:]


@pytest.mark.slow
def test_two_processes_train_together(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    logs = ["--redirects", "1", "--log-dir", str(tmp_path)]
    options = ["-m", "amp", "run", str(SCRIPTS / "classify.py"), "--opt-level", "O2"]
    finished = subprocess.run(
        [*torchrun, *logs, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    first, second = [file.read_text() for file in tmp_path.rglob("stdout.log")]
    assert first == second
    assert first.count("scale 65536.0") == 8


@pytest.mark.slow
def test_processes_that_a_script_spawns() -> None:
    assert run(SCRIPTS / "spawn.py").stdout == "trained\n"


@pytest.mark.parametrize("options", [["--fp16"], ["--fp16", "--loss_scale", "128"], []])
def test_finetuning_with_the_first_fp16_optimizer(options: list[str]) -> None:
    lines = run(SCRIPTS / "pretrained.py", *options).stdout.splitlines()
    first, last = [float(line.split()[1]) for line in lines if line.startswith("loss")]
    assert first == pytest.approx(0.742, abs=2e-3)  # as in float32
    assert last == pytest.approx(0.513, abs=2e-3)


def test_private_names_that_bert_touched(tmp_path: Path) -> None:
    assert run(SCRIPTS / "bert.py", tmp_path / "ckpt.pt").stdout.splitlines()[-1] == "resumed at 4096.0"


def numbers(line: str) -> list[float]:
    """Return the numbers in a line of output."""
    return [float(word) for word in line.split() if word[:1].isdigit()]


@pytest.mark.parametrize(
    "scheduler",
    [
        "cosine",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dev_perf", "inv_sqrt", "constant")),
    ],
)
def test_a_transformer_and_its_schedules(scheduler: str) -> None:
    finished = {
        level: run(
            *(SCRIPTS / "schedulers.py", "--scheduler", scheduler, "--apex-amp-opt-level", level),
            *("--optim", "adam" if level == "O2" else "sgd"),
        )
        for level in ("O0", "O2")
    }
    traces = {
        level: [line for line in process.stdout.splitlines() if line.startswith("| step")]
        for level, process in finished.items()
    }
    rates = {level: [line.split("|")[2] for line in trace] for level, trace in traces.items()}
    assert len(traces["O2"]) == 16
    if scheduler != "dev_perf":  # which goes by the loss
        assert rates["O2"] == rates["O0"]
    assert len(set(rates["O2"])) > 1
    losses = [float(line.split()[-1]) for line in traces["O2"]]
    assert losses[-1] < 0.7 * losses[0]
    assert "optimizer.step()" not in finished["O2"].stderr  # torch's word on schedules out of order


OPTIONS = (
    ["--opt-level", "O1", "--loss-scale", "dynamic"],
    ["--opt-level", "O2"],
    ["--opt-level", "O2", "--loss-scale", "dynamic", "--master-weights"],
)


@pytest.mark.parametrize(
    ("attack", "options"),
    [
        pytest.param(attack, options, marks=() if i == j else pytest.mark.slow)
        for i, attack in enumerate(("fgsm", "penalty"))
        for j, options in enumerate(OPTIONS)
    ],
)
def test_adversarial_training(attack: str, options: list[str]) -> None:
    line = run(SCRIPTS / "adversarial.py", "--attack", attack, *options).stdout.splitlines()[-1]
    first, last, clean, attacked = numbers(line)
    assert last < first
    assert clean < attacked < first


@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "O2"])
def test_the_amp_block_of_an_engine(tmp_path: Path, level: str) -> None:
    weights = []
    for enabled in (True, False):
        config = {
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "amp": {"enabled": enabled, "opt_level": level, "loss_scale": 1024.0},
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        run(SCRIPTS / "engine.py", tmp_path / "config.json", tmp_path / "checkpoint.pt")
        weights.append(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["module"])
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], atol=2e-3, rtol=0)


@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "O2"])
def test_a_precision_plugin(level: str) -> None:
    losses, rates = run(SCRIPTS / "plugin.py", level).stdout.splitlines()[-2:]
    first, _, last, _ = numbers(losses)
    assert last < first
    assert numbers(rates) == [0.0025, 0.1]


@pytest.mark.parametrize("zipped", [True, False])
def test_checkpoints_of_2019(tmp_path: Path, apex: Any, zipped: bool) -> None:
    masters = [torch.tensor([[1.0, 1 / 3, 0.1], [2.0, -1 / 3, 0.2]]), torch.tensor([1e-3, 1 / 7])]
    buffers = {i: {"momentum_buffer": master / 2} for i, master in enumerate(masters)}
    group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False}
    optimizer = {"state": buffers, "param_groups": [{**group, "params": [0, 1]}]}
    amp_state = {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 3}}
    amp_state["loss_scaler1"] = {"loss_scale": 0.5, "unskipped": 1999}
    file = tmp_path / "checkpoint.pt"
    expected = f"{[m.tolist() for m in masters]} {[m.sum().div(2).item() for m in masters]}"

    model = dict(zip(("weight", "bias"), masters, strict=True))
    content: dict[str, Any] = {"model": model, "optimizer": optimizer, "amp": amp_state}
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    lines = run(SCRIPTS / "resume.py", file).stdout.splitlines()
    assert lines[-2:] == ["[4096.0, 0.5] 1999", expected]

    scaler = importlib.import_module("apex.amp.scaler").LossScaler("dynamic")
    scaler._loss_scale = 4096.0
    scaler.__class__.__module__ = "apex.amp.scaler"
    try:
        by_hand = {
            "loss_scaler": scaler,
            "dynamic_loss_scale": True,
            "overflow": False,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": optimizer,
            "fp32_from_fp16": [masters],
        }
        content = {"optimizer": by_hand}
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
    finally:
        scaler.__class__.__module__ = "amp.compat.state"
    lines = run(SCRIPTS / "resume.py", file).stdout.splitlines()
    assert lines[-2:] == ["4096.0 False", expected]


def test_a_module_and_its_arguments(tmp_path: Path) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("import sys, apex.amp; print(sys.argv[1:], __name__)")
    finished = run("-m", "project.train", "--lr", "1", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert finished.stdout.strip() == "['--lr', '1'] __main__"


def test_nothing_to_run_and_parts_that_are_not_here(tmp_path: Path) -> None:
    assert run(status=2).stderr.startswith("reamp: nothing to run: give script.py or -m")
    assert run("nowhere.py", status=2).stderr == "reamp: there is no file 'nowhere.py'\n"
    script = tmp_path / "script.py"
    script.write_text("from apex.contrib.xentropy import SoftmaxCrossEntropyLoss")
    assert "ModuleNotFoundError: 'apex.contrib.xentropy' is a part" in run(script, status=1).stderr
    script.write_text("from apex import amp\namp.initialize(1)")
    error = run(script, status=1).stderr
    assert "amp.initialize(1)" in error  # the traceback of the script
    assert "AmpTypeError" in error


def test_a_real_apex_stays_out_of_what_is_run(tmp_path: Path) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('real')")
    (tmp_path / "script.py").write_text("import apex.amp; print(apex.amp.scale_loss.__module__)")
    assert run(tmp_path / "script.py").stdout == "amp.frontend\n"


def test_it_is_not_there_unless_it_is_asked_for() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'apex'"):
        importlib.import_module("apex")


def test_names_are_ours(apex: Any) -> None:
    compat.install()
    kinds = [f"{kind}_function" for kind in ("half", "bfloat16", "float", "promote")]
    for name in ("scale_loss", *kinds, *(f"register_{kind}" for kind in kinds)):
        assert getattr(apex.amp, name) is getattr(amp, name)
    assert apex.optimizers.FusedAdam is FusedAdam
    assert apex.fp16_utils.FP16_Optimizer is importlib.import_module("amp.fp16_utils").FP16_Optimizer
    names: dict[str, Any] = {}
    exec("from apex.fp16_utils import *", names)
    assert names["FP16_Optimizer"] is apex.fp16_utils.FP16_Optimizer
    assert names["network_to_half"] is apex.fp16_utils.network_to_half
    for name in ("LARC", "_amp_state"):  # names of a module, and of what is in it
        for parent in ("apex.parallel", "apex.amp"):
            if hasattr(importlib.import_module(parent), name):
                inner = importlib.import_module(f"{parent}.{name}")
                assert getattr(inner, name) is getattr(importlib.import_module(parent), name)
                assert not isinstance(getattr(importlib.import_module(parent), name), ModuleType)


def test_the_state_is_that_of_the_session(apex: Any) -> None:
    with pytest.raises(AmpRuntimeError, match=r"called before amp.initialize"):
        _ = apex.amp._amp_state.loss_scalers
    model = nn.Linear(2, 2)
    model, optimizer = apex.amp.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", min_loss_scale=2.0, verbosity=0
    )
    state = apex.amp._amp_state
    state.loss_scalers[0]._loss_scale = 32.0
    state.loss_scalers[0]._unskipped = 7
    assert apex.amp.state_dict()["loss_scaler0"]["unskipped"] == 7
    assert amp.loss_scale() == state.loss_scalers[0].loss_scale() == 32.0
    assert state.loss_scalers[0].dynamic
    assert (state.min_loss_scale, state.max_loss_scale) == (2.0, 2.0**24)
    assert state.opt_properties.opt_level == "O2"
    stash = optimizer._amp_stash
    assert stash.all_fp16_params == list(model.parameters())
    assert stash.all_fp32_from_fp16_params == list(amp.master_params(optimizer))
    assert stash.all_fp32_from_fp32_params == []
    with apex.amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    masters = [weakref.ref(master) for master in stash.all_fp32_from_fp16_params]
    destination: dict[str, Any] = {}
    assert apex.amp.state_dict(destination=destination) is destination
    assert "loss_scaler0" in destination
    amp.get_session().close()
    assert stash.all_fp16_params == []
    assert [master() for master in masters] == [None, None]


@pytest.mark.parametrize(
    ("part", "message"),
    {
        "apex.pyprof": "'apex.pyprof' .* use torch.profiler instead",
        "apex.optimizers.FusedMixedPrecisionLamb": "use amp.optimizers.FusedLAMB at O2",
        "apex.amp.scale_los": "'apex.amp.scale_los' is a part of apex that reamp does not",
        "apex.contrib.sparsity.ASP": "use torch.ao.pruning.WeightNormSparsifier",
        "apex.contrib.xentropy.SoftmaxCrossEntropyLoss": "use torch.nn.functional.cross_entropy",
        "apex.contrib.optimizers.distributed_fused_adam.DistributedFusedAdam": (
            "use amp.optimizers.FusedAdam with a model that torch.distributed.fsdp.fully_shard"
        ),
        "apex.contrib.optimizers.DistributedFusedAdam": "use amp.optimizers.FusedAdam",
        "apex.contrib.optimizers.distributed_fused_lamb.DistributedFusedLAMB": (
            "use amp.optimizers.FusedLAMB with a model"
        ),
        "amp_C.multi_tensor_lamb_stage1_cuda": "use amp_C.multi_tensor_lamb, which does",
        "amp_C.multi_tensor_lamb_stage2_cuda": "use amp_C.multi_tensor_lamb, which does",
        "amp_C.multi_tensor_novograd": "use amp.optimizers.FusedNovoGrad instead",
        "apex.amp.rnn_compat": "use torch.nn.RNN, LSTM and GRU, whose inputs amp casts",
        "apex.parallel.distributed.split_half_float_double": "use torch.distributed inst",
        "apex.normalization.fused_layer_norm.Other": "torch.nn.functional.layer_norm",
    }.items(),
)
def test_missing_parts_say_what_to_use(apex: Any, part: str, message: str) -> None:
    module, _, name = part.rpartition(".")
    with pytest.raises(ImportError, match=message):
        exec(f"from {module} import {name}")
    if name == "pyprof":
        with pytest.raises(ImportError, match="use torch.nn.RNN, LSTM and GRU instead"):
            importlib.import_module("apex.RNN")


def test_a_loss_scaler_of_its_own(apex: Any) -> None:
    scaler = importlib.import_module("apex.amp.scaler").LossScaler(
        "dynamic", init_scale=8.0, scale_window=2, min_loss_scale=4.0, max_loss_scale=16.0
    )
    grads, masters = [torch.full((3,), 8.0).half()], [torch.zeros(3)]
    scales = []
    for bad in (False, False, False, False, True, True, True):
        grads[0][0] = torch.inf if bad else 8.0
        scaler.clear_overflow_state()
        scaler.unscale(grads, masters, scaler.loss_scale())
        assert masters[0][1] == 8.0 / scaler.loss_scale()
        assert scaler._has_overflow == bad
        assert scaler.update_scale() == bad
        scales.append(scaler.loss_scale())
    assert scales == [8.0, 16.0, 16.0, 16.0, 8.0, 4.0, 4.0]
    scaler.unscale_with_stashed(grads, [torch.ones(3)], masters)
    assert masters[0].tolist() == [torch.inf, 3.0, 3.0]
    scaler.unscale_with_stashed(grads, [torch.ones(3)], masters, scale_override=(8.0, 0.5, 1.0))
    assert masters[0].tolist() == [torch.inf, 3.0, 3.0]
    copied = copy.deepcopy(scaler)
    assert (copied.loss_scale(), copied._min_loss_scale, copied.dynamic) == (4.0, 4.0, True)
    by_four = pickle.loads(
        pickle.dumps(importlib.import_module("apex.amp.scaler").LossScaler("dynamic", scale_factor=4.0))
    )
    by_four._overflow_buf = torch.ones(1, dtype=torch.int32)
    assert by_four.update_scale()
    assert by_four.loss_scale() == 2.0**14
    static = importlib.import_module("apex.amp.scaler").LossScaler(128.0)
    static.unscale(grads, masters, 1.0, scale_override=2.0)
    assert masters[0].tolist() == [torch.inf, 4.0, 4.0]
    assert not static.update_scale()
    assert (static.loss_scale(), static._unskipped, static._has_overflow) == (128.0, 1, False)


def test_what_initialize_does_not_take(apex: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match="argument 'combine_grad'; leave it out. It takes models, opt"):
        apex.amp.initialize(model, optimizer, combine_grad=True)
    wrapper = apex.fp16_utils.FP16_Optimizer(optimizer, verbose=False)
    with pytest.raises(RuntimeError, match="Pass the SGD inside it to amp.initialize"):
        apex.amp.initialize(model, wrapper)
    assert apex.amp.initialize(nn.Linear(2, 2), [], verbosity=0)[1] == []


def test_a_real_apex_is_not_shadowed_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AmpRuntimeError, match=r"compat.install\(replace=True\)"):
        compat.install()
    assert importlib.import_module("apex").real
    compat.install(replace=True)
    try:
        assert not hasattr(importlib.import_module("apex"), "real")
    finally:
        compat.uninstall()
    assert importlib.import_module("apex").real
    del sys.modules["apex"]


def test_larc_scales_each_gradient_by_its_layer() -> None:
    parallel = importlib.import_module("amp.compat.parallel")
    for clip in (True, False):
        parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
        larc = parallel.LARC(torch.optim.SGD([parameter], lr=0.1, weight_decay=0.01), 0.04, clip)
        parameter.grad = torch.tensor([0.6, 0.8])
        larc.step()
        rate = 0.04 * 5 / (1 + 0.01 * 5 + 1e-8)
        rate = min(rate / 0.1, 1.0) if clip else rate
        expected = torch.tensor([3.0, 4.0]) - 0.1 * rate * torch.tensor([0.63, 0.84])
        torch.testing.assert_close(parameter.detach(), expected)
        assert larc.param_groups[0]["weight_decay"] == 0.01


def test_batch_norms_are_converted() -> None:
    parallel = importlib.import_module("amp.compat.parallel")
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(3)))
    converted = parallel.convert_syncbn_model(model)
    assert [type(m) for m in converted.modules()].count(parallel.SyncBatchNorm) == 2
    assert converted[:2].eval()(torch.ones(1, 1, 3, 3)).shape == (1, 2, 3, 3)  # type: ignore[index]
    norm = parallel.SyncBatchNorm(2, fuse_relu=True).eval()
    assert torch.equal(norm(torch.tensor([[-1.0, 0.0]])), torch.zeros(1, 2))


def test_a_collective_of_many_tensors(apex: Any) -> None:
    from apex.parallel import ReduceOp  # type: ignore[import-not-found,unused-ignore]
    from apex.parallel.distributed import (  # type: ignore[import-not-found,unused-ignore]
        flat_dist_call,
    )

    weights = [nn.Parameter(torch.ones(2, 2)), torch.ones(3, dtype=torch.float16), torch.zeros(1)]
    sizes = []

    def double(flat: torch.Tensor, factor: int) -> None:
        sizes.append(len(flat))
        flat *= factor

    flat_dist_call(weights, double, (2,))
    assert sorted(sizes) == [3, 5]
    assert [weight.sum().item() for weight in weights] == [8, 6, 0]
    assert ReduceOp is torch.distributed.ReduceOp


def test_norms() -> None:
    norms = importlib.import_module("amp.compat.normalization")
    x = torch.randn(3, 4).half()
    torch.manual_seed(0)
    assert torch.equal(norms.FusedLayerNorm(4)(x.float()), nn.LayerNorm(4)(x.float()))
    assert torch.equal(norms.FusedRMSNorm(4)(x.float()), nn.RMSNorm(4, eps=1e-5)(x.float()))
    with pytest.raises(RuntimeError, match=r"there is none. Use FusedRMSNorm"):
        norms.MixedFusedRMSNorm(4, elementwise_affine=False)
    for kind in (norms.MixedFusedLayerNorm, norms.MixedFusedRMSNorm):
        assert kind(4)(x).dtype is torch.float32
        assert kind(4).half()(x.float()).dtype is torch.float16


def test_functions_of_norms(apex: Any) -> None:
    from apex.normalization.fused_layer_norm import (  # type: ignore[import-not-found,unused-ignore]
        FusedLayerNormAffineFunction,
        FusedLayerNormFunction,
        FusedRMSNormAffineFunction,
        FusedRMSNormFunction,
    )

    x, weight, bias = torch.randn(3, 4, requires_grad=True), torch.rand(4), torch.rand(4)
    with_bias = F.layer_norm(x, (4,), weight, bias, 1e-12)
    for shape in (4, (4,), torch.Size([4])):
        for options in ([1e-12], [1e-12, True]):  # memory_efficient
            each = FusedLayerNormAffineFunction.apply(x, weight, bias, shape, *options)
            assert torch.equal(each, with_bias)
            each = FusedLayerNormFunction.apply(x, shape, *options)
            assert torch.equal(each, F.layer_norm(x, (4,), eps=1e-12))
            each = FusedRMSNormAffineFunction.apply(x, weight, shape, *options)
            assert torch.equal(each, F.rms_norm(x, (4,), weight, 1e-12))
            each = FusedRMSNormFunction.apply(x, shape, *options)
            assert torch.equal(each, F.rms_norm(x, (4,), None, 1e-12))
    each.sum().backward()
    assert x.grad is not None
    # How scripts find out which version of apex there is.
    assert "memory_efficient" in inspect.getfullargspec(FusedLayerNormAffineFunction.forward).args


@pytest.mark.parametrize(("level", "dtype"), [("O2", torch.float16), ("O5", torch.bfloat16)])
def test_a_forward_whose_inputs_a_script_casts(apex: Any, level: str, dtype: torch.dtype) -> None:
    """As catalyst and others did for DataParallel."""
    from apex.amp._initialize import applier, to_type  # type: ignore[import-not-found,unused-ignore]

    class Pair(NamedTuple):
        x: torch.Tensor
        number: torch.Tensor

    amp_state = apex.amp._amp_state
    assert not hasattr(amp_state, "opt_properties")
    apex.amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    options = amp_state.opt_properties.options
    assert options["cast_model_type"] is dtype
    assert options.get("cast_model_outputs", torch.float32) is torch.float32
    assert (options["opt_level"], options["master_weights"], options["enabled"]) == (level, True, True)
    assert options["loss_scale"] == amp_state.opt_properties.loss_scale
    assert isinstance(amp_state.opt_properties, apex.amp.frontend.Properties)
    with pytest.raises(TypeError):
        options["master_weights"] = False
    caster = functools.partial(to_type, options["cast_model_type"])
    given = ({"pair": Pair(torch.ones(2), torch.arange(2))}, [torch.ones(1)], "word", None)
    first, second, *others = applier(given, caster)
    assert isinstance(first["pair"], Pair)
    assert (first["pair"].x.dtype, first["pair"].number.dtype) == (dtype, torch.int64)
    assert second[0].dtype is dtype
    assert others == ["word", None]
    assert given[0]["pair"].x.dtype is torch.float32  # type: ignore[index]
    assert apex.amp._initialize.applier is applier


def test_an_overflow_check_with_its_arguments_in_either_order(apex: Any) -> None:
    check = importlib.import_module("apex.amp.scaler").scale_check_overflow_python
    grad, master = torch.tensor([2.0, 4.0]).half(), torch.zeros(2)
    for arguments in ((master, 0.5), (0.5, master), (torch.tensor(0.5), master)):
        assert not check(grad, *arguments)
        assert master.tolist() == [1.0, 2.0]
        master.zero_()
    assert grad.tolist() == [2.0, 4.0]
    bad = torch.tensor([torch.inf, 4.0]).half()
    assert check(bad, 0.5, master)  # the older order always checks
    assert check(bad, master, 0.5, True)
    assert check(bad, master, 0.5, check_overflow=True)
    assert check(bad, scale=0.5, master_grad=master, check_overflow=True)
    assert master.tolist() == [0.0, 0.0]
    assert not check(bad, master, 0.5)
    assert not check(bad, 0.5, master, False)
    assert master.tolist() == [torch.inf, 2.0]
    # A gradient penalty scales a gradient in its graph.
    x = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad((8 * x**2).sum(), x, create_graph=True)
    assert not check(grad, 1 / 8, grad)
    grad.square().sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [8.0, 8.0]


def train_by_hand(apex: Any, level: str, fused: bool, by_hand: bool, **options: Any) -> list[Any]:
    """Train by `scale_loss`, or by the steps that scripts put in its place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    make: Any = apex.optimizers.FusedAdam if fused else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.01)
    model, optimizer = apex.amp.initialize(
        model, optimizer, opt_level=level, num_losses=2, verbosity=0, **options
    )
    scales = []
    for i in range(5):
        for loss_id in range(2):
            loss = model(torch.randn(6, 4)).float().square().mean() * (math.inf if i == 2 else 1.0)
            if by_hand:
                scaler = apex.amp._amp_state.loss_scalers[loss_id]
                if not optimizer._amp_stash.params_have_scaled_gradients:
                    optimizer._prepare_amp_backward()
                (loss * scaler.loss_scale()).backward()
                scaler.clear_overflow_state()
                optimizer._post_amp_backward(scaler)
                optimizer._amp_stash.params_have_scaled_gradients = False
                scaler.update_scale()
            else:
                with apex.amp.scale_loss(loss, optimizer, loss_id) as scaled_loss:
                    scaled_loss.backward()
            scales.append(apex.amp._amp_state.loss_scalers[loss_id].loss_scale())
        optimizer.step()
        optimizer.zero_grad()
    buffers = [buffer.tolist() for buffer in model.buffers()]
    return [[p.tolist() for p in apex.amp.master_params(optimizer)], buffers, scales]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_steps_of_scale_loss_one_by_one(apex: Any, level: str, fused: bool) -> None:
    options = {} if level == "O0" else {"loss_scale": "dynamic"}
    by_hand = train_by_hand(apex, level, fused, by_hand=True, **options)
    assert str(by_hand) == str(train_by_hand(apex, level, fused, by_hand=False, **options))
    assert by_hand[2][5] == (1.0 if level == "O0" else 2.0**15)


def test_steps_of_scale_loss_that_do_not_fit(apex: Any) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = apex.amp.initialize(
        model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0
    )
    nn.init.zeros_(model.weight)
    scaler = apex.amp._amp_state.loss_scalers[0]
    with apex.amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
        with pytest.raises(AmpRuntimeError, match="inside an amp.scale_loss block"):
            optimizer._post_amp_backward(scaler)
        with pytest.raises(AmpRuntimeError, match=r"inside another amp.scale_loss block"):
            optimizer._prepare_amp_backward()
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert model.weight.tolist() == [[-1.0, -1.0]]
    # A backward that has failed leaves nothing behind.
    optimizer._prepare_amp_backward()
    (model(torch.ones(1, 2)).sum() * 3).backward()
    with pytest.raises(AmpRuntimeError, match="Leave the first block"):
        apex.amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer).__enter__()
    with pytest.raises(AmpRuntimeError, match=r"optimizer.step\(\) was called inside"):
        optimizer.step()
    optimizer._prepare_amp_backward()
    (model(torch.ones(1, 2)).sum() * scaler.loss_scale()).backward()
    optimizer._post_amp_backward(scaler)
    optimizer.step()
    assert model.weight.tolist() == [[-2.0, -2.0]]
    optimizer.zero_grad()
    # Gradients that accumulate scaled, as with `delay_unscale`, are of no block before.
    for is_last in (False, True):
        (model(torch.ones(1, 2)).sum() * scaler.loss_scale() / 2).backward()
        if not is_last:
            optimizer._amp_stash.params_have_scaled_gradients = True
            assert optimizer._amp_stash.params_have_scaled_gradients
    with pytest.raises(TypeError, match=r"takes one of _amp_state.loss_scalers, and got .*GradScaler"):
        optimizer._post_amp_backward(torch.amp.GradScaler("cpu"))
    optimizer._post_amp_backward(scaler)
    assert not optimizer._amp_stash.params_have_scaled_gradients
    optimizer.step()
    assert model.weight.tolist() == [[-3.0, -3.0]]
    optimizer.zero_grad()
    with apex.amp.scale_loss(
        model(torch.ones(1, 2)).sum(), optimizer, delay_unscale=True
    ) as scaled_loss:
        scaled_loss.backward()
    optimizer._post_amp_backward(scaler)
    optimizer.step()
    assert model.weight.tolist() == [[-4.0, -4.0]]
    amp.get_session().close()
    for call in (
        optimizer._prepare_amp_backward,
        functools.partial(optimizer._post_amp_backward, scaler),
    ):
        with pytest.raises(AmpRuntimeError, match="this SGD is in no session"):
            call()


def test_steps_of_scale_loss_around_gradients_that_are_not_reduced(apex: Any) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Linear(2, 1, bias=False)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        apex.amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
        nn.init.zeros_(model.weight)
        ddp = apex.parallel.DistributedDataParallel(model)
        scaler = apex.amp._amp_state.loss_scalers[0]
        optimizer._prepare_amp_backward()
        with ddp.no_sync():
            (ddp(torch.ones(1, 2)).sum() * scaler.loss_scale()).backward()
        with pytest.raises(NotImplementedError, match=r"under no_sync\(\), whose gradients are not"):
            optimizer._post_amp_backward(scaler)
        (ddp(torch.ones(1, 2)).sum() * scaler.loss_scale()).backward()
        optimizer._post_amp_backward(scaler)
        optimizer.step()
        assert model.weight.tolist() == [[-2.0, -2.0]]
    finally:
        torch.distributed.destroy_process_group()


def test_steps_of_scale_loss_at_a_level_that_apex_lacks(apex: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    recipe = {"recipe": "delayed", "skip": []}
    apex.amp.initialize(model, optimizer, opt_level="O6", fp8=recipe, verbosity=0)
    with pytest.raises(NotImplementedError, match="FP8 by the recipe 'delayed'"):
        optimizer._prepare_amp_backward()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_script_that_handles_overflows_itself(apex: Any, level: str) -> None:
    """As NVIDIA's BERT did: a flag of its own for `update_scale`, and gradients cleared by hand."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    nn.init.zeros_(model.weight)
    mine = torch.zeros(1, dtype=torch.int)
    scales, weights = [], []
    for factor in (1.0, math.inf, 1.0, 1.0):
        loss = model(torch.ones(1, 2)).float().sum() * factor / 2**10
        with apex.amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled_loss:
            scaled_loss.backward()
        grads = [p.grad for p in apex.amp.master_params(optimizer)]
        flat = importlib.import_module("apex_C").flatten(grads)
        views = importlib.import_module("apex_C").unflatten(flat, grads)
        mine.zero_()
        applier = apex.multi_tensor_apply.multi_tensor_applier
        applier(importlib.import_module("amp_C").multi_tensor_scale, mine, [grads, views], 1.0)
        scaler = apex.amp._amp_state.loss_scalers[0]
        old_overflow_buf = scaler._overflow_buf
        scaler._overflow_buf = mine
        had_overflow = scaler.update_scale()
        scaler._overflow_buf = old_overflow_buf
        assert had_overflow == (factor == math.inf)
        assert apex.amp._amp_state.loss_scalers[0]._has_overflow == had_overflow
        if not had_overflow:
            optimizer.step()
        for parameter in [*model.parameters(), *apex.amp.master_params(optimizer)]:
            parameter.grad = None
        scales.append(scaler.loss_scale())
        weights.append(model.weight.tolist()[0][0] * 2**10)
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
    assert weights == [-1.0, -1.0, -2.0, -3.0]


def test_what_scripts_set_of_a_scaler(apex: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = apex.amp._amp_state
    assert not hasattr(state, "opt_properties")
    assert not hasattr(state, "loss_scalers")
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    scaler = state.loss_scalers[0]
    scaler._scale_seq_len, scaler._min_loss_scale, scaler._max_loss_scale = 1, 2.0**15, 2.0**16
    for factor in (math.inf, math.inf, 1e-6, 1e-6):
        with apex.amp.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        assert state.loss_scalers[0]._has_overflow == (factor == math.inf)
        optimizer.step()
        assert scaler.loss_scale() == (2.0**15 if factor == math.inf else 2.0**16)
    scaler._has_overflow = True
    assert state.loss_scalers[0]._has_overflow
    scaler.dynamic = False
    assert not state.loss_scalers[0].dynamic
    assert apex.amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**16
    optimizer._amp_lazy_init()


class Accumulating:
    """A wrapper that steps at every second call, as users wrote them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.wrapped, self.calls = optimizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            self.wrapped.step()
            self.wrapped.zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_wrapper_is_stepped_when_what_it_wraps_is(apex: Any, level: str, fused: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    sgd: Any = apex.optimizers.FusedSGD if fused else torch.optim.SGD
    optimizer: Any = Accumulating(sgd(model.parameters(), lr=1.0))
    nn.init.zeros_(model.weight)
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    weights = []
    for factor in (1.0, 1.0, math.inf, 1.0, 1.0, 1.0):
        with apex.amp.scale_loss(model(torch.ones(1, 1)).float().sum() * factor / 4, optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [0.0, -0.5, -0.5, -0.5, -0.5, -1.0]


def test_a_wrapper_and_what_it_wraps_are_one(apex: Any) -> None:
    model = nn.Linear(1, 1)
    larc = apex.parallel.LARC(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"optimizers\[1\] is in the list twice"):
        apex.amp.initialize(model, [larc, larc.optim], opt_level="O2", verbosity=0)
    apex.amp.initialize(model, larc, opt_level="O2", loss_scale=128.0, verbosity=0)
    with apex.amp.scale_loss(model(torch.ones(1, 1)).sum(), [larc, larc.optim]) as scaled_loss:
        scaled_loss.backward()
    larc.step()
    assert not amp.step_was_skipped(larc.optim)


def test_what_tells_whether_apex_is_there(apex: Any) -> None:
    assert importlib.util.find_spec("apex") is not None
    assert importlib.metadata.version("apex") == "0.1"
    with pytest.raises(AttributeError, match="'apex.RNN' .* use torch.nn.RNN, LSTM and GRU"):
        _ = apex.RNN
    assert getattr(apex.parallel, "nothing", None) is None
    compat.uninstall()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")


def test_a_disabled_script_may_scale_for_anything(apex: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = Accumulating(torch.optim.SGD(model.parameters(), lr=1.0))
    apex.amp.initialize(model, optimizer, enabled=False)
    loss = model(torch.ones(1, 1)).sum()
    with apex.amp.scale_loss(loss, object()) as same:
        assert same is loss
