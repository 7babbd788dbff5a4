"""Photos per second, decoded and augmented to uint8 batches: ours, a bare loop of the same
operations, and others."""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from accel_trainer import BatchPlan, RuntimeConfig, TrainLoader
from accel_trainer.core.types import StepBatch
from accel_trainer.distributed.accelerator import start_accelerator
from accel_trainer.vision import (
    AugmentedPhotoReader,
    EvalTransform,
    PhotoAugmentConfig,
    Photos,
    load_photos,
)
from accel_trainer.vision.augment.photo import PhotoAugment, random_resized_box
from accel_trainer.vision.data.eval_transform import resize_box

from . import results
from .photo_peers import (
    BATCH_SIZE,
    NUM_CLASSES,
    PEERS,
    PIL,
    SCALE,
    SHAPE,
    SIZE,
    Source,
    installed_peers,
)

NUM_CUTS = 60
BARE, OURS = "bare loop", "ours"


def cut_photos(width: int, height: int) -> list[bytes]:
    """Return JPEG files cut from scikit-learn's two photographs."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    places, files = np.random.default_rng(0), []
    for index in range(NUM_CUTS):
        photo = Image.fromarray(load_sample_images().images[index % 2])
        left, top = int(places.integers(0, 140)), int(places.integers(0, 52))
        data = io.BytesIO()
        photo.resize((width, height), box=(left, top, left + 500, top + 375)).save(
            data, "jpeg", quality=92
        )
        files.append(data.getvalue())
    return files


def save_table(folder: Path, files: Sequence[bytes], num_rows: int) -> None:
    """Write `num_rows` photos, which repeat, as `save_to_disk` does."""
    import pyarrow as pa
    from datasets import ClassLabel, Dataset, Features, Image

    features = Features({"image": Image(), "label": ClassLabel(num_classes=NUM_CLASSES)})
    # in a record batch
    thousand = [files[index % len(files)] for index in range(min(1000, num_rows))]
    columns = {"image": thousand, "label": [index % NUM_CLASSES for index in range(len(thousand))]}
    few = Dataset.from_dict(columns, features=features)
    table = few.data.table
    whole = pa.concat_tables([table] * -(-num_rows // len(table))).slice(0, num_rows)
    Dataset(whole, info=few.info).save_to_disk(str(folder), max_shard_size="4GB")


def our_batches(photos: Photos, num_workers: int) -> Iterator[StepBatch]:
    num_samples = len(photos.train)
    plan = BatchPlan(
        num_samples=num_samples,
        global_batch_size=BATCH_SIZE,
        per_device_batch_size=BATCH_SIZE,
        drop_last=True,
    )
    cpu = torch.device("cpu")
    reader = AugmentedPhotoReader(
        photos.train,
        transform=EvalTransform(size=SIZE),
        device=cpu,
        num_workers=num_workers,
        augment=PhotoAugmentConfig(),
        num_classes=NUM_CLASSES,
        seed=0,
    )
    loader = TrainLoader(reader, plan, seed=0, device=cpu)
    # A micro-batch that is not indexed stays uint8, as those of the others.
    return (step for epoch in range(1000) for step in loader.step_batches(epoch, 0))


def bare_batches(files: Sequence[bytes]) -> Iterator[Any]:
    """Decode, crop, resize and flip into a batch, and do nothing else."""
    import simplejpeg

    draws = PhotoAugment(PhotoAugmentConfig(), size=SIZE, mean=(0.5,) * 3, seed=0, epoch=0).draw(
        torch.arange(4096)
    )
    row = 0
    while True:
        batch = np.empty((BATCH_SIZE, SIZE, SIZE, 3), np.uint8)
        for place in range(BATCH_SIZE):
            drawn, row = draws[row % len(draws)], row + 1
            pixels = simplejpeg.decode_jpeg(files[row % len(files)])
            box = random_resized_box(*pixels.shape[:2], scale=SCALE, shape=SHAPE, draws=drawn)
            photo = resize_box(pixels, box, SIZE)
            batch[place] = (photo.flip(1) if drawn.is_flipped else photo).numpy()
        yield batch


def bare_rate(files: Sequence[bytes], num_batches: int) -> float:
    start_accelerator(RuntimeConfig(num_threads=1))
    return photos_per_s(bare_batches(files), num_batches, time.perf_counter)


def photos_per_s(batches: Iterator[Any], num_batches: int, clock: Callable[[], float]) -> float:
    """Return the steady rate, without the first batches, during which workers start."""
    for _ in islice(batches, 3):
        pass
    start = clock()
    num_taken = sum(1 for _ in islice(batches, num_batches))
    return num_taken * BATCH_SIZE / (clock() - start)


def make_rate(
    folder: Path, files: Sequence[bytes], num_batches: int
) -> Callable[[str], results.Row]:
    """Return what measures a way by name; `2 workers` in it is of wall time, otherwise of CPU
    time."""
    import datasets

    num_rows = (num_batches + 4) * BATCH_SIZE
    save_table(folder / "saved", files, num_rows)
    saved = datasets.load_from_disk(folder / "saved")
    photos = load_photos(datasets.DatasetDict(train=saved, test=saved))
    source = Source(files, num_rows, saved, folder)

    def rate(name: str) -> results.Row:
        num_workers = 2 if "2 workers" in name else 0
        clock = time.perf_counter if num_workers else time.thread_time
        if name.startswith(BARE) and num_workers:
            with ProcessPoolExecutor(2, get_context("spawn")) as pool:
                rates = list(pool.map(bare_rate, [files] * 2, [num_batches // 2] * 2))
            return {"rate": sum(rates)}
        if name.startswith(BARE):
            return {"rate": photos_per_s(bare_batches(files), num_batches, clock)}
        if name.startswith(OURS):
            batches: Iterator[Any] = our_batches(photos, num_workers)
        else:
            batches = PEERS[name.removesuffix(", 2 workers")].batches(source, num_workers)
        return {"rate": photos_per_s(batches, num_batches, clock)}

    return rate


def table_of(measured: dict[str, list[results.Row]], *, to: Sequence[str]) -> list[results.Row]:
    """Return a row for each way, with the medians of its ratios to the ways `to` in the same
    round."""
    table = []
    for name, rows in measured.items():
        rates = [row["rate"] for row in rows]
        ratios = {}
        for other in to:
            pairs = zip(rates, measured[other], strict=True)
            ratios[f"of {other.partition(',')[0]}"] = statistics.median(
                mine / row["rate"] for mine, row in pairs
            )
        table.append(
            {
                "way": name,
                "photos/s": statistics.median(rates),
                "lowest": min(rates),
                "highest": max(rates),
            }
        )
        table[-1] |= {**ratios, "n": len(rates), "samples": rates}
    return table


def private_bytes() -> int:
    """Return the memory of this process that is no page of a file: what is mapped can be dropped at
    any time."""
    info = psutil.Process().memory_info()
    return int(info.rss - info.shared)


def start_of_a_run(folder: Path) -> None:
    """Print what the first batch of a large dataset takes, as JSON: seconds, and private memory in
    MiB."""
    import datasets  # noqa: F401  # the imports are not measured

    before = private_bytes()
    start = time.perf_counter()
    photos = load_photos(folder, val_fraction=0.01)
    loaded_s = time.perf_counter() - start
    steps = our_batches(photos, 0)
    next(steps)
    first_s = time.perf_counter() - start
    for _ in islice(steps, 300):
        pass
    after = private_bytes()
    row = {
        "photos": len(photos.train) + len(photos.val),
        "load s": loaded_s,
        "first batch s": first_s,
    }
    print(json.dumps(row | {"private MiB": (after - before) / 2**20}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batches", type=int, default=16, help="of 64 photos, in each measurement")
    parser.add_argument("--records", type=int, default=1_280_000, help="of the large dataset")
    parser.add_argument("--large", type=Path, help="only measure the start on this folder")
    options = parser.parse_args()
    # memory that is freed is kept, as in a run: for all ways
    start_accelerator(RuntimeConfig(num_threads=1))
    if options.large is not None:
        start_of_a_run(options.large)
        return
    import datasets

    datasets.disable_progress_bars()
    started = results.environment()
    with tempfile.TemporaryDirectory() as scratch:
        rate = make_rate(Path(scratch), cut_photos(500, 375), options.batches)
        ways = [BARE, OURS, *installed_peers()]
        one = results.interleave(ways, rate, repeats=options.repeats)
        names = [f"{name}, 2 workers" for name in ways]
        two = results.interleave(names, rate, repeats=options.repeats)
        save_table(Path(scratch) / "large", cut_photos(32, 32), options.records)
        large = results.in_process("photos", "--large", f"{scratch}/large")
    tables = {
        "One core, CPU time": table_of(one, to=[BARE, PIL]),
        "Two workers (threads of ours, processes of the others), wall time": table_of(
            two, to=[names[0], names[2]]
        ),
        "Start of a run": [large],
    }
    first, second = (list(tables.values())[place][1] for place in (0, 1))
    results.write(
        "photos",
        title="Photos",
        how=f"JPEG of 500 x 375 pixels cut from two photographs, RandomResizedCrop to {SIZE} "
        f"pixels with antialiasing, flip, batches of {BATCH_SIZE} in uint8. The bare loop is "
        "simplejpeg and torch's resize.",
        tables=tables,
        goals=[
            f"At least 1.5 times PIL in torch's DataLoader on one core: {first[f'of {PIL}']:.2f} "
            "times.",
            f"At least 0.9 of the bare loop on one core: {first[f'of {BARE}']:.2f}.",
            f"At least 0.9 of two bare loops with two workers: {second[f'of {BARE}']:.2f}.",
            f"The first batch within 2 s of the imports: {large['first batch s']:.2f} s; "
            f"at most 150 MiB of private memory: {large['private MiB']:.0f} MiB.",
        ],
        started=started,
    )


if __name__ == "__main__":
    main()
