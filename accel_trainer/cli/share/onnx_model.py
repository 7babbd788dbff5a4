"""Writes an exported network as ONNX.

Shapes: B samples, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ...core.errors import OutputError
from ...vision.pretrained import ExportConfig, from_pretrained, read_export_config

_ANY_SIZE = (32, 32)  # if the export does not record one


class _Normalized(nn.Module):
    """Normalisation followed by a model."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, config: ExportConfig) -> None:
        super().__init__()
        self.model = model
        for name, values in vars(config.normalization).items():
            self.register_buffer(name, torch.tensor(values)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, K] of images [B, C, H, W] with values between 0 and 1."""
        logits: Tensor = self.model((images - self.mean) / self.std)
        return logits


def write_onnx(folder: Path) -> bytes:
    """Return the exported model in `folder` as ONNX, for any batch size.

    Raises:
        OutputError: a package that torch's exporter needs is not installed.
    """
    config = read_export_config(folder)
    model = _Normalized(from_pretrained(folder), config).eval()
    images = torch.zeros(2, config.in_channels, *(config.image_size or _ANY_SIZE))
    try:
        with _silent():
            program = torch.onnx.export(
                model, (images,), dynamo=True, verbose=False, input_names=["images"], output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )  # fmt: skip
        assert program is not None
        return bytes(program.model_proto.SerializeToString())
    except ImportError as error:
        raise OutputError("EXPORT", f"--onnx needs {error.name}: pip install 'accel-trainer[onnx]'") from error


@contextmanager
def _silent() -> Iterator[None]:
    """Hide warnings of torch 2.13 about its own internals and optional packages."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
