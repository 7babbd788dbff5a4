"""Hashes of what checkpoints hold, and of what they do not, tell what a resume has lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_trainer import Callback
from accel_trainer.cli.recipe.same_run import lost_state
from accel_trainer.cli.recipe.unsaved import UnsavedState, file_of
from accel_trainer.training.callback import TrainerView

from ...training import planted

STEPS_PER_EPOCH = 8


class CountsEvaluations(Callback):
    """Has a state that no checkpoint holds."""

    number = 0

    def on_evaluate_end(self, trainer: TrainerView, metrics: Mapping[str, Any]) -> None:
        self.number += 1


def train(folder: Path, max_steps: int | None = None) -> Path:
    counts = CountsEvaluations()
    notes = folder.with_suffix(".notes")
    notes.mkdir(exist_ok=True)
    observer = UnsavedState(folder=str(notes))
    observer.see_parts({"model": planted.Net(), "counts": counts})
    config = planted.make_config(folder, max_steps=max_steps)
    planted.train(config, callbacks=(observer, counts))
    return file_of(notes, STEPS_PER_EPOCH)


def test_what_an_evaluation_before_the_save_has_changed_is_lost(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    for max_steps in (STEPS_PER_EPOCH, None):
        resumed = train(tmp_path / "resumed", max_steps)
    assert lost_state(whole, resumed) == ["counts.number"]
