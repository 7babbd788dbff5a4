"""Processes that really differ are in `tests/faults/test_run_disk.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from accelerate import Accelerator

from accel_trainer.checks import agreement
from accel_trainer.checks.agreement import check_same_everywhere, describe_identity
from accel_trainer.core.errors import ConfigError


def test_a_process_alone_agrees_with_itself() -> None:
    check_same_everywhere({"code": "1", "config": "a: 1\nb: 2"}, Accelerator(cpu=True))


def test_values_that_other_processes_do_not_agree_on_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    differing = {"1": {}, "2": {1: "3", 2: "3"}, "a: 1\nb: 2": {2: "b: 7, not b: 2"}}
    monkeypatch.setattr(agreement, "differing_lines", lambda value, accelerator: differing[value])
    with pytest.raises(ConfigError) as caught:
        check_same_everywhere(
            {"torch": "1", "code": "2", "config": "a: 1\nb: 2"}, Accelerator(cpu=True)
        )
    said = (
        "not the same as on process 0: code on 1, 2; config on 2 (b: 7, not b: 2). Install the same"
    )
    assert said in str(caught.value)


def test_processes_must_agree_on_the_recipe_and_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "recipe.py")])
    (tmp_path / "recipe.py").write_text("lr = 0.1")
    first = describe_identity("seed: 0")
    assert describe_identity("seed: 0") == first
    (tmp_path / "recipe.py").write_text("lr = 0.2")
    second = describe_identity("seed: 1")
    assert [name for name in first if first[name] != second[name]] == ["code", "config"]
