"""State that no checkpoint holds is named wherever it is kept, and whichever part uses it."""

from __future__ import annotations

import random
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from accel_trainer import Batch, StepOutput

from ..training.planted import PlainTask, run
from ..variants import slow_but
from .hidden import PLACES, USERS, Counts

# One of the places is a file that is left open.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def named(caplog: pytest.LogCaptureFixture) -> str:
    lines = [each for each in caplog.messages if each.startswith("[UNSAVED_STATE] ")]
    assert len(lines) <= 1, lines
    return "".join(lines)


@pytest.fixture(autouse=True)
def number_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN_NUMBER", "1")


@pytest.mark.parametrize(
    "place",
    slow_but(
        [
            "slot",
            "layer made late",
            "method",
            "closure",
            "partial",
            "cache of draws",
            "global",
            "optimizer",
            "generator of torch",
            "cycle",
        ],
        PLACES,
    ),
)
def test_a_number_is_named_wherever_it_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """Fault (Resume): part of the state is not restored because it is in no checkpoint: attributes,
    globals, a task's teacher, generators, a callback's counter -> one line names it after two steps
    if both steps changed it, or at the end of an epoch; state that only changes later is not
    detected
    """
    parts, _ = USERS["task"]
    run(tmp_path / "run", **parts(PLACES[place](tmp_path)))
    assert any(word in named(caplog) for word in ("training changes ", "the first step creates "))


@pytest.mark.parametrize("user", USERS)
def test_a_number_is_named_whichever_part_uses_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, user: str
) -> None:
    parts, name = USERS[user]
    assert run(tmp_path, **parts(Counts())).state == "done"
    assert f"{name}," in named(caplog)


# A schedule is asked before the first step: each start makes the same layer.
NOT_LOOKED_FOR = {"schedule": {"layer made late"}}


@pytest.mark.slow
def test_a_number_in_any_place_is_named_whichever_part_uses_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(0)
    for number in range(60):
        caplog.clear()
        user = draw.choice([*USERS])
        place = draw.choice([each for each in PLACES if each not in NOT_LOOKED_FOR.get(user, ())])
        (tmp_path / str(number)).mkdir()
        run(tmp_path / f"run-{number}", **USERS[user][0](PLACES[place](tmp_path / str(number))))
        assert named(caplog), (place, user)


def test_attributes_of_classes_and_files_of_the_user_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "number = 0\n\n\nclass Config:\n    value = 0\n"
    (tmp_path / "hidden_config.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    code = (
        "import hidden_config\nfrom hidden_config import Config\n"
        "from accel_trainer import ClassificationTask\n\n\n"
        "class Counts(ClassificationTask):\n"
        "    def step(self, model, batch):\n"
        "        Config.value += model.training\n"
        "        hidden_config.number += model.training\n"
        "        return super().step(model, batch)\n"
    )
    (tmp_path / "hidden_task.py").write_text(code, encoding="utf-8")
    try:
        import hidden_task  # type: ignore[import-not-found]

        run(tmp_path / "run", task=hidden_task.Counts)
    finally:
        for module in ("hidden_task", "hidden_config"):
            sys.modules.pop(module, None)
    assert "training changes Config.value, hidden_config.number," in named(caplog)


@lru_cache
def weight_of(step: int) -> float:
    return 1 / (step + 1)


class Honest(PlainTask):
    """Has tables, caches and iterators that no step changes, or that are made in each."""

    table = {"a": 1}
    names: Any = None

    def __init__(self, log: Any) -> None:
        self.log, self.numbers = log, range(10)
        self.space = SimpleNamespace(rate=0.1)

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.names = self.names or ["first"]
        print(batch.position.step, file=self.log)
        numbers = iter(self.numbers)
        next(numbers)
        output = super().step(model, batch)
        return output._replace(losses=output.losses * weight_of(batch.position.step))

    eval_step = PlainTask.step


def test_nothing_is_said_of_honest_tables_caches_and_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / "log.txt").open("w", encoding="utf-8") as log:
        run(tmp_path / "run", task=lambda: Honest(log))
    assert named(caplog) == ""
