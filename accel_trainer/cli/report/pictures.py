"""Images of a report: the most confident mistakes, and augmented training images.

Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...core.batch_plan import BatchConfig
from ...core.errors import ConfigError
from ...core.json_files import read_json_object
from ...data.loader import TrainLoader
from ...data.reader import Reader
from ...vision import (
    AugmentConfig,
    AugmentedImageReader,
    AugmentedPhotoReader,
    EvalTransform,
    ImageDataset,
    Normalization,
    PhotoAugmentConfig,
    PhotoConfig,
    Photos,
    load_images,
    load_photos,
)
from ...vision.data.bad_images import WHATEVER_WAS_KEPT
from ...vision.mistakes import MISTAKES_FILE, encode_png
from ..runs.run_reader import RunReader

_NUM_PICTURES = 16
_MAX_SIDE = 128  # pixels
_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+=*")

Picture = Mapping[str, Any]


def read_mistakes(run: RunReader) -> list[Picture]:
    """Return the mistakes of the last evaluation that the run stored, the most confident first."""
    try:
        stored = read_json_object(run.folder / MISTAKES_FILE)["mistakes"]
    except FileNotFoundError:
        return []
    return [
        {
            "src": mistake["picture"] if _PICTURE.fullmatch(mistake["picture"]) else "",
            "label": str(mistake["prediction"]),
            "truth": str(mistake["label"]),
            "confidence": f"{float(mistake['probability']):.0%}",
            "name": _without_folders(str(mistake["name"]), run),
        }
        for mistake in stored[:_NUM_PICTURES]
    ]


def _without_folders(name: str, run: RunReader) -> str:
    """Return the name of a sample as its dataset knows it.

    A report is made to be shown: it does not tell where a machine keeps its files.
    """
    command = run.environment.get("command") or {}
    directory = str(command.get("directory") or "")
    dataset = os.path.normpath(os.path.join(directory, str(run.config.get("dataset") or "")))
    if not os.path.isabs(dataset) or dataset == os.path.dirname(dataset):
        return name
    return name.replace(dataset + os.sep, "").replace(dataset, os.path.basename(dataset))


def load_data(run: RunReader, dataset: str, *, cache_dir: Path) -> ImageDataset | Photos:
    """Load a dataset as the run did. Raises UserError."""
    settings = run.config.get("photos")
    if settings is None:
        return load_images(dataset, cache_dir=cache_dir, bad_images=WHATEVER_WAS_KEPT)
    photos = PhotoConfig(**settings)
    return load_photos(
        dataset,
        image_column=photos.image_column,
        label_column=photos.label_column,
        val_fraction=photos.val_fraction,
        cache_dir=cache_dir,
    )


def draw_samples(run: RunReader, data: ImageDataset | Photos) -> list[Picture]:
    """Return the first training images of the first epoch, with their augmentation."""
    seed = run.config.get("seed") or 0
    cpu = torch.device("cpu")
    try:
        plan = BatchConfig(per_device_batch_size=_NUM_PICTURES).plan(
            len(data.train), num_processes=1
        )
        reader, normalization = _build_reader(run, data, seed, cpu)
    except (TypeError, ConfigError):  # a config of a different version
        return []
    loader = TrainLoader(reader, plan, seed=seed, device=cpu)
    batch = next(loader.step_batches(0, 0)).micro_batches[0]
    mean = torch.tensor(normalization.mean)[:, None, None]
    std = torch.tensor(normalization.std)[:, None, None]
    images = batch.inputs * std + mean  # [B, C, H, W]
    pixels = (images * 255).round().clamp(0, 255).to(torch.uint8)
    targets = batch.targets if batch.targets.ndim == 1 else batch.targets.argmax(1)
    return [
        {
            "src": encode_png(image.permute(1, 2, 0), max_side=_MAX_SIDE),
            "label": data.class_names[target],
        }
        for image, target in zip(pixels, targets.tolist(), strict=True)
    ]


def _build_reader(
    run: RunReader, data: ImageDataset | Photos, seed: int, device: torch.device
) -> tuple[Reader, Normalization | EvalTransform]:
    stored = run.config.get("augment") or {}
    augment: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()
    }
    if isinstance(data, Photos):
        transform = PhotoConfig(**run.config.get("photos") or {}).eval_transform()
        photo_reader = AugmentedPhotoReader(
            data.train,
            transform=transform,
            device=device,
            augment=PhotoAugmentConfig(**augment),
            num_classes=data.num_classes,
            seed=seed,
        )
        return photo_reader, transform
    reader = AugmentedImageReader(
        data.train,
        normalization=data.normalization,
        device=device,
        augment=AugmentConfig(**augment),
        seed=seed,
    )
    return reader, data.normalization
