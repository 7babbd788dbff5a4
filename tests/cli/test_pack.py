from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import signal
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from accel_trainer.cli.main import main
from accel_trainer.core.errors import DataError
from accel_trainer.vision import Photos, load_photos
from tests.faults.disks import CountingDisk, DyingDisk, installed
from tests.variants import slow
from tests.vision.make_photos import decoded, encoded, photo, write_classes

from .conftest import run_command

# Newer Pythons warn of threads; those of torch are idle here, and a spawned process takes 3 s to
# import it.
FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


pytestmark = pytest.mark.usefixtures("quiet_datasets")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """17 photos to train on, of 40 x 30 pixels or more, and 4 to evaluate on."""
    root = tmp_path / "photos"
    write_classes(root / "train", ["ant", "bee", "cow"], per_class=5)
    write_classes(root / "val", ["ant", "cow"], per_class=2)
    (root / "train" / "bee" / "large.jpg").write_bytes(encoded(photo(400, 300)))
    (root / "train" / "bee" / "tall.png").write_bytes(encoded(photo(100, 250), "png"))
    return root


def pack(source: Path, out: Path, *flags: str) -> int:
    places = [str(source), str(out), "--cache-dir", str(source.parent / "cache")]
    return main(
        ["pack", *places, "--short-side", "48", "--shard-size", "4", "--num-workers", "2", *flags]
    )


def load(folder: Path, **options: float) -> Photos:
    return load_photos(folder, cache_dir=folder.parent / "cache", **options)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, str]:
    """Return the hash of each file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_a_packed_dataset_has_the_splits_classes_and_order_of_its_source(
    source: Path, tmp_path: Path
) -> None:
    assert pack(source, tmp_path / "packed") == 0
    photos, packed = load(source), load(tmp_path / "packed")
    assert packed.class_names == photos.class_names
    for before, after in ((photos.train, packed.train), (photos.val, packed.val)):
        assert after.labels.tolist() == before.labels.tolist()
    anybody = datasets.load_from_disk(str(tmp_path / "packed"))
    assert {name: len(split) for name, split in anybody.items()} == {"train": 17, "validation": 4}
    assert anybody["train"].features["label"].names == ["ant", "bee", "cow"]
    row = anybody["train"].cast_column("image", datasets.Image(decode=False))[8]
    assert row["image"]["path"] == "train/bee/3.jpg"
    assert row["image_sha256"] == hashlib.sha256(row["image"]["bytes"]).hexdigest()
    assert anybody["train"][10]["image"].size == (64, 48)


def test_large_photos_are_made_smaller_and_small_ones_keep_their_bytes(
    source: Path, tmp_path: Path
) -> None:
    pack(source, tmp_path / "packed", "--quality", "95")
    packed = load(tmp_path / "packed").train
    by_name = {
        packed.name_of(index).split(" ")[0]: packed.encoded_at(index)
        for index in range(len(packed))
    }
    small = "train/ant/0.jpg"
    assert by_name[small] == (source / small).read_bytes()
    large = decoded(by_name["train/bee/large.jpg"])
    assert large.shape == (48, 64, 3)
    expected = np.array(photo(400, 300).resize((64, 48), Image.Resampling.BILINEAR), dtype=float)
    assert np.abs(large - expected).mean() < 6, "the same picture, but for the losses of JPEG"
    assert decoded(by_name["train/bee/tall.png"]).shape == (120, 48, 3)


def test_photos_that_would_keep_a_few_shades_are_said_before_it_starts(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twelve_bits = np.random.default_rng(0).integers(0, 4096, (90, 90)).astype(np.uint16)
    deep = source / "train" / "bee" / "deep.png"
    deep.write_bytes(encoded(Image.fromarray(twelve_bits), "png"))
    assert pack(source, tmp_path / "packed") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "PNG I;16" in line and "multiplying them by 16" in line]


def test_the_same_photos_are_set_aside_for_validation_before_and_after(
    source: Path, tmp_path: Path
) -> None:
    shutil.rmtree(source / "val")
    pack(source, tmp_path / "packed")
    sides = []
    for root in (source, tmp_path / "packed"):
        split = load(root, val_fraction=0.4).val
        sides.append([(int(label), index) for index, label in enumerate(split.labels)])
    assert sides[0] == sides[1] != []


def test_a_photo_that_changed_after_a_pack_is_named_when_it_is_read(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault (Data, config and users' code): a packed photo is damaged -> exit 65 with its name when
    it is read; packing again replaces the damaged file
    """
    packed = tmp_path / "packed"
    pack(source, packed)
    expected = contents(packed)
    shard = packed / "train" / "data-00001-of-00005.arrow"
    photos = load(packed).train
    data = bytearray(shard.read_bytes())
    place, before = data.index(photos.encoded_at(5)) + 200, photos.encoded_at(4)
    data[place] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match="train/bee/0.jpg .*has changed since it was packed.*pack"):
        photos.encoded_at(5)  # the file is mapped into memory
    assert photos.encoded_at(4) == before
    code, out, _ = run_command(
        capsys, ["pack", source, packed, "--cache-dir", tmp_path / "cache", *FLAGS]
    )
    assert code == 0
    assert "17 train, 4 validation photos of 3 classes" in out
    assert contents(packed) == expected


