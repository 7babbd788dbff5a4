"""`accel-trainer probe` logs in a past run what it forgot to log."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from accel_trainer.cli.main import main
from accel_trainer.cli.runs.run_reader import read_run
from accel_trainer.core.history import read_history
from accel_trainer.lab.replay.replay import Replay
from accel_trainer.lab.replay.store import Store
from accel_trainer.lab.replay.stretches import num_steps, plan
from tests import processes
from tests.cli.conftest import run_command
from tests.programs.faults import act_in_call

from .conftest import NAMED, Train

pytestmark = pytest.mark.usefixtures("python_is_forked")

PROBE = Path(__file__).with_name("logs_gradients.py")
PLACE = ("event", "optimizer_step", "epoch")


def logged_in(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what `PROBE` has logged in rows."""
    groups = (*PLACE, "grad/", "log/")
    found = [{name: row[name] for name in row if name.startswith(groups)} for row in rows]
    return [row for row in found if len(row) > len(PLACE)]


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "probe.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def live(train_poisoned: Train) -> Path:
    """The same run as `poisoned`, with the callbacks."""
    return train_poisoned(callbacks=PROBE)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_probe_logs_the_bits_that_it_would_have_logged_live(
    poisoned: Path, live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(poisoned)
    argv = ["probe", poisoned, PROBE, "--to", tmp_path / "probed", "--jobs", "2"]
    code, out, err = run_command(capsys, argv)
    assert code == 0, err
    assert err == NAMED
    assert "segments, 2 at a time" in out
    assert "DIFFERENT" not in out
    rows = rows_in(tmp_path / "probed")
    assert rows == logged_in(read_history(live)) != []
    assert rows[-1]["event"] == "log"
    (drawn,) = [row["log/drawn"]["picture"] for row in rows if row["optimizer_step"] == 16]
    assert (tmp_path / "probed" / drawn).read_bytes() == (live / drawn).read_bytes()
    assert content(poisoned) == before


def test_a_stretch_begins_at_a_checkpoint_before_the_row_that_it_follows(poisoned: Path) -> None:
    replay = Replay.of(read_run(poisoned), None)
    for every in (4, 5):  # the checkpoints of steps 15, 20, 30 ... are of rows, or are not
        stretches = plan(replay, every=every)
        assert [each.until for each in stretches] == [*(each.after for each in stretches[1:]), 60]
        for each in stretches[1:]:
            assert each.after % every == 0
            assert each.until - num_steps(replay, each) < each.after


def test_a_killed_probe_continues_with_what_is_stored(
    poisoned: Path, live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["probe", poisoned, PROBE, "--to", tmp_path / "probed", "--jobs", 1, "--until", 28]
    processes.run(
        probe_until_the_second_stretch_is_stored,
        sys.executable,
        [*map(str, argv), "--keep", str(tmp_path / "left")],
        folder=tmp_path / "logs",
        has_workers=True,
        codes=[-signal.SIGKILL],
    )
    assert not (tmp_path / "probed" / "probe.jsonl").exists()
    code, out, _ = run_command(capsys, argv)
    assert code == 0
    assert " stored" in out
    rows = [row for row in read_history(live) if row["optimizer_step"] <= 28]
    assert rows_in(tmp_path / "probed") == logged_in(rows)


def probe_until_the_second_stretch_is_stored(python: str, argv: list[str]) -> None:
    sys.executable = python  # with which it starts the recipe
    act_in_call(Store, "put", 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    main(argv)


def test_a_probe_with_a_state_is_trained_in_one_stretch(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = tmp_path / "counts.py"
    probe.write_text(
        "from accel_trainer import Callback\n"
        "class Counts(Callback):\n"
        "    num_steps = 0\n"
        "    def on_step_end(self, trainer, report):\n"
        "        self.num_steps += 1\n"
        "        trainer.log('num_steps', self.num_steps)\n"
        "    def state_dict(self):\n"
        "        return {'num_steps': self.num_steps}\n"
        "    def load_state_dict(self, state):\n"
        "        self.num_steps = state['num_steps']\n"
    )
    argv = ["probe", poisoned, probe, "--to", tmp_path / "probed", "--every", "1", "--json"]
    code, out, err = run_command(capsys, [*argv, "--from", "39", "--until", "41"])
    assert (code, err) == (0, NAMED)
    report = json.loads(out)
    assert (report["num_steps"], report["names"]) == (41, ["log/num_steps"])
    assert [row["log/num_steps"] for row in rows_in(tmp_path / "probed")] == [39, 40, 41]


def test_a_probe_of_a_run_that_is_not_repeated_names_the_row(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = tmp_path / "forged"
    shutil.copytree(poisoned, forged)
    path = forged / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["optimizer_step"] == 24:
            row["digest/model"] = "0" * 16
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["probe", forged, PROBE, "--from", "22", "--until", "24"]
    code, out, _ = run_command(capsys, argv)
    assert code == 1
    assert "DIFFERENT from the run: step 24, digest/model 0000000000000000 -> " in out
    assert rows_in(tmp_path / "forged-logs_gradients")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "give the path of a Python file"),
        ("x = 1", "defines no subclass of Callback"),
        ("import nothing_of_this_name", "cannot be run (ModuleNotFoundError"),
    ],
)
def test_a_file_that_is_no_probe_is_one_line_before_any_work(
    poisoned: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str | None,
    words: str,
) -> None:
    probe = tmp_path / "probe.py"
    if source is not None:
        probe.write_text(source)
    code, out, err = run_command(capsys, ["probe", poisoned, probe, "--to", tmp_path / "probed"])
    assert (code, out, len(err.splitlines())) == (64, "", 1)
    assert words in err
    assert not (tmp_path / "probed").exists()


def test_rows_go_into_no_folder_of_something_else(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = Path(__file__).with_name("logs_gradients.py")
    (tmp_path / "probe.jsonl").write_text("mine")
    code, _, err = run_command(capsys, ["probe", poisoned, probe, "--to", tmp_path])
    assert (code, "holds other files" in err) == (73, True)
    assert [path.name for path in tmp_path.iterdir()] == ["probe.jsonl"]
