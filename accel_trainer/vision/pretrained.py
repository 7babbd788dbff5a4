"""Loads an exported model and its expected input. It runs no code from the export."""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from ..checkpoint.serialization import DTYPES
from ..checkpoint.state_dict import check_weights, load_weights
from ..core import filesystem
from ..core.errors import CheckpointError, ConfigError
from ..core.json_files import MAX_BYTES, parse_json, read_json_object
from .data.eval_transform import EvalTransform, Views
from .data.images import Normalization
from .models.zoo import ModelConfig, build_model
from .sources.class_names import Names

Content = dict[str, Any]
"""What the `config.json` of an export says."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_WEIGHTS_BYTES = 2**36
# A forged config.json could ask for more memory than there is.
_MAX_CHANNELS = 2**12
_MAX_WIDTH = 2**16
_MAX_SIDE = 2**14
# The expected types of what is not part of an `ExportConfig`; None is always allowed.
_CONTENT = {"evaluation": dict, "weights": str, "onnx_sha256": str, "sha256": str}
_EVALUATION = {"mixed_precision": str, "seed": int, "ignore_index": int, "photos": dict}
_PHOTOS = {"image_column": str, "label_column": str, "val_fraction": int | float}


@dataclass(frozen=True)
class ExportConfig:
    """The contents of an export's `config.json`."""

    model: ModelConfig | None
    """None: a user's own model, which only its ONNX file describes."""
    in_channels: int
    class_names: Names
    normalization: Normalization
    image_size: tuple[int, int] | None
    """Height and width of the training images; None: not recorded, any size works."""
    transform: EvalTransform | None = None
    """How a photo of any size becomes an input; None: the training images were of one size."""

    def check_fits(self, weights: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError if the names, shapes or dtypes of `weights` do not fit the model.

        It allocates no memory for weights.
        """
        with torch.device("meta"):
            model = self.build_model()
        check_weights("model", model.state_dict(), weights)

    def build_model(self) -> nn.Module:
        """Build the model with random weights.

        Raises CheckpointError if it is not a model of accel_trainer.vision.
        """
        if self.model is None:
            fact = "the exported model is not one of accel_trainer.vision"
            raise CheckpointError(
                "EXPORT", f"{fact}: load its weights into your own class, or export it with --onnx"
            )
        return build_model(
            self.model,
            in_channels=self.in_channels,
            num_classes=len(self.class_names),
            image_size=self.image_size,
            pretrained=False,
        )


def from_pretrained(folder: Path | str) -> nn.Module:
    """Return the exported model in `folder`, on the CPU and in evaluation mode.

    `folder` is an export, a finished run, or ORG/NAME on the hub, which is downloaded once.

    Raises:
        CheckpointError: there is no export, it is damaged, or its model is not one of
            accel_trainer.vision.
    """
    folder = find_export(folder)
    config = read_export_config(folder)
    recorded = read_export_content(folder).get("sha256")
    path = file_in(folder, "model.safetensors")
    try:
        config.check_fits(_described_tensors(path))
        data = filesystem.read_file(path, max_bytes=_MAX_WEIGHTS_BYTES)
        if recorded not in (None, hashlib.sha256(data).hexdigest()):
            raise ValueError("its SHA-256 is not the one in config.json")
        weights = load_safetensors(data)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            "EXPORT", f"{path} cannot be read ({error}): export the run again"
        ) from error
    model = config.build_model()
    load_weights(model, weights)
    return model.eval()


def _described_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors that the header of a safetensors file describes, without their data."""
    with filesystem.open_file(path) as file:
        (size,) = struct.unpack("<Q", file.read(8).ljust(8))
        if size > MAX_BYTES:
            raise ValueError("its header is too large")
        header = parse_json(file.read(size))
    return {
        name: torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")
        for name, entry in header.items()
        if name != "__metadata__"
    }


def find_export(folder: Path | str) -> Path:
    """Return the folder with the exported weights.

    It is `folder` itself, `export` in a run's folder, or a download from the hub.
    """
    for place in (Path(folder), Path(folder) / "export"):
        is_link = place.is_symlink() and place != Path(folder)
        if not is_link and (place / "model.safetensors").is_file():
            return place
    if not Path(folder).exists() and _HUB_NAME.fullmatch(str(folder)):
        return _download(str(folder))
    fix = "give a finished run or an exported model"
    if runs := sorted(Path(folder).glob("*/export/model.safetensors")):
        fix = f"give one of its runs, such as {runs[0].parents[1]}"
    raise CheckpointError("EXPORT", f"{folder} has no model.safetensors: {fix}")


def file_in(folder: Path, name: str) -> Path:
    """Return the path of a file of an export. The links of a download from the hub are followed."""
    path = folder / name
    is_download = path.resolve().parent == (folder.parent.parent / "blobs").resolve()
    return path.resolve() if is_download else path


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    files = ["config.json", "model.onnx", "model.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # network errors depend on the version of the hub's HTTP library
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        fact = f"{name} is not a folder and cannot be downloaded from the hub ({reason})"
        raise CheckpointError("EXPORT", f"{fact}: check the name") from error


def read_export_content(folder: Path) -> Content:
    """Return the content of an export's `config.json`. Raises CheckpointError if it is damaged."""
    path = file_in(folder, "config.json")
    try:
        content = read_json_object(path)
        _check_kinds(content, _CONTENT)
        if "model" in content:  # that of a user's own model means what its recipe says
            _check_evaluation(content.get("evaluation") or {})
        if "class_names" in content and not _checked_names(content["class_names"]):
            del content["class_names"]
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "EXPORT", f"{path} cannot be read ({error}): export the run again"
        ) from error
    return content


def read_export_config(folder: Path) -> ExportConfig:
    """Read `config.json` in an export.

    Raises CheckpointError if it is damaged, or describes no model of accel_trainer.vision.
    """
    content = read_export_content(folder)
    path = file_in(folder, "config.json")
    try:
        normalization = content["normalization"].items()
        channels = int(content["in_channels"])
        mean_and_std = {name: _numbers(values, channels) for name, values in normalization}
        if min(mean_and_std["std"]) <= 0:
            raise ValueError("std is not above 0")
        model = ModelConfig(**content["model"]) if "model" in content else None
        if model is not None and model.width is not None:
            _bounded("width", model.width, _MAX_WIDTH)
        size = content.get("image_size")
        if size is not None:
            height, width = (_bounded("image_size", side, _MAX_SIDE) for side in size)
            size = (height, width)
        return ExportConfig(
            model=model,
            in_channels=_bounded("in_channels", channels, _MAX_CHANNELS),
            class_names=tuple(content["class_names"]),
            normalization=Normalization(**mean_and_std),
            image_size=size,
            transform=EvalTransform.from_dict(content["eval_transform"])
            if "eval_transform" in content
            else None,
        )
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        ConfigError,
    ) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        message = f"{path} does not describe a model of accel_trainer.vision ({reason})"
        raise CheckpointError("EXPORT", message) from error


def _check_kinds(values: Content, kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        if not isinstance(values.get(name), kind | None):
            raise ValueError(f"{name} is {str(values[name])[:40]!r}")


def _check_evaluation(values: Content) -> None:
    _check_kinds(values, _EVALUATION)
    _check_kinds(values.get("photos") or {}, _PHOTOS)
    if values.get("tta") not in (None, *get_args(Views)):
        raise ValueError(f"tta is {str(values['tta'])[:40]!r}")


def _checked_names(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("class_names is not a list of names")
    return values


def _bounded(name: str, value: Any, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}, not 1 to {most:,}")
    return value


def _numbers(values: Sequence[Any], count: int) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in values)
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"normalization {str(values)[:40]} is not {count} numbers")
    return numbers
