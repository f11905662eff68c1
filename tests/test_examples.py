"""The examples run as the README says."""

from __future__ import annotations

import ast
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import amp
from tests.levels import LEVELS
from tests.processes import Forked

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("sklearn", "matplotlib"))), reason="needs the examples extra"
)


def load(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # where Python looks for what a script imports
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["digits", "dcgan", "char_gpt"])
def test_a_picture_overwrites_no_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        load(name).parse_args(["--plot", "train.py"])
    assert "--plot train.py: a picture is a .png, .svg, .pdf file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_digits_learns_at_every_level(level: str, tmp_path: Path) -> None:
    plot = tmp_path / "digits.png"
    (run,) = load("digits").main(["--opt-level", level, "--epochs", "5", "--plot", str(plot)])
    assert run.accuracy >= 0.95
    assert plot.stat().st_size > 10_000


@pytest.mark.slow
def test_digits_takes_its_level_from_a_config(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("amp: {opt_level: O5, loss_scale: 8}\n")
    arguments = ["--config", str(config), "--epochs", "1", "--plot", str(tmp_path / "digits.png")]
    (run,) = load("digits").main(arguments)
    assert (run.level, run.weight_dtype, run.scales[-1]) == ("O5", "bfloat16", 8.0)
    (run,) = load("digits").main([*arguments, "--opt-level", "O3"])
    assert (run.level, run.weight_dtype) == ("O3", "float16")
    assert amp.get_session().properties.loss_scale == 8.0


def test_digits_trains_with_three_amp_lines() -> None:
    source = (EXAMPLES / "digits.py").read_text()
    (train,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "train"
    ]
    lines = (ast.get_source_segment(source, train) or "").splitlines()
    used = [line.strip() for line in lines if "amp." in line or "scaled_loss" in line]
    assert used[1:] == [
        "model, optimizer = amp.initialize(model, optimizer, **options)",
        "with amp.scale_loss(loss, optimizer) as scaled_loss:",
        "scaled_loss.backward()",
    ]
    assert used[0].startswith('"""')


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, weights_only=True)["model"]


KILLS = int(os.environ.get("AMP_KILLS", "1"))
"""`AMP_KILLS=20 pytest -m slow tests/test_examples.py -k kill` kills more runs, and each that often."""
SEED = os.environ.get("AMP_KILLS_SEED") or str(random.randrange(1_000_000))

Process = subprocess.Popen[str] | Forked


def wait_until(happens: Callable[[], object], process: Process) -> bool:
    """Wait for something that a process does; return False if it has ended before."""
    while not happens():
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


class Moments:
    """When a process is killed: between two saves, and every other time while it saves.

    Args:
        saved: returns what differs after each save.
        is_saving: whether a save has begun and not ended.
    """

    def __init__(
        self, of: str, saved: Callable[[], object], is_saving: Callable[[], bool], steps: int
    ) -> None:
        print(f"AMP_KILLS_SEED={SEED}")
        self.chance = random.Random(f"{SEED} {of}")
        self._saved, self._is_saving, self._steps = saved, is_saving, steps
        self._kills = self._torn = 0

    def wait(self, process: Process) -> bool:
        """Wait for the next one, which may be right after a save, right before the next, or between.

        Return False if the process has ended before.
        """
        self._kills += 1
        began = self._time_of_a_save(process)
        if self._kills % 2 == 0:
            return wait_until(self._is_saving, process)
        apart = self._time_of_a_save(process) - began
        share = self.chance.random()
        time.sleep(share * apart)
        print(
            f"kill {self._kills}: at {share:.0%} of the {1000 * apart:.0f} ms from a save to the next"
        )
        return process.poll() is None

    def _time_of_a_save(self, process: Process) -> float:
        before = self._saved()
        wait_until(lambda: self._saved() != before, process)
        return time.monotonic()

    def note_kill(self) -> None:
        """Note, once the process has gone, whether it has left a save that it had begun."""
        self._torn += self._is_saving()

    def tell(self) -> None:
        print(f"{self._kills} kills, {self._torn} while it saved, of {self._steps} steps")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O7"] if KILLS == 1 else ["O2", "O7"])
