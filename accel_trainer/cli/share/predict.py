"""`accel-trainer predict MODEL IMAGE ...`: predict the classes of images, with confidence.

IMAGE may be a folder of images. Images of any size are prepared with the transform that is stored
with the model, and their logits are averaged over the views of `--tta`, as in the run's evaluation.
If an image cannot be read or has an unsupported format, it is reported, the others are predicted,
and the exit code is 65.
Your own model runs from the ONNX file that its recipe writes with `--onnx`.

example: accel-trainer predict runs/first photos --top 2
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import ConfigError, DataError, ExitCode
from ...distributed.accelerator import RuntimeConfig, start_accelerator
from ...distributed.placement import place_model
from ...vision.data.photo_decode import decode_photo, read_photo
from ...vision.pretrained import (
    ExportConfig,
    from_pretrained,
    read_export_config,
    read_export_content,
)
from ...vision.sources.listing import LITTER, LeftOut, describe_left_out, list_photos
from ...vision.tasks import AveragedOverViews
from ..common.output import JsonObject, tell, tell_json
from ..common.parser import CommandParser
from ..common.threads import decoding_threads, in_order
from .best_so_far import opened_export
from .export import evaluation_of, run_of
from .onnx_model import Classes, OnnxModel, is_own_model, top_classes

_ADDRESS = re.compile(r"[a-z][a-z0-9+]+:/", re.IGNORECASE)

Prediction = tuple[Path, Classes | DataError]
"""The path of an image, and its classes with their probabilities, or the error of reading it."""


@torch.inference_mode()
def main(argv: Sequence[str]) -> int:
    """Print a line per image: its path, then labels with their confidence."""
    parser = CommandParser(__doc__)
    parser.add_model()
    parser.add_argument("image", type=Path, nargs="+", help="an image, or a folder of images")
    parser.add_number("--top", "classes to print per image; default: 1", default=1, lowest=1)
    parser.add_number("--batch-size", "images per forward pass; default: 64", default=64, lowest=1)
    parser.add_workers_option()
    parser.add_switch("--jsonl", "print a JSON object per image")
    options = parser.parse_args(argv)
    image = options.image[0]
    if (image / "export").is_dir() and not (options.model / "export").is_dir():
        raise ConfigError("USAGE", f"{image} is a run: give it first, before the images")
    with opened_export(options.model) as folder:
        return _predict(folder, options)


def _predict(folder: Path, options: argparse.Namespace) -> int:
    """Print the predictions of the export in `folder`, and return the exit code."""
    own_model = OnnxModel(folder) if is_own_model(folder) else None
    content = read_export_content(folder)
    if own_model is not None and "normalization" not in content:
        fact = f"the run did not record how to turn {options.image[0]} into its input"
        raise ConfigError("USAGE", f"{fact}: run export/model.onnx by onnxruntime")
    found_in = [find_images(given) for given in options.image]
    paths = [path for images, _ in found_in for path in images]
    left_out = [each for _, others in found_in for each in others if each.reason != LITTER]
    for line in describe_left_out(left_out):
        tell(f"accel_trainer: {line}", file=sys.stderr)
    config = read_export_config(folder)
    runtime = RuntimeConfig()
    accelerator = start_accelerator(runtime)
    device = torch.device("cpu") if own_model is not None else accelerator.device
    run = run_of(options.model)
    tta = (content.get("evaluation", {}) if run is None else evaluation_of(run)).get("tta", "none")
    model = own_model or AveragedOverViews(
        place_model(from_pretrained(folder), accelerator, runtime), tta
    )
    num_failed = sum(each.is_loss for each in left_out)
    with decoding_threads(options.num_workers) as threads:
        # Without a recorded size, images may differ in size and cannot share a batch.
        batch_size = options.batch_size if config.image_size is not None else 1
        results = predict(
            model,
            config,
            paths,
            top=options.top,
            batch_size=batch_size,
            threads=threads,
            device=device,
        )
        for path, found in results:
            if isinstance(found, DataError):
                num_failed += 1
                tell(f"accel_trainer: {found}", file=sys.stderr)
            if options.jsonl:
                tell_json(_row(path, found))
            elif not isinstance(found, DataError):
                classes = [f"{label} {confidence:.1%}" for label, confidence in found]
                tell("  ".join([str(path), *classes]).replace("\n", "\\n"))
    return ExitCode.DATA if num_failed else ExitCode.DONE


def find_images(path: Path) -> tuple[list[Path], list[LeftOut]]:
    """Return the path of an image, or of all images below a folder, and what is left out there.

    Raises DataError if there are none, and ConfigError for what is no path.
    """
    if str(path) == "-" or _ADDRESS.match(str(path)):
        what = "standard input is" if str(path) == "-" else f"{path}: images on the web are"
        raise ConfigError("USAGE", f"{what} not read: save them, and give files or a folder")
    if not path.is_dir():
        return [path], []
    listing = list_photos(path)
    if not listing.photos:
        found = [each for each in listing.left_out if each.reason != LITTER]
        what = f", but {found[0].path} ({found[0].reason})" if found else ""
        raise DataError("IMAGE", f"{path} contains no images{what}: give a different folder")
    return list(map(Path, listing.photos)), listing.left_out


def predict(
    model: Callable[[Tensor], Tensor],
    config: ExportConfig,
    paths: Iterable[Path],
    *,
    top: int,
    batch_size: int,
    threads: ThreadPoolExecutor,
    device: torch.device,
) -> Iterator[Prediction]:
    """Yield the images in order, each with its `top` classes, or with the error of reading it."""

    def load(path: Path) -> tuple[Path, Tensor | DataError]:
        try:
            return path, read_image(path, config)
        except DataError as error:
            return path, error

    loaded = in_order(threads, load, paths)
    while batch := list(islice(loaded, batch_size)):
        images = [image for _, image in batch if isinstance(image, Tensor)]
        logits = (
            model(torch.stack(images).to(device)).float()
            if images
            else torch.empty(0, len(config.class_names))
        )
        predicted = iter(top_classes(logits, config.class_names, top=top))
        for path, image in batch:
            found = image if isinstance(image, DataError) else next(predicted)
            yield path, found


def read_image(path: Path, config: ExportConfig) -> Tensor:
    """Return an image as model input: normalised, float32 [C, H, W]."""
    data = read_photo(path, str(path))
    if config.transform is not None:
        return config.transform.normalize(config.transform(data, str(path))[None])[0]
    return _read_resized(data, str(path), config)


def _read_resized(data: bytes, name: str, config: ExportConfig) -> Tensor:
    """Return the whole image, resized to the size of the images that the model was trained on."""
    import numpy as np
    from PIL import Image

    image = Image.fromarray(decode_photo(data, name))
    if config.in_channels == 1:
        image = image.convert("L")  # the same pixels, if they are grey
    if config.image_size is not None:
        height, width = config.image_size
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    rows = torch.from_numpy(np.array(image)).reshape(image.height, image.width, -1)
    pixels = rows.permute(2, 0, 1) / 255
    mean, std = (
        torch.tensor(values)[:, None, None] for values in vars(config.normalization).values()
    )
    return (pixels - mean) / std


def _row(path: Path, found: Classes | DataError) -> JsonObject:
    if isinstance(found, DataError):
        return {"path": str(path), "error": str(found)}
    classes = [{"label": label, "probability": probability} for label, probability in found]
    return {"path": str(path), "predictions": classes}
