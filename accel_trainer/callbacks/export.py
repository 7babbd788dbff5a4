"""`export/`: the best evaluated weights of a run, else the last, and what is needed to build the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ..checkpoint.format import checkpoint_name
from ..checkpoint.retention import load_checkpoint
from ..checkpoint.sharded import stream_tensors
from ..core import filesystem
from ..core.callback import Callback, RunResult, TrainerView
from ..core.errors import CheckpointError
from ..core.run_dir import writes_to


class Exporter(Callback):
    """Writes `export/model.safetensors` and `export/config.json` on the main process once a run has ended.

    `config` is what is needed to build the model; `weights` are exported from the last step if no evaluation was the
    best.
    """

    def __init__(self, run_folder: Path, *, weights: Literal["model", "ema"], config: Mapping[str, Any]) -> None:
        self._run_folder, self._folder = run_folder, run_folder / "export"
        self._weights, self._config = weights, config

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Export, unless the run continues later."""
        if trainer.accelerator.is_main_process and result.state != "preempted":
            with writes_to(self._run_folder):
                filesystem.make_directory(self._folder)
                if not self._export_best(result):
                    name = checkpoint_name(result.position)
                    self._export(f"{self._weights} after step {result.position.optimizer_step}", name, self._weights)

    def _export_best(self, result: RunResult) -> bool:
        if result.best is None:
            return False
        weights = "ema" if result.best.metric.startswith("eval_ema/") else "model"
        try:
            self._export(f"{weights} of the best checkpoint {result.best.name}", result.best.name, weights)
        except CheckpointError:
            return False  # a branch does not have the best checkpoint of its run
        return True

    def _export(self, source: str, checkpoint: str, weights: str) -> None:
        loaded = load_checkpoint(self._run_folder / "checkpoints", checkpoint)
        assert loaded is not None
        sha256 = hashlib.sha256()

        def hashed(chunks: Iterable[filesystem.Chunk]) -> Iterator[filesystem.Chunk]:
            for chunk in chunks:
                sha256.update(chunk)
                yield chunk

        chunks = hashed(stream_tensors(loaded.pieces[weights]))
        filesystem.replace_file(self._folder / "model.safetensors", chunks)
        config = {**self._config, "weights": source, "sha256": sha256.hexdigest()}
        filesystem.write_file_atomic(self._folder / "config.json", json.dumps(config, indent=1).encode())
