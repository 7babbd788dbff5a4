"""JSON is bounded by its size, and is an object where one is expected."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from accel_trainer.core.json_files import (
    MAX_BYTES,
    dump_json,
    parse_json,
    read_json_object,
    write_json,
)


def test_a_json_file_has_what_was_written_and_can_be_read_by_a_person(tmp_path: Path) -> None:
    value = {"name": "Zoë", "numbers": [1, 2.5, None]}
    path = tmp_path / "value.json"
    write_json(path, value)
    assert read_json_object(path) == value == json.loads(path.read_text())
    assert path.read_text().count("\n") > 3
    assert dump_json(value).isascii()


@pytest.mark.parametrize("value", [{"loss": math.nan}, [math.inf], "x" * MAX_BYTES])
def test_json_that_others_could_not_read_is_not_written(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant|bytes of JSON"):
        dump_json(value)


@pytest.mark.parametrize("text", ["[1]", '"name"', "3", "null"])
def test_a_json_file_without_an_object_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="config.json is not an object"):
        read_json_object(path)


def test_a_json_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": "' + "x" * 100 + '"}')
    with pytest.raises(OSError, match="more than 50"):
        read_json_object(path, max_bytes=50)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff", b"{", b""])
def test_bytes_that_are_no_json_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # any: the caller names the file
        parse_json(data)
