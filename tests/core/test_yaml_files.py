from __future__ import annotations

from pathlib import Path

import pytest

from accel_trainer.core.yaml_files import dump_yaml, parse_yaml, read_yaml


def test_plain_values_are_read(tmp_path: Path) -> None:
    text = "a: {b: [1, 2.5, null, true, text]}\n'': '010'"
    values = {"a": {"b": [1, 2.5, None, True, "text"]}, "": "010"}
    (tmp_path / "x.yaml").write_text(text)
    assert parse_yaml(text) == read_yaml(tmp_path / "x.yaml") == values


def test_what_is_written_is_read_again() -> None:
    values = {
        "017": "017",
        "<<": 1,
        "on": ["1:30", "1_000", "2026-01-01", "no", 1e-05, float("inf"), -3],
    }
    assert parse_yaml(dump_yaml(values)) == values


def test_long_names_that_begin_alike_are_two() -> None:
    one, other = "a" * 50 + "b", "a" * 50 + "c"
    assert parse_yaml(f"{one}: 1\n{other}: 2") == {one: 1, other: 2}


def test_one_name_in_two_groups_is_no_repetition() -> None:
    assert parse_yaml("a: {name: 1}\nb: {name: 2}") == {"a": {"name": 1}, "b": {"name": 2}}


@pytest.mark.parametrize("text", ["", "# a comment", "{}", "---"])
def test_an_empty_text_has_no_values_and_an_empty_file_is_refused(
    text: str, tmp_path: Path
) -> None:
    assert parse_yaml(text) == {}
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match="x.yaml is empty"):
        read_yaml(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "invalid start byte"),
        (b"a: 1\na: 2", "line 2: a appears twice"),
        (b"a: &x 1\nb: *x", "line 2: aliases"),
        (b"<<: {a: 1, a: 2}", "line 1: merges"),
        (b"a: 1\nb:\n  <<: {c: 1}\n  c: 2", "line 3: merges"),
        (b"a: !!bool x", "not YAML: 'x'"),
        (b"[1, 2]", "expected names with values, got a value of type list"),
    ],
)
def test_what_is_not_plain_is_a_value_error(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_yaml(tmp_path / "x.yaml")


def test_a_file_of_more_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("# \n" * 400_000)
    with pytest.raises(OSError, match="more than 1048576"):
        read_yaml(tmp_path / "x.yaml")
