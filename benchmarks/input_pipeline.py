"""Images per second, cropped, flipped and normalised: ours, and the usual code with `datasets` and
PIL."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel_trainer import BatchPlan, RuntimeConfig, TrainLoader
from accel_trainer.distributed.accelerator import start_accelerator
from accel_trainer.vision import AugmentConfig, AugmentedImageReader, ImageDataset, load_images

from . import results

BATCH_SIZE, PADDING, SIZE = 128, 4, 32
Clock = Callable[[], float]


def write_noise(folder: Path, *, num_train: int, num_test: int = 100) -> None:
    """Write parquet files like CIFAR-10's on the hub, with random images."""
    random = np.random.default_rng(0)
    for split, num in (("train", num_train), ("test", num_test)):
        pixels = random.integers(0, 256, (num, SIZE, SIZE, 3), dtype=np.uint8)
        write_parquet(folder / f"{split}.parquet", pixels, [i % 10 for i in range(num)])


def write_parquet(path: Path, pixels: NDArray[np.uint8], labels: Sequence[int]) -> None:
    """Write images [N, H, W, 3] and their labels below 10, as on the hub."""
    import datasets
    from PIL import Image

    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=max(labels) + 1)}
    )
    columns = {"img": [Image.fromarray(image) for image in pixels], "label": labels}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(str(path))


