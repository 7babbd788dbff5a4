"""A task may depend on where the training stands: `batch.position`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_trainer import (
    Batch,
    ClassificationTask,
    ScheduleConfig,
    StepOutput,
)
from tests.evaluated import (
    make_config,
    train,
)


class Witness(ClassificationTask):
    """Writes down the position of each batch, with the number of its samples."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def _write(self, kind: str, batch: Batch) -> None:
        rank = os.environ.get("RANK", "0")
        with self.file.with_suffix(f".{rank}").open("a") as file:
            file.write(json.dumps([kind, *batch.position[:3]]) + "\n")

    def step(self, model: Any, batch: Batch) -> StepOutput:
        self._write("step", batch)
        return super().step(model, batch)

    def eval_step(self, model: Any, batch: Batch) -> StepOutput:
        self._write("evaluation", batch)
        return super().eval_step(model, batch)


def positions(file: Path, kind: str) -> list[tuple[int, int, float]]:
    rows = [json.loads(line) for line in file.with_suffix(".0").read_text().splitlines()]
    return [tuple(row[1:]) for row in dict.fromkeys(map(tuple, rows)) if row[0] == kind]


def test_a_batch_knows_the_step_the_epoch_and_the_fraction_done(tmp_path: Path) -> None:
    train(make_config(tmp_path / "run", num_epochs=2), task=Witness(tmp_path / "seen"))
    # 2 epochs of 5 steps; the rehearsal after the first step takes it once more.
    expected = [(step, step // 5, (step // 5 + step % 5 / 5) / 2) for step in range(10)]
    assert positions(tmp_path / "seen", "step") == expected
    evaluated = positions(tmp_path / "seen", "evaluation")
    # Before the first step the metrics are tried. At the end of an epoch, it still counts.
    assert evaluated == [(0, 0, 0.0), (3, 0, 0.3), (6, 1, 0.6), (9, 1, 0.9), (10, 1, 1.0)]


def test_progress_counts_the_epochs_of_the_config_where_a_run_stops_early(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", num_epochs=2, max_steps=4)
    train(config, task=Witness(tmp_path / "seen"))
    assert positions(tmp_path / "seen", "step")[-1] == (3, 0, 0.3)


def test_progress_is_0_on_a_trunk_and_the_fraction_done_of_its_decay(tmp_path: Path) -> None:
    for name, schedule, expected in (
        ("trunk", {}, [0.0] * 10),
        ("decays", {"decay_at": 6}, [0.0] * 7 + [0.25, 0.5, 0.75]),
    ):
        config = make_config(tmp_path / name, num_epochs=2)
        config = replace(config, schedule=ScheduleConfig(shape="trunk", **schedule))
        train(config, task=Witness(tmp_path / f"{name}-seen"))
        assert [row[2] for row in positions(tmp_path / f"{name}-seen", "step")] == expected
        last = positions(tmp_path / f"{name}-seen", "evaluation")[-1]
        assert last == (10, 1, 1.0 if schedule else 0.0)
