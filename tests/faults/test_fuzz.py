"""Damaged checkpoints are refused in one line, hostile ones run nothing; the campaign can tell."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from accel_trainer.checkpoint import format, loading
from accel_trainer.checkpoint.format import LoadedCheckpoint
from accel_trainer.distributed.collectives import Files
from tests.faults.fuzz import run_campaign

pytestmark = pytest.mark.fuzz


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "RETRY_DELAYS_S", ())


def test_no_blind_damage_is_accepted(effort: int) -> None:
    """Fault (Corruption): truncated file -> a warning with the file and both sizes; the previous
    checkpoint is used

    Fault (Corruption): any flipped bit -> a warning with the file and both sizes; the previous
    checkpoint is used

    Fault (Corruption): a missing or an extra file -> a missing file is damage; an extra file is
    ignored

    Fault (Corruption): manifest or COMMIT altered -> damage

    Fault (Malice): a pickle under the name of one of our files -> never unpickled; counts as damage
    """
    summary = run_campaign(100 * effort, is_blind=True)
    assert summary.num_accepted == 0
    assert not summary.problems


def test_a_forged_checkpoint_is_plain_data_or_an_error(effort: int) -> None:
    """Fault (Malice): hashes recomputed after the change -> no code runs. The file is read as plain
    data, and refused if it does not fit the run that resumes; or reading it fails, perhaps with
    a traceback

    Fault (Malice): `../../x` in a manifest with correct hashes -> a regular file is read and its
    hash is compared; nothing is written or run
    """
    summary = run_campaign(100 * effort, is_blind=False)
    assert 0 < summary.num_accepted < summary.num_cases
    assert summary.num_code_events == 0
    assert not summary.problems


def test_the_campaign_sees_damage_that_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        format,
        "read_listed_file",
        lambda path, entry: format.filesystem.read_file(path, max_bytes=2**20),
    )
    assert run_campaign(200, is_blind=True).num_accepted > 0


def test_the_campaign_sees_code_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_with_pickle(files: Files, folder: Path) -> LoadedCheckpoint:
        for data in files.values():
            if data[:1] == b"\x80":
                pickle.loads(data)
        return format.decode_files(files, folder)

    monkeypatch.setattr(loading, "decode_files", decode_with_pickle)
    assert run_campaign(200, is_blind=False).num_code_events > 0
