"""Classes of different tables are matched by their names, or refused: never by their numbers."""

from __future__ import annotations

import itertools
import random
import unicodedata
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value

from accel_trainer.core.errors import DataError
from accel_trainer.vision import Photos, load_images, load_photos
from tests.vision.make_photos import encoded, photo

PNG = [encoded(photo(8, 8, seed=index), "png") for index in range(4)]
CLASSES = ("ant", "bee", "cow")
NUMERALS = ("0", "1", "2")


def table(values: Sequence[Any], kind: Any, *, column: str = "label", **more: Any) -> Dataset:
    columns = {"image": [PNG[index % 4] for index in range(len(values))], column: list(values)}
    features = {"image": Image(), column: kind}
    for name, (others, feature) in more.items():
        columns[name] = others
        features[name] = feature
    return Dataset.from_dict(columns, features=Features(features))


def written(truth: Sequence[str], kind: str, names: Sequence[str]) -> Dataset:
    """A table of the classes in `truth`, as a kind of column; `names` is the order of a list."""
    if kind == "classes":
        feature = ClassLabel(names=list(names))
        return table([names.index(name) for name in truth], feature)
    if kind == "texts":
        return table(truth, Value("string"))
    if kind == "numerals":
        return table([int(name) for name in truth], Value("int32"))
    return table([names.index(name) for name in truth], Value("int64"))


def named(photos: Any, split: Any) -> list[str]:
    return [photos.class_names[label] for label in split.labels.tolist()]


def load(root: Path, **options: Any) -> Photos:
    return load_photos(root, cache_dir=root.parent / "cache", **options)


def test_generated_tables_have_their_own_classes_or_are_refused(tmp_path: Path) -> None:
    """Shards and splits in any mixture of kinds and orders: the truth, or one error with both."""
    draw = random.Random(0)
    num_read = num_refused = 0
    for number in range(60):
        numeral = draw.random() < 0.3
        classes = NUMERALS if numeral else CLASSES
        kinds = ["classes", "classes", "texts", "integers"] + ["numerals"] * numeral
        root = tmp_path / str(number) / "data"
        root.mkdir(parents=True)
        files = ["train-0", "train-1", "test-0"]
        truth = {name: [draw.choice(classes) for _ in range(4)] for name in files}
        truth["train-0"][:3] = classes
        of_kind = {name: draw.choice(kinds) for name in files}
        is_in_order = True
        for name in files:
            names = list(classes)
            if of_kind[name] == "classes":
                draw.shuffle(names)
                is_in_order &= names == list(classes)
            written(truth[name], of_kind[name], names).to_parquet(str(root / f"{name}.parquet"))
        counted = {"integers", "numerals"} & set(of_kind.values())
        is_mixed = counted and not (numeral and is_in_order) and set(of_kind.values()) - counted
        if set(of_kind.values()) == {"integers"}:
            truth = {name: [str(classes.index(each)) for each in truth[name]] for name in files}
        for read in (load, lambda root: load_images(str(root), cache_dir=root.parent / "images")):
            if is_mixed:
                with pytest.raises(DataError, match="differ in column label") as error:
                    read(root)
                assert error.value.code == "DATA_COLUMNS"
                assert "has the integers" in str(error.value)
                assert "class names" in str(error.value) or "texts" in str(error.value)
                num_refused += 1
                continue
            data = read(root)
            held_out = data.val if isinstance(data, Photos) else data.test
            assert named(data, data.train) == truth["train-0"] + truth["train-1"]
            assert named(data, held_out) == truth["test-0"]
            num_read += 1
    assert num_read > 20
    assert num_refused > 20


def test_the_numbers_of_a_list_are_those_of_its_own_split_in_memory() -> None:
    for order in itertools.permutations(CLASSES):
        splits = DatasetDict(
            train=written(CLASSES, "classes", CLASSES), test=written(CLASSES, "classes", order)
        )
        photos = load_photos(splits)
        assert photos.class_names == CLASSES
        assert named(photos, photos.val) == list(CLASSES)


