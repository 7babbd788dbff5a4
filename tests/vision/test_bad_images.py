"""Images that cannot be used: each kind of fault stops a run with its name, or is left out on all
processes alike."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from accel_trainer import BatchConfig
from accel_trainer.core.errors import ConfigError, DataError
from accel_trainer.vision import (
    AugmentConfig,
    BadImageConfig,
    ImageDataset,
    build_image_loaders,
    load_images,
)
from accel_trainer.vision.sources.find import find_image_source
from accel_trainer.vision.sources.listing import list_photos
from tests import processes
from tests.joined import joined_processes
from tests.vision.loader_run import loader_run
from tests.vision.make_data import png, random_images, write_parquet
from tests.vision.odd_pictures import bomb

IMAGES = [png(image) for image in random_images(12)]
FAULTS = {
    "cut short": IMAGES[0][:-40],
    "no image": b"hello",
    "missing": None,
    "a bomb": bomb(60_000),
    "another size": png(random_images(1, size=9)[0]),
}
SKIP = BadImageConfig(policy="skip", max_fraction=0.1)


def write(root: Path, bad: dict[int, bytes | None], *, name: str = "train") -> None:
    encoded = [bad.get(index, image) for index, image in enumerate(IMAGES)]
    write_parquet(root / f"{name}.parquet", encoded, [index % 3 for index in range(12)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "images", {})
    write(tmp_path / "images", {}, name="test")
    return tmp_path / "images"


def load(root: Path, bad_images: BadImageConfig | None = None) -> ImageDataset:
    return load_images(str(root), cache_dir=root.parent / "cache", bad_images=bad_images)


# The first image decides the size: of one that has another, all others differ.
@pytest.mark.parametrize(
    ("fault", "position"), [(f, p) for f in FAULTS for p in (0, 5)][:-2] + [("another size", 5)]
)
def test_a_bad_image_is_named_or_left_out_with_its_label(
    root: Path, fault: str, position: int
) -> None:
    """Fault (Data, config and users' code): an image is truncated, a decompression bomb, missing,
    or of a different size -> an error with its file or row; with `--on-bad-image skip` all
    processes leave it out, up to 0.1% of the images. If a sample of your own dataset cannot be
    read, all processes end with an error that names it
    """
    whole = load(root)
    write(root, {position: FAULTS[fault]})
    with pytest.raises(
        DataError, match=rf"row {position} of .*train.parquet .*--on-bad-image skip"
    ) as error:
        load(root)
    assert "\n" not in str(error.value)
    found = load(root, SKIP)
    kept = [index for index in range(12) if index != position]
    assert torch.equal(found.train.images, whole.train.images[kept])
    assert found.train.labels.tolist() == [index % 3 for index in kept]
    assert [f"row {position} of" in bad.message for bad in found.train.left_out] == [True]
    assert found.test.left_out == ()
    assert found.fingerprint != whole.fingerprint


def test_a_file_that_vanishes_while_it_is_read_is_named_or_left_out(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for index, image in enumerate(IMAGES):
            name = "ant" if index < 10 else "bee"
            path = tmp_path / "images" / split / name / f"{index:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image)
    source = find_image_source(str(tmp_path / "images"))
    Path(list_photos(tmp_path / "images" / "train").photos[7]).unlink()
    raw = source.read()
    left_out: list[object] = []
    with pytest.raises(DataError, match=r"train/ant/07.png cannot be read \(.*No such file"):
        list(BadImageConfig().usable(raw.train, []))
    kept = [index for index, _ in SKIP.usable(raw.train, left_out)]  # type: ignore[arg-type]
    assert kept == [index for index in range(12) if index != 7]
    assert len(left_out) == 1


def test_more_bad_images_than_allowed_are_refused_with_the_count(root: Path) -> None:
    write(root, {2: b"", 4: b""})
    with pytest.raises(DataError, match="DATA_BAD_IMAGES.*2 of 12 images .*row 4 .* at most 0.1"):
        load(root, SKIP)
    with pytest.raises(DataError, match="DATA_BAD_IMAGES.*1 of 12 images .* at most 0.001 of them"):
        load(root, BadImageConfig(policy="skip"))  # a thousandth of 12 is none
    assert len(load(root, BadImageConfig(policy="skip", max_fraction=0.2)).train) == 10
    write(root, {0: FAULTS["another size"]})
    with pytest.raises(DataError, match="2 of 12 images .*row 2 .* is 8x8 pixels, but the first"):
        load(root, SKIP)


def test_a_cache_without_bad_images_is_not_used_where_they_are_an_error(root: Path) -> None:
    write(root, {2: b"hello"}, name="test")
    first = load(root, SKIP)
    with pytest.raises(DataError, match=r"DATA_IMAGE\]: row 2 of .*test.parquet cannot be decoded"):
        load(root)
    with pytest.raises(DataError, match=r"DATA_BAD_IMAGES.*1 of 12"):
        load(root, BadImageConfig(policy="skip"))
    again = load(root, SKIP)
    assert again.fingerprint == first.fingerprint
    assert again.test.left_out == first.test.left_out


def test_what_was_left_out_does_not_depend_on_where_the_data_lie(
    root: Path, tmp_path: Path
) -> None:
    write(root, {2: b"hello"})
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    first = load(root, SKIP).fingerprint
    shutil.rmtree(tmp_path / "cache")
    assert load(tmp_path / "copy", SKIP).fingerprint == first


def test_bad_images_are_listed_and_epochs_are_as_long_on_all_processes(
    root: Path, tmp_path: Path
) -> None:
    write(root, {3: b"hello"})
    job = processes.run(take_an_epoch, root, num_processes=2, folder=tmp_path / "logs")
    assert "1 of 12 train images are left out: row 3 of" in job.output(0)
    assert "left out" not in job.output(1)


def take_an_epoch(root: Path) -> None:
    logging.basicConfig()
    with joined_processes() as accelerator:
        loader, _ = build_image_loaders(
            loader_run(BatchConfig(per_device_batch_size=2), accelerator),
            load(root, SKIP),
            augment=AugmentConfig(),
        )
        step_batches = list(loader.step_batches(0, 0))
        ids = torch.cat(
            [batch.sample_ids for step_batch in step_batches for batch in step_batch.micro_batches]
        )
        ids = accelerator.pad_across_processes(ids, pad_index=-1)
        seen = sorted(int(one) for one in accelerator.gather(ids) if one >= 0)
        assert len(step_batches) == 3
        assert seen == list(range(11))


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_a_fraction_that_makes_no_sense_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=f"bad_images.max_fraction is {value}: set it"):
        BadImageConfig(max_fraction=value)
