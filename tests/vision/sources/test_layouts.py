"""Folders of splits, and of images and their masks, do not become classes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accel_trainer.core.errors import DataError
from accel_trainer.vision import load_images, load_photos
from tests.vision.make_photos import write_photos

SPLITS = {
    "train_images": "test_images",
    "train-set": "val-set",
    "trainImages": "testImages",
    "train2017": "val2017",
    "seg_train": "seg_test",
    "Training_Data": "Validation_Data",
    "images_train": "images_val",
}
PAIRS = itertools.product(
    ("images", "imgs", "JPEGImages"), ("masks", "labels", "SegmentationClass")
)


@pytest.mark.parametrize("place", ["{}", "photos/{}", "{}/class {}"])
def test_folders_that_are_called_like_splits_are_no_classes(place: str, tmp_path: Path) -> None:
    for number, (train, val) in enumerate(SPLITS.items()):
        root = tmp_path / str(number)
        for name in (train, val):
            for each in (1, 2):
                write_photos(root / place.format(name, each), ["0.jpg", "1.jpg"])
        with pytest.raises(DataError, match="rename them to train/ and val/") as error:
            load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")
        assert train in str(error.value)
        assert val in str(error.value)


def test_images_and_their_masks_are_no_classes(tmp_path: Path) -> None:
    for number, (images, masks) in enumerate(PAIRS):
        root = tmp_path / str(number)
        for name in (images, masks):
            write_photos(root / "train" / name, ["0.jpg", "1.jpg"])
            write_photos(root / "val" / name, ["0.jpg"])
        with pytest.raises(DataError, match=f"{images}/ and {masks}/") as error:
            load_photos(root, cache_dir=tmp_path / "cache")
        assert error.value.code == "DATA_NO_CLASSES"


@pytest.mark.parametrize(
    "names",
    [
        ("train station", "test tube"),
        ("images", "boat"),
        ("train", "boat"),
        ("dev", "ops"),
        ("mask", "no mask"),
        ("label", "bottle"),
    ],
)
def test_classes_with_a_word_of_a_split_in_their_name_are_classes(
    names: tuple[str, str], tmp_path: Path
) -> None:
    for name in names:
        write_photos(tmp_path / name, [f"{index}.jpg" for index in range(6)])
    photos = load_photos(tmp_path, val_fraction=0.5, cache_dir=tmp_path / "cache")
    assert photos.class_names == tuple(sorted(names))


def test_small_images_without_class_folders_are_told_what_is_missing(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_photos(tmp_path / split, ["0.png", "1.png"])
    with pytest.raises(DataError, match="no class folders") as error:
        load_images(str(tmp_path), cache_dir=tmp_path / "cache")
    assert "train" in str(error.value)
    assert "train/<class>/" in str(error.value)
    for name in ("ant", "bee"):
        write_photos(tmp_path / "train" / name, ["0.png", "1.png"])
        (tmp_path / "train" / f"{name == 'bee':d}.png").unlink()
    with pytest.raises(DataError, match="test/<class>/"):
        load_images(str(tmp_path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    "place", ["data/{split}/{label}", "data/more/{split}/{label}", "{label}/{split}"]
)
def test_splits_below_another_folder_are_not_read_as_one(place: str, tmp_path: Path) -> None:
    for number, val in enumerate(("val", "Test", "validation", "test_images")):
        root = tmp_path / str(number)
        train = "train_images" if val == "test_images" else "train"
        for split, label in itertools.product((train, val, "other"), ("ant", "bee")):
            write_photos(root / place.format(split=split, label=label), ["0.jpg", "1.jpg"])
        with pytest.raises(DataError, match=f"{train}/ and {val}/") as error:
            load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")
        assert error.value.code == "DATA_NOT_RECOGNISED"


@pytest.mark.parametrize(
    ("train", "val"),
    [("Train", "Test"), ("more/Train-00000-of-00001", "more/Val-00000-of-00001")],
)
def test_tables_of_two_splits_are_not_read_as_one(train: str, val: str, tmp_path: Path) -> None:
    photo = (write_photos(tmp_path / "photos", ["0.jpg"]) / "0.jpg").read_bytes()
    for name in (train, val):
        table = pa.table({"image": [{"bytes": photo}] * 4, "label": ["a", "b"] * 2})
        path = tmp_path / "tables" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
    with pytest.raises(DataError, match="one split") as error:
        load_photos(tmp_path / "tables", val_fraction=0.5, cache_dir=tmp_path / "cache")
    assert Path(train).name in str(error.value)
    assert Path(val).name in str(error.value)


def test_small_images_do_not_ignore_a_table_of_labels(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in ("ant", "bee"):
            write_photos(tmp_path / "images" / split / label, ["0.jpg"])
    load_images(str(tmp_path / "images"), cache_dir=tmp_path / "cache")
    (tmp_path / "images" / "train" / "metadata.csv").write_text("file_name,label\nant/0.jpg,bee\n")
    with pytest.raises(DataError, match="train/metadata.csv describes the images"):
        load_images(str(tmp_path / "images"), cache_dir=tmp_path / "cache")
