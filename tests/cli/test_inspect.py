from __future__ import annotations

from pathlib import Path

import pytest

from accel_trainer.cli.main import main
from tests.faults.tiny_run import best_at, damage, make, name_at, pieces_at, position_at

Shown = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints 1, the best, and 2."""
    checkpointer = make(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpointer.save(position_at(step), pieces_at(step), best=best_at(step))
    checkpointer.close()
    return tmp_path


def test_a_run_shows_its_checkpoints_and_what_a_resume_would_use(run: Path, capsys: Shown) -> None:
    assert main(["inspect", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = (line.split() for line in lines[2:4])
    assert (first[:2], first[3:]) == ([name_at(1), "complete"], ["best"])
    assert (second[:2], second[3:]) == ([name_at(2), "complete"], ["resumes", "here"])
    for expected in (
        f"a resume would use {name_at(2)}",
        "position: optimizer step 2, epoch 0, step in epoch 2, samples seen 16",
        "num_processes: 1",
    ):
        assert expected in lines


def test_inspect_names_a_damaged_checkpoint_and_the_older_one_is_used(
    run: Path, capsys: Shown
) -> None:
    damage(run / "checkpoints", 2)
    (run / "checkpoints" / ".tmp-step-0000000003-epoch-00000-7-1700000000000000007").mkdir()
    assert main(["inspect", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"{name_at(2)}/model.safetensors: its sha256 is not the one in the manifest" in shown
    assert (
        "not used: .tmp-step-0000000003-epoch-00000-7-1700000000000000007 (left by a killed save"
        in shown
    )
    assert f"a resume would use {name_at(1)}" in shown
    assert main(["inspect", str(run / "checkpoints" / name_at(2))]) == 74


def test_a_run_without_a_folder_of_checkpoints_is_still_a_run(
    tmp_path: Path, capsys: Shown
) -> None:
    for name in ("config.yaml", "status.json"):
        (tmp_path / name).touch()
    assert main(["inspect", str(tmp_path)]) == 74
    assert "has no checkpoints: start it again" in capsys.readouterr().err


def test_a_run_without_a_valid_checkpoint_says_so_and_exits_with_74(
    run: Path, capsys: Shown
) -> None:
    for step in (1, 2):
        damage(run / "checkpoints", step)
    assert main(["inspect", str(run)]) == 74
    assert "there is no valid checkpoint to resume from" in capsys.readouterr().out


def test_what_is_neither_a_run_nor_a_checkpoint_is_one_line(tmp_path: Path, capsys: Shown) -> None:
    assert main(["inspect", str(tmp_path)]) == 74
    assert capsys.readouterr().err.count("\n") == 1
