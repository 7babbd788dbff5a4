"""A small run whose weights, optimizer and average are shards, in real processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_trainer import BatchConfig, Callback, OptimizerConfig, Trainer, TrainerConfig
from accel_trainer.checkpoint.loading import load_checkpoint
from accel_trainer.checkpoint.sharded import load_whole
from tests import processes, workload
from tests.joined import FSDP

KINDS: dict[str, dict[str, str]] = {
    "sharded": FSDP | {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"},
    "gathered": FSDP,  # shards that are saved whole
    "whole": {},
}


class ComparesResume(Callback):
    """Fails if what was restored is not, in every bit of every tensor, the checkpoint that the run
    resumes from."""

    def on_fit_start(self, trainer: Trainer) -> None:
        loaded = load_checkpoint(trainer._checkpointer.directory)
        if loaded is None:
            return
        live = {
            "model": trainer.model.state_dict(),
            "optimizer": trainer._states.state_dict()["optimizer"]["state"],
        }
        live["ema"] = trainer.average_model.state_dict()
        stored = {name: loaded.pieces[name] for name in live}
        stored["optimizer"] = stored["optimizer"]["state"]
        assert trainer.state._asdict().items() <= loaded.manifest.items()
        mine, theirs = flat(live), flat(stored)
        assert mine == theirs
        print(f"resumed at step {trainer.state.optimizer_step} with the same {len(mine)} tensors")


def flat(value: Any, path: str = "") -> dict[str, bytes]:
    """Return the bytes of each tensor, whole, by its path. **Collective** if there are shards."""
    if isinstance(value, Mapping):
        return {
            name: data
            for key, item in value.items()
            for name, data in flat(item, f"{path}.{key}").items()
        }
    whole = value.full_tensor() if hasattr(value, "full_tensor") else load_whole(value)
    assert isinstance(whole, Tensor)
    return {path: whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()}


def train(folder: Path, kind: str, max_steps: int | None, name: str) -> None:
    """Train up to 6 steps, in 2 epochs, on any number of processes that divides 24."""
    os.environ.update(KINDS[kind])
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    config = workload.make_config(
        folder,
        batch=BatchConfig(
            per_device_batch_size=24 // num_processes, global_batch_size=24, eval_batch_size=10
        ),
        trainer=TrainerConfig(
            num_epochs=2, max_steps=max_steps, log_every_n_steps=1, max_grad_norm=0.5, ema_decay=0.9
        ),
        optimizer=OptimizerConfig(name=name, learning_rate=0.05),
    )
    workload.train(config, num_train=72, norm="batch", callbacks=(ComparesResume(),))


def run(
    folder: Path,
    num_processes: int,
    kind: str = "sharded",
    *,
    steps: int | None = None,
    name: str = "adamw",
) -> str:
    """Run, or continue, in `folder`; return what the main process printed."""
    logs = folder.with_name(f"{folder.name}-logs")
    shutil.rmtree(logs, ignore_errors=True)
    return processes.run(
        train, folder, kind, steps, name, num_processes=num_processes, folder=logs
    ).output()


def newest(folder: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return max((folder / "checkpoints").glob("step-*"))


def stored_bytes(checkpoint: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint that hold its state."""
    return {
        str(p.relative_to(checkpoint)): p.read_bytes()
        for p in sorted(checkpoint.rglob("*.safetensors"))
    }