def test_char_gpt_killed_and_resumed_is_the_run_that_went_through(level: str, tmp_path: Path) -> None:
    """It is killed at random moments: between saves, and every other time while it saves."""
    steps = 12 * KILLS + 4

    def arguments(name: str) -> list[str]:
        return [
            *("--opt-level", level, "--steps", str(steps), "--width", "32", "--sample", "1"),
            *("--save-every", "3", "--eval-every", str(steps), "--eval-windows", "8"),
            *("--checkpoint", str(tmp_path / f"{name}.pt"), "--plot", str(tmp_path / f"{name}.png")),
        ]

    def run() -> Forked:
        command = [sys.executable, EXAMPLES / "char_gpt.py", *arguments("killed")]
        return Forked(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    load("char_gpt").main(arguments("whole"))
    file = tmp_path / "killed.pt"
    moments = Moments(
        level,
        saved=lambda: file.stat().st_mtime_ns if file.exists() else 0,
        is_saving=lambda: any(tmp_path.glob("killed.pt.*.tmp")),
        steps=steps,
    )
    for _ in range(KILLS):
        killed = run()
        try:
            assert moments.wait(killed), "it ended before it was killed"
        finally:
            killed.kill()
            killed.wait()
        moments.note_kill()
        assert torch.load(file, weights_only=True)["step"] < steps, "it ended before it was killed"
    assert run().wait() == 0
    moments.tell()
    whole, resumed = weights(tmp_path / "whole.pt"), weights(tmp_path / "killed.pt")
    assert list(whole) == list(resumed)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def command(*arguments: Any, steps: int) -> list[str]:
    return [
        *(str(EXAMPLES / "char_gpt.py"), "--eval-every", "40", "--eval-windows", "8"),
        *("--sample", "1", "--width", "32", "--save-every", "3", "--steps", str(steps)),
        *map(str, arguments),
    ]


def run_ranks(processes: int, *arguments: Any, steps: int = 12) -> str:
    """Run char_gpt.py on some processes without a launcher, and return what they print."""
    with socket.socket() as free, tempfile.TemporaryFile("r+") as printed:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        words = [sys.executable, *command(*arguments, steps=steps)]
        ranks = []
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            env = {**os.environ, **place, **own}
            ranks.append(Forked(words, env=env, stdout=printed, stderr=printed))
        statuses = [each.wait() for each in ranks]
        printed.seek(0)
        said = printed.read()
    assert statuses == [0] * processes, said
    return said


def torchrun(
    processes: int, *arguments: Any, steps: int = 12, restarts: int = 0
) -> subprocess.Popen[str]:
    """Start char_gpt.py on some processes; what it prints is one stream."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--monitor-interval", "0.1", "--nproc-per-node", str(processes)]
    launcher += ["--max-restarts", str(restarts)]
    return subprocess.Popen(
        [*launcher, *command(*arguments, steps=steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=240 * KILLS)
    assert process.returncode == 0, printed
    return printed


def weights_of_all(folder: Path) -> dict[str, torch.Tensor]:
    plain = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, plain)
    return torch.load(plain, weights_only=True)["model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "level"), [("fsdp2", "O2")] if KILLS == 1 else [("tp", "O5"), ("fsdp2", "O2")]
)
def test_char_gpt_goes_on_after_a_rank_was_killed(kind: str, level: str, tmp_path: Path) -> None:
    """Torchrun starts all ranks again, and the run ends with the weights of one that went through.

    A random rank is killed, at random moments: between saves, and every other time while they save.
    """
    steps = 12 * KILLS + 4
    arguments = ["--parallel", kind, "--opt-level", level, "--plot", tmp_path / "plot.png"]
    run_ranks(2, *arguments, "--checkpoint", tmp_path / "whole", steps=steps)
    folder = tmp_path / "killed"
    killed = torchrun(2, *arguments, "--checkpoint", folder, steps=steps, restarts=KILLS)
    ended = ThreadPoolExecutor().submit(wait_for, killed)  # which reads on, so that no pipe is full

    def files(pattern: str) -> list[Path]:
        return [file for file in folder.glob(pattern) if file.exists()]

    moments = Moments(
        kind,
        saved=lambda: max((file.stat().st_mtime_ns for file in files("step-*/.metadata")), default=0),
        is_saving=lambda: len(files("step-*")) > len(files("step-*/.metadata")),
        steps=steps,
    )
    for _ in range(KILLS):
        assert moments.wait(killed), ended.result()
        children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
        os.kill(int(moments.chance.choice(children[-2:])), signal.SIGKILL)
        wait_until(
            lambda old=children: not any(Path("/proc", pid).exists() for pid in old[-2:]), killed
        )
        moments.note_kill()
    printed = ended.result()
    assert printed.count("Going on from step") == KILLS
    moments.tell()
    whole, resumed = [weights_of_all(tmp_path / name / f"step-{steps}") for name in ("whole", "killed")]
    assert list(whole) == list(resumed)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_char_gpt_resumes_in_another_wrapper(tmp_path: Path) -> None:
    """What two ranks began, others go on with in another wrapper, and come to what one process does."""
    ways = (("ddp", 2, 6), ("fsdp2+tp", 4, 12) if KILLS > 1 else ("fsdp2", 2, 12))
    common = ["--opt-level", "O5", "--checkpoint", tmp_path / "run", "--plot", tmp_path / "plot.png"]
    for kind, processes, steps in ways:
        printed = run_ranks(processes, "--parallel", kind, *common, steps=steps)
        assert ("Going on from step" in printed) == (steps > 6)
    arguments = ["--opt-level", "O5", "--width", "32", "--steps", "12", "--eval-every", "40"]
    arguments += ["--eval-windows", "8", "--sample", "1", "--plot", str(tmp_path / "one.png")]
    load("char_gpt").main([*arguments, "--checkpoint", str(tmp_path / "one.pt")])
    alone, together = weights(tmp_path / "one.pt"), weights_of_all(tmp_path / "run" / "step-12")
    one, other = [torch.cat([each[name].flatten() for name in alone]) for each in (alone, together)]
    assert (one - other).norm() < 0.02 * one.norm()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2"] if KILLS == 1 else ["O1", "O2", "O5"])
def test_dcgan_resumes_exactly(level: str, tmp_path: Path) -> None:
    def run(name: str, steps: int) -> Any:
        files = ["--checkpoint", str(tmp_path / f"{name}.pt"), "--plot", str(tmp_path / f"{name}.png")]
        return load("dcgan").main(["--opt-level", level, "--steps", str(steps), *files])

    whole = run("whole", 6)
    run("halves", 3)
    halves = run("halves", 6)
    assert halves.discriminator_losses == whole.discriminator_losses
    assert halves.generator_losses == whole.generator_losses
    assert halves.scales == whole.scales
    assert (tmp_path / "whole.png").stat().st_size > 10_000
