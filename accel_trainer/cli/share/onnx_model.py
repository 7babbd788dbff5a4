"""Writes networks of this package as ONNX, and runs the ONNX files of users' own models.

Shapes: B samples, K classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...callbacks.onnx import OnnxFiles, write_onnx
from ...core import filesystem
from ...core.errors import CheckpointError, DataError, OutputError
from ...vision.pretrained import (
    file_in,
    from_pretrained,
    read_export_config,
    read_export_content,
)
from ...vision.tasks import AveragedOverViews
from ..common.output import JsonObject

_DEFAULT_SIZE = (32, 32)  # of the traced images, if the export does not record a size
_MAX_BYTES = 1 << 36
Classes = list[tuple[str, float]]
"""Names of classes with their probabilities, the likeliest first."""


def convert(folder: Path, config: JsonObject) -> OnnxFiles:
    """Return the ONNX files of the exported model in `folder`.

    `config` is what the `config.json` beside it will be.

    Raises:
        OutputError: a package that torch's exporter needs is not installed.
    """
    described = read_export_config(folder)
    size = described.image_size or _DEFAULT_SIZE
    noise = torch.Generator().manual_seed(0)
    images = torch.randn(8, described.in_channels, *size, generator=noise)
    tta = config["evaluation"].get("tta", "none")
    try:
        model = AveragedOverViews(from_pretrained(folder), tta)
        return write_onnx(model, ((images,), {}), config)
    except ImportError as error:
        raise OutputError(
            "EXPORT", f"--onnx needs {error.name}: pip install 'accel-trainer[onnx]'"
        ) from error


def is_own_model(export: Path) -> bool:
    """Whether the model of an export is a user's own, not one of accel_trainer.vision."""
    return "model" not in read_export_content(export)


class OnnxModel:
    """The ONNX file of an export, on the CPU, which maps images to logits.

    Raises:
        CheckpointError: there is no such file, or it is not the one that the run has written.
        OutputError: onnxruntime is not installed.
    """

    def __init__(self, export: Path) -> None:
        expected = read_export_content(export).get("onnx_sha256")
        if expected is None:
            fact = f"{export} has no model.onnx, and the class of its model is in the recipe"
            raise CheckpointError(
                "EXPORT",
                f"{fact}: start the recipe again with --onnx, which only exports a finished run, "
                "or evaluate it there: model.load_state_dict(load_file('model.safetensors'))",
            )
        try:
            import onnxruntime
        except ImportError as error:
            raise OutputError(
                "EXPORT", f"{export / 'model.onnx'} needs onnxruntime: pip install onnxruntime"
            ) from error
        try:
            data = filesystem.read_file(file_in(export, "model.onnx"), max_bytes=_MAX_BYTES)
        except OSError as error:
            raise CheckpointError(
                "EXPORT", f"{export}/model.onnx cannot be read ({error.strerror})"
            ) from error
        if hashlib.sha256(data).hexdigest() != expected:
            raise CheckpointError(
                "EXPORT", f"{export}/model.onnx was changed: export the run again"
            )
        try:
            self._session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        except Exception as error:  # the types of onnxruntime's errors are private
            raise CheckpointError(
                "EXPORT", f"{export}/model.onnx cannot be loaded ({_in_short(error)}): export again"
            ) from error
        inputs = self._session.get_inputs()
        self._inputs = [value.name for value in inputs]
        values = [*inputs, *self._session.get_outputs()]
        if not inputs or not all(value.type.startswith("tensor(") for value in values):
            fact = f"{export}/model.onnx has inputs or outputs that are not tensors"
            raise CheckpointError("EXPORT", f"{fact}: export a model of tensors")

    def __call__(self, images: Tensor) -> Tensor:
        """Return the first output of the model for its only input.

        Raises DataError if it has others, or if the images do not fit.
        """
        first, *others = self._inputs
        if others:
            taken = ", ".join(self._inputs)
            raise DataError("INPUT", f"the image has no {others[0]}: the model takes {taken}")
        try:
            output, *_ = self._session.run(None, {first: images.numpy()})
        except Exception as error:  # the types of onnxruntime's errors are private
            fact = f"the image does not fit the model ({_in_short(error)})"
            raise DataError("INPUT", f"{fact}: give inputs like those in training") from error
        if not output.ndim:
            fact = "the model returns a single number for all images"
            raise DataError(
                "INPUT", f"{fact}: export a model that returns an output for each sample"
            )
        return torch.from_numpy(output)


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def top_classes(logits: Tensor, class_names: Sequence[str], *, top: int) -> list[Classes]:
    """Return the `top` classes of each row of logits [B, K]."""
    found = logits.softmax(1).cpu().topk(min(top, len(class_names)))
    rows = zip(found.values.tolist(), found.indices.tolist(), strict=True)
    return [
        [(class_names[label], value) for value, label in zip(*row, strict=True)] for row in rows
    ]
