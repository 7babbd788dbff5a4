from __future__ import annotations

import gc
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from accel_trainer.core.batch_plan import BatchPlan
from accel_trainer.core.errors import ConfigError, DataError
from accel_trainer.core.types import Batch
from accel_trainer.data.loader import EvalLoader, TrainLoader
from accel_trainer.data.workers import SampleReader

from ..variants import slow

CPU = torch.device("cpu")
NUM_SAMPLES, GLOBAL_BATCH = 31, 12


class Noisy:
    """Samples that draw from all three global generators, as transforms do: the draws, and the
    index."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draws = [index, random.random(), float(np.random.rand()), torch.rand(()).item()]
        return torch.tensor(draws, dtype=torch.float64), index


class WithWorker(Noisy):
    """Samples whose input is the process that made them."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([os.getpid()]), index


def make_loader(
    *,
    num_processes: int = 1,
    micro: int = 64,
    num_workers: int = 0,
    process_index: int = 0,
    seed: int = 0,
) -> TrainLoader[SampleReader]:
    plan = BatchPlan(
        num_samples=NUM_SAMPLES,
        global_batch_size=GLOBAL_BATCH,
        per_device_batch_size=micro,
        num_processes=num_processes,
    )
    reader = SampleReader(Noisy(), CPU, seed=seed, num_workers=num_workers)
    return TrainLoader(reader, plan, seed=seed, device=CPU, process_index=process_index)


def batches_of(
    loader: TrainLoader[Any], *, epoch: int = 0, first_step: int = 0
) -> list[list[Batch]]:
    return [list(step_batch.micro_batches) for step_batch in loader.step_batches(epoch, first_step)]


