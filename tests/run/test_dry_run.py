"""`--dry-run`: everything once, and nothing left of it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import Callback, RecipeConfig, RunResult, main
from accel_trainer.run.dry_run import dry_run
from recipes import cifar
from tests import processes
from tests.workload import make_config, train


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, and nothing else is."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_a_dry_run_of_a_recipe_says_in_its_last_line_that_all_went_well_and_leaves_nothing(
    tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scratch.parent)
    before = {path.name for path in scratch.parent.iterdir()}
    flags = ["--dataset", "digits", "--model", "resnet8", "--augment.crop-padding", "1", "--dry-run"]
    with pytest.raises(SystemExit) as ended:
        main(cifar.train, cifar.Config, description="", argv=[*flags, "--cache-dir", str(tmp_path / "cache")])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "done: max_steps reached at step 1  eval loss" in shown
    assert "continuing after step 1" in shown
    assert shown.splitlines()[-1].startswith("dry run ok: trained, evaluated, saved, loaded and resumed in ")
    assert list(scratch.glob("dry-run*")) == []
    assert {path.name for path in scratch.parent.iterdir()} - before == {"cache"}


def dry(folder: Path) -> None:
    dry_run(train, make_config(folder))


def test_two_processes_meet_again_for_the_second_half(tmp_path: Path, scratch: Path) -> None:
    job = processes.run(dry, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")
    assert [job.output(rank).count("dry run ok") for rank in (0, 1)] == [1, 0]
    assert list(scratch.glob("dry-run*")) == []
    assert not (tmp_path / "run").exists()


class Forgetful(Callback):
    """Saves what it then cannot take back."""

    is_essential = True

    def state_dict(self) -> dict[str, Any]:
        return {"notes": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no such notes")


def test_what_can_be_saved_but_not_loaded_fails_the_dry_run(
    tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train_forgetfully(config: RecipeConfig) -> RunResult:
        return train(config, callbacks=(Forgetful(),))

    config = make_config(tmp_path / "run")
    assert train_forgetfully(replace(config, trainer=replace(config.trainer, max_steps=1))).state == "done"
    with pytest.raises(RuntimeError, match="no such notes"):
        dry_run(train_forgetfully, config)
    assert "dry run ok" not in capsys.readouterr().out
    assert list(scratch.glob("dry-run*")) == []
