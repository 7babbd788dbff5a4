"""The cache of the images is harmed while a run reads it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import Callback, main
from tests import processes, workload
from tests.digits import ON_DIGITS

pytest.importorskip("sklearn")  # the digits


class Harm(Callback):
    """Calls `harm` with the file of the training images after the third step."""

    def __init__(self, cache: Path, harm: Callable[[Path], object]) -> None:
        self._cache = cache
        self._harm = harm

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if report.optimizer_step == 3:
            self._harm(next(self._cache.glob("*/train_images.u8")))


def train(folder: Path, harm: Callable[[Path], object]) -> None:
    from recipes import cifar

    cache = folder / "cache"
    workload.add_callback(cifar, Harm(cache, harm))
    flags = [*ON_DIGITS, "--model.width", "4", "--epochs", "2", "--batch-size", "128"]
    places = ["--cache-dir", str(cache), "--output-dir", str(folder / "run")]
    main(cifar.train, cifar.Config, description="", argv=[*flags, *places])


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def zero(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def zero_unseen(path: Path) -> None:
    status = path.stat()
    zero(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def delete(path: Path) -> None:
    shutil.rmtree(path.parent)


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(100))
    other.rename(path)


def run_and_harm(tmp_path: Path, harm: Callable[[Path], object]) -> tuple[list[int | None], str]:
    job = processes.start(train, tmp_path, harm, folder=tmp_path / "logs")
    return job.wait(), job.output()


def test_a_cache_that_is_cut_short_ends_the_run_with_the_place_that_read(tmp_path: Path) -> None:
    codes, output = run_and_harm(tmp_path, truncate)
    assert codes == [-signal.SIGBUS]
    assert "Fatal Python error: Bus error" in output
    assert " in crop_by_copy\n" in output


@pytest.mark.parametrize("harm", [zero, zero_unseen])
def test_a_cache_that_is_overwritten_is_found_at_the_end_of_the_epoch(
    tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    """Fault (Data, config and users' code): the cache of decoded images is changed while a run
    reads it -> overwritten in place: exit 65 at the end of the epoch; truncated: SIGBUS from the
    system, with a stack trace on stderr; deleted or replaced: the run keeps the file it opened
    """
    codes, output = run_and_harm(tmp_path, harm)
    assert codes == [65], output
    assert "error[CACHE_CHANGED]: " in output.splitlines()[-1]
    assert "train_images.u8 was changed while the run read it (368128 -> 368128 bytes)" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("harm", [delete, replace])
def test_a_cache_that_is_deleted_or_replaced_is_read_to_the_end_as_it_was(
    tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    codes, output = run_and_harm(tmp_path, harm)
    assert codes == [0], output