class PilTransform:
    """Zero-padded random crop, flip and normalisation of one PIL image, as in the usual recipes."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean = torch.tensor(mean)[:, None, None]
        self._std = torch.tensor(std)[:, None, None]

    def __call__(self, image: Any) -> Tensor:
        from PIL import Image, ImageOps

        row, column, flip = (
            int(torch.randint(high, ())) for high in (2 * PADDING + 1, 2 * PADDING + 1, 2)
        )
        image = ImageOps.expand(image.convert("RGB"), PADDING)
        image = image.crop((column, row, column + SIZE, row + SIZE))
        if flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        result: Tensor = (pixels.float() / 255 - self._mean) / self._std
        return result

    def of_batch(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {"img": [self(image) for image in rows["img"]], "label": rows["label"]}


class PerItem(Dataset[Any]):
    """A dataset that reads, decodes and transforms one sample at a time."""

    def __init__(self, rows: Any, transform: PilTransform) -> None:
        self._rows, self._transform = rows, transform

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self._rows[index]
        return self._transform(row["img"]), row["label"]


def collate(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    return torch.stack([row["img"] for row in rows]), torch.tensor([row["label"] for row in rows])


def hf_loader(
    rows: Any, transform: PilTransform, *, is_batched: bool, num_workers: int
) -> Iterator[Any]:
    options: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "shuffle": True,
        "num_workers": num_workers,
    }
    if is_batched:
        return iter(
            DataLoader(rows.with_transform(transform.of_batch), collate_fn=collate, **options)
        )
    return iter(DataLoader(PerItem(rows, transform), **options))


def our_loader(images: ImageDataset, crop_mode: Any) -> Iterator[Any]:
    num_samples = len(images.train)
    plan = BatchPlan(
        num_samples=num_samples,
        global_batch_size=BATCH_SIZE,
        per_device_batch_size=BATCH_SIZE,
        drop_last=True,
    )
    cpu = torch.device("cpu")
    reader = AugmentedImageReader(
        images.train,
        normalization=images.normalization,
        device=cpu,
        augment=AugmentConfig(crop_padding=PADDING, crop_mode=crop_mode),
        seed=0,
    )
    loader = TrainLoader(reader, plan, seed=0, device=cpu)
    return (
        batch
        for epoch in range(1000)
        for step_batch in loader.step_batches(epoch, 0)
        for batch in step_batch.micro_batches
    )


def images_per_s(batches: Iterator[Any], num_batches: int, clock: Clock) -> float:
    """Return the steady rate, without the first batches, during which workers start."""
    for _ in islice(batches, 4):
        pass
    start = clock()
    # a short pass of a peer may have fewer
    num_taken = sum(1 for _ in islice(batches, num_batches))
    return num_taken * BATCH_SIZE / (clock() - start)


def copied_bytes_per_s() -> float:
    """Return the memory bandwidth of one core: bytes read and written by a large copy."""
    source, target = torch.ones(2**28, dtype=torch.uint8), torch.zeros(2**28, dtype=torch.uint8)
    rates = []
    for _ in range(5):
        start = time.thread_time()
        target.copy_(source)
        rates.append(2 * len(source) / (time.thread_time() - start))
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dataset", type=Path, help="a folder with train.parquet and test.parquet; default: noise"
    )
    parser.add_argument("--images", type=int, default=10_000, help="of noise")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    import datasets

    datasets.disable_progress_bars()
    # memory that is freed is kept, as in a run: for all ways
    start_accelerator(RuntimeConfig(num_threads=1))
    started = results.environment()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.dataset or Path(scratch)
        if options.dataset is None:
            write_noise(folder, num_train=options.images)
        train_file = str(folder / "train.parquet")
        rows = datasets.load_dataset(
            "parquet", data_files=train_file, cache_dir=f"{scratch}/hf", split="train"
        )
        images = load_images(str(folder), cache_dir=Path(scratch) / "cache")
        transform = PilTransform(images.normalization.mean, images.normalization.std)

        def run(name: str) -> results.Row:
            if name.startswith("ours"):
                rate = images_per_s(our_loader(images, name.split()[-1]), 380, time.thread_time)
            else:
                num_workers = options.workers if "workers" in name else 0
                loader = hf_loader(
                    rows, transform, is_batched="batched" in name, num_workers=num_workers
                )
                rate = images_per_s(
                    loader, 24, time.perf_counter if num_workers else time.thread_time
                )
            return {
                "rate": rate,
                "bandwidth": copied_bytes_per_s() if name.startswith("ours") else None,
            }

        workers = f"{options.workers} workers, wall"
        names = ["ours, crop reflect", "ours, crop zero", "HF + PIL batched", "HF + PIL per item"]
        names += [f"HF + PIL batched, {workers}", f"HF + PIL per item, {workers}"]
        measured = results.interleave(names, run, repeats=options.repeats)
    table = []
    for name in names:
        rates = [row["rate"] for row in measured[name]]
        ratios = [
            mine / other["rate"]
            for mine, other in zip(rates, measured["HF + PIL batched"], strict=True)
        ]
        table.append(
            {
                "pipeline": name,
                "images/s": statistics.median(rates),
                "lowest": min(rates),
                "highest": max(rates),
                "of HF + PIL batched": statistics.median(ratios),
                "n": len(rates),
                "samples": rates,
            }
        )
    # Read as uint8, written as float32.
    shares = [
        row["rate"] * SIZE * SIZE * 3 * 5 / row["bandwidth"]
        for row in measured["ours, crop reflect"]
    ]
    results.write(
        "input_pipeline",
        title="Input pipeline",
        how=f"CIFAR-sized images ({'real, JPEG' if options.dataset else 'noise, PNG'}), batches "
        f"of {BATCH_SIZE}, crop (padding 4), flip, normalise, float32. Images per second of "
        "the thread's CPU time; with workers, of wall time. HF + PIL pads with zeros; our "
        "images are decoded once, beforehand.",
        tables={"One core": table},
        goals=[
            f"At least 200,000 images/s per core: {table[0]['images/s']:,.0f} (best "
            f"{table[0]['highest']:,.0f}).",
            f"At least 25 times batched HF + PIL: {table[0]['of HF + PIL batched']:.0f} times.",
            "Fraction of the memory bandwidth of a plain copy on one core "
            f"({measured['ours, crop reflect'][0]['bandwidth'] / 1e9:.0f} GB/s): "
            f"{statistics.median(shares):.0%}.",
        ],
        started=started,
    )


if __name__ == "__main__":
    main()
