"""Readers of one's own: as exact as a dataset, and wrong ones are refused."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_trainer import (
    Batch,
    BatchConfig,
    CheckpointError,
    ConfigError,
    EvalLoader,
    Reader,
    StreamReader,
    TrainLoader,
    build_train_loader,
)
from accel_trainer.data.order import choose_order
from tests import processes
from tests.docs.pages import ROOT, blocks_of
from tests.evaluated import (
    NUM_CLASSES,
    Interruption,
    differing,
    make_config,
    run_interrupted,
    run_whole,
    train,
)

CPU = torch.device("cpu")
SIZES = {"train": 38, "val": 13}


# --- the one of docs/datasets.md ---


def rows_class() -> Any:
    """The class `Rows` as the page has it."""
    page = ROOT / "docs" / "datasets.md"
    (block,) = (each for each in blocks_of(page) if "class Rows(Reader)" in each.text)
    names: dict[str, Any] = {}
    exec(block.text, names)
    return names["Rows"]


def write_rows(path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    with closing(sqlite3.connect(path)) as database, database:
        for table, size in SIZES.items():
            database.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, x, y, label)")
            points = torch.randn(size, 2, generator=generator).tolist()
            rows = [(index, x, y, index % NUM_CLASSES) for index, (x, y) in enumerate(points)]
            database.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", reversed(rows))
    return path


def parts_of(path: Path) -> dict[str, Any]:
    """Return the arguments of `build_trainer`; each process opens the database."""
    rows = rows_class()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, NUM_CLASSES))
    return {"model": model, "train_set": rows(path, "train"), "sets": rows(path, "val")}


def test_rows_of_a_database_train_to_the_same_bits_however_they_run(tmp_path: Path) -> None:
    parts = partial(parts_of, write_rows(tmp_path / "points.db"))

    def config_of(name: str) -> Any:
        return make_config(tmp_path / name, batch={"reduce": "exact"}, num_epochs=2)

    whole = run_whole(config_of("whole"), parts)
    # Step 4 is saved, and an epoch has 5 steps.
    for num_processes in (1, 2):
        killed = config_of(f"killed-{num_processes}")
        left = run_interrupted(
            killed, Interruption("KILL", "step", 6), parts, num_processes=num_processes
        )
        same = {name for name in whole if name.endswith("model.safetensors")}
        assert same
        assert not same & {*differing(left, whole)}
        assert num_processes > 1 or differing(left, whole) == []


def test_changed_rows_are_noticed_at_a_resume(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "points.db")
    config = make_config(tmp_path / "run", num_epochs=2, max_steps=5)
    train(config, **parts_of(path))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE train SET x = 7 WHERE id = 0")
    with pytest.raises(CheckpointError, match="DATA_CHANGED"):
        train(make_config(tmp_path / "run", num_epochs=2), **parts_of(path))


# --- what a reader is asked, and what it must answer ---


class Numbers(Reader):
    """Samples that are their ids; it notes what it was asked."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.asked: list[tuple[list[int], int | None]] = []

    def __len__(self) -> int:
        return self.size

    def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        for batch_ids in ids:
            self.asked.append((batch_ids.tolist(), epoch))
            numbers = batch_ids % self.size
            yield Batch(numbers[:, None].float(), numbers, batch_ids)

    def finish(self, batch: Batch, epoch: int | None) -> Batch:
        return Batch(batch.inputs + 100 * (epoch or 0), batch.targets, batch.sample_ids)


def loader_of(reader: Reader, **batch: Any) -> TrainLoader[Any]:
    settings = BatchConfig(**{"per_device_batch_size": 2, "global_batch_size": 4, **batch})
    return build_train_loader(reader, settings, seed=0, accelerator=Accelerator(cpu=True))


