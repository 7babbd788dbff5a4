"""A run, `data`, `predict` and `evaluate` see the same photos, and say the same of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_trainer.vision import load_photos
from tests.vision.make_photos import encoded, photo, write_classes

from .conftest import run_command

pytestmark = pytest.mark.usefixtures("quiet_datasets")


def test_data_lists_what_a_run_warns_of_and_no_litter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "photos"
    for split in ("train", "val"):
        write_classes(root / split, ("__ant__", ".bee"))
    for index in range(5):
        (root / "train" / ".bee" / f"{index}.HEIC").write_bytes(b"")
    for index in range(30):
        (root / "train" / ".bee" / f"{index}").mkdir()
    (root / "val" / ".bee" / "gone.jpg").symlink_to("/nowhere")
    (root / "val" / ".DS_Store").write_bytes(b"")
    code, out, _ = run_command(capsys, ["data", root, "--cache-dir", tmp_path / "cache"])
    assert code == 0
    lines = out.splitlines()
    photos = load_photos(root, cache_dir=tmp_path / "cache")
    assert len(photos.notes) == 3
    assert all(lines.count(note) == 1 for note in (*photos.notes, *photos.facts))
    assert "DS_Store" not in out
    (root / "train" / "cow").mkdir()
    (root / "train" / "cow" / "1.heif").write_bytes(b"")
    code, _, err = run_command(capsys, ["data", root, "--cache-dir", tmp_path / "cache"])
    assert code == 65
    assert "DATA_CLASS_UNREAD" in err


def test_predict_reports_each_file_of_a_folder_that_it_does_not_predict(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mix"
    folder.mkdir()
    (folder / "1.png").write_bytes(encoded(photo(16, 16).convert("L"), "png"))
    (folder / "notes.txt").write_text("")
    (folder / ".DS_Store").write_text("")
    code, out, err = run_command(capsys, ["predict", runs / "fast", folder])
    assert code == 0, "a text is no photo"
    assert len(out.splitlines()) == 1
    assert "notes.txt" in err
    (folder / "2.heic").write_bytes(b"")
    (folder / "3.jpg").symlink_to("/nowhere")
    (folder / "4.jpg").write_bytes(b"")
    code, out, err = run_command(capsys, ["predict", runs / "fast", folder])
    assert code == 65
    assert len(out.splitlines()) == 1
    assert all(name in err for name in ("2.heic", "3.jpg", "4.jpg"))
    assert "DS_Store" not in err
