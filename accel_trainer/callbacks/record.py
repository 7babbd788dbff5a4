"""What a run leaves in its folder when it ends: `result.json` and `export/`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
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

_MAX_RECORD_BYTES = 2**26
_MAX_WEIGHTS_BYTES = 2**40


class RunRecord(Callback):
    """Writes, on the main process, how the run ended and the weights to use: the best evaluated ones, else the last.

    `export_config` says what someone needs to build the model again; it becomes `export/config.json`
    beside `export/model.safetensors`. What is there already and right stays: a finished run that is started again
    changes nothing, and one whose record is missing or old gets it.
    """

    def __init__(self, folder: Path, *, log: MetricsLog, export_config: Mapping[str, Any]) -> None:
        self._folder, self._log, self._export_config = folder, log, export_config
        self._start_s = time.perf_counter()

    def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
        """Write both."""
        if trainer.accelerator.is_main_process:
            with writes_to(self._folder):
                if result.state != "preempted":
                    self._export(trainer, result)
                self._record(trainer, result)

    def _record(self, trainer: Trainer, result: RunResult) -> None:
        outcome = {
            "state": result.state,
            "stop_reason": result.stop_reason,
            "optimizer_step": result.position.optimizer_step,
            "epoch": result.position.epoch,
            "samples_seen": result.position.samples_seen,
            "metrics": dict(result.metrics),
            "best": None if result.best is None else vars(result.best),
            "num_eval_samples": trainer.evaluator.loader.num_samples,
        }
        path = self._folder / "result.json"
        known = _read_json(path)
        if json.loads(json.dumps(outcome)) == {name: known.get(name) for name in outcome}:
            return  # with the times of the attempt that trained
        measured = {
            "images_per_s": self._log.items_per_s,
            "wall_s": time.perf_counter() - self._start_s,
            "peak_memory_bytes": peak_memory_bytes(trainer.accelerator),
        }
        storage.write_file_atomic(path, json.dumps({**outcome, **measured}, indent=1).encode())

    def _export(self, trainer: Trainer, result: RunResult) -> None:
        folder = self._folder / "export"
        storage.make_directory(folder)
        if result.best is not None:
            piece = "ema" if result.best.metric.startswith("eval_ema/") else "model"
            source = f"{piece} of the best checkpoint {result.best.name}"
            if self._is_exported(folder, source):
                return
            try:
                self._write_export(folder, source, _load(trainer, result.best.name, piece))
                return
            except CheckpointError:
                pass  # a branch of a run whose best checkpoint stayed behind
        piece = "model" if trainer.ema is None else "ema"
        source = f"{piece} after step {result.position.optimizer_step}"
        if not self._is_exported(folder, source):
            self._write_export(folder, source, _load(trainer, checkpoint_name(result.position), piece))

    def _is_exported(self, folder: Path, source: str) -> bool:
        """Whether the weights of `source` are there, undamaged and with this config."""
        stored = _read_json(folder / "config.json")
        if stored != json.loads(json.dumps({**self._export_config, "weights": source, "sha256": stored.get("sha256")})):
            return False
        try:
            weights = storage.read_file(folder / "model.safetensors", max_bytes=_MAX_WEIGHTS_BYTES)
        except OSError:
            return False
        return bool(hashlib.sha256(weights).hexdigest() == stored["sha256"])

    def _write_export(self, folder: Path, source: str, weights: Mapping[str, Tensor]) -> None:
        data = safetensors.torch.save(dict(weights))
        storage.write_file_atomic(folder / "model.safetensors", data)
        config = {**self._export_config, "weights": source, "sha256": hashlib.sha256(data).hexdigest()}
        storage.write_file_atomic(folder / "config.json", json.dumps(config, indent=1).encode())


def _load(trainer: Trainer, name: str, piece: str) -> Mapping[str, Tensor]:
    checkpoint = load_checkpoint(trainer.checkpointer.directory, name)
    assert checkpoint is not None  # one that is named is there, or an error
    weights: Mapping[str, Tensor] = checkpoint.pieces[piece]
    return weights


def _read_json(path: Path) -> dict[str, Any]:
    """Return what is in a file; nothing if it is not there or cannot be read."""
    try:
        return dict(json.loads(storage.read_file(path, max_bytes=_MAX_RECORD_BYTES)))
    except (OSError, ValueError, TypeError):
        return {}
