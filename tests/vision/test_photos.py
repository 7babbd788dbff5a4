from __future__ import annotations

import logging
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value

from accel_trainer import BatchConfig
from accel_trainer.core.errors import ConfigError, DataError
from accel_trainer.vision import EvalTransform, PhotoAugmentConfig, build_photo_loaders
from accel_trainer.vision.sources.photo_splits import load_splits
from accel_trainer.vision.sources.photos import Photos, PhotoSplit, load_photos

from .loader_run import loader_run
from .make_photos import encoded, photo, write_classes, write_photos, write_tar


def load(source: Any, tmp_path: Path, **options: Any) -> Photos:
    return load_photos(source, cache_dir=tmp_path / "cache", **options)


def contents(split: PhotoSplit) -> list[tuple[int, bytes]]:
    return [(int(split.labels[index]), split.encoded_at(index)) for index in range(len(split))]


def table(count: int, *, names: bool = True, classes: int = 2) -> Dataset:
    """Photos with bytes in the table, as on the hub."""
    images = [
        {"bytes": encoded(photo(30, 20, seed=index)), "path": f"{index:04}.jpg" if names else None}
        for index in range(count)
    ]
    features = Features(
        {
            "image": Image(),
            "label": ClassLabel(names=[f"class {label}" for label in range(classes)]),
        }
    )
    return Dataset.from_dict(
        {"image": images, "label": [i % classes for i in range(count)]}, features=features
    )


def test_a_folder_with_train_and_val(tmp_path: Path) -> None:
    root = tmp_path / "photos [2021]"
    write_classes(root / "train", ["bee", "ant", "cow"])
    write_classes(root / "val", ["ant", "cow"], per_class=2)
    photos = load(root, tmp_path)
    assert photos.class_names == ("ant", "bee", "cow")
    assert photos.num_classes == 3
    assert photos.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert photos.train.labels.dtype == np.int64
    assert photos.train.labels.flags.writeable, "torch warns of others"
    assert photos.val.labels.tolist() == [0, 0, 2, 2]
    assert photos.train.encoded_at(4) == (root / "train" / "bee" / "1.jpg").read_bytes()
    assert str(root / "train" / "bee" / "1.jpg") in photos.train.name_of(4)
    assert len(photos.train) == 9


def several_labels(labels: list[list[int] | None]) -> Dataset:
    images = [
        {"bytes": encoded(photo(30, 20, seed=index)), "path": f"{index}.jpg"}
        for index in range(len(labels))
    ]
    features = Features({"image": Image(), "tags": List(Value("int64"))})
    return Dataset.from_dict({"image": images, "tags": labels}, features=features)


def test_photos_with_any_number_of_labels_are_a_row_of_ones_and_zeros(tmp_path: Path) -> None:
    splits = {
        "train": several_labels([[0, 2], [], [1], [2, 2]]),
        "val": several_labels([[1], [0, 1, 2]]),
    }
    photos = load(DatasetDict(splits), tmp_path, multi_label=True)
    assert photos.class_names == ("0", "1", "2")
    assert photos.train.labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert photos.val.labels.tolist() == [[0, 1, 0], [1, 1, 1]]
    assert photos.train.labels.dtype == np.float32


@pytest.mark.parametrize(
    ("train", "val", "line"),
    [
        ([[0], None], [[0]], "row 1 of the dataset has no label in column tags"),
        ([[0], [1, -1]], [[0]], "row 1 of the dataset has label -1"),
        ([[0], [1, None]], [[0]], "row 1 of the dataset has no label in column tags"),
        (
            [[0], [0]],
            [[0], [5]],
            "(row 1 of the dataset) is of class 5, which no training photo has",
        ),
    ],
)
def test_lists_of_labels_that_cannot_be_used_are_named_by_their_row(
    tmp_path: Path, train: list[list[int] | None], val: list[list[int] | None], line: str
) -> None:
    splits = DatasetDict(train=several_labels(train), val=several_labels(val))
    with pytest.raises(DataError, match=re.escape(line)):
        load(splits, tmp_path, multi_label=True)


