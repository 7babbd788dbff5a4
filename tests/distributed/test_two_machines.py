"""Two machines find each other in any starting order, and each reports what the other loses."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import processes, workload
from tests.training.test_exactness import final_files
from tests.variants import slow

from .machines import Launch, Machines, in_namespaces


@pytest.fixture
def machines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machines]:
    """Two machines in the network that the test names."""
    if request.param == "loopback":
        yield Machines(tmp_path)
        return
    try:
        with in_namespaces(tmp_path) as found:
            yield found
    except PermissionError as error:
        pytest.skip(str(error))


def undisturbed(folder: Path, num_processes: int) -> dict[str, bytes]:
    """What the run leaves on one machine."""
    processes.run(train, folder / "whole", num_processes=num_processes, folder=folder / "logs")
    return final_files(folder / "whole")


def train(folder: Path) -> None:
    workload.train(workload.make_config(folder), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "launcher", "processes_each", "order", "late_s"),
    [
        ("loopback", "accelerate", 2, (1, 0), 0),
        ("namespaces", "accelerate", 1, (0, 1), 5),
        ("namespaces", "torchrun", 2, (1, 0), 0),
    ],
    indirect=["machines"],
)
def test_two_machines_started_in_any_order_train_as_one_does(
    machines: Machines, launcher: str, processes_each: int, order: tuple[int, int], late_s: float
) -> None:
    launches: dict[int, Launch] = {}
    for machine in order:
        launches[machine] = machines.start(machine, launcher, processes_each=processes_each)
        time.sleep(late_s)
    assert [launches[machine].wait() for machine in (0, 1)] == [0, 0], (
        launches[0].output + launches[1].output
    )
    assert launches[0].output.count("done:") == 1
    assert "done:" not in launches[1].output
    assert final_files(machines.disk(0)) == undisturbed(machines.folder, 2 * processes_each)
    if machines.namespaces:
        assert [path.name for path in machines.disk(1).iterdir()] == ["logs"], (
            "process 0 alone writes"
        )


@pytest.mark.parametrize(
    ("machines", "processes_each", "lost"),
    [("loopback", 1, 1), *slow([("namespaces", 2, 0)])],
    indirect=["machines"],
)
def test_a_lost_machine_ends_the_run_on_the_other_and_is_resumed_exactly(
    request: pytest.FixtureRequest, machines: Machines, processes_each: int, lost: int
) -> None:
    def launch(machine: int, *options: str) -> Launch:
        return machines.start(machine, "accelerate", *options, processes_each=processes_each)

    first = launch(lost, "--kill", "machine-4")  # with real interpreters, as it kills its parent
    if not machines.namespaces:  # which a forked process is not in
        request.getfixturevalue("python_is_forked")
    survivor = launch(1 - lost)
    assert first.wait() == -signal.SIGKILL
    assert survivor.wait() == 1, "accelerate's code for any failure"
    said = survivor.output
    assert re.search(
        r"rank \d, step [34], .*(exited without an error report|no answer from another)", said
    ), said
    again = [launch(machine) for machine in (0, 1)]
    assert [machine.wait() for machine in again] == [0, 0], again[0].output + again[1].output
    assert re.search("continuing after step [23]", again[0].output)
    assert final_files(machines.disk(0)) == undisturbed(machines.folder, 2 * processes_each)
