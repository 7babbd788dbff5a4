"""A stream that each process has divided already is refused, at a start and at a resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_trainer import (
    BatchConfig,
    ClassificationTask,
    ConfigError,
    RecipeConfig,
    RunConfig,
    StreamReader,
    TrainerConfig,
    build_trainer,
    start_run,
)

from .. import processes

NUM = 64
SAMPLES = torch.randn(NUM, 4, generator=torch.Generator().manual_seed(0))


def place() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Skipping:
    """A stream that can begin anywhere."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def seek(self, position: int) -> None:
        self.numbers = self.numbers[position:]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((SAMPLES[number], number % 2) for number in self.numbers)


def divided(epoch: int) -> Any:
    rank, size = place()
    return Skipping([*range(NUM)][rank::size]).__iter__()


def divided_with_seek(epoch: int) -> Any:
    rank, size = place()
    return Skipping([*range(NUM)][rank::size] * 2)


def divided_in_blocks(epoch: int) -> Any:
    rank, size = place()
    return iter(Skipping([*range(rank * NUM // size, NUM)] * 2))


def divided_in_datasets(epoch: int) -> Any:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    table = Dataset.from_dict({"x": SAMPLES.tolist(), "y": [0, 1] * (NUM // 2)})
    parts = split_dataset_by_node(table.to_iterable_dataset(num_shards=4), *place())
    return ((torch.tensor(row["x"]), row["y"]) for row in parts)


def whole(epoch: int) -> Any:
    return iter(Skipping([*range(NUM)]))


def whole_with_seek(epoch: int) -> Any:
    return Skipping([*range(NUM)])


def all_alike(epoch: int) -> Any:
    return ((torch.ones(4), 1) for _ in range(NUM))


def noisy(epoch: int) -> Any:
    """Draws from the global generators, whose state depends on the process after a forward."""
    for inputs, target in whole(epoch):
        yield inputs + torch.randn(4) + float(np.random.rand()), target


def train(folder: Path, name: str, function: Callable[[int], Any], **changes: Any) -> str:
    config = RecipeConfig(
        batch=BatchConfig(global_batch_size=8, per_device_batch_size=2),
        trainer=replace(TrainerConfig(num_epochs=1), **changes),
        run=RunConfig(output_dir=folder / name, quiet=True),
    )
    kept = [(each, number % 2) for number, each in enumerate(SAMPLES + 1)]
    is_evaluated = name.startswith("evaluated")
    stream = StreamReader(function, NUM // 2)
    try:
        with start_run(config, recipe="divided") as run:
            build_trainer(
                run,
                model=torch.nn.Linear(4, 2),
                task=ClassificationTask(),
                train_set=kept if is_evaluated else stream,
                eval_sets=stream if is_evaluated else kept,
            ).fit()
    except ConfigError as error:
        return str(error)
    return ""


RESUMED = (divided, divided_with_seek, whole_with_seek, noisy)


def try_each(folder: Path, functions: Sequence[Callable[[int], Any]]) -> None:
    for function in functions:
        for name, argument in (("", "train_set"), ("evaluated_", "eval_sets")):
            found = train(folder, name + function.__name__, function)
            if "divided" in function.__name__:
                assert f"different samples of the stream {argument}" in found, (function, found)
                assert "\n" not in found
            else:
                assert found == "", function


def resume(folder: Path) -> None:
    for function in RESUMED:
        found = train(folder, function.__name__, function)
        assert ("different samples" in found) == ("divided" in function.__name__), (function, found)


def begin(folder: Path) -> None:
    for function in RESUMED:
        assert train(folder, function.__name__, function, max_steps=2) == ""


@pytest.mark.parametrize(
    "functions",
    [
        (divided, noisy),
        pytest.param(
            (
                divided_in_blocks,
                divided_with_seek,
                divided_in_datasets,
                whole,
                whole_with_seek,
                all_alike,
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["few", "others"],
)
def test_a_stream_that_is_divided_already_is_refused_on_all_processes(
    tmp_path: Path, functions: Sequence[Callable[[int], Any]]
) -> None:
    pytest.importorskip("datasets")
    processes.run(try_each, tmp_path, functions, num_processes=2, folder=tmp_path)


def test_it_is_refused_where_a_run_of_one_process_is_resumed_on_two(tmp_path: Path) -> None:
    processes.run(begin, tmp_path, folder=tmp_path / "one")
    processes.run(resume, tmp_path, num_processes=2, folder=tmp_path / "two")


def test_a_stream_is_not_read_further_than_without_the_comparison(tmp_path: Path) -> None:
    path = tmp_path / "taken"

    def counted(epoch: int) -> Iterator[Any]:
        for each in whole(epoch):
            with path.open("a") as taken:  # a list would be state that reading changes
                taken.write(".")
            yield each

    assert train(tmp_path, "counted", counted) == ""
    assert len(path.read_text()) == NUM // 2 + 1  # and the first one beyond `num_samples`
    assert [*islice(whole(0), 1)]
