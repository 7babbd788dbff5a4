from __future__ import annotations

import json
import math

import pytest

from accel_trainer.cli.common.output import tell_json


def refuse(constant: str) -> float:
    raise AssertionError(constant)


def test_what_json_lacks_is_printed_as_texts(capsys: pytest.CaptureFixture[str]) -> None:
    tell_json({"loss": math.nan, "rows": [(1, -math.inf), (2.5, None)], "name": "a\nb"})
    line = capsys.readouterr().out
    expected = {"loss": "nan", "rows": [[1, "-inf"], [2.5, None]], "name": "a\nb"}
    assert json.loads(line, parse_constant=refuse) == expected
    assert line.count("\n") == 1
