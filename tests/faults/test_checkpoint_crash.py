"""A SIGKILL before, half-way through or after any disk change loses no acknowledged checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.faults.disks import CountingDisk, KillingDisk, When, installed
from tests.faults.tiny_run import BEST_STEP, continue_run, leftovers, name_at, valid_steps
from tests.variants import slow

pytestmark = [pytest.mark.crash, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]

LAST_STEP = 4


def run_until_killed(folder: Path, disk: KillingDisk) -> list[str]:
    """Run in a child and return what it acknowledged before it died."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with installed(disk):
                continue_run(
                    folder,
                    last_step=LAST_STEP,
                    acknowledge=lambda name: os.write(writer, name.encode() + b"\n"),
                )
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        acknowledged = pipe.read().split()
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return acknowledged


def assert_nothing_is_lost(folder: Path, acknowledged: list[str]) -> None:
    steps = valid_steps(folder)
    assert len(steps) >= min(len(acknowledged), 2)
    for step, name in zip(steps[::-1], acknowledged[:-3:-1], strict=False):
        assert name_at(step) >= name
    if len(acknowledged) >= BEST_STEP:
        assert BEST_STEP in steps
    continue_run(folder, last_step=LAST_STEP + 1)
    assert valid_steps(folder) == [BEST_STEP, LAST_STEP, LAST_STEP + 1]
    assert not leftovers(folder)
    rows = [b"%015d\n" % step for step in range(1, LAST_STEP + 2)]
    assert (folder / "metrics.jsonl").read_bytes() == b"".join(rows)


def links_refused(*_: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def count_changes(folder: Path) -> int:
    disk = CountingDisk()
    with installed(disk):
        continue_run(folder, last_step=LAST_STEP)
    return len(disk.operations)


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch")
@pytest.mark.parametrize(
    ("when", "every", "has_links"),
    [
        ("half", 9, True),
        *slow([("before", 1, True), ("half", 1, True), ("after", 1, True), ("half", 1, False)]),
    ],
)
def test_a_kill_at_any_change_loses_nothing(
    scratch: Path, when: When, every: int, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault (Crash during a save): crash while an old checkpoint is deleted -> the checkpoint is
    renamed first, so it is either complete or removed as a leftover at the next start
    """
    if not has_links:
        monkeypatch.setattr(os, "link", links_refused)
    (scratch / "whole").mkdir()
    for at in range(0, count_changes(scratch / "whole"), every):
        folder = scratch / str(at)
        folder.mkdir()
        assert_nothing_is_lost(folder, run_until_killed(folder, KillingDisk(at, when)))
        shutil.rmtree(folder)
