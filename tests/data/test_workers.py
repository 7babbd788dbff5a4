"""What data workers do as processes is in `test_dataloader.py`."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from accel_trainer.core.errors import ConfigError, DataError
from accel_trainer.core.types import Batch
from accel_trainer.data.loader import DatasetOptions
from accel_trainer.data.workers import (
    SampleError,
    SampleReader,
    inputs_and_targets,
    make_batch,
)

from .. import processes

CPU = torch.device("cpu")


class Drawing:
    """Samples that draw from all three global generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]), index


def read(reader: SampleReader, *ids: list[int], epoch: int | None = None) -> list[Batch]:
    return list(reader.read([torch.tensor(batch, dtype=torch.int64) for batch in ids], epoch))


def test_a_sample_draws_by_its_id_and_the_key_wherever_it_stands() -> None:
    reader = SampleReader(Drawing(), CPU)
    (together,) = read(reader, [3, 7])
    later, alone = read(reader, [1, 2], [7])
    assert torch.equal(together.inputs[1], alone.inputs[0])
    assert not torch.equal(together.inputs[0], together.inputs[1])
    assert not torch.equal(read(reader, [7], epoch=1)[0].inputs, alone.inputs)
    assert later.sample_ids.tolist() == [1, 2]


def test_reading_samples_leaves_the_ids_and_targets_together() -> None:
    (batch,) = read(SampleReader(Drawing(), CPU), [9, 0, 4])
    assert batch.targets.tolist() == batch.sample_ids.tolist() == [9, 0, 4]


def test_a_batch_without_samples_has_the_shape_of_one_with_them() -> None:
    full, empty = read(SampleReader(Drawing(), CPU), [1, 2], [])
    assert empty.inputs.shape == (0, *full.inputs.shape[1:])
    assert (len(empty), empty.targets.dtype) == (0, full.targets.dtype)


@pytest.mark.parametrize(
    ("collated", "expected"),
    [
        (([1, 2], [0, 1]), ([1, 2], [0, 1])),
        ({"ids": [1, 2], "labels": [0, 1]}, ({"ids": [1, 2]}, [0, 1])),
        ({"ids": [1, 2]}, ({"ids": [1, 2]}, None)),
        (["a", "b", "c"], (("a", "b"), "c")),
        (("a",), ("a", None)),
        ("a", ("a", None)),
    ],
)
def test_a_collated_batch_has_its_targets_last_or_as_labels(collated: Any, expected: Any) -> None:
    assert inputs_and_targets(collated) == expected


@pytest.mark.parametrize("num_samples", [2, 3])
def test_a_batch_of_bare_tensors_is_input_whatever_its_size(num_samples: int) -> None:
    inputs, targets = inputs_and_targets(torch.zeros(num_samples, 4))
    assert inputs.shape == (num_samples, 4)
    assert targets is None


def test_a_label_outside_the_classes_names_its_sample() -> None:
    reader = SampleReader(Drawing(), CPU, num_classes=5)
    read(reader, [4])
    with pytest.raises(DataError, match="sample 7 has label 7, the classes are 0 to 4"):
        read(reader, [1, 7])


def test_classes_of_targets_that_are_no_labels_are_one_line() -> None:
    rows = TensorDataset(torch.zeros(8, 2), torch.zeros(8, 3))
    reader = SampleReader(rows, CPU, num_classes=3)
    with pytest.raises(DataError, match=r"num_classes= is for labels \[2\], the targets are \[2"):
        read(reader, [1, 7])


@pytest.mark.parametrize("number", ["3", 0, [3]])
def test_a_number_of_classes_that_is_none_is_one_line(number: Any) -> None:
    with pytest.raises(ConfigError, match=r"DatasetOptions.num_classes is .*: set it to 1 or more"):
        DatasetOptions(num_classes=number)


class Unsendable(Drawing):
    """Samples that are made with what no pickle can hold."""

    def __init__(self, file: IO[bytes]) -> None:
        self._lock = threading.Lock()
        self._change = lambda index: index + 1
        self._file = file

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with self._lock:
            return torch.tensor([self._change(index), len(self._file.read(0))]), index


