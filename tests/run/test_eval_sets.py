"""Several evaluation sets and a test set: what is measured on each, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from accel_trainer import (
    Batch,
    CheckpointError,
    ClassificationTask,
    ConfigError,
    ConfusionMatrix,
    DataError,
    DatasetOptions,
    MeanLoss,
    StepOutput,
    TopKAccuracy,
    UserError,
    WholeSetMetric,
    build_train_loader,
    build_trainer,
    start_run,
)
from tests.evaluated import (
    NUM_CLASSES,
    SIZES,
    eval_sets,
    make_config,
    rows_of,
    steps_of,
    train,
    train_set,
)
from tests.evaluated import test_set as points_of_test

MANY_CLASSES = 300  # a confusion matrix of more than 256 keeps the predictions of all samples


def names_in(row: dict[str, Any]) -> list[str]:
    return [name for name in row if "/" in name]


def test_rows_have_the_numbers_of_each_set_by_its_name(tmp_path: Path) -> None:
    config = make_config(tmp_path, ema_decay=0.8)
    result = train(config, sets=eval_sets("val", "hard"), test_set=points_of_test())
    groups = ["eval_val", "eval_ema_val", "eval_hard", "eval_ema_hard"]
    expected = [f"{group}/{name}" for group in groups for name in ("loss", "accuracy")]
    for row in rows_of(tmp_path):
        assert names_in(row) == expected
    (row,) = rows_of(tmp_path, "test")
    assert names_in(row) == ["test/loss", "test/accuracy"]
    assert list(result.metrics) == [*expected, "test/loss", "test/accuracy"]
    assert result.best is not None
    assert (result.best.metric, result.best.weights) == ("eval_ema_val/accuracy", "ema")


def test_a_set_is_measured_as_if_it_were_the_only_one(tmp_path: Path) -> None:
    train(make_config(tmp_path / "both"), sets=eval_sets("val", "hard"))
    for name in ("val", "hard"):
        train(make_config(tmp_path / name), sets=eval_sets(name)[name])
        alone = [row["eval/loss"] for row in rows_of(tmp_path / name)]
        assert alone == [row[f"eval_{name}/loss"] for row in rows_of(tmp_path / "both")]


def test_an_evaluation_set_may_be_called_test_beside_the_test_set(tmp_path: Path) -> None:
    metrics = {"test": [MeanLoss()], "test_set": [TopKAccuracy()]}
    result = train(
        make_config(tmp_path),
        sets=eval_sets("test"),
        test_set=points_of_test(),
        metrics=metrics,
    )
    assert [*result.metrics] == ["eval_test/loss", "test/accuracy"]


@pytest.mark.parametrize(
    ("monitor", "chosen"),
    [
        (None, "eval_val/accuracy"),
        ("eval_hard/accuracy", "eval_hard/accuracy"),
        ("eval_hard/loss", "eval_hard/loss"),
    ],
)
def test_the_first_set_or_the_monitored_number_chooses_the_best(
    tmp_path: Path, monitor: str | None, chosen: str
) -> None:
    result = train(make_config(tmp_path, monitor=monitor), sets=eval_sets("val", "hard"))
    choose = min if chosen.endswith("loss") else max
    best = choose(rows_of(tmp_path), key=lambda row: float(row[chosen]))
    assert result.best is not None
    assert (result.best.metric, result.best.value) == (chosen, best[chosen])
    assert result.best.name.startswith(f"step-{best['optimizer_step']:010d}-")


def test_sets_may_have_metrics_of_their_own(tmp_path: Path) -> None:
    metrics = {"val": [MeanLoss()], "hard": [TopKAccuracy()]}
    result = train(
        make_config(tmp_path),
        sets=eval_sets("val", "hard"),
        metrics=metrics,
        test_set=points_of_test(),
    )
    # The test set is not named, and has those of the first set.
    assert list(result.metrics) == ["eval_val/loss", "eval_hard/accuracy", "test/loss"]


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    return {"accuracy": float((outputs.argmax(1) == targets).double().mean())}


def test_metrics_of_whole_sets_follow_the_size_of_each(tmp_path: Path) -> None:
    net = torch.nn.Linear(6, MANY_CLASSES)
    result = train(
        make_config(tmp_path),
        model=net,
        sets=eval_sets("val", "hard"),
        test_set=points_of_test(),
        metrics=[
            ConfusionMatrix(MANY_CLASSES),
            WholeSetMetric(accuracy, num_outputs=MANY_CLASSES),
        ],
    )
    for group, name in (("eval_val", "val"), ("eval_hard", "hard"), ("test", "test")):
        pairs = torch.tensor(result.metrics[f"{group}/confused_pairs"])
        assert pairs[:, 2].sum() == SIZES[name]
        right = pairs[pairs[:, 0] == pairs[:, 1]][:, 2].sum()
        assert float(right) / SIZES[name] == result.metrics[f"{group}/accuracy"]


def points(num: int, *, label: int = 0, width: int = 6) -> TensorDataset:
    return TensorDataset(torch.zeros(num, width), torch.full((num,), label))


VAL = points(5)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"sets": {"ema_val": VAL}}, "an evaluation set is called 'ema_val': use 1 to 40"),
        ({"sets": {"Val": VAL}}, "an evaluation set is called 'Val': use 1 to 40 lowercase"),
        ({"sets": {"": VAL}}, "an evaluation set is called '': use 1 to 40 lowercase"),
        ({"sets": {1: VAL}}, "is dict: give one of its parts, 1"),
        ({"sets": {}}, "eval_sets= has no set: give one or more"),
        ({"sets": {"val": 3}}, r"is int: give an object with len\(\) and \[index\]"),
        ({"sets": {"val": VAL, "hard": points(0)}}, "eval_sets= has a set without samples: add"),
        ({"test_set": points(0)}, "test_set= has a set without samples: add some"),
        ({"sets": [VAL, VAL]}, "an evaluation set is list: join them, .* give a dict of them"),
        ({"options": {"num_classes": 3}}, "options= is an object of type dict with num_classes"),
        ({"options": DatasetOptions}, "options= is the class DatasetOptions: give an instance"),
        ({"test_set": 3}, r"is int: give an object with len\(\) and \[index\]"),
        ({"metrics": {"val": [MeanLoss()]}}, r"metrics= has \['val'\], and the sets are \[''\]"),
        (
            {"sets": {"val": VAL}, "metrics": {"val": [MeanLoss()], "hrd": []}},
            r"metrics= has \['val', 'hrd'\], and the sets are \['val'\]: give a list",
        ),
        (
            {"sets": {"val": VAL, "hard": VAL}, "metrics": {"hard": [MeanLoss()]}},
            r"metrics= has \['hard'\], and the sets are \['val', 'hard'\]: give",
        ),
        ({"sets": {"val": VAL}, "metrics": {"val": MeanLoss()}}, "metrics= is not a list: put"),
        ({"sets": {"val": VAL, "hard": points(4, label=7)}}, "has the target 7, but the classes"),
        ({"test_set": points(4, label=7)}, "has the target 7, but the classes are"),
        (
            {"test_set": points(4), "metrics": [ConfusionMatrix(NUM_CLASSES + 1)]},
            "3 logits per sample, the confusion matrix has 4 classes",
        ),
    ],
)
def test_sets_and_metrics_that_cannot_be_are_one_line_before_any_step(
    tmp_path: Path, parts: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        train(make_config(tmp_path), **{"sets": VAL, **parts})
    assert "\n" not in str(caught.value)
    assert steps_of(tmp_path, "train") == []


@pytest.mark.parametrize(
    "monitor", ["eval/loss", "eval_hrd/loss", "test/loss", "eval_ema_val/loss"]
)
def test_a_number_of_no_set_cannot_be_monitored(tmp_path: Path, monitor: str) -> None:
    said = f"no metric '{monitor}' to monitor: set TrainerConfig.monitor=. to one of eval_val/loss,"
    with pytest.raises(ConfigError, match=said):
        train(make_config(tmp_path, monitor=monitor), sets=eval_sets("val", "hard"))


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("val", "test"), r"\(38, 13, 7\) -> \(38, 13, 9\) samples"),
        (("val",), r"\(38, 13, 7\) -> \(38, 13\) samples"),
    ],
)
def test_other_evaluation_sets_are_refused_in_a_resume(
    tmp_path: Path, sets: tuple[str, ...], said: str
) -> None:
    train(make_config(tmp_path, max_steps=4), sets=eval_sets("val", "hard"))
    with pytest.raises(CheckpointError, match=f"DATA_CHANGED.*{said}"):
        train(make_config(tmp_path), sets=eval_sets(*sets))


def test_a_set_needs_enough_samples_for_nothing_but_itself(tmp_path: Path) -> None:
    result = train(make_config(tmp_path), sets={"one": points(1)}, train_set=train_set())
    assert list(result.metrics) == ["eval_one/loss", "eval_one/accuracy"]


def test_the_order_of_a_loader_of_ones_own_cannot_be_set(tmp_path: Path) -> None:
    class Loader:
        plan = None

        def step_batches(self, epoch: int, first_step: int) -> Any:
            raise AssertionError

    for batch in ({"order": "balanced"}, {"leave_out": tmp_path / "bad.txt"}):
        with pytest.raises(ConfigError, match="a Loader determines its own order"):
            train(make_config(tmp_path / "run", batch=batch), train_set=Loader())


def test_an_evaluation_without_samples_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="DATA_TOO_SMALL"):
        train(make_config(tmp_path), sets=points(0))


def test_a_loader_keeps_its_order_and_refuses_weights(tmp_path: Path) -> None:
    with start_run(make_config(tmp_path), recipe="weights") as run:
        data = train_set()
        loader = build_train_loader(data, run.config.batch, seed=0, accelerator=run.accelerator)
        with pytest.raises(ConfigError, match="TrainLoader determines its own order: .*weights="):
            build_trainer(
                run,
                model=nn.Linear(6, NUM_CLASSES),
                task=ClassificationTask(),
                train_set=loader,
                eval_sets=data,
                options=DatasetOptions(weights=[1.0] * len(data)),
            )


def test_a_test_set_that_is_also_used_otherwise_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, part in (("same", eval_sets()), ("other", points_of_test())):
        train(make_config(tmp_path / name, max_steps=1), test_set=part)
        said = [line for line in caplog.messages if line.startswith("[TEST_SET] test_set= has the")]
        assert len(said) == (name == "same")
        caplog.clear()


def test_training_samples_that_choose_the_best_checkpoint_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = {**eval_sets("val"), "seen": train_set()}
    for name, sets in (("same", {"val": train_set()}), ("watched", watched)):
        train(make_config(tmp_path / name, max_steps=1), sets=sets)
        said = [line for line in caplog.messages if line.startswith("[EVAL_SETS] eval_sets= has")]
        assert len(said) == (name == "same")
        caplog.clear()


class Strange(MeanLoss):
    """Reports its number as `name`, which it may or may not declare."""

    def __init__(self, name: str, declared: bool) -> None:
        self.higher_is_better = {name: False} if declared else {}  # type: ignore[misc]
        self.number = name

    def compute(self, sums: Tensor) -> dict[str, Any]:
        return {self.number: 1.0}


@pytest.mark.parametrize("name", ["", "x" * 300, "a\0b", "a\nb", "..", "a/../b"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_metric_with_a_strange_name_costs_no_training(
    tmp_path: Path, name: str, declared: bool
) -> None:
    with pytest.raises(ConfigError, match="NAME.*has a number named"):
        train(make_config(tmp_path), metrics=[MeanLoss(), Strange(name, declared)])
    assert not list(tmp_path.glob("checkpoints/step-*"))


class Unmeasurable(MeanLoss):
    higher_is_better: ClassVar[Mapping[str, bool]] = {"f1": True}

    def compute(self, sums: Tensor) -> dict[str, Any]:
        return {"f1": float("nan")}


def test_a_monitored_number_that_is_nan_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, max_steps=1)
    train(config, metrics=[Unmeasurable()])
    said = [line for line in caplog.messages if line.startswith("[METRIC] ")]
    assert ["eval/f1 " in line for line in said] == [True]


class OwnStep:
    """Trains and evaluates with one function."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        losses = F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")
        return StepOutput(losses)


