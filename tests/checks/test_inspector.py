"""Checks only look on: a run without them trains the same bits, on its way and after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import RecipeConfig, Trainer
from accel_trainer.training.inspector import Inspector

from .. import workload
from ..training.test_exactness import final_files


class Unwatched(Trainer):
    """Trains with an inspector that does nothing."""

    def __init__(self, *arguments: Any, inspector: Inspector, **others: Any) -> None:
        super().__init__(*arguments, inspector=Inspector(), **others)


WAYS: dict[str, dict[str, Any]] = {
    "dropout and batch norms": {"norm": "batch", "dropout": 0.2},
    "workers": {"num_workers": 0},
}


def train(config: RecipeConfig, trainer_class: type[Trainer], **way: Any) -> dict[str, bytes]:
    """Train three steps, and then the rest from their checkpoint."""
    folder = config.run.output_dir
    assert folder is not None
    for max_steps in (3, None):
        trainer = replace(config.trainer, max_steps=max_steps)
        workload.train(replace(config, trainer=trainer), trainer_class=trainer_class, **way)
    return final_files(folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_without_checks_trains_the_same_bits(tmp_path: Path, way: str) -> None:
    found = [
        train(workload.make_config(tmp_path / kind.__name__), kind, **WAYS[way])
        for kind in (Trainer, Unwatched)
    ]
    assert found[0] == found[1]
