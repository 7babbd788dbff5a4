"""What the machine has, as a process may use it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_trainer.distributed import machine


def make_cgroups(folder: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]) -> None:
    """Let this process be in the cgroups of `own`, with `files` below /sys/fs/cgroup."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own)
    monkeypatch.setattr(machine, "_OWN_CGROUPS", folder / "own")
    monkeypatch.setattr(machine, "_CGROUPS", folder / "cgroup")


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),  # half a core
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 6),
        ("0::/\n", {}, 6),
        ("0::/job/task\n", {"job/cpu.max": "300000 100000\n", "job/task/cpu.max": "max 100000\n"}, 3),
        ("0::/of/the/host\n", {"cpu.max": "400000 100000\n"}, 4),  # a container that sees the path outside
        ("2:cpuset:/a\n", {"a/cpu.max": "200000 100000\n"}, 6),  # of cgroups' first version, which is not looked at
        ("0::/\n", {"cpu.max": "rubbish"}, 6),
    ],
)
def test_a_quota_counts_as_cores_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(6))
    make_cgroups(tmp_path, monkeypatch, own, files)
    assert machine.available_cpus() == cores


def test_without_affinity_and_cgroups_the_cores_of_the_machine_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", Path("/nowhere"))
    assert machine.available_cpus() == os.cpu_count()
