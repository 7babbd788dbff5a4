"""Images for a report: the most confident mistakes, and augmented training images.

Shapes: N images, B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.batch_plan import BatchConfig
from ...core.errors import ConfigError, UserError
from ...vision import AugmentConfig, ImageDataset, ImageEvalLoader, ImageLoader
from ...vision.data.images import ImageSplit
from ...vision.pretrained import from_pretrained
from ..runs.run_reader import RunReader

_NUM_PICTURES = 16
MAX_EXAMINED = 2_000  # test images; takes seconds on a CPU

Picture = Mapping[str, Any]


@torch.inference_mode()
def find_mistakes(run: RunReader, images: ImageDataset) -> list[Picture]:
    """Return the exported model's mistakes on test images, the most confident first.

    Examines at most `MAX_EXAMINED` images, spread evenly over the data, which may be sorted by class. Returns nothing
    without an export.
    """
    try:
        model = from_pretrained(run.folder)
    except UserError:
        return []
    num_examined = min(len(images.test), MAX_EXAMINED)
    examined = torch.arange(num_examined) * len(images.test) // num_examined  # ids [N]
    split = ImageSplit(
        images=images.test.images[examined], labels=images.test.labels[examined], num_classes=images.num_classes
    )
    loader = ImageEvalLoader(
        split,
        batch_size=250,
        num_processes=1,
        process_index=0,
        normalization=images.normalization,
        device=torch.device("cpu"),
    )
    probabilities = torch.cat([model(batch.inputs).softmax(1) for batch in loader.batches()])  # [N, K]
    confidences, predictions = probabilities.max(1)
    wrong = (predictions != split.labels).nonzero()[:, 0]
    surest = wrong[confidences[wrong].argsort(descending=True)][:_NUM_PICTURES]
    names = images.class_names
    return [
        {
            "src": _encode(split.images[index]),
            "label": names[int(predictions[index])],
            "truth": names[int(split.labels[index])],
            "confidence": f"{float(confidences[index]):.0%}",
        }
        for index in surest.tolist()
    ]


def draw_samples(run: RunReader, images: ImageDataset) -> list[Picture]:
    """Return the first training images of the first epoch, with their augmentation."""
    try:
        augment = AugmentConfig(**run.config.get("augment") or {})
    except (TypeError, ConfigError):  # a config of another version
        return []
    loader = ImageLoader(
        images.train,
        plan=BatchConfig(per_device_batch_size=_NUM_PICTURES).plan(len(images.train), num_processes=1),
        process_index=0,
        seed=run.config.get("seed") or 0,
        augment=augment,
        normalization=images.normalization,
        device=torch.device("cpu"),
    )
    batch = next(loader.step_batches(0, 0)).micro_batches[0]
    mean = torch.tensor(images.normalization.mean)[:, None, None]
    std = torch.tensor(images.normalization.std)[:, None, None]
    pixels = ((batch.inputs * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)  # [B, C, H, W]
    targets = batch.targets if batch.targets.ndim == 1 else batch.targets.argmax(1)
    return [
        {"src": _encode(image), "label": images.class_names[target]}
        for image, target in zip(pixels, targets.tolist(), strict=True)
    ]


def _encode(image: Tensor) -> str:
    """Return uint8 [C, H, W] as a data URL of a PNG."""
    from PIL import Image

    pixels = image.permute(1, 2, 0).numpy()
    data = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(data, "png")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
