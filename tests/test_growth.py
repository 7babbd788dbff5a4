"""What a start does once takes time and memory in proportion to the photos, classes and files.

Four times as many of each may cost six times as many lines and bytes: "for each class, look at all
photos" costs sixteen times as many. Both are counted, and no time is taken.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from accel_trainer.callbacks.metrics_file import MetricsFile
from accel_trainer.cli.runs import run_reader
from accel_trainer.cli.runs.run_reader import MetricsReader
from accel_trainer.core.batch_plan import BatchConfig
from accel_trainer.data.order import choose_order
from accel_trainer.data.samples import datasets_in
from accel_trainer.vision import EvalTransform, PhotoAugmentConfig, PhotoSplit, load_photos
from accel_trainer.vision.data.photo_reader import AugmentedPhotoReader
from accel_trainer.vision.sources.class_names import check_class_names, names_in_two_cases
from accel_trainer.vision.sources.labels import read_labels
from accel_trainer.vision.sources.layouts import refuse_inner_splits, refuse_unclear_tables
from accel_trainer.vision.sources.listing import describe_left_out, list_photos
from accel_trainer.vision.sources.photo_files import open_dataset
from accel_trainer.vision.sources.raw import Table
from tests.vision.make_photos import encoded, photo, write_tar

JPEG = encoded(photo(8, 8))
GROWTH = 4
AT_MOST = 6
Function = Callable[[], object]


class Cost(NamedTuple):
    """Lines of Python that ran, peak bytes of Python and numpy, and bytes that torch took."""

    lines: int
    peak_bytes: int
    torch_bytes: int


def cost_of(function: Function) -> Cost:
    lines = count_lines(function)
    tracemalloc.start()
    function()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profile:
        function()
    taken = sum(max(0, event.cpu_memory_usage) for event in profile.function_events)
    return Cost(lines, peak, taken)


def count_lines(function: Function) -> int:
    """Return how many lines ran; a loop in one line counts each time."""
    number = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal number
        number += event == "line"
        return count

    previous = sys.gettrace()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(previous)
    return number


def calls_of(function: Function) -> list[str]:
    """Return the names of the functions that are called."""
    names = []

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            names.append(frame.f_code.co_name if event == "call" else argument.__name__)

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return names


def labels(num_samples: int, num_classes: int) -> Any:
    return np.random.default_rng(0).permutation(np.arange(num_samples) % num_classes)


def balance(num_samples: int, num_classes: int, folder: Path) -> Function:
    of_samples = labels(num_samples, num_classes)
    config = BatchConfig(order="balanced")
    return lambda: choose_order(config, num_samples, labels=of_samples).draw(seed=0, epoch=1)


def count_classes(num_samples: int, num_classes: int, folder: Path) -> Function:
    reader = AugmentedPhotoReader(
        PhotoSplit(labels=labels(num_samples, num_classes), encoded_at=lambda _: b"", name_of=str),
        transform=EvalTransform(size=8),
        device=torch.device("cpu"),
        augment=PhotoAugmentConfig(),
        num_classes=num_classes,
        seed=0,
    )
    return lambda: reader.class_counts


def find_parts(num_samples: int, num_classes: int, folder: Path) -> Function:
    parts = [Subset(TensorDataset(torch.zeros(1)), [0]) for _ in range(num_samples)]
    return lambda: datasets_in(ConcatDataset(parts))


def name_shards(num_samples: int, num_classes: int, folder: Path) -> Function:
    paths = [folder / f"train-{number:05}-of-99999.parquet" for number in range(num_samples)]
    return lambda: refuse_unclear_tables(folder, {"train": paths})


def look_for_inner_splits(num_samples: int, num_classes: int, folder: Path) -> Function:
    paths = [
        str(folder / f"group {number % 7}" / f"test {number}") for number in range(num_classes)
    ]
    return lambda: refuse_inner_splits(folder, paths)


def name_classes(num_samples: int, num_classes: int, folder: Path) -> Function:
    names = [f"{number}a" for number in range(num_classes)]
    return lambda: (check_class_names(names, ""), names_in_two_cases(names))


def read_texts(num_samples: int, num_classes: int, folder: Path) -> Function:
    column = [f"class {number}" for number in labels(num_samples, num_classes)]
    tables = [[Table(Dataset.from_dict({"label": part}), "") for part in (column, column)]]
    return lambda: read_labels(tables, "label")


def write_classes(num_samples: int, num_classes: int, folder: Path) -> None:
    for number in range(num_samples):
        path = folder / f"class {number % num_classes}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(JPEG)
        (path.with_suffix(".txt")).touch()


def load(folder: Path) -> Function:
    return lambda: load_photos(folder, val_fraction=0.5, cache_dir=folder.parent / "cache")


def load_folders(num_samples: int, num_classes: int, folder: Path) -> Function:
    write_classes(num_samples, num_classes, folder)
    return load(folder)


def load_metadata(num_samples: int, num_classes: int, folder: Path) -> Function:
    write_classes(num_samples, num_classes, folder)
    names = [str(path.relative_to(folder)) for path in folder.rglob("*.jpg")]
    rows = "".join(f"{name},{index % num_classes}\n" for index, name in enumerate(names))
    (folder / "metadata.csv").write_text(f"file_name,label\n{rows}")
    return load(folder)


def load_table(num_samples: int, num_classes: int, folder: Path) -> Function:
    table = pa.table(
        {
            "image": [{"bytes": JPEG, "path": f"{number}.jpg"} for number in range(num_samples)],
            "label": labels(num_samples, num_classes),
        }
    )
    folder.mkdir()
    pq.write_table(table, folder / "train.parquet")
    return load(folder)


def load_tars(num_samples: int, num_classes: int, folder: Path) -> Function:
    members = [
        member
        for number in range(num_samples)
        for member in (
            (f"{number:06}.jpg", JPEG),
            (f"{number:06}.cls", str(number % num_classes).encode()),
        )
    ]
    write_tar(folder / "photos.tar", members)
    return load(folder)


def describe(num_samples: int, num_classes: int, folder: Path) -> Function:
    write_classes(num_samples, num_classes, folder)
    left_out = list_photos(folder).left_out
    return lambda: describe_left_out(left_out)


FUNCTIONS = {
    balance: (8_000, 50),
    count_classes: (8_000, 50),
    find_parts: (150, 1),
    name_shards: (150, 1),
    look_for_inner_splits: (1, 150),
    name_classes: (1, 150),
    read_texts: (2_000, 50),
    load_folders: (400, 20),
    load_metadata: (400, 20),
    load_table: (400, 20),
    load_tars: (400, 20),
    describe: (400, 20),
}


@pytest.mark.parametrize("make", FUNCTIONS)
def test_four_times_as_much_data_cost_less_than_six_times_as_much(
    make: Callable[[int, int, Path], Function], tmp_path: Path
) -> None:
    num_samples, num_classes = FUNCTIONS[make]
    small = make(num_samples, num_classes, tmp_path / "small")
    large = make(GROWTH * num_samples, GROWTH * num_classes, tmp_path / "large")
    small()  # the first call imports libraries and fills caches
    large()
    one, other = cost_of(small), cost_of(large)
    assert other.lines < AT_MOST * one.lines
    assert other.peak_bytes < AT_MOST * one.peak_bytes
    assert other.torch_bytes <= AT_MOST * one.torch_bytes


def test_photos_are_listed_without_a_look_at_each(tmp_path: Path) -> None:
    looks = []
    for number in (50, 200):
        folder = tmp_path / str(number)
        write_classes(number, 5, folder)
        names = calls_of(partial(open_dataset, folder, cache_dir=None))
        looks.append([name for name in names if name in ("stat", "lstat", "islink", "isfile")])
        assert "scandir" in names
    assert len(looks[0]) == len(looks[1])


def test_what_save_to_disk_wrote_is_opened_without_hashing_each_file(tmp_path: Path) -> None:
    Dataset.from_dict({"label": [0, 1] * 4}).save_to_disk(str(tmp_path / "saved"), num_shards=4)
    (first, *_) = sorted((tmp_path / "saved").glob("*.arrow"))
    assert "generate_fingerprint" in calls_of(partial(Dataset.from_file, str(first)))
    names = calls_of(partial(open_dataset, tmp_path / "saved", cache_dir=None))
    assert "generate_fingerprint" not in names


def test_rows_that_a_long_run_leaves_out_are_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_reader, "_MAX_ROWS", 50)
    path = tmp_path / "metrics.jsonl"
    rows = MetricsFile(path)
    for step in range(1, 3201):
        event = "eval" if step % 800 == 0 else "train"
        picture = {"train/picture": {"step": step}} if step == 777 else {}
        rows.append({"event": event, "optimizer_step": step, "epoch": 1, "loss": 1.0, **picture})
    rows.close()
    reader = MetricsReader(path)
    parsed = [name for name in calls_of(reader.read) if name == "parse_json"]
    assert len(parsed) < 3200 // 8
    assert [row["optimizer_step"] for row in reader.read() if row["event"] == "eval"] == [
        *range(800, 3201, 800)
    ]
    assert reader.logged == {"train/picture": {"step": 777}}