class OwnEvalStep(OwnStep):
    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return self.step(model, batch)


@pytest.mark.parametrize("name", ["hard", "test_set"])
def test_a_step_that_fails_on_a_set_costs_no_training(tmp_path: Path, name: str) -> None:
    wide = points(4, width=7)
    sets = {"sets": {"val": VAL, "hard": wide}} if name == "hard" else {"test_set": wide}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(make_config(tmp_path, every=1), task=OwnStep(), metrics=[MeanLoss()], **sets)
    assert not list(tmp_path.glob("checkpoints/*"))


def test_an_eval_step_that_fails_before_training_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may need what training leaves, so the run goes on."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(
            make_config(tmp_path, max_steps=1),
            task=OwnEvalStep(),
            metrics=[MeanLoss()],
            test_set=points(4, width=7),
        )
    (line,) = [line for line in caplog.messages if "cannot be tried before training" in line]
    assert "RuntimeError: " in line
    assert "shapes cannot be multiplied" in line
    assert "test_eval_sets.py:" in line
    assert list(tmp_path.glob("checkpoints/*"))


class NegativeLoss(MeanLoss):
    """Is best at first, as training goes on."""

    higher_is_better: ClassVar[Mapping[str, bool]] = {"loss": True}


@pytest.mark.parametrize(
    ("sets", "size", "is_kept"),
    [("hard", 38, False), ("val", 39, True)],
    ids=["other evaluation data", "other training data"],
)
def test_the_best_so_far_counts_only_for_the_data_that_it_was_measured_on(
    tmp_path: Path, sets: str, size: int, is_kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    same = {"metrics": [NegativeLoss()]}
    first = train(make_config(tmp_path, max_steps=6), sets=eval_sets("val")["val"], **same)
    config = make_config(tmp_path, allow=("data",))
    other = eval_sets(sets)[sets]
    with caplog.at_level("WARNING"):
        second = train(config, sets=other, train_set=train_set(size), **same)
    assert first.best is not None
    assert second.best is not None
    assert (second.best == first.best) is is_kept
    assert ("start again" in caplog.text) is not is_kept
    assert is_kept or second.best.value in [row["eval/loss"] for row in rows_of(tmp_path)[2:]]
