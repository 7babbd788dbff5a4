"""An evaluation of one's own, anything with `run`, beside those of sets or alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_trainer import (
    Batch,
    ClassificationTask,
    ConfigError,
    ConfusionMatrix,
    Evaluator,
    MeanLoss,
    StepOutput,
    build_eval_loader,
    build_trainer,
    start_run,
)
from accel_trainer.fault_tolerance.preemption import StopFlag
from tests import processes
from tests.evaluated import (
    Points,
    eval_sets,
    left_by,
    make_config,
    make_net,
    rows_of,
    steps_of,
    train,
    train_set,
)


class KNearest:
    """The accuracy of the label of the nearest known point, by the features of the model."""

    monitors: Mapping[str, bool] = {"knn": True}  # noqa: RUF012

    def __init__(self, known: Points, asked: Points) -> None:
        self.known = known
        self.asked = asked

    def run(self, model: nn.Module, position: Any, stop_flag: Any) -> dict[str, Any]:
        features = model[:-1]
        nearest = torch.cdist(features(self.asked.points), features(self.known.points)).argmin(1)
        return {"knn": (self.known.labels[nearest] == self.asked.labels).double().mean()}


def with_neighbours() -> dict[str, Any]:
    """A set, and an evaluation of its own."""
    asked = Points(60, seed=5, spread=2.0)
    return {"sets": {"val": eval_sets(), "knn": KNearest(train_set(), asked)}}


def exact(folder: Path, **settings: Any) -> Any:
    batch = {"per_device_batch_size": 2, "reduce": "exact"}
    return make_config(folder, batch=batch, monitor="eval_knn/knn", **settings)


def test_a_number_of_ones_own_chooses_the_best_checkpoint(tmp_path: Path) -> None:
    result = train(make_config(tmp_path, monitor="eval_knn/knn"), **with_neighbours())
    rows = rows_of(tmp_path)
    best = max(rows, key=lambda row: float(row["eval_knn/knn"]))
    assert len({row["eval_knn/knn"] for row in rows}) > 1
    assert result.best is not None
    assert (result.best.metric, result.best.value) == ("eval_knn/knn", best["eval_knn/knn"])
    assert result.best.name.startswith(f"step-{best['optimizer_step']:010d}-")
    model = make_net()
    model.load_state_dict(load_file(tmp_path / "export" / "model.safetensors"))
    again = with_neighbours()["sets"]["knn"].run(model.eval(), None, None)
    assert float(again["knn"]) == result.best.value


# --- what surrounds it ---


class Careless:
    """Draws, changes the model's mode and a buffer, and notes how it was called."""

    monitors: Mapping[str, bool] = {}  # noqa: RUF012
    unsaved_attributes = ("calls",)

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def run(self, model: nn.Module, position: Any, stop_flag: StopFlag) -> dict[str, Any]:
        self.calls.append((model.training, torch.is_grad_enabled(), position.step))
        model.train()
        for buffer in model.buffers():
            buffer += 1
        return {"drawn": random.random() + float(torch.rand(())), "word": "good", "many": [1, 2]}


def make_normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))


def test_a_careless_evaluation_changes_nothing_of_the_training(tmp_path: Path) -> None:
    careless = Careless()
    sets = {"val": eval_sets(), "own": careless}
    train(make_config(tmp_path / "with"), sets=sets, model=make_normed())
    train(make_config(tmp_path / "without"), sets={"val": eval_sets()}, model=make_normed())
    one, other = ("export/model.safetensors", "metrics.jsonl")
    found = left_by(tmp_path / "with")
    expected = left_by(tmp_path / "without")
    assert found[one] == expected[one]
    drawn = {row.pop("eval_own/drawn") for row in found[other] if row["event"] == "eval"}
    assert found[other] == expected[other]
    assert len(drawn) == 1, "it draws the same in every evaluation"
    assert careless.calls == [(False, False, step) for step in (3, 6, 9, 12, 15)]
    metrics = json.loads((tmp_path / "with" / "result.json").read_text())["metrics"]
    assert (metrics["eval_own/word"], metrics["eval_own/many"]) == ("good", [1, 2])


class OfProcess:
    """A number that differs between processes, and improves on the main one only."""

    monitors: Mapping[str, bool] = {"number": True}  # noqa: RUF012

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def run(self, model: nn.Module, position: Any, stop_flag: Any) -> dict[str, Any]:
        return {"number": -position.step if self.rank else 1}


