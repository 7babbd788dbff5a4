"""A run of a few bytes that saves each step: what the fault tests crash, starve and corrupt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from accel_trainer.checkpoint.config import CheckpointConfig
from accel_trainer.checkpoint.format import (
    decode_files,
    list_checkpoints,
    read_files,
)
from accel_trainer.checkpoint.frozen import digests_of
from accel_trainer.checkpoint.loading import load_checkpoint
from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.checkpoint.serialization import encode
from accel_trainer.checkpoint.sharded import load_whole
from accel_trainer.core.errors import CheckpointError
from accel_trainer.core.filesystem import AppendFile
from accel_trainer.core.train_state import BestCheckpoint, TrainState, checkpoint_name

METADATA = {"settings": {"seed": 0}, "data_fingerprint": "1" * 64, "num_processes": 1}
BEST_STEP = 1
FROZEN_NAMES = ("base.weight",)
ROW_BYTES = 16


def position_at(step: int) -> TrainState:
    return TrainState(optimizer_step=step, epoch=0, step_in_epoch=step, samples_seen=8 * step)


def name_at(step: int) -> str:
    return checkpoint_name(position_at(step))


def pieces_at(step: int) -> dict[str, object]:
    """Return the state after `step`, a pure function of it, with every kind of stored value.

    Of the model's parameters, `base.weight` stands still.
    """
    weights = torch.arange(6, dtype=torch.float32).reshape(2, 3) + step
    base = torch.arange(5, dtype=torch.float32)
    return {
        "model": {
            "base.weight": base,
            "layer.weight": weights,
            "layer.num_batches_tracked": torch.tensor(step),
        },
        "optimizer": {
            "state": {0: {"momentum_buffer": weights / 2}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "ema": {"base.weight": base, "layer.weight": weights / 3},
        "trainer": {
            "position": position_at(step)._asdict(),
            "history_bytes": ROW_BYTES * step,
            "big": 2**100 + step,
            "best": float("-inf"),
            "key": torch.arange(step, step + 4),
        },
    }


def is_state_at(pieces: object, step: int) -> bool:
    """Whether `pieces`, as loaded, are exactly those of `step`.

    Raises CheckpointError for a damaged slice.
    """
    ours, theirs = (encode(value, name="all") for value in (pieces_at(step), whole(pieces)))
    return (
        ours.skeleton == theirs.skeleton
        and list(ours.tensors) == list(theirs.tensors)
        and all(
            torch.equal(a, b)
            for a, b in zip(ours.tensors.values(), theirs.tensors.values(), strict=True)
        )
    )


def whole(value: Any) -> Any:
    """Return `value` with tensors in place of those that are read when they are needed."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return load_whole(value)


def best_at(step: int) -> BestCheckpoint | None:
    return BestCheckpoint(name_at(BEST_STEP), "accuracy", 0.5) if step >= BEST_STEP else None


def continue_run(
    folder: Path,
    *,
    last_step: int,
    acknowledge: Callable[[str], None] = lambda name: None,
    make: type[Checkpointer] = Checkpointer,
    must_succeed: bool = True,
) -> Checkpointer:
    """Continue in `folder` to `last_step`, saving each step; acknowledge what is durable."""
    history = AppendFile(folder / "metrics.jsonl")
    checkpointer = make(
        folder / "checkpoints",
        config=CheckpointConfig(keep_last_n=2),
        header=METADATA,
        before_commit=history.sync,
    )
    checkpointer.prepare(pieces_at(0))
    loaded = load_checkpoint(checkpointer.directory)
    begin(checkpointer)
    first_step = 0 if loaded is None else loaded.manifest["optimizer_step"]
    history.truncate(0 if loaded is None else loaded.pieces["trainer"]["history_bytes"])
    for step in range(first_step + 1, last_step + 1):
        history.append(b"%015d\n" % step)
        save(checkpointer, step, best=best_at(step), must_succeed=must_succeed)
        acknowledge(name_at(step))
    checkpointer.close()
    history.close()
    return checkpointer


def begin(checkpointer: Checkpointer) -> None:
    """Tell the checkpointer what nothing trains, and what it begins with, as a run does."""
    checkpointer.unstepped = lambda: FROZEN_NAMES
    weights: Any = pieces_at(0)["model"]
    checkpointer.frozen = digests_of(weights, FROZEN_NAMES)


def valid_steps(folder: Path) -> list[int]:
    """The steps whose checkpoints are whole and hold exactly their state."""
    steps = []
    for path in list_checkpoints(folder / "checkpoints"):
        try:
            loaded = decode_files(read_files(path), path)
            if is_state_at(loaded.pieces, loaded.manifest["optimizer_step"]):
                steps.append(loaded.manifest["optimizer_step"])
        except CheckpointError:
            continue
    return steps


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]


def make(directory: Path, metadata: dict[str, Any] = METADATA, **config: Any) -> Checkpointer:
    checkpointer = Checkpointer(directory, config=CheckpointConfig(**config), header=metadata)
    begin(checkpointer)
    checkpointer.prepare(pieces_at(0))
    return checkpointer


def save(
    checkpointer: Checkpointer, *steps: int, must_succeed: bool = True, **options: Any
) -> None:
    for step in steps:
        checkpointer.save(position_at(step), pieces_at(step), **options)
        checkpointer.wait(must_succeed=must_succeed)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def damage(directory: Path, step: int) -> None:
    with open(directory / name_at(step) / "model.safetensors", "r+b") as file:
        file.write(b"\xff")