def test_damaged_sums_are_written_again_and_vouch_for_no_file(source: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    pack(source, packed)
    expected = contents(packed)
    sums, shard = packed / "SHA256SUMS", packed / "train" / "data-00001-of-00005.arrow"
    sums.write_bytes(b"\xff" + sums.read_bytes()[1:])
    assert pack(source, packed) == 0
    assert contents(packed) == expected
    sums.rename(packed / "other")
    shard.rename(sums)
    (packed / "other").rename(shard)
    assert pack(source, packed) == 0
    assert contents(packed) == expected


FLAGS = ("--short-side", "48", "--shard-size", "4", "--num-workers", "2")


def pack_and_die(source: Path, out: Path, num_changes: int) -> None:
    with installed(DyingDisk(num_changes)):
        pack(source, out)


@FORKS
@pytest.mark.parametrize("every", [13, *slow([3])])
def test_killed_anywhere_and_started_again_it_writes_the_same_bytes(
    every: int, source: Path, tmp_path: Path
) -> None:
    """Fault (Data, config and users' code): `pack` is killed -> the same command continues after
    the last complete file and writes the same bytes; until it has finished, the result cannot be
    used as a dataset
    """
    whole, out = tmp_path / "whole", tmp_path / "packed"
    with installed(CountingDisk()) as disk:
        assert pack(source, whole) == 0
    expected = contents(whole)
    context = multiprocessing.get_context("fork")
    last = len(disk.operations) - 1
    for num_changes in [*range(0, last, every), last]:
        shutil.rmtree(out, ignore_errors=True)
        process = context.Process(target=pack_and_die, args=(source, out, num_changes))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (out / "dataset_dict.json").exists() or contents(out) == expected, (
            "it is committed at the end"
        )
        assert pack(source, out) == 0
        assert contents(out) == expected
    assert last >= 70


def test_a_start_that_continues_reads_only_the_photos_that_are_missing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_trainer.cli.data import pack as module

    packed = tmp_path / "packed"
    pack(source, packed)
    (packed / "dataset_dict.json").unlink()
    (packed / "train" / "data-00002-of-00005.arrow").unlink()
    read: list[str] = []
    reencode = module.reencode

    def note(data: bytes, name: str, **options: int) -> bytes:
        read.append(name)
        return reencode(data, name, **options)

    monkeypatch.setattr(module, "reencode", note)
    pack(source, packed)
    assert len(read) == 4


@pytest.mark.parametrize(
    ("flags", "change"),
    [(["--quality", "80"], "quality: 92 -> 80"), (["--short-side", "32"], "short_side: 48 -> 32")],
)
def test_a_folder_that_was_packed_otherwise_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], change: str
) -> None:
    pack(source, tmp_path / "packed")
    before = contents(tmp_path / "packed")
    argv = ["pack", source, tmp_path / "packed", "--cache-dir", tmp_path / "cache", *FLAGS, *flags]
    code, _, err = run_command(capsys, argv)
    assert (code, len(err.splitlines())) == (73, 1)
    assert "PACK_OUT" in err
    assert change in err
    assert contents(tmp_path / "packed") == before


def test_a_folder_that_is_something_else_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("Once")
    # Named as a run's half-written files are.
    (tmp_path / "thesis" / ".tmp-mine-1-0000000000000000001").mkdir()
    code, _, err = run_command(
        capsys, ["pack", source, tmp_path / "thesis", "--cache-dir", tmp_path / "cache"]
    )
    assert code == 73
    assert "which pack did not write" in err
    assert {path.name for path in (tmp_path / "thesis").iterdir()} == {
        "chapter.tex",
        ".tmp-mine-1-0000000000000000001",
    }


def test_a_broken_photo_is_named_or_left_out(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = source / "train" / "bee" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    argv = ["pack", source, tmp_path / "packed", "--cache-dir", tmp_path / "cache", *FLAGS]
    code, _, err = run_command(capsys, argv)
    assert code == 65
    assert "train/bee/2.jpg" in err
    assert "--on-bad-image skip" in err
    code, out, _ = run_command(
        capsys, ["pack", source, tmp_path / "other", *argv[3:], "--on-bad-image", "skip"]
    )
    assert code == 0
    assert "16 train, 4 validation photos" in out
    assert "left out now: 1 photo," in out
    assert json.loads((tmp_path / "other" / "dataset_dict.json").read_text()) == {
        "splits": ["train", "validation"]
    }


@pytest.mark.parametrize(
    ("flag", "value"), [("--short-side", "0"), ("--quality", "101"), ("--shard-size", "-1")]
)
def test_numbers_out_of_range_are_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    code, _, err = run_command(capsys, ["pack", source, tmp_path / "packed", flag, value])
    assert code == 64
    assert f"{flag}: it is {value}" in err
    assert not (tmp_path / "packed").exists()
