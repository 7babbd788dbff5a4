"""A run of one's own data continues on these data and on no others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from accel_trainer import (
    CheckpointError,
    ClassificationTask,
    MeanLoss,
    RunResult,
    TopKAccuracy,
    build_trainer,
    start_run,
)
from accel_trainer.data.fingerprint import (
    NUM_HASHED,
    NUM_REPEATS,
    fingerprint_samples,
    hash_value,
    is_same_data,
    join_fingerprints,
)
from tests import workload


class Points:
    """Samples that count how often they are read."""

    def __init__(self, num: int, shift: float = 0.0) -> None:
        self.points, self.reads = (
            torch.randn(num, 4, generator=torch.Generator().manual_seed(1)) + shift,
            list[int](),
        )

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads.append(index)
        return self.points[index], index % 2


def train(
    folder: Path, data: Any, *, max_steps: int | None = None, allow: tuple[str, ...] = ()
) -> RunResult:
    config = workload.make_config(folder)
    config = replace(
        config,
        trainer=replace(config.trainer, max_steps=max_steps),
        run=replace(config.run, allow_change=allow),
    )
    with start_run(config, recipe="points") as run:
        return build_trainer(
            run,
            model=nn.Linear(4, 2),
            task=ClassificationTask(),
            train_set=data,
            eval_sets=Points(10),
            metrics=[MeanLoss(), TopKAccuracy()],
        ).fit()


@pytest.mark.parametrize(
    ("other", "difference"),
    [(Points(64), r"\(96, 10\) -> \(64, 10\) samples"), (Points(96, shift=0.01), "sampled:")],
)
def test_other_data_is_refused_by_number_and_by_content(
    tmp_path: Path, other: Points, difference: str
) -> None:
    train(tmp_path, Points(96), max_steps=4)
    with pytest.raises(
        CheckpointError, match=rf"DATA_CHANGED\]: .*{difference}.*allow_change=.'data'"
    ):
        train(tmp_path, other)
    assert train(tmp_path, Points(96), max_steps=5).state == "done"


def test_data_that_is_changed_on_purpose_starts_the_epoch_again(tmp_path: Path) -> None:
    train(tmp_path, Points(96), max_steps=4)
    result = train(tmp_path, Points(32), allow=("data",))
    assert (result.position.epoch, result.position.optimizer_step) == (2, 4 + 2 * 2)


def test_the_banner_counts_the_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, Points(96), max_steps=1)
    assert "96 samples to train on, 10 to evaluate\n" in capsys.readouterr().out


def test_data_that_cannot_be_read_twice_says_so_and_is_compared_by_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fleeting(Points):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            point, label = super().__getitem__(index)
            return point + len(self.reads), label

    train(tmp_path, Fleeting(96), max_steps=4)
    assert "so a resumed run would train on different samples" in caplog.text
    assert "a resume compares only their number" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="DATA_CHANGED"):
        train(tmp_path, Fleeting(95))


def test_a_generator_of_the_data_that_changes_some_reads_is_noticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = Points(96)
    generator = np.random.default_rng(0)
    assert fingerprint_samples(lambda index: data[index][0] * generator.choice([1, -1]), 96) == ""
    assert "draw from the global generators of torch, numpy or Python" in caplog.text


def test_the_cost_does_not_grow_with_the_data() -> None:
    data = Points(10_000)
    fingerprint_samples(lambda index: data[index], len(data))
    assert len(data.reads) == NUM_HASHED + NUM_REPEATS - 1
    assert max(data.reads) > 9_000


KINDS: dict[str, Callable[[int], Any]] = {
    "tensors": lambda n: (torch.full((2, 2), n), torch.tensor(0)),
    "bfloat16": lambda n: torch.full((3,), n, dtype=torch.bfloat16),
    "arrays": lambda n: np.full((2, 2), n),
    "pictures": lambda n: Image.new("RGB", (4, 4), (n, 0, 0)),
    "text": lambda n: {"text": f"word {n}", "label": 0},
    "numbers in lists": lambda n: [[1, 2], [3.0, n]],
    "dtypes": lambda n: torch.zeros(2, dtype=torch.float64 if n else torch.float32),
    "shapes": lambda n: np.zeros((2, 3) if n else (3, 2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_any_kind_are_told_apart(kind: str) -> None:
    make = KINDS[kind]
    assert fingerprint_samples(lambda index: make(0), 5) == fingerprint_samples(
        lambda index: make(0), 5
    )
    assert fingerprint_samples(lambda index: make(0), 5) != fingerprint_samples(
        lambda index: make(index // 4), 5
    )
    assert fingerprint_samples(lambda index: make(0), 5) != fingerprint_samples(
        lambda index: make(0), 6
    )


def test_a_tensor_dataset_has_a_fingerprint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, TensorDataset(torch.randn(96, 4), torch.arange(96) % 2), max_steps=1)
    assert "only their number" not in capsys.readouterr().out


@dataclass
class Graph:
    """A sample of a class of one's own, without `tobytes`."""

    edges: list[tuple[int, int]]
    name: str = "ring"


