"""Loads an exported model and its expected input. Runs no code from the export."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import nn

from ..checkpoint.serialization import read_json_object
from ..checkpoint.state_dict import load_weights
from ..core import filesystem
from ..core.errors import CheckpointError, ConfigError
from . import ModelConfig, build_model
from .data.eval_transform import EvalTransform
from .data.images import Normalization

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_WEIGHTS_BYTES = 2**36


@dataclass(frozen=True)
class ExportConfig:
    """The contents of an export's `config.json`."""

    model: ModelConfig | None
    """None: a model of one's own, which only its ONNX file describes."""
    in_channels: int
    class_names: tuple[str, ...]
    normalization: Normalization
    image_size: tuple[int, int] | None
    """Height and width of the images it was trained on; None: not recorded, any size works."""
    transform: EvalTransform | None = None
    """How a photo of any size becomes its input; None: it was trained on images of one size."""

    def build_model(self) -> nn.Module:
        """Build the model with random weights. Raises CheckpointError if it is none of accel_trainer.vision."""
        if self.model is None:
            fact = "the exported model is not one of accel_trainer.vision"
            raise CheckpointError("EXPORT", f"{fact}: load its weights into your own class, or export it with --onnx")
        return build_model(
            self.model, in_channels=self.in_channels, num_classes=len(self.class_names), image_size=self.image_size,
            pretrained=False,
        )  # fmt: skip


def from_pretrained(folder: Path | str) -> nn.Module:
    """Return the exported model in `folder`, on the CPU and in evaluation mode.

    `folder` is an export, a finished run, or ORG/NAME on the hub, which is downloaded once.

    Raises:
        CheckpointError: there is no export, it is damaged, or its model is not one of accel_trainer.vision.
    """
    folder = find_export(folder)
    config = read_export_config(folder)
    model = config.build_model()
    path = file_in(folder, "model.safetensors")
    try:
        weights = load_safetensors(filesystem.read_file(path, max_bytes=_MAX_WEIGHTS_BYTES))
    except (OSError, SafetensorError) as error:
        raise CheckpointError("EXPORT", f"{path} cannot be read ({error}): export the run again") from error
    load_weights(model, weights)
    return model.eval()


def find_export(folder: Path | str) -> Path:
    """Return the folder with the exported weights: the given one, `export` in a run, or a download from the hub."""
    for place in (Path(folder), Path(folder) / "export"):
        is_link = place.is_symlink() and place != Path(folder)
        if not is_link and (place / "model.safetensors").is_file():
            return place
    if not Path(folder).exists() and _HUB_NAME.fullmatch(str(folder)):
        return _download(str(folder))
    raise CheckpointError("EXPORT", f"{folder} has no model.safetensors: give a finished run or an exported model")


def file_in(folder: Path, name: str) -> Path:
    """Return the path of an export's file. Downloads from the hub are links to `blobs`, which are followed."""
    path = folder / name
    is_download = path.resolve().parent == (folder.parent.parent / "blobs").resolve()
    return path.resolve() if is_download else path


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "model.onnx", "model.safetensors"]))
    except Exception as error:  # network errors depend on the version of the hub's HTTP library
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        message = f"{name} is not a folder and cannot be downloaded from the hub ({reason}): check the name"
        raise CheckpointError("EXPORT", message) from error


def read_export_config(folder: Path) -> ExportConfig:
    """Read `config.json` in an export."""
    path = file_in(folder, "config.json")
    try:
        content = read_json_object(path)
        mean_and_std = {name: tuple(values) for name, values in content["normalization"].items()}
        return ExportConfig(
            # Version 0.1.0 had no other stem.
            model=ModelConfig(**{"stem": "cifar", **content["model"]}) if "model" in content else None,
            in_channels=int(content["in_channels"]),
            class_names=tuple(content["class_names"]),
            normalization=Normalization(**mean_and_std),
            image_size=tuple(content["image_size"]) if "image_size" in content else None,
            transform=EvalTransform.from_dict(content["eval_transform"]) if "eval_transform" in content else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        message = f"{path} does not describe a model of accel_trainer.vision ({reason})"
        raise CheckpointError("EXPORT", message) from error
