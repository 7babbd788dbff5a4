"""What the machine has, as a process may use it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_trainer.distributed import machine


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("50000 100000\n", 1), ("250000 100000\n", 2), ("max 100000\n", 6), (None, 6), ("rubbish", 6)],
)
def test_a_quota_counts_as_cores_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, cores: int
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(6), raising=False)
    monkeypatch.setattr(machine, "_CPU_QUOTA", tmp_path / "cpu.max")
    assert machine.available_cpus() == cores


def test_without_affinity_and_cgroups_the_cores_of_the_machine_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr(machine, "_CPU_QUOTA", Path("/nowhere"))
    assert machine.available_cpus() == os.cpu_count()
