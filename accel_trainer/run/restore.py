"""Whether a checkpoint is of this run: of its data and its task; and how a trainer continues from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint.format import LoadedCheckpoint
from ..core.errors import CheckpointError
from ..data.fingerprint import is_same_data
from ..training.trainer import Trainer

_logger = logging.getLogger(__name__)

_DECISIVE = ("num_processes", "num_threads")  # of the last bits, with the versions


def restore_checkpoint(
    trainer: Trainer,
    checkpoint: LoadedCheckpoint,
    *,
    metadata: Mapping[str, Any],
    changes: Sequence[str],
    allowed: Sequence[str],
) -> None:
    """Let `trainer` continue from `checkpoint`; `metadata` is what its own checkpoints will have.

    `changes` are the settings that were changed on purpose, and `allowed` those that may be.

    Raises:
        CheckpointError: the data or the task is another, or the content is nothing that this run
            has saved.
    """
    changes = [*changes, *_data_changes(checkpoint.manifest, metadata, allowed)]
    _check_task(checkpoint, metadata["task_fingerprint"])
    _warn_of_changes(checkpoint, metadata)
    try:
        trainer.restore(checkpoint.pieces, changes=changes)
        for stored in checkpoint.slices:
            stored.kept = None  # verified here, and read on another process
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        message = f"{checkpoint.name} contains state that this run cannot load ({reason}): use another checkpoint"
        raise CheckpointError("CKPT_STATE", message) from error


def _data_changes(
    stored: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str]
) -> list[str]:
    """Return `["data"]` if the data differs from the checkpoint's, and that is allowed; else nothing."""
    before, after = stored.get("num_samples", now["num_samples"]), now["num_samples"]
    old, new = stored.get("data_fingerprint", ""), now["data_fingerprint"]
    if before == after and is_same_data(old, new):
        return []
    if "data" in allowed:
        return ["data"]
    change = (
        f"{tuple(before)} -> {tuple(after)} samples"
        if before != after
        else f"{old[:16]} -> {new[:16]}"
    )
    fix = "restore it, choose another --output-dir, or continue on purpose with --allow-change data"
    raise CheckpointError(
        "DATA_CHANGED", f"the data is not what this run was trained on ({change}): {fix}"
    )


def _check_task(checkpoint: LoadedCheckpoint, fingerprint: str) -> None:
    if checkpoint.manifest.get("task_fingerprint", fingerprint) != fingerprint:
        fact = "the task is not what this run was trained with, such as its class weights or its teacher"
        raise CheckpointError("TASK_CHANGED", f"{fact}: restore it, or choose another --output-dir")


def _warn_of_changes(checkpoint: LoadedCheckpoint, metadata: Mapping[str, Any]) -> None:
    """Warn of other libraries, threads or processes than the checkpoint's: the last bits may differ."""
    before, now = (
        {**(each.get("versions") or {}), **{name: each[name] for name in _DECISIVE if name in each}}
        for each in (checkpoint.manifest, metadata)
    )
    if metadata["reduce"] == "exact":
        del before["num_processes"]
    if changed := [
        f"{name} {old} -> {now.get(name)}" for name, old in before.items() if old != now.get(name)
    ]:
        text = "changed since %s was saved: %s; the results may differ in the last bits"
        _logger.warning(text, checkpoint.name, ", ".join(changed))
