from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from accel_trainer import read_history
from accel_trainer.callbacks.metrics_file import MetricsFile


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_lines_and_are_there_at_once(tmp_path: Path) -> None:
    history = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(3):
        history.append({"optimizer_step": step, "train/loss": 0.1 * step, "event": "train"})
        assert rows(tmp_path / "metrics.jsonl")[-1]["optimizer_step"] == step
        assert history.size == (tmp_path / "metrics.jsonl").stat().st_size
    assert [row["train/loss"] for row in rows(tmp_path / "metrics.jsonl")] == [0.0, 0.1, 0.2]
    history.sync()
    history.close()


def test_a_history_continues_at_the_length_stored_in_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = MetricsFile(path)
    history.append({"optimizer_step": 1})
    size = history.size
    history.append({"optimizer_step": 2})
    history.append({"optimizer_step": 3})
    history.close()

    resumed = MetricsFile(path)
    resumed.truncate(size)
    assert rows(path) == [{"optimizer_step": 1}]
    resumed.append({"optimizer_step": 2})
    assert rows(path) == [{"optimizer_step": 1}, {"optimizer_step": 2}]
    resumed.truncate(0)
    assert (path.read_bytes(), resumed.size) == (b"", 0)
    resumed.close()


def test_numbers_that_json_has_not_are_written_as_strings(tmp_path: Path) -> None:
    history = MetricsFile(tmp_path / "metrics.jsonl")
    history.append({"a": math.nan, "b": -math.inf, "c": 1.5, "d": None})
    history.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"a": "nan", "b": "-inf", "c": 1.5, "d": null}\n'


def test_a_metrics_file_that_is_too_short_is_kept_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    history = MetricsFile(path)
    history.append({"optimizer_step": 1})
    before = path.read_bytes()
    with caplog.at_level(logging.WARNING):
        history.truncate(len(before) + 100)
    assert path.read_bytes() == before
    assert (
        f"{path} has {len(before)} bytes, but had {len(before) + 100} at the checkpoint"
        in caplog.text
    )
    history.append({"optimizer_step": 9})
    assert [row["optimizer_step"] for row in rows(path)] == [1, 9]
    history.close()


def test_a_history_is_read_row_by_row_without_one_that_is_still_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "train", "train/loss": "nan"}\n{"event": "eval"}\n{"event": "tra')
    rows_of_run = read_history(tmp_path)
    assert next(rows_of_run) == {"event": "train", "train/loss": "nan"}
    with path.open("a") as file:
        file.write('in"}\n')
    assert list(rows_of_run) == [{"event": "eval"}, {"event": "train"}]
    with pytest.raises(FileNotFoundError):
        next(read_history(tmp_path / "none"))


@pytest.mark.parametrize("rest", [b"", b'{"optimizer', b'{"optimizer_step": 2}'])
def test_a_row_that_was_cut_is_dropped_and_not_continued_by_the_next(
    tmp_path: Path, rest: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"optimizer_step": 1}\n' + rest)
    history = MetricsFile(path)
    history.truncate(44)
    history.append({"optimizer_step": 3})
    history.close()
    assert [row["optimizer_step"] for row in read_history(tmp_path)] == [1, 3]


def test_rows_that_were_edited_are_cut_back_to_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"optimizer_step": 1}\n{"optimizer_step": 2, "note": "edited"}\n')
    history = MetricsFile(path)
    history.truncate(44)
    history.append({"optimizer_step": 3})
    history.close()
    assert [row["optimizer_step"] for row in read_history(tmp_path)] == [1, 3]