def test_a_test_split_may_lack_classes_and_may_not_have_others(tmp_path: Path) -> None:
    train = written(CLASSES, "classes", CLASSES)
    few = load_photos(DatasetDict(train=train, test=written(["cow"], "classes", ("cow", "bee"))))
    assert few.val.labels.tolist() == [2]
    other = DatasetDict(train=train, test=written(["dog"], "classes", ("dog", "bee")))
    with pytest.raises(DataError, match="is of class dog, which no training photo has"):
        load_photos(other)


def test_a_row_of_a_shard_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for index, names in enumerate((CLASSES, CLASSES[::-1])):
        path = str(tmp_path / "data" / f"train-{index}.parquet")
        written(CLASSES, "classes", names).to_parquet(path)
    photos = load(tmp_path / "data", val_fraction=0.5)
    places = [
        split.name_of(index) for split in (photos.train, photos.val) for index in range(len(split))
    ]
    assert sum("row 2 of" in place and "train-1.parquet" in place for place in places) == 1


# --- which column ---

UNUSABLE = {
    "float64": ([0.0, 1.0, 0.0, 1.0], Value("float64")),
    "float32": ([0.0, 1.0, 0.0, None], Value("float32")),
    "null": ([None] * 4, Value("null")),
    "struct": ([{"id": 1, "name": "a"}] * 4, {"id": Value("int64"), "name": Value("string")}),
    "list": ([[0], [1], [0, 1], []], List(Value("int64"))),
    "binary": ([b"a"] * 4, Value("binary")),
    "date": ([date(2026, 1, 1)] * 4, Value("date32")),
}
LABEL_NAMES = ("label", "labels", "class", "target", "fine_label", "Label", "LABELS", " Class ")


def test_a_column_that_is_called_like_labels_is_used_or_is_the_error() -> None:
    """Never another column in its place, whatever that is called and of whatever type it is."""
    others = {
        "width": ([640, 480, 640, 480], Value("int64")),
        "fold": (["f0", "f1", "f0", "f1"], Value("string")),
        "digit": ([0, 1, 0, 1], ClassLabel(names=["a", "b"])),
    }
    for name, (kind, (values, feature)) in itertools.product(LABEL_NAMES, UNUSABLE.items()):
        for other, column in others.items():
            data = table(values, feature, column=name, **{other: column})
            with pytest.raises(DataError) as error:
                load_photos(data, val_fraction=0.5)
            assert error.value.code == "DATA_COLUMNS"
            assert f"column {name} of" in str(error.value), (name, kind, other)
    usable = {
        "int8": ([0, 1, 0, 1], Value("int8")),
        "string": (["x", "y", "x", "y"], Value("string")),
        "bool": ([True, False, True, False], Value("bool")),
    }
    for name, (values, feature) in itertools.product(LABEL_NAMES, usable.values()):
        for other, column in others.items():
            data = table(values, feature, column=name, **{other: column})
            photos = load_photos(data, val_fraction=0.5)
            assert any(f"classes from column {name}" in fact for fact in photos.facts)
            assert photos.class_names == tuple(sorted(map(str, set(values))))


def test_of_two_columns_that_are_called_like_labels_none_is_passed_over() -> None:
    floats = ([0.0, 1.0, 0.0, 1.0], Value("float64"))
    for kind in (Value("int64"), ClassLabel(names=["a", "b"])):
        data = table([0, 1, 0, 1], kind, column="class", target=floats)
        with pytest.raises(DataError, match="columns class, target of"):
            load_photos(data, val_fraction=0.5)
        assert load_photos(data, val_fraction=0.5, label_column="class").num_classes == 2


def test_an_empty_text_is_no_class() -> None:
    for empty in ("", "  ", "\n"):
        with pytest.raises(DataError, match="row 1 of the dataset has label"):
            load_photos(table(["a", empty, "b", "a"], Value("string")), val_fraction=0.5)


