"""`accel-trainer predict MODEL IMAGE ...`: the predicted classes of images, with confidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import DataError
from ...vision.pretrained import ExportConfig, find_export, from_pretrained, read_export_config
from ..parser import CommandParser

_EXAMPLE = "example: accel-trainer predict runs/first cat.png dog.jpg --top 3"


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per image: its path, then labels with their confidence."""
    parser = CommandParser(prog="accel-trainer predict", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("model", type=Path, help="an export, a finished run, or ORG/NAME on the hub")
    parser.add_argument("image", type=Path, nargs="+", help="an image in any format that pillow reads")
    parser.add_argument("--top", type=int, default=1, help="labels to print for each; default: 1")
    options = parser.parse_args(argv)
    folder = find_export(options.model)
    config, model = read_export_config(folder), from_pretrained(folder)
    for path in options.image:
        probabilities = model(read_image(path, config)[None])[0].softmax(0)
        top = probabilities.topk(min(max(1, options.top), len(config.class_names)))
        labels = [
            f"{config.class_names[index]} {confidence:.1%}"
            for confidence, index in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        ]
        print("  ".join([str(path), *labels]))
    return 0


def read_image(path: Path, config: ExportConfig) -> Tensor:
    """Return an image as model input: normalised, float32 [C, H, W]."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as file:
            image = file.convert("L" if config.in_channels == 1 else "RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError("IMAGE", f"{path} cannot be read as an image ({error})") from error
    if config.image_size is not None:
        height, width = config.image_size
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image)).reshape(image.height, image.width, -1).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in vars(config.normalization).values())
    return (pixels - mean) / std
