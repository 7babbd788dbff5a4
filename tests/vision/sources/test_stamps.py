"""A file whose content changes is read again, whatever its size and time of modification say."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accel_trainer.vision import load_images, load_photos
from tests.vision.make_photos import encoded, photo, write_tar

TIME = 1_700_000_000
NUM_PHOTOS = 4


def photos_of(version: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield split, class and file of photos: in versions 0 and 1 two classes are exchanged."""
    for split in ("train", "val"):
        for index in range(NUM_PHOTOS):
            picture = photo(8, 8, seed=index).convert("RGB")
            yield split, "ab"[(index + version) % 2], encoded(picture, "bmp")


def write_table(path: Path, split: str, version: int) -> Path:
    rows = [(label, data) for each, label, data in photos_of(version) if each == split]
    images = [{"bytes": data, "path": None} for _, data in rows]
    table = pa.table({"image": images, "label": [label for label, _ in rows]})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    return path


def write_tables(root: Path, version: int) -> Path:
    for split in ("train", "val"):
        write_table(root / f"{split}.parquet", split, version)
    return root


def write_inner_table(root: Path, version: int) -> Path:
    write_table(root / "data" / "val.parquet", "val", version)
    return write_table(root / "data" / "train.parquet", "train", version).parent.parent


def write_one_table(root: Path, version: int) -> Path:
    return write_table(root / "all.parquet", "train", version)


def write_classes(root: Path, version: int) -> Path:
    """Exchange the pixels of files whose names stay."""
    for number, (split, _, data) in enumerate(photos_of(0)):
        other = (number + version) % 2
        path = root / split / "ab"[other] / f"{number - number % 2}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def write_tars(root: Path, version: int) -> Path:
    root.mkdir(exist_ok=True)
    for split in ("train", "val"):
        members = [
            member
            for number, (each, label, data) in enumerate(photos_of(version))
            for member in ((f"{number:02}.bmp", data), (f"{number:02}.txt", label.encode()))
            if each == split
        ]
        write_tar(root / f"{split}.tar", members)
    return root


def read_photos(source: Path, cache_dir: Path) -> object:
    fraction = 0.5 if source.is_file() else 0.0
    photos = load_photos(source, val_fraction=fraction, cache_dir=cache_dir)
    splits = (photos.train, photos.val)
    pairs = [(each.labels.tolist(), [*map(each.encoded_at, range(len(each)))]) for each in splits]
    return photos.fingerprint, pairs


def read_images(source: Path, cache_dir: Path) -> object:
    images = load_images(str(source), cache_dir=cache_dir)
    return images.fingerprint, images.train.images.numpy().tobytes()


WRITERS = {
    "parquet": write_tables,
    "parquet in a folder": write_inner_table,
    "one parquet file": write_one_table,
    "class folders": write_classes,
    "tars": write_tars,
}
OF_IMAGES = ("parquet", "parquet in a folder", "class folders")


@pytest.mark.parametrize(
    ("read", "layout"),
    [*((read_photos, each) for each in WRITERS), *((read_images, each) for each in OF_IMAGES)],
)
def test_bytes_exchanged_with_size_and_time_kept_are_seen(
    read: Callable[[Path, Path], object], layout: str, tmp_path: Path
) -> None:
    write = WRITERS[layout]
    found, sizes = [], []
    for version in (0, 1):
        source = write(tmp_path / "data", version)
        files = sorted(path for path in source.rglob("*") if path.is_file()) or [source]
        for path in files:
            os.utime(path, (TIME, TIME))
        sizes.append([(path, path.stat().st_size) for path in files])
        found.append(read(source, tmp_path / "cache"))
        assert found[-1] == read(source, tmp_path / f"cache of version {version}")
    assert sizes[0] == sizes[1]
    assert found[0] != found[1]
