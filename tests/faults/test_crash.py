"""Kill the trainer anywhere and restart it: nothing acknowledged is lost, all bytes are equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tests.faults.crash import Tally, run_share

pytestmark = pytest.mark.crash

ROOT = Path(__file__).parents[2]


def run_campaign(scratch: Path, effort: int) -> dict[str, Tally]:
    """Return the tally by kind of kill; more than a few have a worker per core."""
    if effort == 1:
        return run_share(scratch, effort=1, worker=0, num_workers=1)
    num_workers = os.cpu_count() or 1
    command = [sys.executable, "-m", "tests.faults.crash"]
    command += ["--effort", str(effort), "--num-workers", str(num_workers)]
    workers = [
        subprocess.Popen(
            [*command, "--worker", str(index), scratch / str(index)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(num_workers)
    ]
    total: dict[str, Tally] = {}
    for worker in workers:
        output, _ = worker.communicate()
        complaints, _, tallies = output.rpartition("tally ")
        assert worker.returncode == 0, output
        print(complaints)
        for kind, values in json.loads(tallies).items():
            total.setdefault(kind, Tally()).add(Tally(**values))
    return total


def as_table(tallies: dict[str, Tally]) -> str:
    names = [field.name for field in fields(Tally)]
    total = Tally()
    for tally in tallies.values():
        total.add(tally)
    lines = [f"{'SIGKILL':33}" + "".join(f"{name.replace('_', ' '):>14}" for name in names)]
    for kind, tally in {**tallies, "all": total}.items():
        values = (getattr(tally, name) for name in names)
        lines.append(f"{kind:33}" + "".join(f"{value:>14.0f}" for value in values))
    return "\n".join(lines)


@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    sys.platform != "linux", reason="kills at a change of the disk need a forked process"
)
def test_a_run_killed_anywhere_and_started_again_ends_with_the_same_bytes(
    scratch: Path, effort: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tallies = run_campaign(scratch, effort)
    with capsys.disabled():
        print(f"\n{as_table(tallies)}")
    assert {kind: tally.num_bad for kind, tally in tallies.items()} == dict.fromkeys(tallies, 0)
    # A kill at a change of the disk that the run never came to would be no kill.
    at_a_change = tallies["at a change of the disk"]
    assert at_a_change.kills == at_a_change.runs
