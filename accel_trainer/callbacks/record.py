"""What a run leaves in its folder when it ends: `result.json` and `export/`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
from torch import Tensor

from .. import storage
from ..checkpoint_files import checkpoint_name
from ..checkpoint_folder import load_checkpoint
from ..errors import CheckpointError
from ..run_folder import writes_to
from ..runtime import peak_memory_bytes
from .base import Callback
from .log import MetricsLog

if TYPE_CHECKING:
    from ..trainer import RunResult, Trainer


class RunRecord(Callback):
    """Writes, on the main process, how the run ended and the weights to use: the best evaluated ones, else the last.

    `export_config` says what someone needs to build the model again; it becomes `export/config.json`
    beside `export/model.safetensors`.
    """

    is_essential = True

    def __init__(self, folder: Path, *, log: MetricsLog, export_config: Mapping[str, Any]) -> None:
        self._folder, self._log, self._export_config = folder, log, export_config
        self._start_s, self._first_step = time.perf_counter(), 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start the clock."""
        self._first_step = trainer.state.optimizer_step

    def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
        """Write both, unless this attempt found the run finished and recorded."""
        path = self._folder / "result.json"
        if not trainer.accelerator.is_main_process:
            return
        if path.exists() and result.state == "done" and result.position.optimizer_step == self._first_step > 0:
            return
        with writes_to(self._folder):
            self._write(trainer, result)

    def _write(self, trainer: Trainer, result: RunResult) -> None:
        if result.state != "preempted":
            self._export(trainer, result)
        record = {
            "state": result.state,
            "stop_reason": result.stop_reason,
            "optimizer_step": result.position.optimizer_step,
            "epoch": result.position.epoch,
            "samples_seen": result.position.samples_seen,
            "metrics": dict(result.metrics),
            "best": None if result.best is None else vars(result.best),
            "num_eval_samples": trainer.evaluator.loader.num_samples,
            "images_per_s": self._log.items_per_s,
            "wall_s": time.perf_counter() - self._start_s,
            "peak_memory_bytes": peak_memory_bytes(trainer.accelerator),
        }
        storage.write_file_atomic(self._folder / "result.json", json.dumps(record, indent=1).encode())

    def _export(self, trainer: Trainer, result: RunResult) -> None:
        weights, source = _weights_to_export(trainer, result)
        folder = self._folder / "export"
        storage.make_directory(folder)
        data = safetensors.torch.save(weights)
        storage.write_file_atomic(folder / "model.safetensors", data)
        config = {**self._export_config, "weights": source, "sha256": hashlib.sha256(data).hexdigest()}
        storage.write_file_atomic(folder / "config.json", json.dumps(config, indent=1).encode())


def _weights_to_export(trainer: Trainer, result: RunResult) -> tuple[dict[str, Tensor], str]:
    """Return the weights of the best checkpoint, or of the last, and say which they are."""

    def load(name: str, piece: str) -> dict[str, Tensor]:
        checkpoint = load_checkpoint(trainer.checkpointer.directory, name)
        assert checkpoint is not None  # one that is named is there, or an error
        return dict(checkpoint.pieces[piece])

    if result.best is not None:
        piece = "ema" if result.best.metric.startswith("eval_ema/") else "model"
        with suppress(CheckpointError):  # a branch of a run whose best checkpoint stayed behind
            return load(result.best.name, piece), f"{piece} of the best checkpoint {result.best.name}"
    piece = "model" if trainer.ema is None else "ema"
    name = checkpoint_name(result.position)
    return load(name, piece), f"{piece} after step {result.position.optimizer_step}"
