"""The link between two machines is cut: a short cut costs only time, a longer one ends both.

No bit of the result changes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import processes, workload
from tests.training.test_exactness import final_files

from .machines import Launch, Machines, in_namespaces

PHASES = ("step", "evaluation", "save")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    try:
        with in_namespaces(tmp_path) as found:
            yield found
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    """What the run leaves that nothing disturbs."""
    processes.run(train, tmp_path / "whole", num_processes=2, folder=tmp_path / "logs")
    return final_files(tmp_path / "whole")


def train(folder: Path) -> None:
    workload.train(workload.make_config(folder), dtype=torch.float64)


def start_and_cut(machines: Machines, phase: str, *, timeout_s: float) -> list[Launch]:
    """Start a run, and cut the link while both processes are in `phase`."""
    options = ["--pause", phase, "--timeout-s", str(timeout_s)]
    launches = [machines.start(machine, "accelerate", *options) for machine in (0, 1)]
    while not all((machines.folder / f"paused-{rank}").exists() for rank in (0, 1)):
        assert all(launch.process.poll() is None for launch in launches), (
            launches[0].output + launches[1].output
        )
        time.sleep(0.05)
    machines.cut_link()
    (machines.folder / "continue").touch()
    return launches


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_link_that_is_back_before_the_timeout_costs_nothing_but_time(
    machines: Machines, whole: dict[str, bytes], phase: str
) -> None:
    """Fault (Signals and processes): the link between two machines is cut -> if it is back before
    `--runtime.timeout-s`, training continues. If not, both sides end with a line that says so,
    and the same commands resume the run with the same bits
    """
    launches = start_and_cut(machines, phase, timeout_s=60)
    time.sleep(5)
    machines.join_link()
    assert [launch.wait() for launch in launches] == [0, 0], launches[0].output + launches[1].output
    assert final_files(machines.disk(0)) == whole


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_link_that_is_cut_is_named_and_the_run_resumes_exactly(
    machines: Machines, whole: dict[str, bytes], phase: str
) -> None:
    launches = start_and_cut(machines, phase, timeout_s=8)
    assert [launch.wait() for launch in launches] == [1, 1], "accelerate's code for any failure"
    for rank, launch in enumerate(launches):
        line = rf"error\[PROCESS\]: rank {rank}, step \d, \w+: no answer from another machine: .*"
        assert re.search(line, launch.output), launch.output
        assert "Traceback" not in launch.output.partition("error[PROCESS]")[0]
    machines.join_link()
    again = [machines.start(machine, "accelerate") for machine in (0, 1)]
    assert [launch.wait() for launch in again] == [0, 0], again[0].output + again[1].output
    assert re.search("continuing after step [123]", again[0].output)
    assert final_files(machines.disk(0)) == whole