def check_agreement(folder: Path) -> None:
    config = make_config(folder, patience=2)
    with start_run(config, recipe="evaluated") as run:
        trainer = build_trainer(
            run,
            model=make_net(),
            task=ClassificationTask(),
            train_set=train_set(),
            eval_sets={"own": OfProcess(run.accelerator.process_index)},
        )
        result = trainer.fit()
    assert result.best is not None
    print(result.best, result.position.optimizer_step, result.metrics)


def test_the_main_process_s_numbers_choose_and_stop_on_all(tmp_path: Path) -> None:
    job = processes.run(check_agreement, tmp_path / "run", num_processes=2, folder=tmp_path / "log")
    said = [job.output(rank).splitlines()[-1] for rank in (0, 1)]
    assert said[0] == said[1]
    assert "value=1, " in said[0]
    assert " 9 {'eval_own/number': 1}" in said[0], "the third evaluation uses up the patience"


@pytest.mark.parametrize("weights", [None, "model"])
def test_the_averaged_weights_are_measured_unless_it_says_model(
    tmp_path: Path, weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if weights is not None:
        monkeypatch.setattr(KNearest, "weights", weights, raising=False)
    sets = with_neighbours()["sets"]
    config = make_config(tmp_path, ema_decay=0.8, max_steps=3)
    result = train(config, sets={"knn": sets["knn"], "val": sets["val"]})
    assert ("eval_ema_knn/knn" in result.metrics) == (weights is None)
    assert "eval_ema_val/accuracy" in result.metrics
    assert result.best is not None
    assert result.best.metric == ("eval_ema_knn/knn" if weights is None else "eval_knn/knn")


# --- before the first step ---


class Limited:
    """Is tried before the first step, since `run` has a limit."""

    monitors: Mapping[str, bool] = {"number": True}  # noqa: RUF012

    def __init__(self, value: Any = 0.5) -> None:
        self.value = value
        self.limits: list[int | None] = []

    def run(self, model: nn.Module, position: Any, stop_flag: Any, limit: int | None = None) -> Any:
        self.limits.append(limit)
        return self.value if isinstance(self.value, Exception) else {"number": self.value}


def test_a_run_with_a_limit_is_tried_before_the_first_step(tmp_path: Path) -> None:
    limited = Limited()
    train(make_config(tmp_path, max_steps=3), sets={"own": limited})
    assert limited.limits == [1, None]


def test_an_evaluation_that_keeps_state_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Keeps(KNearest):
        highest = 0.0

        def run(self, *arguments: Any) -> dict[str, Any]:
            self.highest = self.highest + 1
            return {"knn": self.highest}

    sets = {"knn": Keeps(train_set(), eval_sets())}
    train(make_config(tmp_path, num_epochs=1), sets=sets)
    (line,) = [line for line in caplog.messages if line.startswith("[UNSAVED_STATE]")]
    assert "the end of an epoch changes Keeps.highest" in line


class NoMonitors:
    def run(self, *arguments: Any) -> dict[str, Any]:
        return {}


class Returns(KNearest):
    """Returns something, with or without a trial before the first step."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def run(self, model: nn.Module, position: Any, stop_flag: Any, limit: Any = None) -> Any:
        return self.found


class OtherMonitors(KNearest):
    monitors = ["knn"]  # type: ignore[assignment]  # noqa: RUF012


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"sets": {"own": NoMonitors()}}, "is NoMonitors: give .*, or with run and monitors"),
        ({"sets": {"own": KNearest}}, "an evaluation set is KNearest: give an instance of it"),
        (
            {"sets": {"own": OtherMonitors(train_set(), eval_sets())}},
            r"monitors of OtherMonitors is \['knn'\]: declare which numbers",
        ),
        ({"sets": {"own": Returns(3)}}, "run of Returns returned an object of type int: return a"),
        ({"sets": {"own": Returns({"a": object()})}}, "a holds an object of type object: return"),
        ({"sets": {"own": Returns({"acc": 1})}}, "knn decides .*, and the metrics computed acc: "),
        ({"sets": {"own": Returns({"knn": "x"})}}, "knn decides .*, and is of type str: set"),
        (
            {"sets": with_neighbours()["sets"], "monitor": "eval_knn/f1"},
            "no metric 'eval_knn/f1' to monitor: .* eval_knn/knn",
        ),
        (
            {"sets": with_neighbours()["sets"], "metrics": {"knn": [MeanLoss()]}},
            r"metrics= has \['knn'\], and the sets are \['val'\]",
        ),
        ({"sets": {"own": Returns({"knn": 1.0})}, "onnx": True}, "onnx= traces an evaluation"),
    ],
)
def test_an_evaluation_that_cannot_work_is_one_line_before_any_step(
    tmp_path: Path, parts: dict[str, Any], said: str
) -> None:
    config = make_config(tmp_path, every=1, monitor=parts.pop("monitor", None))
    config = replace(config, run=replace(config.run, onnx=parts.pop("onnx", False)))
    with pytest.raises(ConfigError, match=said):
        train(config, **parts)
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_a_number_that_is_missing_later_loses_no_step(tmp_path: Path) -> None:
    class Late(KNearest):
        def run(self, *arguments: Any) -> dict[str, Any]:
            return {}

    with pytest.raises(ConfigError, match="eval_knn/knn decides the best checkpoint"):
        train(make_config(tmp_path, every=None), sets={"knn": Late(train_set(), eval_sets())})
    assert [path.name for path in tmp_path.glob("checkpoints/step-*")] == [
        "step-0000000003-epoch-00000"
    ]


# --- alone, at the end, and exact with another task ---


def test_a_run_may_have_no_other_evaluation(tmp_path: Path) -> None:
    sets = with_neighbours()["sets"]["knn"]
    result = train(make_config(tmp_path, max_steps=3), sets=sets, metrics=None)
    assert list(result.metrics) == ["eval/knn"]
    assert result.best is not None
    assert result.best.metric == "eval/knn"


def test_the_test_set_may_be_an_evaluation_of_the_best_weights(tmp_path: Path) -> None:
    parts = with_neighbours()
    result = train(
        make_config(tmp_path, monitor="eval_val/loss", monitor_mode="max"),
        test_set=parts["sets"]["knn"],
        **parts,
    )
    first, *_ = rows_of(tmp_path)
    assert result.best is not None
    assert result.best.value == first["eval_val/loss"], "the first evaluation is the best"
    assert result.metrics["test/knn"] == first["eval_knn/knn"]
    assert len(rows_of(tmp_path, "test")) == 1


class Doubled(ClassificationTask):
    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().eval_step(model, batch)
        return output._replace(losses=2 * output.losses)


def test_a_set_may_be_evaluated_exactly_by_another_task(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_steps=3)
    with start_run(config, recipe="evaluated") as run:
        loader = build_eval_loader(
            eval_sets(), config.batch, num_parts=1, accelerator=run.accelerator
        )
        doubled = Evaluator(
            loader, task=Doubled(), metrics=[MeanLoss()], accelerator=run.accelerator
        )
        result = build_trainer(
            run,
            model=make_net(),
            task=ClassificationTask(),
            train_set=train_set(),
            eval_sets={"val": eval_sets(), "doubled": doubled},
            metrics=[MeanLoss(), ConfusionMatrix(3)],
        ).fit()
    assert result.metrics["eval_doubled/loss"] == 2 * result.metrics["eval_val/loss"]


class Mean:
    """Divides by the number of its rounds; a signal comes before one of them, once."""

    monitors: Mapping[str, bool] = {}  # noqa: RUF012

    def __init__(self, signal_before: int) -> None:
        self.signal_before: int | None = signal_before
        self.means: list[float] = []

    def rounds(self, stop_flag: StopFlag) -> Iterator[int]:
        for number in range(9):
            if number == self.signal_before:
                self.signal_before = None
                stop_flag.request(15)
            yield number

    def run(self, model: nn.Module, position: Any, stop_flag: StopFlag) -> dict[str, Any]:
        seen = [*stop_flag.until_preempted(self.rounds(stop_flag))]
        self.means.append(sum(seen) / len(seen))
        return {"mean": self.means[-1]}


@pytest.mark.parametrize("signal_before", [0, 4])
def test_a_signal_ends_an_evaluation_and_a_resume_evaluates_again(
    tmp_path: Path, signal_before: int
) -> None:
    mean = Mean(signal_before)
    with pytest.raises(SystemExit):
        train(make_config(tmp_path), sets=mean)
    assert (mean.means, steps_of(tmp_path)) == ([], [])
    train(make_config(tmp_path), sets=mean)
    assert mean.means == [4.0] * 5
    assert steps_of(tmp_path) == [3, 6, 9, 12, 15]
