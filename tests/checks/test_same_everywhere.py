"""What a checkpoint stores once is the same on all processes, or the value is named."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accel_trainer import Callback, CheckpointError, OptimizerConfig
from accel_trainer.checks.same_everywhere import check_same_parts

from .. import processes, workload
from .test_rehearsal_on_processes import Plain

NAN = float("nan")
# What processes 0 and 1 have.
DIFFERENT = {
    "another number": (1.0, 2.0),
    "another type": (1, 1.0),
    "a bool that equals a number": (1, True),
    "another sign of zero": (0.0, -0.0),
    "nothing": (None, 0),
    "an empty tuple for an empty list": ((), []),
    "another text": ("a", "b"),
    "a list that is longer": ([1], [1, 2]),
    "an order in a list": ([1, 2], [2, 1]),
    "elements in another order": (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
    "a tensor for a number": (1.0, torch.tensor(1.0)),
    "another dtype": (torch.ones(1), torch.ones(1).double()),
    "another shape": (torch.ones(2, 1), torch.ones(1, 2)),
    "a key that is missing": ({"a": 1}, {}),
    "a value further down": ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}),
}
EQUAL = {
    "NaN": (NAN, float("nan")),
    "NaN in a tensor": (torch.tensor(NAN), torch.tensor(NAN)),
    "the order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "a form in memory": (torch.ones(2, 3), torch.ones(3, 2).t()),
    "one value in all places": (torch.ones(1).expand(4), torch.ones(4)),
}
PLACES = {
    "a state": lambda value: {"own": {"value": value}},
    "a callback": lambda value: {"trainer": {"callbacks": {"Own": {"value": value}}}},
    "an optimizer's own": lambda value: {"optimizer": {"state": {}, "value": value}},
    "a second one's": lambda value: {"optimizer-b": {"param_groups": [{"value": value}]}},
    "what is done": lambda value: {"trainer": {"skipped_steps": value}},
}
# What is each process's own, or is compared elsewhere.
LEFT_OUT = {
    "what main logs": lambda rank: {"trainer": {"log": rank}},
    "rows": lambda rank: {"trainer": {"callbacks": {"MetricLogger": {"history_bytes": rank}}}},
    "weights": lambda rank: {"model": {"w": rank}, "ema": {"w": rank}},
}


def check(pieces: Mapping[str, Any], accelerator: Accelerator) -> str:
    try:
        check_same_parts(pieces, accelerator)
    except CheckpointError as error:
        return str(error)
    return ""


def compare_values() -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    for place in PLACES.values():
        for kind, values in DIFFERENT.items():
            assert "CKPT_INEXACT" in check(place(values[rank]), accelerator), kind
        for kind, values in EQUAL.items():
            assert not check(place(values[rank]), accelerator), kind
    for kind, pieces in LEFT_OUT.items():
        assert not check(pieces(rank), accelerator), kind


def test_any_value_that_differs_is_found_wherever_it_is_kept(tmp_path: Path) -> None:
    processes.run(compare_values, num_processes=2, folder=tmp_path)


class Keeps(Callback):
    """Counts the process's own number from a step on."""

    def __init__(self, step: int) -> None:
        self.step, self.value = step, 0

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if report.optimizer_step >= self.step:
            self.value += trainer.accelerator.process_index

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Logs(Keeps):
    """Logs the process's own number, of which only the main process's is kept."""

    def on_step_end(self, trainer: Any, report: Any) -> None:
        trainer.log("here", trainer.accelerator.process_index)


class LateRank(Plain):
    """Keeps the process's own number beside what torch keeps, from the fourth step on."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        late = int(os.environ["RANK"]) if self.num_steps > 3 else 0
        return {**super().state_dict(), "late": late}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


def train(folder: Path, **options: Any) -> None:
    own = {"optimizer": OptimizerConfig()} if "optimizer" in options else {}
    config = workload.make_config(folder, **own)
    config = replace(config, trainer=replace(config.trainer, num_epochs=1, log_every_n_steps=7))
    workload.train(config, num_train=144, **options)


def refuse_differences(folder: Path) -> None:
    for step in (1, 4):
        with pytest.raises(CheckpointError, match=r"CKPT_INEXACT.*callbacks\.Keeps\.value 1; "):
            train(folder / str(step), callbacks=(Keeps(step),))
    with pytest.raises(CheckpointError, match=r"CKPT_INEXACT.*optimizer\.late 1; "):
        train(folder / "optimizer", optimizer=lambda model: LateRank(model.parameters()))
    train(folder / "honest", callbacks=(Keeps(9), Logs(9)))


def test_a_run_ends_with_the_name_of_what_differs(tmp_path: Path) -> None:
    """Fault (Resume): the state of a callback, of `states=` or of an optimizer of your own differs
    between processes, at first or later -> the run ends at its first step, or at the next save,
    with one line that names the first value that differs
    """
    processes.run(refuse_differences, tmp_path, num_processes=2, folder=tmp_path / "logs")
    assert not [*tmp_path.glob("1/checkpoints/step-*")]
    assert len([*tmp_path.glob("4/checkpoints/step-*")]) == 2
    assert [*tmp_path.glob("honest/result.json")]
