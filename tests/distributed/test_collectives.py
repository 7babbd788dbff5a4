from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import torch

from accel_trainer.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    OutOfMemoryError,
    OutputError,
    Preempted,
    UserError,
)
from accel_trainer.distributed.collectives import (
    broadcast_bytes,
    broadcast_files,
    broadcast_from_main,
    gather_rows,
    join_peers,
    run_on_main,
    show_life,
    wait_for_main,
)

from .. import processes
from ..joined import joined_processes

ERRORS = (
    UserError,
    ConfigError,
    OutOfMemoryError,
    DataError,
    OutputError,
    CheckpointError,
    DivergedError,
    Preempted,
)


class OwnError(DataError):
    """Of a recipe: no other module knows it."""


def contents(num_bytes: int) -> bytes:
    generator = torch.Generator().manual_seed(num_bytes)
    return (
        torch.randint(256, (num_bytes,), generator=generator, dtype=torch.uint8).numpy().tobytes()
    )


@pytest.mark.parametrize("num_processes", [1, 3])
def test_rows_are_gathered_and_tensors_of_any_kind_are_copied_from_main(
    tmp_path: Path, num_processes: int
) -> None:
    processes.run(check_tensors, num_processes=num_processes, folder=tmp_path)


def check_tensors() -> None:
    with joined_processes() as accelerator:
        rank = accelerator.process_index
        size = accelerator.num_processes
        mine = torch.full((rank, 2), float(rank))  # process 0 has no row, process 1 has one, ...
        assert gather_rows(mine, accelerator)[:, 0].tolist() == [
            one for one in range(size) for _ in range(one)
        ]

        of_main = kinds_of_tensors(0)
        copies = kinds_of_tensors(rank)
        broadcast_from_main(copies, accelerator)
        for copied, expected in zip(copies, of_main, strict=True):
            assert copied.dtype == expected.dtype
            assert torch.equal(copied, expected)


def kinds_of_tensors(rank: int) -> list[torch.Tensor]:
    numbers = torch.arange(6).view(2, 3) + rank
    weight = torch.nn.Parameter(numbers.float())
    return [
        numbers.bool(),
        numbers.to(torch.int16),
        numbers.double().T,
        numbers.to(torch.bfloat16),
        weight,
    ]


@pytest.mark.parametrize("num_processes", [1, 3])
def test_every_process_gets_what_the_main_one_has(tmp_path: Path, num_processes: int) -> None:
    """Fault (Resume): processes see different checkpoints -> impossible: the main process reads one
    checkpoint and sends it to all others; for a sharded one, it sends the hashes of the parts
    that each process then reads
    """
    processes.run(check_broadcasts, num_processes=num_processes, folder=tmp_path)


def check_broadcasts() -> None:
    with joined_processes() as accelerator:
        for num_bytes in (0, 1, 7, 4096, 5_000_001, 0):
            mine = contents(num_bytes) if accelerator.is_main_process else b"other"
            assert broadcast_bytes(mine, accelerator) == contents(num_bytes)
        files = {"a/ü.json": b"{}", "empty": b"", "large": contents(1_000_003)}
        found = broadcast_files(lambda: files, accelerator)
        assert (found, [*found]) == (files, [*files])
        assert broadcast_files(dict, accelerator) == {}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_run_on_main_gives_the_result_of_the_main_process_to_all(
    tmp_path: Path, num_processes: int
) -> None:
    processes.run(act, tmp_path / "acted", num_processes=num_processes, folder=tmp_path)
    assert (tmp_path / "acted").read_text() == "once"


def act(path: Path) -> None:
    with joined_processes() as accelerator:

        def action() -> list[object]:
            with path.open("a") as file:
                file.write("once")
            return ["result", 1]

        assert run_on_main(action, accelerator) == ["result", 1]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_users_error_of_the_main_process_is_raised_on_every_process(
    tmp_path: Path, num_processes: int
) -> None:
    processes.run(fail, num_processes=num_processes, folder=tmp_path)


def fail() -> None:
    with joined_processes() as accelerator:
        for kind in ERRORS:

            def action(kind: type[UserError] = kind) -> bytes:
                raise kind("CODE", "what happened, ü and the fix")

            with pytest.raises(kind) as caught:
                run_on_main(action, accelerator)
            assert type(caught.value) is kind
            assert str(caught.value) == "error[CODE]: what happened, ü and the fix"
            assert caught.value.exit_code == kind.exit_code
        assert (
            run_on_main(lambda: "and they go on together", accelerator) == "and they go on together"
        )


def test_an_error_of_the_main_process_is_raised_there_if_no_other_is_left(tmp_path: Path) -> None:
    processes.run(leave_or_stop, folder=tmp_path, codes=[0, 7])


def leave_or_stop() -> None:
    with joined_processes() as accelerator:
        if accelerator.process_index == 1:
            os._exit(7)

        def action() -> None:
            time.sleep(1)  # until the other has left
            raise Preempted("PREEMPTED", "SIGTERM before training began")

        with pytest.raises(Preempted, match="SIGTERM before training began"):
            run_on_main(action, accelerator)
        os._exit(0)  # the processes can no longer part


def test_an_error_of_a_recipe_is_raised_elsewhere_as_the_class_it_extends(tmp_path: Path) -> None:
    processes.run(fail_in_own_way, num_processes=2, folder=tmp_path)


def fail_in_own_way() -> None:
    with joined_processes() as accelerator:

        def action() -> None:
            raise OwnError("CODE", "what happened and the fix")

        with pytest.raises(DataError, match="what happened and the fix"):
            run_on_main(action, accelerator)


def test_a_failed_disk_of_one_process_is_raised_on_all_with_its_number(tmp_path: Path) -> None:
    processes.run(disagree, num_processes=2, folder=tmp_path)


def disagree() -> None:
    with joined_processes() as accelerator:
        peers = join_peers(accelerator, timeout_s=60)
        assert peers.agree(lambda: peers.process_index) == [0, 1]

        def write() -> None:
            if peers.process_index == 1:
                raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(OSError, match="process 1: No space left on device") as caught:
            peers.agree(write)
        assert caught.value.errno == errno.ENOSPC


def test_an_unexpected_error_ends_the_main_process_and_is_shown(tmp_path: Path) -> None:
    job = processes.start(crash, num_processes=2, folder=tmp_path)
    assert 0 not in job.wait()
    assert "ZeroDivisionError" in job.output(0)


def crash() -> None:
    with joined_processes() as accelerator:
        run_on_main(lambda: 1 // 0, accelerator)


@pytest.mark.parametrize("shows_life", [True, False])
def test_processes_wait_for_the_main_process_while_it_shows_life(
    tmp_path: Path, shows_life: bool
) -> None:
    """Fault (Signals and processes): the main process is still busy at the end of a run, for
    example with an upload in `on_fit_end` or in the code after `fit` -> the others wait as long
    as it shows signs of life
    """
    processes.run(wait_at_the_end, tmp_path, shows_life, num_processes=2, folder=tmp_path / "logs")
    assert (tmp_path / "waited").read_text() == str(shows_life)


def wait_at_the_end(folder: Path, shows_life: bool) -> None:
    done, waited = folder / "done", folder / "waited"
    with joined_processes() as accelerator:
        if accelerator.is_main_process:
            for _ in range(25 * shows_life):  # as in a long upload
                time.sleep(0.1)
                show_life(accelerator)
            while not (shows_life or waited.exists()):
                time.sleep(0.01)
            done.touch()
        wait_for_main(accelerator, timeout_s=2 if shows_life else 0.5)
        if not accelerator.is_main_process:
            waited.write_text(str(done.exists()))
