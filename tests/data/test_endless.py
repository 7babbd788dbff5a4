"""A stream without a length: no epochs, and `--steps` of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_trainer import (
    BatchConfig,
    BatchPlan,
    ConfigError,
    DataError,
    RecipeConfig,
    StreamReader,
    TrainLoader,
)
from accel_trainer.checkpoint.format import list_checkpoints, step_of
from accel_trainer.core.batch_plan import ENDLESS
from accel_trainer.data.order import choose_order
from accel_trainer.optim.lr_scheduler import ScheduleConfig
from tests import processes
from tests.evaluated import (
    differing,
    eval_sets,
    make_config,
    run_whole,
    steps_of,
    train,
)

CPU = torch.device("cpu")


class Points:
    """Points around the corner of their class, without end or with one."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self.num_yielded = 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return self.begin_at(0)

    def begin_at(self, position: int) -> Iterator[tuple[Tensor, int]]:
        for number in islice(count(), position, self.length):
            self.num_yielded += 1
            point = torch.randn(6, generator=torch.Generator().manual_seed(number))
            point[number % 3] += 1.5
            yield point, number % 3


class Seekable(Points):
    position = 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return self.begin_at(self.position)


def loader_of(stream: Any, num_processes: int, process_index: int) -> TrainLoader[StreamReader]:
    plan = BatchPlan(
        num_samples=ENDLESS,
        global_batch_size=8,
        per_device_batch_size=2,
        num_processes=num_processes,
        drop_last=True,
    )
    order = choose_order(BatchConfig(order="stored"), ENDLESS)
    reader = StreamReader(lambda epoch: stream)
    return TrainLoader(reader, plan, seed=0, device=CPU, process_index=process_index, order=order)


def classes(loader: TrainLoader[StreamReader], first_step: int) -> list[list[int]]:
    """The classes of the samples of this process in each step; sample n has n % 3."""
    return [
        [label for batch in step.micro_batches for label in batch.targets.tolist()]
        for step in loader.step_batches(0, first_step)
    ]


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("kind", [Points, Seekable])
def test_all_processes_end_with_the_last_step_that_is_whole(
    num_processes: int, kind: Callable[[int], Points]
) -> None:
    """29 samples are 3 steps of 8 and 5 samples that are no step, of which some processes have
    all of their part."""
    for first_step in (0, 2):
        parts = [
            classes(loader_of(kind(29), num_processes, index), first_step)
            for index in range(num_processes)
        ]
        steps = [[label for part in step for label in part] for step in zip(*parts, strict=True)]
        assert steps == [
            [number % 3 for number in range(8 * step, 8 * step + 8)]
            for step in range(first_step, 3)
        ]


def test_no_sample_beyond_the_step_is_read() -> None:
    for stream, first_step, num_read in ((Points(), 0, 8), (Points(), 9, 80), (Seekable(), 9, 8)):
        next(loader_of(stream, 2, 0).step_batches(0, first_step))
        assert stream.num_yielded == num_read


# --- runs ---


def config_of(folder: Path, num_steps: int | None = 12, **changes: Any) -> RecipeConfig:
    return make_config(folder, **{"num_epochs": None, "num_steps": num_steps} | changes)


def parts_of(stream: Any) -> dict[str, Any]:
    return {"sets": eval_sets("val"), "train_set": StreamReader(lambda epoch: stream)}


def endless() -> dict[str, Any]:
    return parts_of(Points())


def test_two_processes_train_the_same_model(tmp_path: Path) -> None:
    exact = {"batch": {"reduce": "exact"}}
    one = run_whole(config_of(tmp_path / "one", **exact), endless)
    two = run_whole(config_of(tmp_path / "two", **exact), endless, num_processes=2)
    weights = [name for name in one if name.endswith("model.safetensors")]
    assert weights
    assert [name for name in differing(one, two) if name in weights] == []


def test_a_stream_that_ends_in_its_first_step_needs_more_samples(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match=r"ended after step 0.*yield more samples$"):
        train(config_of(tmp_path), **parts_of(Points(0)))


def test_a_run_whose_stream_ends_early_loses_nothing(tmp_path: Path) -> None:
    """With more samples it goes on as if they had been there, and it may end where it is."""
    for name in ("more", "end"):
        with pytest.raises(DataError, match="DATA_STREAM.*ended after step 7.*steps=7"):
            train(config_of(tmp_path / name), **parts_of(Points(61)))
        assert max(map(step_of, list_checkpoints(tmp_path / name / "checkpoints"))) == 7
    train(config_of(tmp_path / "more"), **endless())
    train(config_of(tmp_path / "whole"), **endless())
    more, whole = (tmp_path / name / "export" / "model.safetensors" for name in ("more", "whole"))
    assert more.read_bytes() == whole.read_bytes()
    config = config_of(tmp_path / "end", 7, allow=("trainer.num_steps",))
    assert train(config, **parts_of(Points(61))).state == "done"
    assert steps_of(tmp_path / "end") == [3, 6, 7]


def test_both_processes_of_a_run_notice_the_end(tmp_path: Path) -> None:
    """After 60 samples, the first process has its part of an eighth step, the second has not."""
    folder = tmp_path / "logs"
    processes.run(train_short, tmp_path / "run", folder=folder, codes=[65, 65])
    assert max(map(step_of, list_checkpoints(tmp_path / "run" / "checkpoints"))) == 7


def train_short(folder: Path) -> None:
    try:
        train(config_of(folder), **parts_of(Points(60)))
    except DataError as error:
        raise SystemExit(65) from error


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_steps": None, "num_epochs": 3}, "no epochs, and epochs= is 3"),
        ({"num_steps": None}, "no epochs, and epochs= is 10"),
        ({"evaluate_every": "0.5epochs"}, "evaluate_every= is 0.5epochs: set it in steps"),
    ],
)
def test_what_is_counted_in_epochs_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"DATA_STREAM.*{said}"):
        train(config_of(tmp_path / "run", **changes), **endless())
    assert not (tmp_path / "run").exists()


def test_a_warmup_in_epochs_is_refused(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path), schedule=ScheduleConfig(warmup_epochs=0.5))
    with pytest.raises(ConfigError, match=r"warmup_epochs=\) is 0\.5"):
        train(config, **endless())


def test_an_evaluation_needs_the_number_of_its_samples(tmp_path: Path) -> None:
    sets = StreamReader(lambda epoch: Points())
    with pytest.raises(ConfigError, match=r"DATA_STREAM.*evaluate on has no length: give num_sam"):
        train(config_of(tmp_path), **endless() | {"sets": sets})
    with pytest.raises(ConfigError, match="StreamReader.num_samples is 0: set it to 1 or more"):
        StreamReader(lambda epoch: Points(), 0)


@pytest.mark.parametrize(("length", "num_warnings"), [(38, 0), (39, 1), (None, 1)])
def test_a_stream_longer_than_its_num_samples_is_noticed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int | None, num_warnings: int
) -> None:
    """Over 3 epochs, each of which trains on the same first samples."""
    with caplog.at_level(logging.WARNING):
        reader = StreamReader(lambda epoch: Points(length), 38)
        train(make_config(tmp_path), train_set=reader)
    said = [record.getMessage() for record in caplog.records if "DATA_STREAM" in record.message]
    assert len(said) == num_warnings
    assert all("num_samples=38" in text and "set steps=" in text for text in said)
