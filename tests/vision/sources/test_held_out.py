"""No photo that is meant to be evaluated on is trained on, or passed over without a word."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image

from accel_trainer.core.errors import DataError
from accel_trainer.vision import load_photos
from accel_trainer.vision.sources.photo_splits import load_splits
from tests.vision.make_photos import encoded, photo, write_classes, write_photos

Write = Callable[[Path], object]


def write_table(path: Path, count: int = 12, **columns: list[object]) -> None:
    images = [{"bytes": encoded(photo(9, 9, seed=index))} for index in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"image": images, "label": [index % 2 for index in range(count)], **columns}
    pq.write_table(pa.table(table), path)


def classes(*names: str) -> Write:
    return lambda root: [write_classes(root / name, per_class=9) for name in names]


def flat(name: str) -> Write:
    return lambda root: write_photos(root / name, ["1.jpg", "2.jpg"])


def table(name: str, **columns: list[object]) -> Write:
    return lambda root: write_table(root / name, **columns)


def text(name: str, content: str = "ant/1\n") -> Write:
    def write(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)

    return write


def link(root: Path) -> None:
    (root / "val").symlink_to("/mnt/not/there")


def metadata(column: str, values: list[str]) -> Write:
    def write(root: Path) -> None:
        names = [f"{index}.jpg" for index in range(12)]
        write_photos(root, names)
        rows = [f"{name},{i % 2},{values[i % 3 % 2]}" for i, name in enumerate(names)]
        (root / "metadata.csv").write_text("\n".join([f"file_name,label,{column}", *rows]))

    return write


def described(*folders: str) -> Write:
    """Photos of several folders in one table."""

    def write(root: Path) -> None:
        names = [f"{folder}/{index}.jpg" for folder in folders for index in range(4)]
        write_photos(root, names)
        rows = [f"{name},{index % 2}" for index, name in enumerate(names)]
        (root / "metadata.csv").write_text("\n".join(["file_name,label", *rows]))

    return write


PASSED_OVER: dict[str, tuple[str, list[Write]]] = {
    "holdout/": ("holdout", [classes("train", "holdout")]),
    "hold_out/": ("hold_out", [classes("train", "hold_out")]),
    "val2/": ("val2", [classes("train", "val2")]),
    "my_test_set/": ("my_test_set", [classes("train", "my_test_set")]),
    "a flat val/": ("/val (", [classes("train"), flat("val")]),
    "a link to nowhere": ("broken link", [classes("train"), link]),
    "val/ beside classes": ("class val", [classes(""), flat("val")]),
    "meta/test.txt": ("meta/test.txt", [classes("images"), text("meta/test.txt")]),
    "val_list.csv": ("val_list.csv", [classes("train"), text("val_list.csv")]),
    "a table": ("holdout.parquet", [table("train.parquet"), table("holdout.parquet")]),
    "is_valid": ("column is_valid", [table("train.parquet", is_valid=[True, False] * 6)]),
    "fold": ("column fold", [table("train.parquet", fold=[0, 1, 2] * 4)]),
    "split": ("column Split", [table("train.parquet", Split=["train", "Test"] * 6)]),
    "a column of metadata": ("column is_test", [metadata("is_test", ["0", "1"])]),
    "usage": ("column usage", [metadata("usage", ["Training", "PublicTest"])]),
    "data_split": ("column data_split", [table("all.parquet", data_split=["train", "dev"] * 6)]),
    "val.zip": ("val.zip", [classes("train"), text("val.zip")]),
    "test.tar.gz": ("test.tar.gz", [classes("train"), text("test.tar.gz")]),
}


@pytest.mark.parametrize("kind", PASSED_OVER)
def test_the_advice_to_set_photos_aside_names_what_lies_beside(kind: str, tmp_path: Path) -> None:
    name, writes = PASSED_OVER[kind]
    root = tmp_path / "photos"
    for write in writes:
        write(root)
    with pytest.raises(DataError, match="--val-fraction") as error:
        load_photos(root, cache_dir=tmp_path / "cache")
    assert error.value.code == "DATA_NO_VAL"
    assert name in str(error.value)
    notes = load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache").notes
    assert [note for note in notes if name in note and "is ignored" in note]


@pytest.mark.parametrize(
    "writes",
    [
        [classes("train"), text("README.txt"), text("train/ant/notes.txt")],
        [table("train.parquet", fold=[1] * 12, set=["a", "b"] * 6, origin=["test", "x"] * 6)],
        [metadata("size", ["0", "1"])],
        [described("test tubes", "train stations")],
        [metadata("scene", ["train station", "beach"])],
        [table("train.parquet", label=["train", "test tube"] * 6)],
        [classes("test tube", "train station")],
    ],
)
def test_nothing_is_said_of_what_is_not_called_like_a_split(
    writes: list[Write], tmp_path: Path
) -> None:
    root = tmp_path / "photos"
    for write in writes:
        write(root)
    with pytest.raises(DataError, match="has no validation split: set one aside"):
        load_photos(root, cache_dir=tmp_path / "cache")
    assert not load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache").notes


READ_AS_ONE: dict[str, list[Write]] = {
    "val/ of classes": [classes("trn", "val")],
    "Test/ of classes": [classes("images", "Test")],
    "val/ beside classes": [classes("", "val")],
    "holdout.parquet": [table("data.parquet"), table("holdout.parquet")],
    "HeldOut-0.parquet": [table("a.parquet"), table("b.parquet"), table("HeldOut-0.parquet")],
    "hold_out/": [table("data/a.parquet"), table("hold_out/a.parquet")],
    "val/ in one metadata.csv": [described("train", "val")],
    "holdout/ in one metadata.csv": [described("a", "b", "holdout/a")],
}


@pytest.mark.parametrize("kind", READ_AS_ONE)
def test_photos_to_evaluate_on_are_not_read_with_the_others(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for write in READ_AS_ONE[kind]:
        write(root)
    with pytest.raises(DataError) as error:
        load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")
    assert error.value.code == "DATA_NOT_RECOGNISED"
    assert kind.split()[0] in str(error.value)


@pytest.mark.parametrize("name", ["val", "test", "validation", "dev", "eval"])
def test_a_split_to_evaluate_on_alone_is_not_trained_on(name: str, tmp_path: Path) -> None:
    write_table(tmp_path / "tables" / f"{name}.parquet")
    write_table(tmp_path / "two" / f"{name}.parquet")
    write_table(tmp_path / "two" / "data.parquet")
    whole = Dataset.from_parquet(
        str(tmp_path / "tables" / f"{name}.parquet"), cache_dir=str(tmp_path / "cache")
    )
    for source in (tmp_path / "tables", tmp_path / "two", DatasetDict({name: whole})):
        for fraction in (0.0, 0.3):
            with pytest.raises(DataError) as error:
                load_photos(source, val_fraction=fraction, cache_dir=tmp_path / "cache")
            assert error.value.code == "DATA_NO_TRAIN"
            assert ("data.parquet" in str(error.value)) == (source == tmp_path / "two")
    (alone,) = load_splits(str(tmp_path / "tables"), cache_dir=tmp_path / "cache").splits.values()
    assert len(alone) == 12


def held_out(root: Path, tmp_path: Path, fraction: float = 0.5) -> set[str]:
    photos = load_photos(root, val_fraction=fraction, cache_dir=tmp_path / "cache")
    return {
        Path(photos.val.name_of(at).partition(" (row")[0]).name for at in range(len(photos.val))
    }


def test_photos_of_a_pool_are_set_aside_alike_wherever_it_is(tmp_path: Path) -> None:
    found = []
    for place in ("a", "b/c"):
        names = [f"{index}.jpg" for index in range(24)]
        write_photos(tmp_path / place / "pool", names)
        rows = "".join(f"../pool/{name},{index % 2}\n" for index, name in enumerate(names))
        root = tmp_path / place / "photos"
        root.mkdir()
        (root / "metadata.csv").write_text(f"file_name,label\n{rows}")
        found.append(held_out(root, tmp_path))
    assert found[0] == found[1]
    assert 4 < len(found[0]) < 20


def test_rows_of_one_path_are_set_aside_one_by_one(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number, num_paths in enumerate((1, 2, 20)):
        paths = [f"{draw.randrange(num_paths)}.png" if number else "" for _ in range(60)]
        images = [
            {"bytes": encoded(photo(9, 9, seed=at)), "path": path} for at, path in enumerate(paths)
        ]
        root = tmp_path / str(number)
        root.mkdir()
        names = ClassLabel(names=["x", "y"])
        columns = {"image": images, "label": [at % 2 for at in range(60)]}
        features = Features({"image": Image(), "label": names})
        Dataset.from_dict(columns, features=features).to_parquet(str(root / "train.parquet"))
        for fraction in (0.2, 0.5, 0.8):
            photos = load_photos(root, val_fraction=fraction, cache_dir=tmp_path / "cache")
            assert abs(len(photos.val) - 60 * fraction) < 15


def test_a_file_that_two_rows_name_is_on_one_side(tmp_path: Path) -> None:
    names = [f"{index}.jpg" for index in range(24)]
    root = write_photos(tmp_path / "photos", names)
    rows = "".join(f"{name},{index % 2}\n" for index, name in enumerate(names)) * 2
    (root / "metadata.csv").write_text(f"file_name,label\n{rows}")
    photos = load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")
    train, val = (
        {each.encoded_at(at) for at in range(len(each))} for each in (photos.train, photos.val)
    )
    assert len(photos.train) + len(photos.val) == 48
    assert not train & val


NUMBERS = ("1", "01", "1.0", "1.", "+1", "1e0", "0001.000", "1_0", "10")


def test_classes_that_are_equal_as_numbers_are_refused(tmp_path: Path) -> None:
    for index, one in enumerate(NUMBERS):
        for other in NUMBERS[:index]:
            root = tmp_path / f"{one} {other}"
            for name in (one, other, "x"):
                write_photos(root / name, ["1.jpg", "2.jpg"])
            if float(one) == float(other):
                with pytest.raises(DataError, match="equal as numbers") as error:
                    load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")
                assert repr(one) in str(error.value)
                assert repr(other) in str(error.value)
            else:
                load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")


def test_classes_that_only_resemble_numbers_are_classes(tmp_path: Path) -> None:
    names = ["nan", "NaN", "inf", "Infinity", "1a", "01a", "v1.0", "v1", "9007199254740993"]
    names += ["9007199254740992", "0x1", "1,0", str(np.pi)]
    root = tmp_path / "photos"
    for name in names:
        write_photos(root / name, ["1.jpg", "2.jpg"])
    photos = load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")
    assert photos.class_names == tuple(sorted(names))
