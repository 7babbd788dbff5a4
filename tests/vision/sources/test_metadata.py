"""Metadata files: their values stay as they are written, and every photo is accounted for."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path

import pytest

from accel_trainer.core.errors import DataError
from accel_trainer.vision import Photos, load_photos
from tests.vision.make_photos import write_photos

WORDS = (
    "NA",
    "N/A",
    "null",
    "NULL",
    "None",
    "nan",
    "NaN",
    "true",
    "False",
    "001",
    "010",
    "1e3",
    "1.0",
    "2.50",
    "0x1F",
    "2021-05-01",
    "12:30",
    "inf",
    "-",
    "#N/A",
    "a,b",
    'say "x"',
    "café",
    "+1",
    "1_000",
)


def load(root: Path, **options: object) -> Photos:
    return load_photos(root, cache_dir=root.parent / "cache", val_fraction=0.5, **options)  # type: ignore[arg-type]


def classes_of(photos: Photos) -> dict[str, str]:
    return {
        Path(split.name_of(index).partition(" (row")[0]).name: photos.class_names[label]
        for split in (photos.train, photos.val)
        for index, label in enumerate(split.labels.tolist())
    }


def as_csv(rows: dict[str, str], *, ends: str = "\n") -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator=ends)
    writer.writerows([("file_name", "label"), *rows.items()])
    return file.getvalue()


def test_generated_labels_are_the_texts_that_were_written(tmp_path: Path) -> None:
    draw = random.Random(0)
    names = [f"{index}.jpg" for index in range(8)]
    write_photos(tmp_path / "photos", names)
    for _ in range(60):
        words = draw.sample(WORDS, draw.randint(2, 4))
        rows = {name: words[index % len(words)] for index, name in enumerate(names)}
        text = as_csv(rows, ends=draw.choice(["\n", "\r\n"]))
        encoding = draw.choice(["utf-8", "utf-8-sig"])
        (tmp_path / "photos" / "metadata.csv").write_bytes(text.encode(encoding))
        assert classes_of(load(tmp_path / "photos")) == rows
        (tmp_path / "photos" / "metadata.csv").unlink()
        lines = [json.dumps({"file_name": name, "label": word}) for name, word in rows.items()]
        (tmp_path / "photos" / "metadata.jsonl").write_text("\n".join(lines))
        assert classes_of(load(tmp_path / "photos")) == rows
        (tmp_path / "photos" / "metadata.jsonl").unlink()


def test_plain_integers_are_sorted_as_numbers_and_keep_their_text(tmp_path: Path) -> None:
    rows = {f"{index}.jpg": str(number) for index, number in enumerate((10, 9, 100, 0) * 3)}
    write_photos(tmp_path / "photos", rows)
    (tmp_path / "photos" / "metadata.csv").write_text(as_csv(rows))
    photos = load(tmp_path / "photos")
    assert photos.class_names == ("0", "9", "10", "100")
    assert classes_of(photos) == rows


def test_photos_that_no_row_lists_are_left_out_with_a_warning(tmp_path: Path) -> None:
    rows = {f"{index}.jpg": "ab"[index % 2] for index in range(6)}
    write_photos(tmp_path / "photos", [*rows, "more/x.jpg", "more/y.png"])
    (tmp_path / "photos" / "metadata.csv").write_text(as_csv(rows))
    (note,) = [each for each in load(tmp_path / "photos").notes if "left out" in each]
    assert "metadata.csv does not list it" in note
    assert "2 files" in note


BROKEN = {
    "no label": ("file_name,label\n0.jpg,a\n1.jpg,\n", "row 1 of"),
    "two labels": ("file_name,label\n0.jpg,a\n1.jpg,b\n0.jpg,b\n", "rows 0 and 2 of"),
    "two labels by two spellings of the path": (
        "file_name,label\n0.jpg,a\n1.jpg,b\n./0.jpg,b\n",
        "rows 0 and 2 of",
    ),
    "no such file": ("file_name,label\n0.jpg,a\n9.jpg,b\n", "9.jpg does not exist"),
    "no file name": ("file_name,label\n0.jpg,a\n,b\n", "row 1 of"),
    "another column": ("name,label\n0.jpg,a\n1.jpg,b\n", "`file_name`"),
    "semicolons": ("file_name;label\n0.jpg;a\n1.jpg;b\n", "separated by ;"),
    "semicolons and quotes": ('label;"file_name";x\na;"0.jpg";1\n', "separated by ;"),
    "tabs": ("label\tfile_name\na\t0.jpg\n", "separated by tabs"),
    "UTF-16": ("file_name,label\n0.jpg,a\n".encode("utf-16"), "it is UTF-16"),
    "UTF-16 without a mark": ("file_name,label\n0.jpg,a\n".encode("utf-16-le"), "it is UTF-16"),
    "backslashes": ("file_name,label\nmore\\2.jpg,a\n", "write its folders with /"),
    "a field too many": ("file_name,label\n0.jpg,a,b\n", "cannot be read"),
    "two columns of one name": ("file_name,label,label\n0.jpg,a,b\n", "two columns"),
    "latin-1": ("file_name,label\n0.jpg,caf\xe9\n".encode("latin-1"), "byte 0xe9 in line 2"),
    "nothing": ("", "cannot be read"),
    "an open quote": ('file_name,"label\n' + "0.jpg,a\n" * 20_000, "cannot be read"),
}
BROKEN_LINES = {
    "too deep": "[" * 100_000,
    "a number beyond 64 bits": '{"file_name": "0.jpg", "label": 1' + "0" * 30 + "}",
}


@pytest.mark.parametrize("kind", BROKEN_LINES)
def test_lines_of_json_that_cannot_be_used_are_one_line(kind: str, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", ["0.jpg"])
    (tmp_path / "photos" / "metadata.jsonl").write_text(BROKEN_LINES[kind])
    with pytest.raises(DataError, match=r"metadata\.jsonl cannot be read"):
        load(tmp_path / "photos")


@pytest.mark.parametrize("kind", BROKEN)
def test_a_table_that_cannot_be_used_is_one_line_with_its_place(kind: str, tmp_path: Path) -> None:
    content, place = BROKEN[kind]
    write_photos(tmp_path / "photos", ["0.jpg", "1.jpg", "more/2.jpg"])
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "photos" / "metadata.csv").write_bytes(data)
    with pytest.raises(DataError) as error:
        load(tmp_path / "photos")
    assert place in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["labels.csv", "METADATA.CSV", "train.tsv", "annotations.jsonl"])
def test_a_table_of_another_name_is_named_with_the_fix(name: str, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", ["0.jpg", "1.jpg"])
    (tmp_path / "photos" / name).write_text("file_name,label\n0.jpg,a\n1.jpg,b\n")
    with pytest.raises(DataError, match="metadata.csv") as error:
        load(tmp_path / "photos")
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("place", "label"),
    [("metadata.jsonl", "b"), ("metadata.jsonl", "a"), ("more/metadata.csv", "b")],
)
def test_a_photo_that_two_tables_describe_is_refused(
    place: str, label: str, tmp_path: Path
) -> None:
    root = tmp_path / "photos"
    rows = {"more/0.jpg": "a", "more/1.jpg": "b"}
    write_photos(root, [*rows])
    (root / "metadata.csv").write_text(as_csv(rows))
    name = "0.jpg" if place.startswith("more") else "more/0.jpg"
    line = json.dumps({"file_name": name, "label": label})
    (root / place).write_text(as_csv({name: label}) if place.endswith(".csv") else f"{line}\n")
    with pytest.raises(DataError, match="both describe") as error:
        load(root)
    assert error.value.code == "DATA_LABEL"
    assert place in str(error.value)