class Slotted:
    __slots__ = ("nodes",)

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes


SAMPLES_OF_OBJECTS: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (
        lambda: np.array(["a" * 9, None, 2.5], dtype=object),
        lambda: np.array(["b" * 9, None, 2.5], dtype=object),
    ),
    (
        lambda: np.array([torch.ones(2), "x"], dtype=object),
        lambda: np.array([torch.zeros(2), "x"], dtype=object),
    ),
    (lambda: Graph([(0, 1)]), lambda: Graph([(1, 0)])),
    (lambda: Slotted(torch.ones(3)), lambda: Slotted(torch.zeros(3))),
    (lambda: {"tags": {"red", "green", "blue"}}, lambda: {"tags": {"red", "green", "black"}}),
    (lambda: deque([1, 2]), lambda: deque([2, 1])),
    (lambda: Path("a.jpg"), lambda: Path("b.jpg")),
    (
        lambda: (datetime(2026, 1, 1), Decimal("0.1")),
        lambda: (datetime(2026, 1, 1), Decimal("0.2")),
    ),
    (lambda: partial(Graph, [(0, 1)]), lambda: partial(Graph, [(0, 2)])),
]


@pytest.mark.parametrize(("sample", "changed"), SAMPLES_OF_OBJECTS)
def test_objects_in_a_sample_are_hashed_by_their_content(
    sample: Callable[[], Any], changed: Callable[[], Any]
) -> None:
    before, again, after = (
        fingerprint_samples(lambda _, make=make: make(), 8) for make in (sample, sample, changed)
    )
    assert before == again
    assert before != after
    assert before


def fingerprints_of_objects() -> list[str]:
    return [fingerprint_samples(lambda _, make=make: make(), 8) for make, _ in SAMPLES_OF_OBJECTS]


def test_the_fingerprint_of_objects_is_the_same_in_another_process() -> None:
    script = "import tests.data.test_fingerprint as t; print(*t.fingerprints_of_objects())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "1"},  # the order of sets
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == fingerprints_of_objects()


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("sample", [lambda: Node(), lambda: threading.Lock()])
def test_a_fingerprint_without_content_leaves_the_number_of_samples(
    sample: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert fingerprint_samples(lambda _: sample(), 8) == ""
    assert "changed data is noticed only by the number of samples" in caplog.text


def test_data_without_a_fingerprint_may_be_the_same() -> None:
    joined = join_fingerprints([fingerprint_samples(lambda _: Graph([]), 8)] * 2)
    assert is_same_data(joined, joined)
    assert is_same_data(joined, "")
    assert is_same_data(join_fingerprints([joined, ""]), joined)
    assert not is_same_data("sampled:0", joined)


def test_a_number_of_a_column_is_hashed_as_any_number() -> None:
    column = torch.arange(6).reshape(2, 3)[:1, 1]
    assert column.stride() == (3,)
    assert hash_value(column) == hash_value(torch.tensor([1]))
