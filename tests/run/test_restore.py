from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from accel_trainer import RecipeConfig, RunConfig
from accel_trainer.checkpoint.format import LoadedCheckpoint
from accel_trainer.core.errors import CheckpointError
from accel_trainer.run.config import decisive_values
from accel_trainer.run.restore import restore_checkpoint
from accel_trainer.training.progress import EVALUATION
from accel_trainer.training.trainer import Trainer

CONFIG = RecipeConfig(seed=3)
NOW: Mapping[str, Any] = {
    "num_samples": [72, 37],
    "data_fingerprint": "sampled:" + "1" * 64,
    "eval_fingerprint": "sampled:" + "5" * 64,
    "order": "3" * 64,
    "settings": decisive_values(CONFIG),
    "task_fingerprint": "task",
    "versions": {"torch": "2.13.0"},
    "num_processes": 2,
    "num_threads": 4,
    "reduce": "float",
}


class Restored:
    """What a trainer is given to restore; it may find that it cannot."""

    def __init__(self, error: Exception | None = None, *, is_main: bool = True) -> None:
        self.error = error
        self.changes: Sequence[str] | None = None
        self.metadata: dict[str, Any] = {}
        self.model = None
        self.accelerator = SimpleNamespace(is_main_process=is_main)
        self.model = nn.Module()

    def restore(self, pieces: Mapping[str, Any], *, changes: Sequence[str]) -> None:
        if self.error is not None:
            raise self.error
        assert pieces == {"model": {}}
        self.changes = changes


def restore(
    *,
    error: Exception | None = None,
    is_main: bool = True,
    allowed: Sequence[str] = (),
    **stored: Any,
) -> Sequence[str] | None:
    """Restore a checkpoint with the manifest of now, but for what was `stored`; return the
    changes."""
    trainer = Restored(error, is_main=is_main)
    manifest = {name: value for name, value in {**NOW, **stored}.items() if value is not None}
    checkpoint = LoadedCheckpoint("step-3", manifest, {"model": {}})
    config = replace(CONFIG, run=RunConfig(allow_change=tuple(allowed)))
    restore_checkpoint(cast(Trainer, trainer), checkpoint, header=NOW, config=config)
    assert checkpoint.pieces == {}, "their memory is free"
    return trainer.changes


def test_a_checkpoint_of_the_same_data_is_restored_with_the_changes() -> None:
    assert restore() == []
    assert restore(settings={**NOW["settings"], "seed": 2}) == ["seed"]
    older = {name: value for name, value in NOW["settings"].items() if name != "seed"}
    assert restore(settings=older) == ["seed"], "its default was another"
    unknown = dict.fromkeys(("settings", "num_samples", "order", "data_fingerprint"))
    assert restore(**unknown, task_fingerprint=None) == [], "a manifest without them"


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"num_samples": [71, 37]}, r"DATA_CHANGED.*\(71, 37\) -> \(72, 37\) samples"),
        (
            {"data_fingerprint": "sampled:" + "2" * 64},
            "DATA_CHANGED.*sampled:22222222 -> sampled:11111111",
        ),
        ({"order": "4" * 64}, "DATA_CHANGED.*other samples are left out, or have other weights"),
    ],
)
def test_a_checkpoint_of_other_data_is_restored_only_if_allowed(
    stored: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        restore(**stored)
    assert restore(allowed=["data"], **stored) == ["data"]


@pytest.mark.parametrize(
    "evaluated",
    [
        {"num_samples": [72, 36]},
        {"num_samples": [72, 37, 5]},
        {"eval_fingerprint": "sampled:" + "6" * 64},
        {"eval_fingerprint": ""},
        {"eval_fingerprint": None},  # of an older version
    ],
)
def test_numbers_of_other_evaluation_data_do_not_count(evaluated: dict[str, Any]) -> None:
    stored = {"data_fingerprint": "sampled:" + "2" * 64, **evaluated}
    assert restore(allowed=["data"], **stored) == ["data", EVALUATION]


def test_another_order_follows_from_its_setting_but_other_data_does_not() -> None:
    settings = {**NOW["settings"], "batch.order": "balanced"}
    balanced = {"settings": settings, "order": "4" * 64}
    assert restore(**balanced) == ["batch.order"]
    with pytest.raises(CheckpointError, match=r"DATA_CHANGED.*\(71, 37\) -> \(72, 37\) samples"):
        restore(**balanced, num_samples=[71, 37])


def test_a_checkpoint_of_another_task_is_not_restored() -> None:
    with pytest.raises(CheckpointError, match="TASK_CHANGED"):
        restore(task_fingerprint="other")


@pytest.mark.parametrize(
    ("stored", "warned"),
    [
        ({}, ""),
        ({"num_processes": 1}, "num_processes 1 -> 2"),
        ({"num_threads": 8}, "num_threads 8 -> 4"),
        ({"num_threads": None}, ""),  # of a version that did not record them
        (
            {"versions": {"torch": "2.8.0"}, "num_processes": 1},
            "torch 2.8.0 -> 2.13.0, num_processes 1 -> 2",
        ),
    ],
)
def test_a_checkpoint_of_other_versions_is_restored_with_a_warning(
    stored: dict[str, Any], warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        restore(**stored)
        restore(**stored, is_main=False)  # the main process has said it
    expected = [
        f"changed since step-3 was saved: {warned}; the results may differ in the last bits"
    ]
    assert caplog.messages == (expected if warned else [])


@pytest.mark.parametrize(
    "error", [KeyError("momentum"), RuntimeError("mine"), CheckpointError("CKPT_STATE", "named")]
)
def test_a_checkpoint_that_cannot_be_restored_is_one_line(error: Exception) -> None:
    is_content = isinstance(error, KeyError)
    with pytest.raises(CheckpointError if is_content else type(error)) as caught:
        restore(error=error)
    if is_content:
        said = "step-3 contains state that this run cannot load (KeyError: 'momentum', at "
        assert str(caught.value).startswith(f"error[CKPT_STATE]: {said}")
        assert str(caught.value).endswith("): use another checkpoint")
    else:
        assert caught.value is error
