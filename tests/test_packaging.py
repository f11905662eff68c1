"""The wheel holds every package of the checkout, and the files that their code reads."""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
CODE_AND_CACHES = (".py", ".pyc")


def folders() -> dict[str, Path]:
    """Return the folders that are packages in a checkout, by dotted name."""
    tops = {"amp": ROOT / "amp", "amp.kernels": ROOT / "kernels", "amp.configs": ROOT / "configs"}
    found = dict(tops)
    for name, top in tops.items():
        for folder in top.rglob("*"):  # does not follow amp/kernels and amp/configs, which are links
            inside = folder.relative_to(top).parts
            if folder.is_dir() and not folder.is_symlink() and "__pycache__" not in inside:
                found[".".join([name, *inside])] = folder
    return found


def test_every_folder_is_packaged() -> None:
    assert sorted(SETTINGS["packages"]) == sorted(folders())


def test_files_that_are_no_code_are_packaged() -> None:
    for name, folder in folders().items():
        patterns = SETTINGS["package-data"].get(name, [])
        for file in folder.iterdir():
            if file.is_file() and file.suffix not in CODE_AND_CACHES:
                assert any(fnmatch.fnmatch(file.name, one) for one in patterns), file