def test_lists_of_labels_are_read_only_where_they_are_expected(tmp_path: Path) -> None:
    splits = DatasetDict(train=several_labels([[0], [1]]), val=several_labels([[0]]))
    with pytest.raises(DataError, match=r"each photo has several labels\)"):
        load(splits, tmp_path, label_column="tags")
    with pytest.raises(DataError, match="column label of the dataset .*each photo has one label"):
        load(
            DatasetDict(train=table(4), val=table(2)),
            tmp_path,
            label_column="label",
            multi_label=True,
        )


def test_a_mixture_of_photos_with_several_labels_weighs_each(tmp_path: Path) -> None:
    splits = DatasetDict(
        train=several_labels([[0, 2], [], [1], [2]] * 2), val=several_labels([[1]])
    )
    photos = load(splits, tmp_path, multi_label=True)
    loader, _ = build_photo_loaders(
        loader_run(BatchConfig(per_device_batch_size=8)),
        photos,
        augment=PhotoAugmentConfig(mixup=1.0),
        transform=EvalTransform(size=8),
    )
    (batch,) = next(iter(loader.step_batches(0, 0))).micro_batches
    assert batch.targets.shape == (8, 3)
    assert 0 < batch.targets[batch.targets > 0].min() < 1
    assert batch.targets.max() <= 1


def test_the_same_photos_have_the_same_fingerprint_wherever_they_are(tmp_path: Path) -> None:
    """Fault (Data, config and users' code): a photo is damaged, or replaced, and can still be
    decoded; two photos are swapped, or one is deleted; a label in a table is changed; two files
    of a packed dataset are swapped -> **not detected while training**: there are no checksums
    for photos that are not packed, for labels, or for the order of packed files, and reading
    everything at each start would take too long. A resume compares the number of photos, all
    labels and the bytes of 256 photos of each split
    """
    write_classes(tmp_path / "a" / "train")
    write_classes(tmp_path / "a" / "val")
    first = load(tmp_path / "a", tmp_path)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert load(tmp_path / "b", tmp_path).fingerprint == first.fingerprint
    (tmp_path / "b" / "train" / "ant" / "1.jpg").write_bytes(encoded(photo(9, 9)))
    changed = load(tmp_path / "b", tmp_path)
    assert changed.fingerprint != first.fingerprint
    assert changed.fingerprint.startswith("sampled:")
    (tmp_path / "b" / "val" / "ant" / "1.jpg").rename(tmp_path / "b" / "val" / "bee" / "x.jpg")
    assert load(tmp_path / "b", tmp_path).fingerprint != changed.fingerprint


def test_a_fraction_is_set_aside_by_name(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "photos", ["ant", "bee"], per_class=40)
    photos = load(root, tmp_path, val_fraction=0.25)
    assert len(photos.train) + len(photos.val) == 80
    assert 10 <= len(photos.val) <= 30
    held_out = {data for _, data in contents(photos.val)}
    assert held_out.isdisjoint(data for _, data in contents(photos.train))

    moved = shutil.copytree(root, tmp_path / "elsewhere" / "photos")
    write_photos(moved, ["ant/0000.jpg", "bee/zzz.jpg", "cow/1.jpg", "cow/2.jpg"], size=(64, 50))
    more = load(moved, tmp_path, val_fraction=0.25)
    old = {data for _, data in contents(photos.train)} | held_out
    assert {data for _, data in contents(more.val)} & old == held_out


def test_a_home_folder_sets_the_same_photos_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    root = write_classes(tmp_path / "photos", ["ant", "bee"], per_class=20)
    named, given = (load(each, tmp_path, val_fraction=0.3) for each in (root, "~/photos"))
    assert contents(named.val) == contents(given.val)
    assert named.fingerprint == given.fingerprint
    splits = load_splits("~/photos", cache_dir=tmp_path)
    assert splits.stored_name("train", 0) == "ant/0.jpg"


def test_rows_without_names_are_set_aside_by_their_place(tmp_path: Path) -> None:
    few, many = (load(table(count, names=False), tmp_path, val_fraction=0.5) for count in (20, 30))
    held_out = {data for _, data in contents(few.val)}
    assert 0 < len(held_out) < 20
    assert held_out <= {data for _, data in contents(many.val)}
    assert held_out.isdisjoint(data for _, data in contents(many.train))