def steps_of(epoch: int = 0, **options: int) -> list[Tensor]:
    """The rows of each step over all processes, in order of process and micro-batch."""
    ranks = [
        batches_of(make_loader(process_index=rank, **options), epoch=epoch)
        for rank in range(options.get("num_processes", 1))
    ]
    return [
        torch.cat([batch.inputs for rank in ranks for batch in rank[step]])
        for step in range(len(ranks[0]))
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_has_the_same_rows_and_augmentation_for_every_split(num_workers: int) -> None:
    whole = steps_of()
    assert [len(step) for step in whole] == [12, 12, 7]
    for num_processes, micro in (
        [(3, 64)] if num_workers else itertools.product((1, 2, 3, 4), (1, 3, 64))
    ):
        split = steps_of(num_processes=num_processes, micro=micro, num_workers=num_workers)
        for mine, theirs in zip(split, whole, strict=True):
            assert torch.equal(mine, theirs), (num_processes, micro)


def test_an_epoch_is_every_sample_once_in_an_order_of_its_own() -> None:
    orders = [torch.cat(steps_of(epoch))[:, 0].long() for epoch in (0, 1)]
    assert all(torch.equal(order.sort().values, torch.arange(NUM_SAMPLES)) for order in orders)
    assert not torch.equal(*orders)


def test_augmentation_differs_between_samples_epochs_and_seeds() -> None:
    def draws(epoch: int, seed: int) -> dict[float, list[float]]:
        rows = torch.cat(
            [
                batch.inputs
                for step_batch in batches_of(make_loader(seed=seed), epoch=epoch)
                for batch in step_batch
            ]
        )
        return {row[0]: row[1:] for row in rows.tolist()}

    origins = [draws(0, 0), draws(1, 0), draws(0, 1)]
    numbers = [number for origin in origins for row in origin.values() for number in row]
    assert len(set(numbers)) == 3 * 3 * NUM_SAMPLES  # none is drawn twice
    assert draws(0, 0) == origins[0]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("first_step", [0, 1, 2, 3])
def test_seeking_gives_the_rest_of_the_epoch_bit_by_bit(num_workers: int, first_step: int) -> None:
    loader = make_loader(micro=5, num_workers=num_workers)
    rest = batches_of(loader, epoch=2, first_step=first_step)
    expected = batches_of(make_loader(micro=5), epoch=2)[first_step:]
    assert len(rest) == len(expected)
    for mine, theirs in zip(itertools.chain(*rest), itertools.chain(*expected), strict=True):
        assert torch.equal(mine.inputs, theirs.inputs)
        assert torch.equal(mine.targets, theirs.targets)
        assert torch.equal(mine.sample_ids, theirs.sample_ids)


def test_a_dataset_that_no_worker_can_be_given_is_one_line() -> None:
    dataset = Noisy()
    dataset.change = lambda value: value  # type: ignore[attr-defined]
    reader = SampleReader(dataset, CPU, num_workers=1)
    reader._loader.multiprocessing_context = "spawn"  # as on macOS and Windows
    with pytest.raises(ConfigError, match="data workers cannot be given the dataset .*pickle.*"):
        list(reader.read([torch.tensor([0])], None))


def test_inputs_targets_and_ids_of_a_batch_belong_together() -> None:
    for batch in itertools.chain(*batches_of(make_loader(micro=5, num_workers=2))):
        assert batch.inputs[:, 0].tolist() == batch.targets.tolist() == batch.sample_ids.tolist()
        assert batch.sample_ids.dtype == torch.int64


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_part_without_samples_is_a_batch_of_no_rows(num_workers: int) -> None:
    plan = BatchPlan(num_samples=13, global_batch_size=12, per_device_batch_size=4, num_processes=3)
    reader = SampleReader(Noisy(13), CPU, num_workers=num_workers)
    loader = TrainLoader(reader, plan, seed=0, device=CPU, process_index=2)
    full, short = loader.step_batches(0, 0)
    assert [len(batch) for batch in full.micro_batches] == [4]
    (empty,) = short.micro_batches
    assert (len(empty), short.num_samples) == (0, 1)
    assert (empty.inputs.shape, empty.inputs.dtype) == ((0, 4), torch.float64)
    assert (empty.targets.shape, empty.targets.dtype) == ((0,), torch.int64)
    assert empty.sample_ids.dtype == torch.int64
    (alone,) = loader.step_batches(0, 1)  # nothing but the empty share is left
    assert [len(batch) for batch in alone.micro_batches] == [0]


def test_step_batches_count_the_samples_of_all_processes() -> None:
    loader = make_loader(num_processes=4, process_index=3)
    assert [step_batch.num_samples for step_batch in loader.step_batches(0, 0)] == [12, 12, 7]


def test_a_plan_for_another_number_of_samples_is_refused() -> None:
    plan = BatchPlan(num_samples=32, global_batch_size=12, per_device_batch_size=4)
    with pytest.raises(ValueError, match="the plan is for 32 samples, an epoch has 31"):
        TrainLoader(SampleReader(Noisy(), CPU), plan, seed=0, device=CPU)


def test_a_signal_to_the_process_group_does_not_end_the_workers() -> None:
    plan = BatchPlan(num_samples=NUM_SAMPLES, global_batch_size=2, per_device_batch_size=2)
    reader = SampleReader(WithWorker(), CPU, num_workers=2)
    step_batches = TrainLoader(reader, plan, seed=0, device=CPU).step_batches(0, 0)
    workers = {next(step_batches).micro_batches[0].inputs[0].item() for _ in range(2)}
    assert len(workers) == 2
    for worker, number in itertools.product(workers, ("TERM", "INT", "HUP")):
        # From another process: its parent may end a worker by SIGTERM.
        code = f"import os, signal; os.kill({int(worker)}, signal.SIG{number})"
        subprocess.run([sys.executable, "-S", "-c", code], check=True)
    assert len(list(step_batches)) == plan.steps_per_epoch - 2


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_samples", [1, 2, 31])
def test_evaluation_gives_every_sample_once_in_order_over_all_processes(
    num_samples: int, num_workers: int
) -> None:
    for num_processes, batch_size in (
        [(3, 4)] if num_workers else itertools.product((1, 2, 3), (1, 4, 64))
    ):
        loaders = [
            EvalLoader(
                SampleReader(Noisy(num_samples), CPU, num_workers=num_workers),
                batch_size=batch_size,
                device=CPU,
                num_processes=num_processes,
                process_index=rank,
            )
            for rank in range(num_processes)
        ]
        assert all(loader.num_samples == num_samples for loader in loaders)
        shares = [list(loader.batches()) for loader in loaders]
        ids = [batch.sample_ids for batches in shares for batch in batches]
        assert torch.cat(ids).tolist() == list(range(num_samples))
        assert all(len(batch_ids) <= batch_size for batch_ids in ids)
        assert len({len(batches) for batches in shares}) == 1, "as many forwards on every process"


def test_evaluation_sees_the_same_samples_every_time() -> None:
    loader = EvalLoader(SampleReader(Noisy(), CPU), batch_size=4, device=CPU)
    first, second = ([batch.inputs for batch in loader.batches()] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


class Faulty(Noisy):
    """Samples of which one does what it should not."""

    def __init__(self, fault: Callable[[], object]) -> None:
        super().__init__()
        self._fault = fault

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return torch.zeros(2), self._fault() if index == 17 else index % 3


def raise_an_error() -> None:
    raise KeyError("a\nfault")


def read_faulty(fault: Callable[[], object], *, num_workers: int = 0, **options: Any) -> str:
    plan = BatchPlan(num_samples=NUM_SAMPLES, global_batch_size=4, per_device_batch_size=4)
    reader = SampleReader(Faulty(fault), CPU, num_workers=num_workers, **options)
    with pytest.raises(DataError) as caught:
        list(TrainLoader(reader, plan, seed=0, device=CPU).step_batches(0, 0))
    said = str(caught.value)
    assert "\n" not in said
    if num_workers:
        del caught, reader
        gc.collect()  # the workers end with the error that holds them
    return said


FAULTS = [
    (
        raise_an_error,
        r"DATA_SAMPLE\]: sample 17 cannot be read "
        r"\(KeyError: 'a\\nfault', at .* in raise_an_error\): fix it",
    ),
    (lambda: 3, r"DATA_SAMPLE\]: sample 17 has label 3, the classes are 0 to 2: fix it"),
    (lambda: -100, r"DATA_SAMPLE\]: sample 17 has label -100, the classes are 0 to 2: fix it"),
    (
        lambda: torch.zeros(3),
        r"DATA_SAMPLE\]: samples such as 17 .*\[3\].* and \d+ .*\(.*Error: ",
    ),
]


@pytest.mark.parametrize(
    ("fault", "message", "num_workers"),
    [
        *((*fault, 0) for fault in FAULTS),
        (*FAULTS[0], 2),
        *slow((*fault, 2) for fault in FAULTS[1:]),
    ],
)
def test_a_sample_that_cannot_be_used_is_named(
    fault: Callable[[], object], message: str, num_workers: int
) -> None:
    assert re.search(message, read_faulty(fault, num_workers=num_workers, num_classes=3))


def test_the_same_holds_for_an_evaluation() -> None:
    reader = SampleReader(Faulty(lambda: 9), CPU, num_classes=3)
    loader = EvalLoader(reader, batch_size=4, device=CPU)
    with pytest.raises(DataError, match="sample 17 has label 9"):
        list(loader.batches())


# torch then opens temporary files, to see whether file descriptors are left. Its handler of the
# worker's death can raise in the middle of that, or while a tensor is received, and leave one open.
a_death_may_leave_a_file_open = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <(_io.FileIO|socket):pytest.PytestUnraisableExceptionWarning"
)


@a_death_may_leave_a_file_open
@pytest.mark.parametrize(
    ("fault", "timeout_s", "fact"),
    [
        (lambda: os._exit(3), 600, r"DataLoader worker .* exited unexpectedly with exit code 3"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            600,
            r"DataLoader worker .* is killed by signal: Killed",
        ),
        (lambda: time.sleep(600), 4, r"DataLoader timed out after 4 seconds"),
    ],
)
def test_a_data_worker_that_dies_or_hangs_ends_with_the_sample_it_was_at(
    fault: Callable[[], object], timeout_s: float, fact: str
) -> None:
    """Fault (Signals and processes): a data worker dies or hangs -> exit 65 as soon as data is next
    requested, with the samples that the worker started last; a hang ends after `timeout_s`
    """
    said = read_faulty(fault, num_workers=1, timeout_s=timeout_s)
    assert re.search(rf"DATA_WORKER\]: {fact} \(the last samples started: 17\)", said), said


@a_death_may_leave_a_file_open
def test_a_data_worker_that_dies_is_reported_when_data_is_next_requested() -> None:
    plan = BatchPlan(num_samples=NUM_SAMPLES, global_batch_size=4, per_device_batch_size=4)
    reader = SampleReader(Faulty(lambda: os.kill(os.getpid(), signal.SIGKILL)), CPU, num_workers=1)
    step_batches = TrainLoader(reader, plan, seed=0, device=CPU).step_batches(0, 0)
    before = psutil.Process().children()
    for _ in range(6):  # the worker is two batches ahead: at the last, which has sample 17
        list(next(step_batches).micro_batches)
    (worker,) = set(psutil.Process().children()) - set(before)
    while worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)  # what computes meanwhile gets no error
    with pytest.raises(DataError, match=r"is killed by signal: Killed \(the last samples started"):
        [list(step_batch.micro_batches) for step_batch in step_batches]
    gc.collect()
