"""Draws augmentations.jpg: a photo in six epochs under each augmentation.

python docs/images/augmentations.py
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from sklearn.datasets import load_sample_images

from accel_trainer.vision import (
    AugmentedPhotoReader,
    EvalTransform,
    PhotoAugmentConfig,
    PhotoSplit,
)

SIZE = 112
NUM_EPOCHS = 6
LABEL_WIDTH = 150
STEP = SIZE + 4  # from one picture to the next, in pixels
PLAIN: dict[str, Any] = {"crop": "none", "flip": "none"}
ROWS = {
    "crop random-resized": {"flip": "none"},
    "crop padded": {"crop": "padded", "crop_padding": 24, "flip": "none"},
    "flip alternating": {"crop": "none", "flip": "alternating"},
    "color-jitter .4 .4 .4 .1": {**PLAIN, "color_jitter": (0.4, 0.4, 0.4, 0.1)},
    "policy randaugment": {**PLAIN, "policy": "randaugment"},
    "policy trivialaugment": {**PLAIN, "policy": "trivialaugment"},
    "erase 1": {**PLAIN, "erase": 1.0},
    "mixup 1": {**PLAIN, "mixup": 1.0},
    "cutmix 1": {**PLAIN, "cutmix": 1.0},
}


def jpeg(pixels: Any) -> bytes:
    """Return the photo, uint8 [H, W, 3], as a JPEG file."""
    data = BytesIO()
    Image.fromarray(pixels).save(data, "jpeg", quality=95)
    return data.getvalue()


def first_photo(photos: PhotoSplit, augment: PhotoAugmentConfig, epoch: int) -> Image.Image:
    """Return sample 0 as the model sees it in `epoch`."""
    transform = EvalTransform(size=SIZE)
    reader = AugmentedPhotoReader(
        photos,
        transform=transform,
        device=torch.device("cpu"),
        augment=augment,
        num_classes=2,
        seed=1,
    )
    (batch,) = reader.read([torch.tensor([0])], epoch)
    image = reader.finish(batch, epoch).inputs[0].permute(1, 2, 0)
    pixels = (image * torch.tensor(transform.std) + torch.tensor(transform.mean)) * 255
    return Image.fromarray(pixels.round().clamp(0, 255).byte().numpy())


def main() -> None:
    """Draw a row of pictures for each augmentation."""
    temple, flower = (jpeg(pixels) for pixels in load_sample_images().images)
    files = [temple, *[flower] * 9]
    photos = PhotoSplit(labels=np.zeros(10, np.int64), encoded_at=files.__getitem__, name_of=str)
    sheet = Image.new("RGB", (LABEL_WIDTH + NUM_EPOCHS * STEP, len(ROWS) * STEP), "white")
    for row, (name, options) in enumerate(ROWS.items()):
        ImageDraw.Draw(sheet).text((4, row * STEP + SIZE // 2 - 6), name, fill="black")
        for epoch in range(NUM_EPOCHS):
            image = first_photo(photos, PhotoAugmentConfig(**options), epoch)
            sheet.paste(image, (LABEL_WIDTH + epoch * STEP, row * STEP))
    sheet.save(Path(__file__).with_name("augmentations.jpg"), quality=75)


if __name__ == "__main__":
    main()
