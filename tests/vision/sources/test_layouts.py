"""Folders of splits, and of images and their masks, do not become classes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accel_trainer.core.errors import DataError
from accel_trainer.vision import load_images, load_photos
from accel_trainer.vision.data.photo_decode import decode_photo
from accel_trainer.vision.sources.layouts import TRAIN_NAMES, VAL_NAMES
from tests.vision.make_photos import encoded, photo, write_photos

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
    with pytest.raises(DataError, match="val/<class>/"):
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
    [
        ("Train", "Test"),
        ("more/Train-00000-of-00001", "more/Val-00000-of-00001"),
        ("dataTrain", "dataVal"),
        ("photos_train", "photos_dev"),
        ("train/0000", "validation/0000"),
        ("TRAIN/a", "eval_set/a"),
    ],
)
def test_tables_of_two_splits_are_read_as_two(train: str, val: str, tmp_path: Path) -> None:
    photo = (write_photos(tmp_path / "photos", ["0.jpg"]) / "0.jpg").read_bytes()
    for name in (train, val):
        num_pairs = 3 if name == train else 1
        labels = ["a", "b"] * num_pairs
        table = pa.table({"image": [{"bytes": photo}] * len(labels), "label": labels})
        path = tmp_path / "tables" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
    photos = load_photos(tmp_path / "tables", cache_dir=tmp_path / "cache")
    assert (len(photos.train), len(photos.val)) == (6, 2)
    assert not photos.notes


def test_two_configurations_of_a_dataset_are_not_read_as_one(tmp_path: Path) -> None:
    photo = (write_photos(tmp_path / "photos", ["0.jpg"]) / "0.jpg").read_bytes()
    for folder in ("cropped", "full"):
        path = tmp_path / "tables" / folder / "train-0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table({"image": [{"bytes": photo}] * 2, "label": ["a", "b"]}), path)
    with pytest.raises(DataError, match="cropped/train-0.parquet and full/train-0") as error:
        load_photos(tmp_path / "tables", val_fraction=0.5, cache_dir=tmp_path / "cache")
    assert error.value.code == "DATA_NOT_RECOGNISED"


def test_small_images_do_not_ignore_a_table_of_labels(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in ("ant", "bee"):
            write_photos(tmp_path / "images" / split / label, ["0.jpg"])
    load_images(str(tmp_path / "images"), cache_dir=tmp_path / "cache")
    (tmp_path / "images" / "train" / "metadata.csv").write_text("file_name,label\nant/0.jpg,bee\n")
    with pytest.raises(DataError, match="train/metadata.csv describes the images"):
        load_images(str(tmp_path / "images"), cache_dir=tmp_path / "cache")


def write_split(root: Path, name: str, seed: int, *, as_table: bool) -> set[bytes]:
    """Write four photos, and return them."""
    photos = [encoded(photo(8, 8, seed=4 * seed + index), "png") for index in range(4)]
    rows = list(zip("abab", photos, strict=True))
    for index, (label, data) in enumerate(rows if not as_table else []):
        path = root / name / label / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    if as_table:
        root.mkdir(exist_ok=True)
        images = [{"bytes": data} for data in photos]
        table = pa.table({"image": images, "label": [label for label, _ in rows]})
        pq.write_table(table, root / f"{name}.parquet")
    return set(photos)


@pytest.mark.parametrize("as_table", [False, True])
def test_both_readers_evaluate_on_the_same_split_and_on_test_last(
    as_table: bool, tmp_path: Path
) -> None:
    of_tests = [name for name in VAL_NAMES if name.startswith(("test", "eval"))]
    of_val = [name for name in VAL_NAMES if name not in of_tests]
    cases = [(name,) for name in VAL_NAMES]
    cases += itertools.product(of_val[-1:] if as_table else of_val, of_tests[:2])
    for number, held_out in enumerate(cases):
        root = tmp_path / str(number)
        train = TRAIN_NAMES[number % 2]
        expected = [
            write_split(root, name, seed, as_table=as_table)
            for seed, name in enumerate((train, *held_out))
        ]
        photos = load_photos(root, cache_dir=tmp_path / "cache")
        images = load_images(str(root), cache_dir=tmp_path / "cache")
        for split, of_images, wanted in (
            (photos.train, images.train, expected[0]),
            (photos.val, images.test, expected[1]),
        ):
            assert {split.encoded_at(index) for index in range(len(split))} == wanted, held_out
            pixels = {each.permute(1, 2, 0).numpy().tobytes() for each in of_images.images}
            assert pixels == {decode_photo(data, "").tobytes() for data in wanted}, held_out
        assert not photos.notes
        assert not images.notes
        for facts in (photos.facts, images.facts):
            is_said = any("not used" in fact or "not in" in fact for fact in facts)
            assert is_said == (len(held_out) > 1), facts
