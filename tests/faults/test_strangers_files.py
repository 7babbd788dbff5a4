"""A finished run that is continued: what somebody has put into its folder is still there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from accel_trainer import CheckpointConfig
from tests import workload

MINE = b"the only copy of a thesis"


class Saved(workload.SmallNet):
    """A net with the verb of transformers."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "deeper").mkdir()
        Path(folder, "deeper", "config.json").write_text("{}")


class Rows(GeneralTracker):
    """A tracker that writes a file for each row."""

    name = "rows"
    requires_logging_directory = True

    def __init__(self, project: str, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        (self._folder / "settings").mkdir()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        (self._folder / "settings" / f"row-{step}").touch()


def train(folder: Path, num_epochs: int) -> None:
    config = workload.make_config(folder, checkpoint=CheckpointConfig(keep_last_n=2))
    trainer = replace(config.trainer, num_epochs=num_epochs, ema_decay=None)
    config = replace(config, trainer=trainer, run=replace(config.run, track=("rows",)))
    config = replace(config, run=replace(config.run, allow_change=("trainer.num_epochs",)))
    assert workload.train(config, net=lambda: Saved(norm="group")).state == "done"


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


PLACES = [
    "export/pretrained/thesis.txt",
    "export/pretrained/deeper/config.json",  # changed
    "export/pretrained/SHA256SUMS",
    "export/pretrained",  # a link
    "trackers/rows/thesis.txt",
    "trackers/rows/settings/thesis.txt",
    "trackers/rows",  # a link
    "checkpoints/STEP/thesis.txt",
    "checkpoints/.tmp-thesis/thesis.txt",
    "checkpoints/.del-thesis-1-2/thesis.txt",
    ".tmp-thesis/thesis.txt",
    "thesis/thesis.txt",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_continued_run_loses_no_file_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "rows", Rows)
    run = tmp_path / "run"
    train(run, 1)
    (step,) = (run / "checkpoints").glob("step-*")
    path = run / place.replace("STEP", step.name)
    if path.is_dir():
        path.rename(tmp_path / "home")
        path.symlink_to(tmp_path / "home")
        path = path / "thesis.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(MINE)
    train(run, 4)
    kept = [each for each in tmp_path.rglob("*") if each.is_file() and each.read_bytes() == MINE]
    assert len(kept) == 1
    assert {*names_in(run / "export/pretrained")} == {"SHA256SUMS", "deeper", "deeper/config.json"}
    assert "thesis.txt" not in names_in(run / "trackers/rows")
    assert len([*(run / "checkpoints").glob("step-*-epoch-?????")]) <= 3  # with the best


def test_a_continued_run_replaces_what_it_has_written_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "rows", Rows)
    train(tmp_path, 1)
    for folder in ("export/pretrained", "trackers/rows"):
        (tmp_path / folder / ".DS_Store").touch()
    train(tmp_path, 4)
    assert caplog.messages == []
    assert os.listdir(tmp_path / "export/pretrained/deeper") == ["config.json"]
    assert not [name for name in names_in(tmp_path) if "-kept-" in name]
