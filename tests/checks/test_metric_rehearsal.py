"""The start tries the task and the metrics on one batch: what cannot work fails in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer import Callback, ClassificationTask, StepOutput, StepReport
from accel_trainer.checks.evaluation_trial import EvaluationTrial
from accel_trainer.core.errors import ConfigError, DivergedError
from accel_trainer.core.types import Batch
from accel_trainer.distributed.accelerator import RuntimeConfig, start_accelerator
from accel_trainer.training.callback import TrainerView
from accel_trainer.training.evaluation.evaluation import (
    EvaluationFailed,
    check_monitored,
    run_evaluation,
)
from accel_trainer.training.evaluation.evaluator import Evaluator
from accel_trainer.training.evaluation.metric_adapters import TorchMetric, WholeSetMetric
from accel_trainer.training.evaluation.metrics import ConfusionMatrix, MeanLoss, TopKAccuracy

from .. import workload
from ..training.evaluation.test_evaluator import NUM_CLASSES, Samples, make_model, shared


class Steps(Callback):
    """Counts the steps."""

    def __init__(self) -> None:
        self.number = 0

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        self.number = report.optimizer_step


def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, metric: Any, **changes: Any) -> str:
    """Train with `metric` in place of the accuracy; return the refusal, before the first step."""
    monkeypatch.setattr(workload, "TopKAccuracy", lambda: metric)
    config = workload.make_config(folder)
    steps = Steps()
    with pytest.raises(ConfigError) as refused:
        workload.train(
            replace(config, trainer=replace(config.trainer, **changes)), callbacks=(steps,)
        )
    assert steps.number == 0
    return str(refused.value)


class Accuracies(TopKAccuracy):
    """Monitored by its name, and a list."""

    def compute(self, sums: Tensor) -> dict[str, Any]:
        return {"accuracy": [0.5, 0.25]}


class Renamed(TopKAccuracy):
    """Without the number that it declares."""

    def compute(self, sums: Tensor) -> dict[str, Any]:
        return {"acc": 0.5}


class Float32Sums(TopKAccuracy):
    """Counts that are exact up to 16 million only."""

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(2, device=device)


class NewSums(MeanLoss):
    """Returns its sums in place of adding them up."""

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        return sums + 1  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (Accuracies(), "accuracy decides the best checkpoint, and is of type list"),
        (Renamed(), "accuracy decides the best checkpoint, and the metrics computed loss, acc,"),
        (Float32Sums(), "the sums of metric Float32Sums are float32 [2]: return float64 zeros"),
        (ConfusionMatrix(workload.NUM_CLASSES + 1), "4 logits per sample, the confusion matrix"),
    ],
)
def test_a_metric_that_cannot_work_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: Any, said: str
) -> None:
    assert said in refusal(tmp_path, monkeypatch, metric)


def test_a_metric_that_returns_new_sums_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "MeanLoss", NewSums)
    said = refusal(tmp_path, monkeypatch, TopKAccuracy())
    assert "metric NewSums: update returned new sums: add to the given ones in place" in said


class LostSums(MeanLoss):
    """Adds to a copy of its sums, which it forgets."""

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        sums = sums + output.losses.sum()


def test_a_metric_whose_update_changes_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workload, "MeanLoss", LostSums)
    with pytest.raises(ConfigError, match="metric LostSums: .* num_items of 0 for all samples"):
        workload.train(workload.make_config(tmp_path / "run"))
    (line,) = [line for line in caplog.messages if line.startswith("[METRIC]")]
    assert line.startswith(
        "[METRIC] the update of metric LostSums has not changed its sums: add to them in place"
    )


class Remembers(MeanLoss):
    """Reports the mean over all evaluations."""

    def __init__(self) -> None:
        self.total = 0.0

    def compute(self, sums: Tensor) -> dict[str, Any]:
        self.total += super().compute(sums)["loss"]
        return {"loss": self.total}


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_a_metric_that_remembers_evaluations_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_confirmed: bool,
) -> None:
    monkeypatch.setattr(workload, "MeanLoss", Remembers)
    if is_confirmed:
        monkeypatch.setattr(Remembers, "unsaved_attributes", ("total",), raising=False)
    workload.train(workload.make_config(tmp_path / "run"))
    lines = [line for line in caplog.messages if line.startswith("[UNSAVED_STATE] an evaluation")]
    assert len(lines) == (not is_confirmed)
    assert is_confirmed or "changes Remembers.total, and no checkpoint" in lines[0]


def test_wrappers_of_torchmetrics_that_keep_no_sums_are_refused() -> None:
    wrappers = pytest.importorskip("torchmetrics.wrappers")
    classification = pytest.importorskip("torchmetrics.classification")
    inner = classification.MulticlassAccuracy(4)
    wrapped = [wrappers.BootStrapper(inner), wrappers.MinMaxMetric(inner)]
    for metric in wrapped:
        with pytest.raises(
            ConfigError,
            match=f"{type(metric).__name__} keeps its state in the metrics that it wraps",
        ):
            TorchMetric("accuracy", metric)


class Fails(TopKAccuracy):
    """Fails in update."""

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        raise ZeroDivisionError("of mine")


def test_an_exception_in_update_ends_the_run_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "TopKAccuracy", Fails)
    steps = Steps()
    with pytest.raises(EvaluationFailed, match="metric Fails failed"):
        workload.train(workload.make_config(tmp_path), callbacks=(steps,))
    assert steps.number == 0


class NeedsAll(TopKAccuracy):
    """Computes of the whole set only, and warns otherwise; of nothing its accuracy is None."""

    def compute(self, sums: Tensor) -> dict[str, Any]:
        if sums[1] < 37:
            raise ValueError("only one class present")
        return super().compute(sums)


class Undefined(TopKAccuracy):
    """Has no value for few samples."""

    def compute(self, sums: Tensor) -> dict[str, Any]:
        return {"accuracy": None} if sums[1] < 37 else super().compute(sums)


@pytest.mark.parametrize("metric", [NeedsAll, Undefined])
def test_a_metric_that_needs_the_whole_set_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: type[TopKAccuracy]
) -> None:
    monkeypatch.setattr(workload, "TopKAccuracy", metric)
    result = workload.train(workload.make_config(tmp_path))
    assert result.best is not None
    assert result.best.metric == "eval_ema/accuracy"


def honest_metrics() -> list[Any]:
    """Metrics that measure little or nothing on a batch of a few samples."""
    sklearn = pytest.importorskip("sklearn.metrics")
    classification = pytest.importorskip("torchmetrics.classification")

    def auroc(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        probabilities = outputs.softmax(1).numpy()
        return {"auroc": sklearn.roc_auc_score(targets.numpy(), probabilities, multi_class="ovr")}

    def r2(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        return {"r2": sklearn.r2_score(targets.numpy(), outputs[:, 0].numpy())}

    def first_output(batch: Batch, output: StepOutput) -> tuple[Tensor, Tensor]:
        return output.outputs[:, 0].double(), batch.targets.double()

    by_class = classification.MulticlassAccuracy(NUM_CLASSES, average=None)
    # It raises ValueError for a single sample.
    torchs_r2 = pytest.importorskip("torchmetrics.regression").R2Score()
    higher = {"auroc": True}
    return [
        MeanLoss(),
        TopKAccuracy(),
        TopKAccuracy(5),
        ConfusionMatrix(NUM_CLASSES),
        TorchMetric("f1", classification.MulticlassF1Score(NUM_CLASSES, average="macro")),
        TorchMetric("by_class", by_class),
        TorchMetric("auroc_of_bins", classification.MulticlassAUROC(NUM_CLASSES, thresholds=20)),
        TorchMetric("kappa", classification.MulticlassCohenKappa(NUM_CLASSES)),
        TorchMetric("torchs_r2", torchs_r2, arguments=first_output),
        WholeSetMetric(auroc, NUM_CLASSES, higher_is_better=higher),
        WholeSetMetric(r2, NUM_CLASSES, higher_is_better={"r2": True}),
    ]


@pytest.mark.parametrize("batch_size", [1, 3, 40])
def test_honest_metrics_pass_the_rehearsal_on_a_batch_of_any_size(batch_size: int) -> None:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    for metric in honest_metrics():
        loader = shared(Samples(40), batch_size, accelerator)
        evaluator = Evaluator(
            loader, task=ClassificationTask(), metrics=[metric], accelerator=accelerator
        )
        found = run_evaluation(EvaluationTrial(evaluator, None), make_model(), accelerator)
        for name in metric.higher_is_better:
            if name != "by_class":
                check_monitored(found, name)


class Counting(nn.Module):
    """Counts its forwards in a buffer, in one that it assigns, and draws, in evaluations too."""

    count: Tensor
    mean: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.count += 1
        self.mean = 0.5 * self.mean + images.mean()
        return self.net(images) * (1 + 0.1 * torch.rand(())) + self.mean * 0.01


def test_the_rehearsal_moves_no_buffer_generator_or_gradient() -> None:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    loader = shared(Samples(40), 10, accelerator)
    evaluator = Evaluator(
        loader, task=ClassificationTask(), metrics=[MeanLoss()], accelerator=accelerator
    )
    model = Counting(make_model()).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state()
    run_evaluation(EvaluationTrial(evaluator, None), model, accelerator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(buffer.is_inference() for buffer in model.buffers())
    assert torch.equal(torch.get_rng_state(), states)
    assert model.training
    model(torch.zeros(4, 5, dtype=torch.float64)).sum().backward()


# --- numbers of items that are none ---


class Items(ClassificationTask):
    """Counts items that may be no counts: in training, in evaluations."""

    def __init__(self, train: float, evaluation: float) -> None:
        super().__init__()
        self.train = train
        self.evaluation = evaluation

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return super().step(model, batch)._replace(num_items=self.items(batch, self.train))

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        num_items = self.items(batch, self.evaluation)
        return super().eval_step(model, batch)._replace(num_items=num_items)

    def items(self, batch: Batch, first: float) -> Tensor:
        """Return `first` for the first sample, and 0 for the others."""
        return torch.eye(len(batch))[0] * first


@pytest.mark.parametrize("number", [-3.0, float("nan")])
def test_a_number_of_items_that_is_negative_or_nan_is_refused(
    tmp_path: Path, number: float
) -> None:
    with pytest.raises(ConfigError, match="the task returned num_items that are negative or NaN"):
        workload.train(workload.make_config(tmp_path / "a"), task=Items(5.0, number))
    with pytest.raises(
        ConfigError, match=rf"the task returned {number} as num_items: return a count"
    ):
        workload.train(workload.make_config(tmp_path / "b"), task=Items(number, 2.0))


def test_losses_without_any_item_are_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="NUM_ITEMS.*returned num_items of 0 for all samples"):
        workload.train(workload.make_config(tmp_path), task=Items(5.0, 0.0))
    assert not list(tmp_path.glob("run/checkpoints/*"))


class PaddedFirst(Items):
    """Has no items in the first batch of a set."""

    def items(self, batch: Batch, first: float) -> Tensor:
        return (batch.sample_ids >= 12).double()

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().eval_step(model, batch)
        return output._replace(losses=output.losses * self.items(batch, 0))


def test_a_first_batch_without_items_says_nothing_about_the_others() -> None:
    """Also where all losses are 0, as the sums of padding are."""
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    loader = shared(Samples(40), 10, accelerator)
    evaluator = Evaluator(
        loader, task=PaddedFirst(0, 0), metrics=[MeanLoss()], accelerator=accelerator
    )
    model = make_model().double()
    run_evaluation(EvaluationTrial(evaluator, None), model, accelerator)
    assert run_evaluation(evaluator, model, accelerator)["loss"] > 0


class NegativeLater(Items):
    """Counts less than nothing in its tenth step."""

    calls = 0

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.calls += 1
        self.train = -1.0 if self.calls == 10 else 16.0
        return super().step(model, batch)


def test_a_negative_number_of_items_in_a_later_step_is_not_applied(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="step 10, .*the gradient is NaN or inf, so it was not"):
        workload.train(workload.make_config(tmp_path), task=NegativeLater(0, 2.0))