def test_labels_inside_another_column_are_not_passed_over() -> None:
    inside = {"label": Value("int64"), "box": List(Value("int64"))}
    rows = [{"label": 1, "box": [0]}] * 4
    for feature, values in ((inside, rows), (List(inside), [rows] * 4)):
        data = table([640, 480] * 2, Value("int64"), column="width", objects=(values, feature))
        with pytest.raises(DataError, match="nested in column objects"):
            load_photos(data, val_fraction=0.5)


def test_a_column_called_image_that_holds_none_is_the_error() -> None:
    data = table([0, 1, 0, 1], Value("int64")).rename_column("image", "thumbnail")
    data = data.add_column("image", ["a.jpg", "b.jpg", "c.jpg", "d.jpg"])
    with pytest.raises(DataError, match="column image of the dataset is of type string"):
        load_photos(data, val_fraction=0.5)
    assert load_photos(data, val_fraction=0.5, image_column="thumbnail").num_classes == 2


def test_a_column_of_numbers_that_are_no_classes_is_warned_of() -> None:
    ids = load_photos(table(range(20), Value("int64"), column="number"), val_fraction=0.5)
    assert any("20 photos have 20 classes" in note for note in ids.notes)
    honest = load_photos(table([0, 1] * 10, Value("int64"), column="kind"), val_fraction=0.5)
    assert not any("photos have" in note for note in honest.notes)


def test_both_columns_are_said(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = table([0, 1] * 4, Value("int64"), column="target").rename_column("image", "photo")
    for split in ("train", "test"):
        data.to_parquet(str(tmp_path / "data" / f"{split}.parquet"))
    line = "images from column photo, classes from column target"
    assert line in load(tmp_path / "data").facts
    assert line in load_images(str(tmp_path / "data"), cache_dir=tmp_path / "images").facts


# --- names that look alike ---


def alike(name: str) -> list[str]:
    return [
        unicodedata.normalize("NFD", name),
        f"{name}\n",
        f"{name}\r\n",
        f" {name}",
        f"{name}\u00a0",
        f"\ufeff{name}",
        f"{name[:2]}\u200b{name[2:]}",
        f"{name}\0",
    ]


def test_names_that_look_alike_are_refused_with_both_spellings() -> None:
    for name in ("café", "Åre", "naïve dog"):
        for other in alike(name):
            for one, two in ((name, other), (other, name)):
                texts = table([one, two, "x", one], Value("string"))
                lists = DatasetDict(
                    train=written([one, "x"], "classes", (one, "x")),
                    test=written([two], "classes", (two,)),
                )
                for data, fraction in ((texts, 0.5), (lists, 0.0)):
                    with pytest.raises(DataError) as error:
                        load_photos(data, val_fraction=fraction)
                    assert error.value.code == "DATA_CLASSES"
                    assert ascii(name) in str(error.value)
                    assert ascii(other) in str(error.value)


def test_names_that_differ_in_capitals_are_two_classes_and_are_said() -> None:
    photos = load_photos(table(["A", "a", "b", "A"] * 5, Value("string")), val_fraction=0.3)
    assert photos.class_names == ("A", "a", "b")
    assert [fact for fact in photos.facts if "A and a" in fact]


def test_a_column_of_splits_that_is_not_followed_is_warned_of() -> None:
    for column, values in (("split", ["train", "val"]), ("Subset", ["Train", "Test", "x"])):
        rows = table(["a", "b", "c"] * 8, Value("string"))
        rows = rows.add_column(column, [values[index % len(values)] for index in range(24)])
        (note,) = [each for each in load_photos(rows, val_fraction=0.5).notes if column in each]
        assert values[1] in note
    for column, kinds in (("split", ["banana", "x"]), ("set", ["test"]), ("origin", ["test", "x"])):
        rows = table(["a", "b", "c"] * 8, Value("string"))
        rows = rows.add_column(column, [kinds[index % len(kinds)] for index in range(24)])
        photos = load_photos(rows, val_fraction=0.5, label_column="label")
        assert not [each for each in photos.notes if "but is ignored" in each]
