"""`accel-trainer finish` makes finished models from the steps of a trunk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from accel_trainer.checkpoint.format import list_checkpoints, read_manifest
from accel_trainer.commands import Start, command_of, environment_of
from tests.cli.conftest import run_command
from tests.lab.replay.conftest import FLAGS, NAMED, RECIPE, ROOT, Train

pytestmark = pytest.mark.usefixtures("python_is_forked")

TRUNK = ("--schedule.shape", "trunk", "--schedule.warmup-epochs", "0.25", "--ema", "0.9")
# Of 60 steps, 5 of them warmup: with a checkpoint, and without one before it.
ENDINGS = [(30, 15), (7, 9)]
# Without one there, and at the end.
MORE_ENDINGS = [(52, 1), (60, 6), (5, 10), (15, 2), (20, 30), (29, 8), (31, 20), (45, 60)]

Plan = Callable[[int, int], Path]


@pytest.fixture(scope="session")
def trunk(train_poisoned: Train) -> Path:
    """The folder of a finished trunk: 3 epochs of 20 steps, checkpoints after each 15 steps."""
    return train_poisoned(*TRUNK)


@pytest.fixture
def copied(trunk: Path, tmp_path: Path) -> Path:
    """A copy of the trunk, with no endings beside it."""
    return Path(shutil.copytree(trunk, tmp_path / "trunk"))


@pytest.fixture
def plan(train_poisoned: Train) -> Plan:
    """Train a run that is planned to decay from a step on, over some steps."""

    def train(at: int, over: int) -> Path:
        length = ("--epochs", "None", "--steps", at + over, "--schedule.decay-at", at)
        return train_poisoned(*TRUNK, *length)

    return train


def hashes(run: Path) -> dict[str, str]:
    """Return what the last checkpoint has of the weights, their average and the optimizer."""
    files = read_manifest(list_checkpoints(run / "checkpoints")[-1])[1]["files"]
    kinds = ("model", "ema", "optim")
    return {name: files[name]["sha256"] for name in files if name.startswith(kinds)}


def rows_of(run: Path) -> dict[tuple[int, str], dict[str, object]]:
    """Return what is logged of the training, without speeds."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {
        (row["optimizer_step"], row["event"]): {
            name: value for name, value in row.items() if not name.startswith("perf/")
        }
        for row in rows
        if row["event"] == "train"
    }


def check_equal(
    copied: Path, plan: Plan, capsys: pytest.CaptureFixture[str], endings: Sequence[tuple[int, int]]
) -> None:
    for at, over in endings:
        code, out, err = run_command(capsys, ["finish", copied, "--at", at, "--over", over])
        assert (code, err) == (0, NAMED), (out, err)
        branch = copied.with_name(f"trunk-finish-{at}-{at + over}")
        planned = plan(at, over)
        assert hashes(branch) == hashes(planned), (at, over)
        assert len(hashes(planned)) >= 4
        mine = rows_of(branch)
        expected = rows_of(planned)
        # Where a row ends an epoch or a run, the other one may not have it.
        assert all(mine[place] == expected[place] for place in mine.keys() & expected.keys())