def test_a_reader_is_asked_for_the_ids_of_an_epoch_and_of_an_evaluation() -> None:
    reader = Numbers()
    loader = loader_of(reader)
    steps = [list(step.micro_batches) for step in loader.step_batches(3, 1)]
    order = choose_order(BatchConfig(), 10).draw(seed=0, epoch=3)
    assert reader.asked == [(order[4 + 2 * part : 6 + 2 * part].tolist(), 3) for part in range(3)]
    for batch in (batch for step in steps for batch in step):
        assert batch.inputs.flatten().tolist() == [300 + number for number in batch.targets]
    reader.asked.clear()
    batches = list(EvalLoader(reader, batch_size=4, device=CPU).batches())
    assert reader.asked == [([0, 1, 2, 3], None), ([4, 5, 6, 7], None), ([8, 9], None)]
    assert torch.cat([batch.inputs for batch in batches]).flatten().tolist() == [*range(10)]


def test_a_sample_that_an_epoch_has_again_is_asked_for_by_a_new_id() -> None:
    reader = Numbers(4)
    reader.labels = torch.tensor([0, 0, 0, 1])  # type: ignore[attr-defined]
    steps = list(loader_of(reader, order="balanced").step_batches(0, 0))
    asked = [number for ids, _ in reader.asked for number in ids]
    assert sorted(number for number in asked if number % 4 == 3) == [3, 7]
    found = [batch.sample_ids for step in steps for batch in step.micro_batches]
    assert torch.cat(found).tolist() == [number % 4 for number in asked]


def test_a_reader_reads_no_further_than_it_is_asked() -> None:
    reader = Numbers(10**6)
    steps = loader_of(reader).step_batches(0, 0)
    for number in range(1, 4):
        next(steps)
        assert len(reader.asked) == 2 * (number - 1)


class Wrong(Numbers):
    """The second batch is missing or too short."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        for number, batch in enumerate(super().read(ids, epoch)):
            if number and self.fault == "missing":
                return
            yield batch.map(lambda tensor: tensor[:1]) if number else batch


@pytest.mark.parametrize(
    ("fault", "said"),
    [("missing", "Wrong read 0 samples for 2 ids"), ("short", "read 1 sample for 2 ids")],
)
def test_a_batch_that_was_asked_for_and_is_not_there_is_an_error(fault: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"DATASET.*{said}: yield a batch"):
        [list(step.micro_batches) for step in loader_of(Wrong(fault)).step_batches(0, 0)]


def test_the_hash_of_a_reader_follows_its_samples() -> None:
    class Larger(Numbers):
        def finish(self, batch: Batch, epoch: int | None) -> Batch:
            raise AssertionError("it is hashed as it is read")

        def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
            for batch in super().read(ids, epoch):
                yield Batch(batch.inputs + 1, batch.targets, batch.sample_ids)

    assert Numbers().fingerprint() == Numbers().fingerprint()
    assert len({Numbers().fingerprint(), Numbers(11).fingerprint(), Larger().fingerprint()}) == 3


def test_a_reader_without_read_cannot_be_made() -> None:
    class Nothing(Reader):
        def __len__(self) -> int:
            return 3

    with pytest.raises(TypeError, match="read"):
        Nothing()  # type: ignore[abstract]


# --- a billion samples ---

BILLION = 10**9


class Zeros:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(2), index % 2


def endless(epoch: int) -> Iterator[tuple[Tensor, int]]:
    while True:
        yield torch.zeros(2), epoch


def read_first_step(source: Any, order: str) -> None:
    batch = BatchConfig(per_device_batch_size=16, order=order)  # type: ignore[arg-type]
    loader = build_train_loader(source, batch, seed=0, accelerator=Accelerator(cpu=True))
    assert len(next(loader.step_batches(0, 0)).micro_batches[0]) == 16


def read_first_steps() -> None:
    """Exit with an error if a first step of a billion samples needs more than 10 MiB."""
    for make, order in ((Zeros, "stored"), (partial(StreamReader, endless), "uniform")):
        read_first_step(make(100), order)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        read_first_step(make(BILLION), order)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 10 * 1024, f"{grown} KiB"


def test_the_first_step_of_a_billion_samples_needs_no_index(tmp_path: Path) -> None:
    processes.run(read_first_steps, folder=tmp_path)
