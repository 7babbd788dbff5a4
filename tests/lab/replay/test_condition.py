"""Conditions of `accel-trainer bisect --where`: their values, and one line about a wrong one."""

from __future__ import annotations

import math

import pytest

from accel_trainer.core.errors import ConfigError
from accel_trainer.lab.replay.condition import parse_condition

ROW = {"train/loss": 2.0, "optim/grad_norm": 11.0, "grad/0.weight": math.nan, "epoch": 1.0}
COLUMNS = [*ROW, "eval/accuracy"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("optim/grad_norm > 10", True),
        ("2<train/loss", False),
        ("train/loss >= -3 and epoch != 2", True),
        ("not train/loss == 2 or epoch <= .5e1", True),
        ("not (train/loss == 2 or epoch <= 5)", False),
        ("isnan(grad/0.weight) and not isfinite(grad/0.weight)", True),
        ("train/loss < optim/grad_norm", True),
        # of a column that the row does not have
        ("eval/accuracy > 0.5", None),
        ("not isnan(eval/accuracy)", None),
        ("eval/accuracy > 0.5 or epoch == 1", True),
        ("epoch == 2 and eval/accuracy > 0.5", False),
        ("eval/accuracy > 0.5 and epoch == 1", None),
    ],
)
def test_a_condition_is_true_false_or_unknown(text: str, value: bool | None) -> None:
    assert parse_condition(text, COLUMNS).holds(ROW) is value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train/grad_norm > 10", "character 1 (train/grad_norm): no row has it, perhaps optim/gr"),
        ("train/loss >", "its end: expected a column or a number"),
        ("train/loss = 3", "character 12 (=): expected one of < <= > >= == !="),
        ("(epoch > 1", "its end: expected a closing parenthesis"),
        ("1 < epoch < 2", "character 11 (<): expected `and`, `or` or the end"),
        ("epoch > 1; exit()", "character 10 (;): expected `and`, `or` or the end"),
        ("__import__('os')", "character 1 (__import__): no row has it"),
    ],
)
def test_a_wrong_condition_is_one_line_with_the_place(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_condition(text, COLUMNS)
    assert words in caught.value.message
    assert caught.value.message.endswith(
        ": the columns are epoch, eval/accuracy, grad/0.weight, optim/grad_norm, train/loss"
    )