@pytest.fixture
def choose_start_method() -> Iterator[Callable[[str | None], None]]:
    """Return a function that chooses how this process starts others; None: nothing is chosen."""
    before = multiprocessing.get_start_method(allow_none=True)
    yield partial(multiprocessing.set_start_method, force=True)
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems spawn their workers")
def test_what_cannot_be_pickled_has_workers_unless_they_are_spawned(
    choose_start_method: Callable[[str | None], None],
) -> None:
    with Path(__file__).open("rb") as file:
        for method in (None, "forkserver", "fork"):  # Python 3.14's default is the second
            choose_start_method(method)
            (batch,) = read(SampleReader(Unsendable(file), CPU, num_workers=1), [3, 7])
            assert batch.inputs.tolist() == [[4, 0], [8, 0]], method
        choose_start_method("spawn")
        with pytest.raises(ConfigError, match=r"DATASET.*pickle.*--num-workers 0"):
            read(SampleReader(Unsendable(file), CPU, num_workers=1), [3, 7])


def test_samples_are_the_same_however_workers_start(
    choose_start_method: Callable[[str | None], None],
) -> None:
    (alone,) = read(SampleReader(Drawing(), CPU), [3, 7])
    for method in multiprocessing.get_all_start_methods():
        choose_start_method(method)
        reader = SampleReader(Drawing(), CPU, num_workers=1)
        (chosen,) = read(reader, [3, 7])
        reader._loader.multiprocessing_context = method
        (forced,) = read(reader, [3, 7])
        assert torch.equal(chosen.inputs, alone.inputs), method
        assert torch.equal(forced.inputs, alone.inputs), method


def die_before_the_workers_begin(folder: Path) -> None:
    """Hold the pipe open in this process and its data workers, and leave them behind."""
    os.open(folder / "pipe", os.O_WRONLY)
    main_pid = os.getpid()

    def begin_late(number: int) -> None:
        """Take the place of what a worker of torch calls first."""
        signal.alarm(120)
        os.close(os.open(folder / f"worker-{os.getpid()}", os.O_CREAT))
        while os.getppid() == main_pid:
            time.sleep(0.01)

    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads = begin_late
    reader = SampleReader(range(8), torch.device("cpu"), num_workers=2)
    threading.Thread(target=list, args=(reader.read([torch.arange(4)], None),)).start()
    while len([*folder.glob("worker-*")]) < 2:
        time.sleep(0.01)
    os.kill(main_pid, signal.SIGKILL)


@pytest.mark.signal
def test_a_worker_ends_if_its_main_process_died_before_it_began(tmp_path: Path) -> None:
    # Until then it holds the connections to the other processes, which wait for their timeout.
    os.mkfifo(tmp_path / "pipe")
    job = processes.start(
        die_before_the_workers_begin,
        tmp_path,
        folder=tmp_path / "logs",
        has_workers=True,
    )
    with (tmp_path / "pipe").open("rb") as pipe:
        assert job.wait() == [-signal.SIGKILL], job.output()
        assert select.select([pipe], [], [], 60)[0], "the workers hold it open"


ODD_SAMPLES: list[tuple[Any, Any]] = [
    ((torch.zeros(6), 1), (torch.zeros(5), 1)),
    ((torch.zeros(3, 8, 8), 1), (torch.zeros(1, 8, 8), 1)),
    ((torch.zeros(3), torch.zeros(4)), (torch.zeros(3), torch.zeros(2))),
    (({"a": torch.zeros(2), "b": [torch.zeros(1)]}, 0), ({"a": torch.zeros(2), "b": []}, 0)),
    (({"a": torch.zeros(2)}, 0), ({"other": torch.zeros(2)}, 0)),
    ((np.zeros((2, 2)), 0), (np.zeros((2, 3)), 0)),
    ((torch.zeros(2), 0), (torch.zeros(2), None)),
    ((torch.zeros(2), 0), (torch.zeros(2),)),
]


@pytest.mark.parametrize("place", [0, 13, 39])
def test_of_a_batch_that_cannot_be_collated_the_odd_sample_is_named(place: int) -> None:
    """Fault (Data, config and users' code): samples cannot be joined into a batch -> an error with
    the sample that does not fit, a typical one, and the shapes or types of both
    """
    for usual, odd in ODD_SAMPLES:
        samples = [(100 + at, odd if at == place else usual) for at in range(40)]
        with pytest.raises(SampleError, match="cannot be collated") as error:
            make_batch(samples, collate=default_collate)
        named = re.findall(r"\b1\d\d\b", str(error.value).partition("cannot be collated")[0])
        assert named == [str(100 + place), "100" if place else "101"], (usual, odd)