def test_an_ending_has_the_bits_of_a_run_that_was_planned_so(
    copied: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    check_equal(copied, plan, capsys, ENDINGS)


@pytest.mark.slow
def test_so_have_more_endings_of_the_same_trunk(
    copied: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    check_equal(copied, plan, capsys, MORE_ENDINGS)


def test_several_endings_are_a_table_and_are_trained_once(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["finish", copied, "--at", 45, 30, "--over", "20%"]
    code, out, _ = run_command(capsys, argv)
    assert code == 0
    assert "trunk-finish-45-54: training 9 steps" in out
    *_, first, second, picture = out.splitlines()
    assert picture == f"next: accel-trainer report {copied} {copied}-finish-* --open"
    assert first.split()[:4] == ["trunk-finish-30-36", "30", "36", "done"]
    assert second.split()[:4] == ["trunk-finish-45-54", "45", "54", "done"]
    before = {path: path.stat().st_mtime_ns for path in copied.parent.rglob("*")}
    code, out, _ = run_command(capsys, [*argv, "--json"])
    rows = json.loads(out)
    assert [(row["at"], row["steps"], row["metric"]) for row in rows] == [
        (30, 36, "eval_ema/accuracy"),
        (45, 54, "eval_ema/accuracy"),
    ]
    table = run_command(capsys, ["finish", copied])[1]
    assert table.splitlines()[1:] == [first, second, picture]
    assert {path: path.stat().st_mtime_ns for path in copied.parent.rglob("*")} == before


KILL_ONCE = """
import os, pathlib, signal
from accel_trainer import Callback

class KillOnce(Callback):
    def on_step_end(self, trainer, report):
        killed = pathlib.Path({marker!r})
        if report.optimizer_step == {step} and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_same_command_continues_an_ending_that_was_killed(
    copied: Path,
    plan: Plan,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callbacks = tmp_path / "kills.py"
    # After the checkpoint of step 45, or before any of the branch's own.
    for step, at, over in ((47, 41, 9), (33, 30, 8)):
        callbacks.write_text(KILL_ONCE.format(marker=str(tmp_path / f"killed-{step}"), step=step))
        monkeypatch.setenv("ACCEL_TRAINER_CALLBACKS", str(callbacks))
        argv = ["finish", copied, "--at", at, "--over", over]
        code, _, err = run_command(capsys, argv)
        assert (code, "error[FINISH]" in err) == (73, True), err
        # A trunk that goes on may lose what its branch has begun with.
        shutil.move(copied / "checkpoints", tmp_path / "gone")
        code, out, err = run_command(capsys, argv)
        shutil.move(tmp_path / "gone", copied / "checkpoints")
        branch = copied.with_name(f"trunk-finish-{at}-{at + over}")
        assert (code, f"{branch.name}: continuing\n" in out) == (0, True), out + err
        monkeypatch.delenv("ACCEL_TRAINER_CALLBACKS")
        assert hashes(branch) == hashes(plan(at, over))


@pytest.mark.slow
def test_an_ending_trains_on_as_many_processes_as_the_trunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed in its decay, and continued."""
    runs = {"trunk": (), "planned": ("--epochs", "None", "--steps", "38", "--schedule.decay-at=30")}
    for name, more in runs.items():
        flags = [*FLAGS.split(), *TRUNK, *more, "--output-dir", str(tmp_path / name)]
        variables = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        start = Start(recipe=str(RECIPE), flags=flags, num_processes=2, variables=variables)
        environment = environment_of(start, os.environ)
        subprocess.run(command_of(start, environment), env=environment, cwd=ROOT, check=True)
    callbacks = tmp_path / "kills.py"
    callbacks.write_text(KILL_ONCE.format(marker=str(tmp_path / "killed"), step=34))
    monkeypatch.setenv("ACCEL_TRAINER_CALLBACKS", str(callbacks))
    argv = ["finish", tmp_path / "trunk", "--at", 30, "--over", 8]
    assert [run_command(capsys, argv)[0] != 0 for _ in range(2)] == [True, False]
    branch = tmp_path / "trunk-finish-30-38"
    assert hashes(branch) == hashes(tmp_path / "planned")
    assert json.loads((branch / "environment.json").read_text())["hardware"]["num_processes"] == 2


@pytest.mark.parametrize(
    ("flags", "code", "texts"),
    [
        (("--at", "61"), 64, ("error[STEP]", "give a step from 1 to 60")),
        (("--at", "0"), 64, ("error[STEP]", "give a step from 1 to 60")),
        (("--at", "4"), 64, ("warms up until step 5", "give a step from 5 on")),
        (("--at", "30", "--over", "0"), 64, ("--over", "such as 10%")),
        (("--at", "30", "--over", "0%"), 64, ("--over", "such as 10%")),
        (("--at", "30", "--over", "-5"), 64, ("--over",)),
        (("--at", "30", "--over", "1epoch"), 64, ("it is 1epoch", "such as 10%")),
    ],
)
def test_what_has_no_ending_is_refused_in_one_line(
    copied: Path,
    capsys: pytest.CaptureFixture[str],
    flags: Sequence[str],
    code: int,
    texts: Sequence[str],
) -> None:
    found, _, err = run_command(capsys, ["finish", copied, *flags])
    assert (found, err.count("\n")) == (code, 1)
    assert all(text in err for text in texts), err
    assert [each.name for each in copied.parent.iterdir()] == ["trunk"]


def test_a_run_that_decays_already_is_refused(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_command(capsys, ["finish", copied, "--at", 30, "--over", 6])
    assert code == 0, err
    ending = copied.with_name("trunk-finish-30-36")
    code, _, err = run_command(capsys, ["finish", ending, "--at", 31])
    assert (code, "decays after step 30" in err) == (64, True)
    config = copied / "config.yaml"
    config.write_text(config.read_text().replace("shape: trunk", "shape: cosine"))
    code, _, err = run_command(capsys, ["finish", copied, "--at", 30])
    assert (code, "error[FINISH]" in err) == (64, True)
    assert "shape cosine" in err
    assert "--schedule.shape trunk" in err


def test_an_ending_of_a_different_trunk_of_that_name_is_refused(
    copied: Path, train_poisoned: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["finish", copied, "--at", 30, "--over", 6]
    assert run_command(capsys, argv)[0] == 0
    shutil.rmtree(copied)
    shutil.copytree(train_poisoned(*TRUNK, "--seed", 1), copied)
    code, _, err = run_command(capsys, argv)
    assert (code, "error[FINISH]" in err, "(seed)" in err) == (73, True, True)