def test_a_class_without_a_validation_photo_is_named_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_classes(tmp_path / "photos", ["ant", "bee"], per_class=20)
    write_classes(root, ["cow"], per_class=1)
    photos = load(root, tmp_path, val_fraction=0.2)
    assert len(photos.notes) == 1
    assert "photo of cow: add photos of it" in photos.notes[0]
    with caplog.at_level(logging.WARNING):
        build_photo_loaders(
            loader_run(BatchConfig(per_device_batch_size=4)),
            photos,
            augment=PhotoAugmentConfig(),
            transform=EvalTransform(size=8),
        )
    assert [record.message for record in caplog.records if record.name.startswith("accel")] == [
        photos.notes[0]
    ]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5, float("nan")])
def test_a_wrong_fraction_is_refused(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(ConfigError, match="set it to at least 0 and below 1"):
        load(tmp_path, tmp_path, val_fraction=fraction)


def test_photos_on_disk_and_in_memory_are_the_same(tmp_path: Path) -> None:
    both = DatasetDict(train=table(6), validation=table(4))
    both.save_to_disk(str(tmp_path / "saved"))
    for split, data in both.items():
        (tmp_path / "parquet" / "data").mkdir(parents=True, exist_ok=True)
        data.to_parquet(str(tmp_path / "parquet" / "data" / f"{split}-00000-of-00001.parquet"))
    expected = load(both, tmp_path)
    assert contents(expected.train) == [(i % 2, encoded(photo(30, 20, seed=i))) for i in range(6)]
    for source in ("saved", "parquet"):
        photos = load(tmp_path / source, tmp_path)
        assert photos.class_names == ("class 0", "class 1")
        assert photos.fingerprint == expected.fingerprint
        assert contents(photos.val) == contents(expected.val)
    only_train = load(
        tmp_path / "parquet" / "data" / "train-00000-of-00001.parquet", tmp_path, val_fraction=0.5
    )
    assert len(only_train.train) + len(only_train.val) == 6


def test_a_selection_of_a_dataset_keeps_its_order(tmp_path: Path) -> None:
    data = table(8).shuffle(seed=3).select(range(1, 7))
    photos = load(DatasetDict(train=data, test=data), tmp_path)
    assert photos.train.labels.tolist() == data["label"]
    expected = [row["image"]["bytes"] for row in data.cast_column("image", Image(decode=False))]
    assert [data for _, data in contents(photos.train)] == expected
    assert "row 2 of the dataset" in photos.train.name_of(2)
    half = load(data, tmp_path, val_fraction=0.5)
    assert sorted(contents(half.train) + contents(half.val)) == sorted(contents(photos.train))


def test_tars_of_webdataset(tmp_path: Path) -> None:
    for split, count in (("train", 5), ("val", 3)):
        members = [
            member
            for index in range(count)
            for member in (
                (f"{index:05}.jpg", encoded(photo(20, 20, seed=index))),
                (f"{index:05}.cls", b"%d" % (index % 2)),
            )
        ]
        write_tar(tmp_path / "tars" / f"{split}-0000.tar", members)
    photos = load(tmp_path / "tars", tmp_path)
    assert photos.class_names == ("0", "1")
    assert contents(photos.train) == [(i % 2, encoded(photo(20, 20, seed=i))) for i in range(5)]
    assert len(photos.val) == 3


@pytest.mark.parametrize(
    ("labels", "feature", "names", "expected"),
    [
        ([3, 1, 3, 2], Value("int64"), ("1", "2", "3"), [2, 0, 2, 1]),
        ([10, 9, 9, 10], Value("int32"), ("9", "10"), [1, 0, 0, 1]),
        (["dog", "cat", "dog", "emu"], Value("string"), ("cat", "dog", "emu"), [1, 0, 1, 2]),
        ([True, False, True, True], Value("bool"), ("False", "True"), [1, 0, 1, 1]),
        ([1, 0, 1, 1], ClassLabel(names=["x", "y", "z"]), ("x", "y", "z"), [1, 0, 1, 1]),
    ],
)
def test_labels_are_integers_strings_or_classes(
    tmp_path: Path, labels: list[Any], feature: Any, names: tuple[str, ...], expected: list[int]
) -> None:
    columns = {"photo": [encoded(photo(9, 9))] * 4, "kind": labels}
    data = Dataset.from_dict(
        columns, features=Features({"photo": Value("binary"), "kind": feature})
    )
    photos = load(DatasetDict(train=data, val=data), tmp_path)
    assert photos.class_names == names
    assert photos.train.labels.tolist() == expected


@pytest.mark.parametrize(
    ("labels", "feature", "message"),
    [
        ([0, -1], Value("int64"), "row 1 of the dataset has label -1 (1 such row): correct"),
        (
            [0, -1],
            ClassLabel(names=["x", "y"]),
            "row 1 of the dataset has label -1 (1 such row): the classes are 0 to",
        ),
        (
            [None, 1],
            Value("int64"),
            "row 0 of the dataset has no label in column label (1 such row)",
        ),
    ],
)
def test_wrong_labels_are_one_line(
    tmp_path: Path, labels: list[Any], feature: Any, message: str
) -> None:
    data = Dataset.from_dict(
        {"image": [encoded(photo(9, 9))] * 2, "label": labels},
        features=Features({"image": Image(), "label": feature}),
    )
    with pytest.raises(DataError) as error:
        load(data, tmp_path, val_fraction=0.5)
    assert "\n" not in str(error.value)
    assert message.removeprefix("names") in str(error.value)


def test_ambiguous_columns_are_asked_for(tmp_path: Path) -> None:
    data = table(4).rename_columns({"image": "left", "label": "fine"})
    data = data.add_column("coarse", [0, 1, 0, 1]).cast_column(
        "coarse", ClassLabel(names=["p", "q"])
    )
    with pytest.raises(DataError, match="columns fine, coarse of the dataset could each hold"):
        load(data, tmp_path, val_fraction=0.5)
    assert load(data, tmp_path, val_fraction=0.5, label_column="coarse").class_names == ("p", "q")
    two = data.add_column("right", data.cast_column("left", Image(decode=False))["left"])
    two = two.cast_column("right", Image())
    with pytest.raises(DataError, match="columns left, right of the dataset could each hold"):
        load(two, tmp_path, val_fraction=0.5, label_column="fine")
    with pytest.raises(ConfigError, match="--image-column middle: the dataset has columns left"):
        load(two, tmp_path, image_column="middle", val_fraction=0.5)
    with pytest.raises(DataError, match="column fine of the dataset has no images"):
        load(two, tmp_path, image_column="fine", label_column="fine", val_fraction=0.5)


def test_a_missing_photo_is_named(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "photos" / "train").parent
    write_classes(root / "val")
    photos = load(root, tmp_path)
    (root / "train" / "bee" / "0.jpg").unlink()
    with pytest.raises(DataError, match=r"bee/0.jpg cannot be read \(No such file"):
        photos.train.encoded_at(3)
    empty = Dataset.from_dict(
        {"image": [None, encoded(photo(9, 9))], "label": [0, 1]}, features=table(1).features
    )
    with pytest.raises(DataError, match="row 0 of the dataset has no image: remove the row"):
        load(DatasetDict(train=empty, test=empty), tmp_path).train.encoded_at(0)


def test_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="IterableDataset: give a map-style"):
        load(table(3).to_iterable_dataset(), tmp_path, val_fraction=0.1)


def test_a_split_is_sent_to_another_process_without_its_photos(tmp_path: Path) -> None:
    table(400).save_to_disk(str(tmp_path / "saved"))
    photos = load(tmp_path / "saved", tmp_path, val_fraction=0.3)
    sent = pickle.dumps(photos.train)
    assert len(sent) < 50_000 < (tmp_path / "saved" / "data-00000-of-00001.arrow").stat().st_size
    received = pickle.loads(sent)
    assert contents(received) == contents(photos.train)
    assert received.name_of(7) == photos.train.name_of(7)
