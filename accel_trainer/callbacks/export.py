"""Writes `export/`: the best weights of a run, or else the last, and what builds their model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.loading import load_checkpoint
from ..checkpoint.serialization import Tensors
from ..checkpoint.sharded import load_whole, stream_tensors
from ..core import filesystem
from ..core.errors import CheckpointError
from ..core.filesystem import writes_to
from ..core.json_files import read_json_object, write_json
from ..core.logger import logger
from ..core.rng import preserved_generators
from ..core.train_state import BestCheckpoint, TrainState, Weights, checkpoint_name
from ..core.user_code import describe_error
from ..training.callback import Callback, RunResult, TrainerView
from .onnx import OnnxExport, OnnxFiles


@dataclass(eq=False)
class Exporter(Callback):
    """Writes `model.safetensors` and `config.json` into `export/` when a run has ended.

    For the main process.

    `config` is what is needed to build the model. It is in `export/config.json` from the start, for
    commands that use a checkpoint. If no evaluation was the best, `weights` says which weights of
    the last step are exported. With `onnx`, the model is also converted to `model.onnx`. That is
    tried before the first step: if it fails, a warning says why, and the run goes on without it.
    """

    run_folder: Path
    _: KW_ONLY
    weights: Weights
    config: Mapping[str, Any]
    onnx: OnnxExport | None = None

    def __post_init__(self) -> None:
        self._folder = self.run_folder / "export"

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Write what builds the model, unless the run has ended before and exported it."""
        if not (self._folder / "config.json").exists():
            with writes_to(self.run_folder):
                filesystem.make_directory(self._folder)
                write_json(self._folder / "config.json", self.config)
        if self.onnx is not None and not trainer.is_finished:
            # An `eval_step` may need what training leaves: it then fails here, and not at the end.
            with preserved_generators(trainer.accelerator.device), suppress(Exception):
                self.onnx.call()
                if not self._convert(self.onnx, self.onnx.model.state_dict()).contents:
                    self.onnx = None

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Export the weights, unless the run was preempted and will continue."""
        if result.state != "preempted":
            with writes_to(self.run_folder):
                filesystem.make_directory(self._folder)
                directory = self.run_folder / "checkpoints"
                load = partial(load_checkpoint, directory, model=trainer.model)
                source, weights = load_best(load, result.best, result.position, self.weights)
                if result.best is not None and result.best.name not in source:
                    logger.warning(
                        "the best checkpoint %s is damaged or not of this run: export/ has the %s",
                        result.best.name,
                        source,
                    )
                self._export(source, weights)

    def _export(self, source: str, weights: Mapping[str, Any]) -> None:
        path = self._folder / "model.safetensors"
        filesystem.replace_file(path, stream_tensors(weights))
        config = {**self.config, "weights": source, "sha256": filesystem.sha256_of(path)}
        if self.onnx is not None:
            whole = {name: load_whole(stored) for name, stored in weights.items()}
            files = self._convert(self.onnx, whole)
            for name, data in files.contents.items():
                filesystem.write_file_atomic(self._folder / name, data)
            config |= files.config
        with suppress(OSError, ValueError):  # the files of the same weights are still theirs
            earlier = read_json_object(self._folder / "config.json")
            if earlier.get("sha256") == config["sha256"]:
                config = earlier | config
        write_json(self._folder / "config.json", config)

    def _convert(self, onnx: OnnxExport, weights: Tensors) -> OnnxFiles:
        """Return the ONNX files; none, with a warning, if the model cannot be converted."""
        try:
            return onnx.files(weights, self.config)
        except Exception as error:  # torch's exporter raises many types
            logger.warning(
                "no %s: torch cannot convert the model (%s)",
                self._folder / "model.onnx",
                describe_error(error.__cause__ or error),
            )
            return OnnxFiles({}, {})


def load_best(
    load: Callable[[str], Any],
    best: BestCheckpoint | None,
    state: TrainState,
    otherwise: Weights,
) -> tuple[str, Mapping[str, Any]]:
    """Return the best weights of a run, or else the last, and first a text that says which.

    `load` reads a checkpoint by its name. `otherwise` are the weights that are taken if no
    evaluation was the best, at the last `state`.
    """
    if best is not None:
        # It may be damaged, and a branch does not have that of the run that it left.
        with suppress(CheckpointError):
            weights = load(best.name).pieces[best.weights]
            return f"{best.weights} of the best checkpoint {best.name}", weights
    weights = load(checkpoint_name(state)).pieces[otherwise]
    return f"{otherwise} after step {state.optimizer_step}", weights
