"""`accel-trainer compare` trains pairs that share a beginning, and says which arm is better."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_trainer.commands import read_rows, read_run
from accel_trainer.core.run_dir import is_locked
from tests.cli.conftest import run_command
from tests.faults.signals import wait_for

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "tests" / "lab" / "replay" / "poisoned.py"
FLAGS = (
    "--epochs 4 --batch-size 40 --lr 0.05 --runtime.num-threads 1 --trainer.max-grad-norm 1"
    " --trainer.monitor eval/loss --trainer.log-every-n-steps 4 --trainer.digest-every-n-steps 4"
)
PLANTED = Path(__file__).with_name("planted.py")
CODES = {"better": 0, "worse": 10, "undecided": 11}

pytestmark = pytest.mark.usefixtures("python_is_forked")

Compare = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Call the command on the recipe; its runs are in `runs`."""

    def call(b: str, *more: object, recipe: Path = RECIPE) -> tuple[int, str, str]:
        place = ["--output-dir", tmp_path / "runs"]
        return run_command(
            capsys, ["compare", recipe, *FLAGS.split(), "--b", b, *place, "--at", "50%", *more]
        )

    return call


def rows_by_run(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return what each run below a folder has logged, and when."""
    return {
        str(path.parent.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("metrics.jsonl")
    }


def test_arms_share_a_beginning_and_nothing_is_trained_twice(
    compare: Compare, tmp_path: Path
) -> None:
    code, out, err = compare("--lr 1e-6", "--pairs", 2)
    assert (code, err) == (11, "")
    assert "2 beginnings of 8 steps and 5 endings of 8 steps" in out
    assert "bit for bit" in out
    assert f"A is {RECIPE.name} --epochs 4" in out
    before = rows_by_run(tmp_path)
    assert len(before) == 6

    code, out, err = compare("--lr 1e-6", "--pairs", 2, "--json")
    found = json.loads(out)
    assert (code, err, found["verdict"], found["at_step"]) == (11, "", "undecided", 8)
    assert (found["recipe"], found["flags"]) == (str(RECIPE), FLAGS.split())
    arms = [[pair[arm] for pair in found["pairs"]] for arm in "ab"]
    assert found["means"] == [statistics.fmean(arm) for arm in arms]
    assert rows_by_run(tmp_path) == before
    for pair in found["pairs"]:
        for arm in "ab":
            run = read_run(Path(pair[f"folder_{arm}"]))
            last = run.evaluations()[-1]
            assert (pair[arm], last["optimizer_step"]) == (last["eval/loss"], 16)
            assert run.config["seed"] == pair["seed"]
        shared = [read_rows(Path(pair[f"folder_{arm}"]), until=8) for arm in "ab"]
        assert shared[0] == shared[1]
        assert pair["a"] != pair["b"]


@pytest.mark.slow
def test_more_pairs_and_another_b_train_only_what_is_missing(
    compare: Compare, tmp_path: Path, one_that_forks: Path
) -> None:
    compare("--lr 1e-6", "--pairs", 2)
    before = rows_by_run(tmp_path)
    _, out, _ = compare("--lr 1e-6", "--pairs", 3)
    assert "(4 of 6 exist already): 1 beginning of 8 steps and 2 endings" in out
    more = rows_by_run(tmp_path)
    assert more.items() >= before.items()
    assert len(more) == 9
    _, out, _ = compare("--ema 0.5", "--pairs", 3)
    assert "(3 of 6 exist already): 3 endings" in out
    assert rows_by_run(tmp_path).items() >= more.items()

    # An arm of A is what its flags alone would train, and the number of B that of its average.
    pair = json.loads(compare("--ema 0.5", "--pairs", 3, "--json")[1])["pairs"][1]
    command = [one_that_forks, RECIPE, *FLAGS.split(), "--seed", "1", "--quiet"]
    whole = tmp_path / "whole"
    subprocess.run([*map(str, command), "--output-dir", str(whole)], check=True, cwd=ROOT)
    rows = read_rows(whole)
    assert read_rows(Path(pair["folder_a"])) == rows
    assert [row["optimizer_step"] for row in rows if "digest/model" in row] == [4, 8, 12, 16]
    last = read_run(Path(pair["folder_b"])).evaluations()[-1]
    assert pair["b"] == last["eval/loss"]


def test_what_cannot_be_compared_is_refused_before_anything_is_trained(
    compare: Compare, tmp_path: Path
) -> None:
    for b, fact in {
        "--seed 3": "seed",
        "--batch.global-batch-size 8": "batch.global_batch_size",
        "--batch.drop-last": "batch.drop_last",
        "--trainer.monitor eval/accuracy": "trainer.monitor",
        "--quiet": "changes no setting",
        "--lr 0.05": "changes no setting",
        "--lrr 1": "--lrr",
    }.items():
        code, out, err = compare(b)
        assert (code, out, err.count("\n")) == (64, "", 1), b
        assert fact in err
    code, _, err = compare("--lr 1", "--resume=never")
    assert (code, "--resume never" in err, err.count("\n")) == (64, True, 1)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_initial_weights_cannot_be_shared_and_whole_runs_are_compared(
    compare: Compare, tmp_path: Path
) -> None:
    compare("--lr 1e-6", "--pairs", 2)
    weights = next((tmp_path / "runs").glob("at-*/beginning/seed-0"))
    code, out, err = compare(f"--init-from {weights}", "--pairs", 2)
    assert (code in CODES.values(), err) == (True, "")
    assert "run.init_from decides the initial weights" in out
    assert "5 whole runs of 16 steps" in out
    (folder,) = (tmp_path / "runs").glob("whole-*")
    assert len(rows_by_run(folder)) == 4


@pytest.mark.slow
def test_b_is_tried_before_anything_is_trained(compare: Compare, tmp_path: Path) -> None:
    code, out, err = compare("--optimizer.name adamw", "--pairs", 2)
    assert (code in CODES.values(), err) == (True, "")
    assert "B cannot branch off from a run of A" in out
    code, out, err = compare(
        "--trainer.monitor eval/nothing --lr 1", "--trainer.monitor", "eval/nothing"
    )
    assert (code, out) == (64, "training a few steps of A\n")
    (tmp_path / "runs").rename(tmp_path / "first")
    code, out, err = compare("--batch.leave-out nothing.txt", "--pairs", 2)
    assert (code, "nothing.txt" in err) == (64, True)
    assert "seed 0" not in out


@pytest.mark.slow
def test_a_setting_that_changes_no_weight_is_no_difference(compare: Compare) -> None:
    code, out, err = compare("--schedule.power 2", "--pairs", 2)  # not of this shape
    assert (code, err) == (11, "")
    assert "B changes nothing after step 8" in out


@pytest.mark.slow
def test_an_arm_that_diverges_loses_its_pair_and_gives_no_interval(compare: Compare) -> None:
    found = json.loads(compare("--lr 1e30", "--pairs", 2, "--json")[1])
    assert (found["verdict"], found["interval"], found["gain"]) == ("undecided", None, None)
    assert (found["wins"], found["losses"]) == (0, 2)
    assert [pair["b"] for pair in found["pairs"]] == [None, None]


@pytest.mark.slow
def test_a_recipe_that_does_not_repeat_itself_is_not_compared(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", "noise")
    code, out, err = compare("--lr 1e-6", "--pairs", 2, recipe=PLANTED)
    assert code == 73
    assert err.count("does not repeat itself with seed 0") == 1
    assert "accel-trainer why" in err
    assert "seed 0:" not in out


@pytest.mark.slow
@pytest.mark.parametrize("at", ["0", "50%"])
def test_runs_on_other_data_are_not_mixed(
    at: str, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", "old")
    code, _, err = compare("--lr 1e-6", "--at", at, "--pairs", 2, recipe=PLANTED)
    assert (code in CODES.values(), err) == (True, "")
    monkeypatch.setenv("PLANTED", "newer")
    code, out, err = compare("--lr 1e-6", "--at", at, "--pairs", 3, recipe=PLANTED)
    assert code == 73
    assert "the data has changed" in err
    assert "B is" not in out.splitlines()[-1]


PAUSES_ONCE = """
import pathlib, time
from accel_trainer import Callback

class PausesOnce(Callback):
    def on_step_end(self, trainer, report):
        folder = pathlib.Path({folder!r})
        if "arm-" in str(trainer.log.folder) and not (folder / "paused").exists():
            (folder / "paused").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_comparison_continues_and_finds_the_same(
    compare: Compare,
    tmp_path: Path,
    signal_number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callbacks = tmp_path / "pauses.py"
    callbacks.write_text(PAUSES_ONCE.format(folder=str(tmp_path)))
    monkeypatch.setenv("ACCEL_TRAINER_CALLBACKS", str(callbacks))
    program = "import sys; from accel_trainer.cli.main import main; sys.exit(main(sys.argv[1:]))"
    flags = ["--at", "50%", "--pairs", "2", "--json"]
    command = ["compare", RECIPE, *FLAGS.split(), "--b", "--lr 1e-6", *flags]
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, command), "--output-dir", str(tmp_path / "runs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    ) as process:
        wait_for(lambda: (tmp_path / "paused").exists() or process.poll() is not None)
        code, _, err = compare("--lr 1e-6", "--pairs", 3)
        assert (code, f"{tmp_path / 'runs'} is locked" in err) == (73, True)
        os.killpg(process.pid, signal_number)
        (tmp_path / "go").touch()
        out, err = process.communicate()
    if signal_number == signal.SIGINT:
        assert (process.returncode, err.splitlines()[-1]) == (130, "accel_trainer: interrupted")
        assert "the same command continues" in err
        assert out == ""
    # A recipe ends soon after the command that has started it.
    wait_for(lambda: not any(is_locked(path) for path in tmp_path.rglob("run.lock")))
    found = json.loads(compare("--lr 1e-6", "--pairs", 2, "--json")[1])
    (tmp_path / "runs").rename(tmp_path / "first")
    again = json.loads(compare("--lr 1e-6", "--pairs", 2, "--jobs", 2, "--json")[1])
    assert found == again
