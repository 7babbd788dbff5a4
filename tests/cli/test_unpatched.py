"""Commands that train look at a run as callbacks may: nothing of this package is replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import run_command
from tests.variants import slow_but

ROOT = Path(__file__).parents[2]
RECIPE = Path(__file__).with_name("unpatched_recipe.py")
FLAGS = (
    "--max-steps 12 --batch-size 8 --runtime.num-threads 1 --quiet --checkpoint-every-n-steps 4"
    " --checkpoint.keep-for-replay 9 --trainer.log-every-n-steps 4"
    " --schedule.shape trunk"
)

pytestmark = pytest.mark.usefixtures("python_is_forked")

COMMANDS = {
    "why": "why A B",
    "plan": "plan RECIPE --seconds 0.1 --batch-size 8",
    "chaos": "chaos RECIPE --steps 8 --faults write@0:900 -- --batch-size 8",
    "bisect": "bisect A --where train/loss>0",
    "at": "at A --step 6 --to DIR/at",
    "finish": "finish A --at 6 --over 2",
    "replay": "replay A --step 3",
    "rerun": "rerun A --output-dir DIR/again",
    "lr-find": "lr-find RECIPE --steps 10 --png DIR/x.png --batch-size 8",
    "compare": "compare RECIPE --output-dir DIR/x --b=--ema=0.5 --at 0 --pairs 2 --steps 8"
    " --batch-size 8",
    "sweep": "sweep RECIPE --output-dir DIR/sweep --seed 0 1 --max-steps 2",
}
FAST = ("plan", "replay")
DISK = "accel_trainer.core.filesystem.disk"  # is there to be replaced, by one that fails


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, one_that_forks: Path) -> dict[str, str]:
    """The folders of two runs that differ in the learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    places = {"A": ("0.05", folder / "a"), "B": ("0.1", folder / "b")}
    environment = {**os.environ, "UNPATCHED": str(folder)}
    for rate, place in places.values():
        command = [one_that_forks, RECIPE, *FLAGS.split(), "--lr", rate, "--output-dir", place]
        subprocess.run([str(word) for word in command], cwd=ROOT, env=environment, check=True)
    return {name: str(place) for name, (_, place) in places.items()}


def replaced_in(folder: Path) -> list[list[str]]:
    """Return what each process that trained has found to be replaced."""
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


@pytest.mark.parametrize("name", slow_but(FAST, COMMANDS))
def test_a_command_replaces_nothing_in_the_process_that_trains(
    name: str,
    runs: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = tmp_path / "found"
    found.mkdir()
    monkeypatch.setenv("UNPATCHED", str(found))
    monkeypatch.chdir(ROOT)
    words = {**runs, "RECIPE": str(RECIPE)}
    argv = [words.get(word, word).replace("DIR", str(tmp_path)) for word in COMMANDS[name].split()]
    code, out, err = run_command(capsys, argv)
    assert code in (0, 1, 11), err  # 11: a comparison is undecided
    assert (every := replaced_in(found)), f"nothing was trained: {out}"
    assert {name for names in every for name in names} <= {DISK}


@pytest.mark.slow
def test_a_dry_run_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPATCHED", str(tmp_path))
    subprocess.run([sys.executable, str(RECIPE), "--dry-run"], cwd=ROOT, check=True)
    assert replaced_in(tmp_path) == [[], [], []]
