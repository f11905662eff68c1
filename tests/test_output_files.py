"""A command overwrites what it has written itself, and no file of another kind."""

import os
from pathlib import Path

import pytest

from amp.cli import main
from amp.terminal.output_files import check_output


@pytest.mark.parametrize(
    ("command", "name"),
    [(["lab", "--out"], "train.py"), (["compare", "train.py", "--out"], "data.csv")],
)
def test_another_kind_of_file_is_kept(
    command: list[str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('it was run')\n")
    Path(name).write_text("import torch\n")
    assert main([*command, name]) == 2
    told = capsys.readouterr()
    assert f"{name} exists already, and is not a" in told.err
    assert "it was run" not in told.out + told.err
    assert Path(name).read_text() == "import torch\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize(
    "command",
    [["lab", "--out", "x.html"], ["compare", "train.py", "--out", "x.html"]],
    ids=lambda command: command[0],
)
def test_a_pipe_is_refused_and_not_waited_for(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('it was run')\n")
    os.mkfifo(command[-1])
    assert main(command) == 2
    told = capsys.readouterr()
    assert f"{command[-1]} is not a regular file. Nothing was written" in told.err
    assert "it was run" not in told.out + told.err


def test_a_missing_folder_is_named_before_a_script_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('it was run')\n")
    assert main(["compare", "train.py", "--out", "no/where.html"]) == 2
    told = capsys.readouterr()
    assert "no/where.html cannot be written: there is no folder" in told.err
    assert "it was run" not in told.out + told.err


def test_a_lab_that_nobody_named_overwrites_no_other_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path("lab.html")
    page.write_text("<!doctype html><title>Our laboratory</title>")
    assert main(["lab"]) == 2
    assert "lab.html exists already, and is not a HTML file with" in capsys.readouterr().err
    assert "Our laboratory" in page.read_text()
    assert main(["lab", "--out", "lab.html"]) == 0  # that was asked for
    page.write_text(page.read_text().replace("</body>", "<!-- an older one --></body>"))
    assert main(["lab"]) == 0
    assert "an older one" not in page.read_text()


def test_its_own_kind_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "lab.html"
    for _ in range(2):
        assert not main(["lab", "--out", str(path)])
    check_output(path)
    path.write_bytes(b"")
    check_output(path)
