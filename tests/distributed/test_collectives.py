from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from accel_trainer.core.errors import CheckpointError, ConfigError, DataError, DivergedError, OutputError, UserError
from accel_trainer.distributed.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    broadcast_bytes,
    broadcast_files,
    gather_rows,
    main_process_first,
    reduce_mean,
    reduce_sum,
    run_on_main,
    scatter,
)

from .. import processes
from ..joined import joined_processes

ERRORS = (UserError, ConfigError, DataError, OutputError, CheckpointError, DivergedError)


def contents(num_bytes: int) -> bytes:
    generator = torch.Generator().manual_seed(num_bytes)
    return torch.randint(256, (num_bytes,), generator=generator, dtype=torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_tensors_are_reduced_gathered_and_sent(tmp_path: Path, num_processes: int) -> None:
    processes.run(check_tensors, tmp_path / "order", num_processes=num_processes, folder=tmp_path)
    assert (tmp_path / "order").read_text().startswith("0")


def check_tensors(order: Path) -> None:
    with joined_processes() as accelerator:
        rank, size = accelerator.process_index, accelerator.num_processes
        everyone = torch.stack([torch.tensor([[one + 1.0, -one], [2.0, 0.5]]) for one in range(size)])
        mine = everyone[rank].clone()
        # Also of a tensor that is not contiguous; and what goes in stays as it is.
        for tensors, tensor in ((everyone, mine), (everyone.transpose(1, 2), mine.T)):
            assert torch.equal(reduce_sum(tensor, accelerator), tensors.sum(0))
            assert torch.equal(reduce_mean(tensor, accelerator), tensors.sum(0) / size)
            assert torch.equal(all_reduce(tensor, accelerator, op="min"), tensors.amin(0))
            assert torch.equal(all_reduce(tensor, accelerator, op="max"), tensors.amax(0))
            assert torch.equal(all_reduce(tensor, accelerator, op="product"), tensors.prod(0))
            assert torch.equal(all_gather(tensor, accelerator), tensors)
            assert torch.equal(broadcast(tensor, accelerator, from_process=size - 1), tensors[-1])
            rows = tensors if rank == size - 1 else torch.zeros_like(tensors)
            assert torch.equal(scatter(rows, accelerator, from_process=size - 1), tensor)
            assert torch.equal(mine, everyone[rank])
        assert reduce_mean(torch.tensor(rank), accelerator) == (size - 1) / 2
        assert all_gather(torch.tensor(rank), accelerator).tolist() == list(range(size))
        mine = torch.full((rank, 2), float(rank))  # as many rows as the process has its number, so that 0 has none
        assert gather_rows(mine, accelerator)[:, 0].tolist() == [one for one in range(size) for _ in range(one)]
        barrier(accelerator)
        with main_process_first(accelerator), order.open("a") as file:
            file.write(f"{rank}\n")


def test_a_barrier_waits_for_all_processes(tmp_path: Path) -> None:
    processes.run(meet, tmp_path / "waiting", tmp_path / "arrived", num_processes=2, folder=tmp_path)


def meet(waiting: Path, arrived: Path) -> None:
    with joined_processes() as accelerator:
        if accelerator.is_main_process:
            while not waiting.exists():
                time.sleep(0.01)
            arrived.touch()
        else:
            waiting.touch()
        barrier(accelerator)
        assert arrived.exists()


@pytest.mark.parametrize("num_processes", [1, 3])
def test_every_process_gets_what_the_main_one_has(tmp_path: Path, num_processes: int) -> None:
    processes.run(check_broadcasts, num_processes=num_processes, folder=tmp_path)


def check_broadcasts() -> None:
    with joined_processes() as accelerator:
        for num_bytes in (0, 1, 7, 4096, 5_000_001, 0):
            mine = contents(num_bytes) if accelerator.is_main_process else None
            assert broadcast_bytes(mine, accelerator) == contents(num_bytes)
        files = {"a/ü.json": b"{}", "empty": b"", "large": contents(1_000_003)}
        assert broadcast_files(files if accelerator.is_main_process else None, accelerator) == files
        assert list(broadcast_files(files if accelerator.is_main_process else None, accelerator)) == list(files)
        assert broadcast_files({} if accelerator.is_main_process else None, accelerator) == {}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_action_runs_only_on_the_main_process_and_its_result_is_everywhere(
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
def test_a_users_error_of_the_main_process_is_raised_on_every_process(tmp_path: Path, num_processes: int) -> None:
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
        assert run_on_main(lambda: "and they go on together", accelerator) == "and they go on together"


def test_an_unexpected_error_ends_the_main_process_and_is_shown(tmp_path: Path) -> None:
    job = processes.start(crash, num_processes=2, folder=tmp_path)
    assert 0 not in job.wait()
    assert "ZeroDivisionError" in job.output(0)


def crash() -> None:
    with joined_processes() as accelerator:
        run_on_main(lambda: 1 // 0, accelerator)
