"""Writes `export/`: the best weights of a run, or else the last, and what builds their model."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from ..checkpoint.loading import load_checkpoint
from ..checkpoint.sharded import load_whole, stream_tensors
from ..checkpoint.state_dict import load_weights
from ..core import filesystem
from ..core.callback import Callback, RunResult, TrainerView
from ..core.errors import CheckpointError
from ..core.json_files import write_json
from ..core.rng import preserved_generators
from ..core.run_dir import writes_to
from ..core.train_state import BestCheckpoint, TrainState, Weights, checkpoint_name
from ..core.types import EvalSource, Task, eval_step_of
from ..core.user_code import describe_error

_logger = logging.getLogger(__name__)
_EXAMPLE_SIZE = 8  # samples
ONNX_FILES = {"model.onnx": "onnx_sha256", "example.safetensors": "example_sha256"}
"""What `--onnx` adds to an export, and the names of the hashes in its `config.json`."""


class OnnxExport(NamedTuple):
    """What an ONNX file is made from: the model, and a task and a loader that show its use."""

    model: nn.Module
    """A copy of the model on the CPU."""
    task: Task
    loader: EvalSource

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with which the task calls the model for some samples."""
        batch = next(batch for batch in self.loader.batches() if len(batch))
        # The exporter takes an axis of size 1 for a constant: a small batch is repeated.
        some = torch.arange(_EXAMPLE_SIZE) % len(batch)
        batch = batch.map(lambda tensor: tensor[some].to("cpu"))
        calls: list[Any] = []
        model = self.model.eval()
        with model.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True):
            eval_step_of(self.task)(model, batch)
        args, kwargs = calls[0]
        return args, kwargs

    def files(self, weights: Mapping[str, Tensor]) -> tuple[bytes, bytes]:
        """Return the contents of `ONNX_FILES`: the model, and an example of inputs and outputs."""
        load_weights(self.model, weights)
        onnx, example = _to_onnx(self.model, *self.call())
        return onnx, safetensors.torch.save(example)


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
                if not self._convert(self.onnx, self.onnx.model.state_dict()):
                    self.onnx = None

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Export the weights, unless the run was preempted and will continue."""
        if result.state != "preempted":
            with writes_to(self.run_folder):
                filesystem.make_directory(self._folder)
                load = partial(load_checkpoint, self.run_folder / "checkpoints")
                source, weights = load_best(load, result.best, result.position, self.weights)
                if result.best is not None and result.best.name not in source:
                    _logger.warning(
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
            for name, data in self._convert(self.onnx, whole).items():
                filesystem.write_file_atomic(self._folder / name, data)
                config[ONNX_FILES[name]] = hashlib.sha256(data).hexdigest()
        write_json(self._folder / "config.json", config)

    def _convert(self, onnx: OnnxExport, weights: Mapping[str, Tensor]) -> dict[str, bytes]:
        """Return the contents of the ONNX file and its example, by name.

        If the model cannot be converted, warn and return nothing.
        """
        # The exporter warns if torchvision is missing (torch 2.13).
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                # The exporter causes warnings about torch's internals (torch 2.13).
                warnings.simplefilter("ignore")
                return dict(zip(ONNX_FILES, onnx.files(weights), strict=True))
        except Exception as error:  # torch's exporter raises many types
            _logger.warning(
                "no %s: torch cannot convert the model (%s)",
                self._folder / "model.onnx",
                describe_error(error.__cause__ or error),
            )
            return {}


def load_best(
    load: Callable[[str], Any],
    best: BestCheckpoint | None,
    position: TrainState,
    otherwise: Weights,
) -> tuple[str, Mapping[str, Any]]:
    """Return the best weights of a run, or else the last, and first a text that says which.

    `load` reads a checkpoint by its name. `otherwise` are the weights that are taken if no
    evaluation was the best, at the last `position`.
    """
    if best is not None:
        # It may be damaged, and a branch does not have that of the run that it left.
        with suppress(CheckpointError):
            weights = load(best.name).pieces[best.weights]
            return f"{best.weights} of the best checkpoint {best.name}", weights
    weights = load(checkpoint_name(position)).pieces[otherwise]
    return f"{otherwise} after step {position.optimizer_step}", weights


def _to_onnx(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bytes, dict[str, Tensor]]:
    """Return the ONNX model for batches of any size, and the named inputs and outputs of this call.

    Raises ValueError if an input or output has no batch dimension.
    """
    batch = torch.export.Dim("batch")
    shapes = torch.export.ShapesCollection()
    inputs = _tensors((args, kwargs))
    for tensor in inputs:
        others = {axis: torch.export.Dim.AUTO for axis, size in enumerate(tensor.shape) if size > 1}
        shapes[tensor] = others | ({0: batch} if tensor.ndim else {})
    traced = torch.export.export(
        model, args, kwargs, dynamic_shapes=shapes.dynamic_shapes(model, args, kwargs)
    )
    program = torch.onnx.export(traced, verbose=False)
    assert program is not None
    graph = program.model_proto.graph
    sizes = {
        value.name: value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output)
    }
    if any(size[:1] != next(iter(sizes.values()))[:1] for size in sizes.values()):
        raise ValueError("its inputs and outputs are not all of one sample each, [B, ...]")
    tensors = [*inputs, *_tensors(model(*args, **kwargs))]
    # safetensors refuses tensors with gaps and tensors that share memory.
    copies = [tensor.contiguous().clone() for tensor in tensors]
    return program.model_proto.SerializeToString(), dict(zip(sizes, copies, strict=True))


def _tensors(data: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in their order."""
    found: list[Tensor] = []
    recursively_apply(found.append, data)
    return found
