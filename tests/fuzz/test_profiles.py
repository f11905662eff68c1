"""Profiles and overrides with anything wrong: a right result, or one AmpError and nothing changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import amp
from amp.errors import AmpError, AmpWarning
from amp.profiles.loss_scaling import SCALING_KEYS
from amp.profiles.properties import OVERRIDE_KEYS, PROPERTY_KEYS
from tests.fuzz.inputs import JUNK, bits, fuzz, model

_SCALARS = r"""
true | no | ~ | 1 | -1 | 1e39 | 1e400 | -.inf | .nan | .inf | 0x1f | !!int abc | !!timestamp x
!!map x | !!seq x | !!str [a] | !!python/object/apply:os.system [ls] | !foo bar | !!binary aGk=
!!float nan | &a 1 | *a | [] | {} | [1, 2] | {a: 1} | float16 | O2 | O1 | mine.yaml | /dev/zero
/ | . | "\0" | "\ud800" | "\UFFFFFFFF" | dynamic | kahan | delayed
{init: 8, growth_interval: .inf} | {init: .nan} | {hysteresis: 1e400} | {min: 5, max: 1}
{a: 1, a: 2} | {recipe: delayed, margin: .inf} | {skip: [[]]} | [{op: this.s, cast: none}]
[{op: 1, cast: 2}] | [{op: builtins.*, cast: float32}] | [{op: torch.mm, cast: float32}]
? [a] : b | ' | " | { | [ | %YAML 9 | @ | ---
"""
SCALARS = st.sampled_from(_SCALARS.strip().replace("\n", " | ").split(" | ")) | st.sampled_from(
    ["9" * 400, "9" * 5000, "\u2028", "\x00", "a/" * 3000]
)
LINES = st.one_of(
    st.builds(
        "{}: {}\n".format, st.sampled_from([*PROPERTY_KEYS, "extends", "brief", "<<", "x"]), SCALARS
    ),
    st.builds("loss_scale:\n  {}: {}\n".format, st.sampled_from([*SCALING_KEYS, "<<", "x"]), SCALARS),
)
FILES = st.lists(LINES, min_size=1, max_size=4).map("".join).map(str.encode) | st.binary(max_size=60)


def check_file(path: Path, content: bytes) -> None:
    """A file is a profile, or an error with file and line; it imports nothing."""
    path.write_bytes(content)
    try:
        amp.load_profile(path).describe()
    except AmpError as error:
        assert f"{path}:" in str(error)
        assert len(str(error)) < 1500
    assert "this" not in sys.modules


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_other_encodings_are_said(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes("loss_scale: 1 # é\n".encode(encoding))
    with pytest.raises(AmpError, match="mine.yaml:1: not a text file in UTF-8"):
        amp.load_profile(path)
    path.write_bytes("loss_scale: 4 # é\n".encode("utf-8-sig"))
    assert amp.load_profile(path).loss_scale == 4.0


@pytest.mark.parametrize("examples", [250, pytest.param(700, marks=pytest.mark.slow)])
def test_files(tmp_path: Path, examples: int) -> None:
    @fuzz(examples)
    @given(FILES)
    def check(content: bytes) -> None:
        check_file(tmp_path / "mine.yaml", content)

    check()


NAMES = [*OVERRIDE_KEYS, "num_losses", "verbosity", "opt_level", "enabled", "process_group"]
VALUES = JUNK | st.sampled_from(
    [
        *("O0", "O1", "O2", "O5", "O7", "dynamic", "128", torch.float16, np.ones(2), np.float32(3)),
        *({"init": 10**400}, {"growth_interval": torch.ones(2)}, {"hysteresis": float("inf")}),
        *([{"op": "builtins.*", "cast": "float32"}], [{"op": "this.s", "cast": "float32"}]),
    ]
)


@pytest.mark.parametrize("examples", [150, pytest.param(400, marks=pytest.mark.slow)])
def test_options_of_initialize(examples: int) -> None:
    @fuzz(examples)
    @given(st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=3))
    def check(options: dict[str, Any]) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        before = bits([dict(net.named_parameters()), optimizer.state_dict()])
        arguments: Any = {"verbosity": 0, **options}
        try:
            amp.initialize(net, optimizer, **arguments)
        except (AmpError, AmpWarning) as error:  # warnings are errors here
            assert len(str(error)) < 1500
            assert bits([dict(net.named_parameters()), optimizer.state_dict()]) == before
            assert "this" not in sys.modules
            return
        amp.get_session().close()

    check()
