"""`accel-trainer chaos` on small recipes: an honest one survives, and what hides state is named."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.cli.conftest import run_command

RECIPE = Path(__file__).with_name("recipe_with_parts.py")
FLAGS = ("--", "--batch-size", "4", "--lr", "0.05")

pytestmark = [
    pytest.mark.usefixtures("python_is_forked"),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder; nothing is left where temporary folders are made."""
    forkserver.ensure_running()  # it keeps a folder, too
    scratch = Path(tempfile.mkdtemp(prefix="chaos-test-"))  # short enough for a socket
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert list(scratch.iterdir()) == []
    shutil.rmtree(scratch)


def chaos(capsys: pytest.CaptureFixture[str], part: str, *options: object) -> tuple[int, str, str]:
    words = ["chaos", RECIPE, "--steps", 12, *options, *FLAGS, "--part", part]
    return run_command(capsys, words)


def test_a_plain_recipe_survives_kills_damage_and_a_full_disk(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = "write@4:20 damage@8:3 full@10"
    code, out, err = chaos(capsys, "plain", "--faults", plan)
    assert (code, err) == (0, ""), out
    first, again, equal, survived, _ = out.splitlines()
    assert first.startswith(f"chaos: {RECIPE}, 12 steps on 1 process; 2 runs without faults, 1 ")
    assert (again, equal) == ("equal     no fault, in a new Python", f"equal     {plan}")
    assert survived.startswith("survived 3 faults: ")
    assert list(here.iterdir()) == []


NAMED = {
    "callback": ("term@1", "the checkpoint did not bring back Shrinks.count"),
    "metric": ("term@1", "an evaluation that draws random numbers, or depends on an earlier one"),
    "worker": ("workers@1:2", "a sample that depends on its data worker"),
    "file": ("", "a run changes tally.txt in the current folder"),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", NAMED)
def test_the_command_for_the_shortest_plan_finds_the_same(
    part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shortest, cause = NAMED[part]
    code, out, _ = chaos(capsys, part, "--faults", "term@4 workers@9:2")
    assert code == 1, out
    assert cause in out
    command = shlex.split(out.splitlines()[-1].removeprefix("  again: "))
    assert command[command.index("--faults") + 1] == shortest
    code, again, _ = run_command(capsys, command[1:])
    assert code == 1
    assert cause in again


def test_state_of_a_callback_is_named_with_the_first_difference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = chaos(capsys, "callback", "--json", "--faults", "term@5")
    found = json.loads(out)
    assert (code, found["survived"], found["num_steps"]) == (1, False, 12)
    assert [run["outcome"] for run in found["runs"]] == ["equal", "DIFFERENT"]
    assert found["failure"]["faults"] == "term@1"
    difference = found["failure"]["difference"]
    assert difference["where"] == "model.linear.weight"
    assert difference["first"].startswith("eval/loss of step 6: ")
    assert NAMED["callback"][1] in difference["cause"]


@pytest.mark.slow
def test_numbers_that_vary_by_themselves_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = chaos(capsys, "time", "--faults", "term@5")
    assert (code, err) == (0, "")
    assert "note: own/address differs in each run, so it is not compared\n" in out


def test_a_recipe_that_fails_by_itself_has_its_own_code_and_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = chaos(capsys, "broken")
    assert (code, len(out.splitlines())) == (80, 1)
    assert "ValueError: no such data" in err.splitlines()[-1]


@pytest.mark.slow
def test_an_exact_recipe_is_compared_on_other_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exact = ("--reduce", "exact", "--global-batch-size", "8")
    words = ["chaos", RECIPE, "--steps", 12, "--faults", "processes@4:2 term@8", *FLAGS, *exact]
    code, out, _ = run_command(capsys, words)
    assert code == 0, out
    assert "\nequal     processes@4:2 term@8\n" in out
    code, out, _ = chaos(capsys, "plain", "--faults", "processes@4:2 term@8")
    assert code == 0, out
    assert "\nresumed   processes@4:2 term@8\n" in out


def test_an_interrupt_ends_all_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERRUPTED", str(os.getpid()))
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(cores)])  # one run at a time
    before = multiprocessing.active_children()
    code, _, err = chaos(capsys, "interrupt", "--runs", "3")
    os.sched_setaffinity(0, cores)
    assert (code, err) == (130, "accel_trainer: interrupted\n")
    assert not {*multiprocessing.active_children()} - {*before}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["none.py"], "none.py is not a file"),
        ([RECIPE, "--runs", "0"], "--runs: it is 0, and must be 1 or more"),
        ([RECIPE, "--faults", "boom"], "--faults 'boom'"),
        ([RECIPE, "--batch-size", "3"], "unrecognized arguments: --batch-size 3"),
        ([RECIPE, "--keep", Path(__file__).parent], "is not empty: give a new folder"),
    ],
)
def test_a_wrong_command_is_one_line(
    words: list[object], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_command(capsys, ["chaos", *words])
    assert (code in (64, 73), out, len(err.splitlines())) == (True, "", 1)
    assert named in err
