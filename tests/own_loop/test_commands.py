from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("program.py")

pytestmark = pytest.mark.usefixtures("python_is_forked")


def command(*words: object, home: Path, python: object = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(home)}
    line = [str(python or sys.executable), *map(str, words)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def runs(one_that_forks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one program, `a` and `b`, which differ in the learning rate."""
    folder = tmp_path_factory.mktemp("own")
    for name, rate in (("a", 0.1), ("b", 0.2)):
        words = (PROGRAM, "--out", folder / name, "--lr", rate)
        done = command(*words, home=folder, python=one_that_forks)
        assert done.returncode == 0, done.stderr
    return folder


def test_rerun_starts_the_same_program_in_a_different_folder(runs: Path) -> None:
    found = command("-m", "accel_trainer", "rerun", runs / "a", home=runs)
    assert found.returncode == 0, found.stderr
    assert "equal: the same weights after step 12" in found.stdout
    assert (runs / "a-rerun" / "result.json").is_file()


@pytest.mark.slow
def test_an_interrupted_loop_is_not_rerun_before_it_has_ended(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "a", tmp_path / "a")
    result = json.loads((runs / "a" / "result.json").read_text()) | {"state": "preempted"}
    (tmp_path / "a" / "result.json").write_text(json.dumps(result))
    found = command("-m", "accel_trainer", "rerun", tmp_path / "a", home=runs)
    assert "OWN_LOOP" in found.stderr, found.stderr
    assert [*tmp_path.iterdir()] == [tmp_path / "a"]


def test_chaos_names_the_command_for_a_loop_of_its_own(tmp_path: Path) -> None:
    found = command("-m", "accel_trainer", "chaos", PROGRAM, home=tmp_path)
    assert "OWN_LOOP" in found.stderr
    assert "--script" in found.stderr


@pytest.mark.slow
def test_a_program_that_this_user_has_not_started_is_not_run(runs: Path, tmp_path: Path) -> None:
    found = command("-m", "accel_trainer", "rerun", runs / "b", home=tmp_path)
    assert found.returncode != 0
    assert not (runs / "b-rerun").exists()


def test_the_digests_of_rows_tell_where_two_runs_go_apart(runs: Path) -> None:
    found = command("-m", "accel_trainer", "why", runs / "a", runs / "b", home=runs)
    assert "digest/model" in found.stdout
    assert "OWN_LOOP" in found.stderr, "and its steps are not trained again"


@pytest.mark.parametrize("words", [("status",), ("inspect",), ("runs",), ("doctor",)])
@pytest.mark.slow
def test_the_commands_know_a_loop_of_its_own(words: tuple[str, ...], runs: Path) -> None:
    found = command("-m", "accel_trainer", *words, runs / "a", home=runs)
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads((runs / "a" / "result.json").read_text())["optimizer_step"] == 12
