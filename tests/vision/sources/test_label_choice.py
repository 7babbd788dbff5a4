"""Class folders with a table beside them: which of both are the classes is never guessed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accel_trainer.core.errors import ConfigError, DataError
from accel_trainer.vision import load_photos
from accel_trainer.vision.sources.photo_splits import load_splits
from tests.vision.make_photos import write_classes, write_photos

CLASSES = ("ant", "bee", "cow")
COLUMNS = {
    "width": lambda draw: draw.choice([640, 480]),
    "caption": lambda draw: f"photo {draw.randint(1, 3)}",
    "patient": lambda draw: draw.randint(1, 6),
    "is_indoor": lambda draw: draw.random() < 0.5,
    "score": lambda draw: draw.random(),
}


def write_table(folder: Path, rows: list[dict[str, object]], kind: str) -> None:
    path = folder / f"metadata.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines))


def described(root: Path, columns: list[str], kind: str, *, at_top: bool, seed: int = 0) -> Path:
    """Class folders in two splits, with a table of all photos at the top or one in each split."""
    draw = random.Random(seed)
    for split in ("train", "val"):
        write_classes(root / split, CLASSES)
    for place in [root] if at_top else [root / "train", root / "val"]:
        names = [str(path.relative_to(place)) for path in sorted(place.rglob("*.jpg"))]
        rows = [
            {"file_name": name} | {column: COLUMNS[column](draw) for column in columns}
            for name in names
        ]
        write_table(place, rows, kind)
    return root


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_table_over_two_splits_is_refused_and_their_folders_load(
    kind: str, tmp_path: Path
) -> None:
    """With its rows read as one set, photos to evaluate on would be trained on."""
    for seed in range(4):
        columns = random.Random(seed).sample([*COLUMNS], seed % 4)
        root = described(tmp_path / str(seed), columns, kind, at_top=True, seed=seed)
        with pytest.raises(DataError, match="train/ or val/") as error:
            load_photos(root, cache_dir=tmp_path / "cache")
        assert error.value.code == "DATA_NOT_RECOGNISED"
        photos = load_photos(root, label_column="folder", cache_dir=tmp_path / "cache")
        assert photos.class_names == CLASSES
        assert len(photos.train) == len(photos.val) == 9


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_class_folders_and_a_table_without_labels_are_both_named(kind: str, tmp_path: Path) -> None:
    for seed in range(6):
        columns = random.Random(seed).sample([*COLUMNS], seed % 4)
        root = described(tmp_path / str(seed), columns, kind, at_top=False, seed=seed)
        with pytest.raises(DataError) as error:
            load_photos(root, cache_dir=tmp_path / "cache")
        assert error.value.code == "DATA_COLUMNS"
        assert "(ant, bee, cow)" in str(error.value)
        choices = ["folder", *(column for column in columns if column != "score")]
        for name in choices:
            assert f"--label-column {name}" in str(error.value)
            photos = load_photos(root, label_column=name, cache_dir=tmp_path / "cache")
            assert (photos.class_names == CLASSES) == (name == "folder")
            assert len(photos.train) == len(photos.val) == 9
        assert load_splits(str(root), label_column="folder").class_names == CLASSES


def test_a_column_of_metadata_is_the_label_by_its_name_alone(tmp_path: Path) -> None:
    names = [f"{index}.jpg" for index in range(8)]
    for number, column in enumerate(("breed", "age", "Label", "class_name")):
        root = write_photos(tmp_path / str(number), names)
        rows = "".join(f"{name},{index % 2}\n" for index, name in enumerate(names))
        (root / "metadata.csv").write_text(f"file_name,{column}\n{rows}")
        options = {"val_fraction": 0.5, "cache_dir": tmp_path / "cache"}
        if number < 2:
            with pytest.raises(DataError, match=f"set --label-column {column}$"):
                load_photos(root, **options)
            options["label_column"] = column
        assert load_photos(root, **options).class_names == ("0", "1")


def test_a_label_column_beats_folders_and_the_flag_beats_it(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "photos", per_class=6)
    names = [str(path.relative_to(root)) for path in sorted(root.rglob("*.jpg"))]
    rows = "".join(f"{name},{index % 3}\n" for index, name in enumerate(names))
    (root / "metadata.csv").write_text(f"file_name,label\n{rows}")
    for column, classes in ((None, ("0", "1", "2")), ("folder", ("ant", "bee"))):
        photos = load_photos(
            root, label_column=column, val_fraction=0.5, cache_dir=tmp_path / "cache"
        )
        assert photos.class_names == classes


@pytest.mark.parametrize("column", ["species", "folder"])
def test_a_column_that_is_not_there_is_refused(column: str, tmp_path: Path) -> None:
    root = write_classes(tmp_path / "photos", per_class=6)
    options = {"val_fraction": 0.5, "label_column": column, "cache_dir": tmp_path / "cache"}
    if column == "folder":
        assert load_photos(root, **options).class_names == ("ant", "bee")
        photos = [path.read_bytes() for path in sorted(root.rglob("*.jpg"))]
        root = tmp_path / "tables"
        root.mkdir()
        table = pa.table({"image": [{"bytes": data} for data in photos], "label": [0, 1] * 6})
        pq.write_table(table, root / "train.parquet")
    with pytest.raises(ConfigError, match=f"--label-column {column}"):
        load_photos(root, **options)
