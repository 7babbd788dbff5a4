"""Restores a trainer from a loaded checkpoint, if the data and the task are the same.

`continued` has compared the settings: what differs was changed on purpose. `Trainer.restore` then
passes each piece to the object that it belongs to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint.format import LoadedCheckpoint
from ..checkpoint.frozen import complete_frozen
from ..checks.changes import warn_of_changes
from ..core.errors import CheckpointError
from ..core.user_code import describe_error
from ..data.fingerprint import is_same_data
from ..training.progress import EVALUATION
from ..training.trainer import Trainer
from .config import RecipeConfig, training_changes

_logger = logging.getLogger(__name__)


def restore_checkpoint(
    trainer: Trainer,
    checkpoint: LoadedCheckpoint,
    *,
    header: Mapping[str, Any],
    config: RecipeConfig,
) -> None:
    """Check that `checkpoint` belongs to this run, and load its state into `trainer`.

    `header` describes this start of the run, as the manifests of its checkpoints will.

    Raises:
        CheckpointError: the data or the task has changed, or this run cannot load the state.
    """
    stored = {**header, **checkpoint.manifest}  # those of older versions have less
    changes = [name for name, _, _ in training_changes(stored["settings"], config)]
    if change := _change_of_data(stored, header, changes):
        if "data" not in config.run.allow_change:
            raise CheckpointError(
                "DATA_CHANGED",
                f"this run was trained on different data ({change}): restore it, choose a "
                "different --output-dir, or continue on purpose with --allow-change data",
            )
        changes.append("data")
        if not _is_evaluated_alike(checkpoint.manifest, header):
            changes.append(EVALUATION)
    if stored["task_fingerprint"] != header["task_fingerprint"]:
        raise CheckpointError(
            "TASK_CHANGED",
            "this run was trained with a different task, such as its class weights or its "
            "teacher: restore it, or choose a different --output-dir",
        )
    if trainer.accelerator.is_main_process:
        warn_of_changes(checkpoint.name, stored, header)
        if EVALUATION in changes:
            _logger.warning(
                "the evaluation data may be other than at %s, so its numbers cannot be compared: "
                "the best checkpoint and the patience start again",
                checkpoint.name,
            )
    try:
        is_main = trainer.accelerator.is_main_process
        level = logging.WARNING if is_main else logging.DEBUG
        complete_frozen(checkpoint, trainer.model, level=level)
        trainer.restore(checkpoint.pieces, changes=changes)
        trainer.metadata.update(checkpoint.manifest.get("metadata", {}))
        checkpoint.pieces.clear()  # the run keeps the checkpoint, whose tensors may be large
        for each in checkpoint.slices:
            each.kept = None  # verified for another process
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            "CKPT_STATE",
            f"{checkpoint.name} contains state that this run cannot load "
            f"({describe_error(error)}): use another checkpoint",
        ) from error


def _change_of_data(
    stored: Mapping[str, Any], now: Mapping[str, Any], changes: Sequence[str]
) -> str | None:
    """Return how the data has changed, other than by one of the settings in `changes`."""
    old = stored["data_fingerprint"]
    new = now["data_fingerprint"]
    if stored["num_samples"] != now["num_samples"]:
        return f"{tuple(stored['num_samples'])} -> {tuple(now['num_samples'])} samples"
    if stored["order"] != now["order"] and "batch.order" not in changes:
        return "other samples are left out, or have other weights or labels"
    return None if is_same_data(old, new) else f"{old[:16]} -> {new[:16]}"


def _is_evaluated_alike(stored: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether the evaluation sets of both are known to have the same samples."""
    sizes = [each.get("num_samples", [])[1:] for each in (stored, now)]
    known = now.get("eval_fingerprint")
    return bool(known) and stored.get("eval_fingerprint") == known and sizes[0] == sizes[1]
