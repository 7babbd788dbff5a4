from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from accel_trainer.checks.evaluation_trial import EvaluationTrial
from accel_trainer.core.errors import ConfigError
from accel_trainer.core.types import Batch, EvalSource, Metric, StepOutput, Task
from accel_trainer.data.loader import EvalLoader
from accel_trainer.data.workers import SampleReader
from accel_trainer.distributed.accelerator import RuntimeConfig, start_accelerator
from accel_trainer.training.evaluation.evaluation import EvaluationFailed, run_evaluation
from accel_trainer.training.evaluation.evaluator import Evaluator
from accel_trainer.training.evaluation.metrics import (
    ConfusionMatrix,
    MeanLoss,
    MeanNumber,
    TopKAccuracy,
)
from accel_trainer.training.tasks.tasks import ClassificationTask

from ... import processes, workload
from ...joined import joined_processes
from ...variants import slow

NUM_CLASSES = 7
METRICS = [MeanLoss(), TopKAccuracy(), TopKAccuracy(5), ConfusionMatrix(NUM_CLASSES)]


class Samples:
    """`num` pairs of features float64 [5] and labels, indexed one by one."""

    def __init__(self, num: int) -> None:
        generator = torch.Generator().manual_seed(num)
        self.features = torch.randn(num, 5, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(NUM_CLASSES, (num,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.labels[index]


def make_model(*, running_mean: float = 0.5) -> nn.Module:
    """Normalises by running statistics and drops half of everything while it trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, NUM_CLASSES), nn.Dropout(0.5)).double()
    model[0].running_mean.fill_(running_mean)
    return model


def plain_loop(model: nn.Module, samples: Samples) -> dict[str, Any]:
    """What a loop over single samples in one process computes."""
    model.eval()
    loss_sum = 0.0
    hits = 0
    hits5 = 0
    confusion = [[0] * NUM_CLASSES for _ in range(NUM_CLASSES)]
    with torch.no_grad():
        for logits, label in zip(model(samples.features), samples.labels.tolist(), strict=True):
            loss_sum += F.cross_entropy(logits, torch.tensor(label)).item()
            ranked = sorted(range(NUM_CLASSES), key=logits.tolist().__getitem__, reverse=True)
            hits, hits5 = hits + (ranked[0] == label), hits5 + (label in ranked[:5])
            confusion[label][ranked[0]] += 1
    num = len(samples)
    return {
        "loss": pytest.approx(loss_sum / num, rel=1e-12),
        "accuracy": hits / num,
        "top5_accuracy": hits5 / num,
        "confusion_matrix": confusion,
        "per_class_accuracy": [
            row[k] / sum(row) if sum(row) else None for k, row in enumerate(confusion)
        ],
    }


def evaluate(model: nn.Module, loader: EvalSource, accelerator: Accelerator) -> dict[str, Any]:
    evaluator = Evaluator(
        loader, task=ClassificationTask(), metrics=METRICS, accelerator=accelerator
    )
    return run_evaluation(evaluator, model, accelerator)


def shared(
    samples: Samples, batch_size: int, accelerator: Accelerator, *, num_parts: int | None = None
) -> EvalLoader[SampleReader]:
    return EvalLoader(
        SampleReader(samples, accelerator.device),
        batch_size=batch_size,
        device=accelerator.device,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        num_parts=num_parts,
    )


@pytest.mark.parametrize("num_processes", [1, 3, *slow([2])])
def test_metrics_equal_a_plain_loop_for_any_samples_and_processes(
    tmp_path: Path, num_processes: int
) -> None:
    processes.run(check_all_sizes, num_processes=num_processes, folder=tmp_path)


def check_all_sizes() -> None:
    with joined_processes() as accelerator:
        for num_samples, batch_sizes in (
            (1, (1, 7)),
            (3, (1, 2)),
            (97, (1, 13, 97, 500)),
            (2_000, (333,)),
        ):
            samples = Samples(num_samples)
            expected = plain_loop(make_model(), samples)
            for batch_size in batch_sizes:
                result = evaluate(
                    make_model(), shared(samples, batch_size, accelerator), accelerator
                )
                assert result == expected, (num_samples, batch_size)


def test_metrics_in_fixed_parts_are_the_same_bits_on_any_processes(tmp_path: Path) -> None:
    results = []
    for number in (1, 2, 4):
        job = processes.run(evaluate_in_parts, num_processes=number, folder=tmp_path / str(number))
        results.append(job.output())
    assert len(results[0].splitlines()) == 7
    assert results[0] == results[1]
    assert results[0] == results[2]


class ManySums:
    """Sums of the losses, weighted differently: some of them show any other order of addition."""

    higher_is_better: dict[str, bool] = {}

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(64, dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        angles = batch.sample_ids[:, None] * torch.arange(1, 65)
        sums.add_((output.losses[:, None] * angles.double().sin()).sum(0))

    def compute(self, sums: Tensor) -> dict[str, Any]:
        return {"sums": sums}


def evaluate_in_parts() -> None:
    with joined_processes() as accelerator:
        for num_samples, batch_size in (
            (1, 7),
            (3, 1),
            (5, 2),
            (97, 1),
            (97, 13),
            (97, 500),
            (500, 31),
        ):
            samples = Samples(num_samples)
            loader = shared(samples, batch_size, accelerator, num_parts=8)
            evaluator = Evaluator(
                loader,
                task=ClassificationTask(),
                metrics=[*METRICS, ManySums()],
                accelerator=accelerator,
                num_parts=8,
            )
            result = run_evaluation(evaluator, make_model(), accelerator)
            if accelerator.is_main_process:
                print(result)
            del result["sums"]
            assert result == plain_loop(make_model(), samples)


def test_where_running_statistics_differ_the_main_process_decides(tmp_path: Path) -> None:
    processes.run(check_buffers, num_processes=2, folder=tmp_path)


def check_buffers() -> None:
    with joined_processes() as accelerator:
        samples = Samples(97)
        model = make_model(running_mean=0.5 + accelerator.process_index)
        result = evaluate(model, shared(samples, 13, accelerator), accelerator)
        assert result == plain_loop(make_model(running_mean=0.5), samples)
        assert model[0].running_mean.tolist() == [0.5] * 5


class NeedsRows(nn.Module):
    """Like layers of torch that refuse a batch of no rows."""

    def forward(self, features: Tensor) -> Tensor:
        if len(features) == 0:
            raise ValueError("no rows")
        return features


def test_an_empty_batch_is_not_evaluated() -> None:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    model = nn.Sequential(NeedsRows(), make_model())
    result = evaluate(model, Given([], list(range(10)), [], num_samples=10), accelerator)
    assert result == plain_loop(make_model(), Samples(10))


class Given:
    """Gives batches of chosen ids, and says that there are `num_samples`."""

    def __init__(self, *batches: list[int], num_samples: int) -> None:
        self.num_samples = num_samples
        self._samples = Samples(10)
        self._batches = [torch.tensor(ids, dtype=torch.int64) for ids in batches]

    def batches(self) -> Iterator[Batch]:
        for ids in self._batches:
            rows = ids % len(self._samples)
            yield Batch(self._samples.features[rows], self._samples.labels[rows], ids)


@pytest.mark.parametrize(("ids", "counted"), [([*range(10), 3], 11), (list(range(9)), 9), ([], 0)])
def test_a_loader_that_gives_a_sample_twice_or_not_at_all_is_detected(
    ids: list[int], counted: int
) -> None:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    with pytest.raises(
        RuntimeError, match=f"evaluation counted {counted} samples, not each of 10 once: the eval"
    ):
        evaluate(make_model(), Given(ids, num_samples=10), accelerator)


def test_a_sample_given_twice_in_the_place_of_another_is_found_out() -> None:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    with pytest.raises(RuntimeError, match="evaluation counted 10 samples, not each of 10 once"):
        evaluate(make_model(), Given([0, 1, 2, 3, 4, 5, 6, 7, 8, 8], num_samples=10), accelerator)


@pytest.mark.parametrize("ids", [[0, 3, 0, 3], [1, 2, 1, 2], [-1, 0, 3, 4], [2**32, 1, 2, 3]])
def test_other_samples_with_the_same_sum_of_ids_are_detected(ids: list[int]) -> None:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    with pytest.raises(RuntimeError, match="evaluation counted 4 samples, not each of 4 once"):
        evaluate(make_model(), Given(ids, num_samples=4), accelerator)


def test_a_sample_that_two_processes_are_given_is_found_out_by_both(tmp_path: Path) -> None:
    processes.run(check_overlap, num_processes=2, folder=tmp_path)


def check_overlap() -> None:
    with joined_processes() as accelerator:
        ids = list(range(5)) if accelerator.is_main_process else list(range(4, 10))
        with pytest.raises(RuntimeError, match="evaluation counted 11 samples, not each of 10"):
            evaluate(make_model(), Given(ids, num_samples=10), accelerator)


@pytest.mark.parametrize("was_training", [True, False])
def test_an_evaluation_leaves_the_mode_statistics_and_gradients_alone(
    was_training: bool,
) -> None:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    model = make_model().train(was_training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluate(model, Given(list(range(10)), num_samples=10), accelerator)
    assert [module.training for module in model.modules()] == [was_training] * 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.zeros(4, 5, dtype=torch.float64)).sum().backward()  # its tensors still train


class Remembering(nn.Module):
    """Changes its buffers in evaluation, too: one in place, and one by assigning it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, NUM_CLASSES).double()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("center", torch.zeros(NUM_CLASSES, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs) - self.center
        self.calls += 1
        self.center = 0.9 * self.center + outputs.detach().mean(0)
        return outputs


def test_buffers_that_a_forward_changes_are_the_same_after_an_evaluation() -> None:
    accelerator = Accelerator(cpu=True)
    model = Remembering()
    first, second = (
        evaluate(model, shared(Samples(20), 7, accelerator), accelerator) for _ in range(2)
    )
    assert first == second
    assert (int(model.calls), model.center.tolist()) == (0, [0] * NUM_CLASSES)
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()


class Lazy(nn.Module):
    """Computes its positions when it first needs them, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, NUM_CLASSES).double()
        self.positions = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.positions is None:
            self.positions = torch.arange(5.0).double()
        return self.layer(inputs * self.positions.to(inputs.device))


def test_a_tensor_that_a_model_caches_in_an_evaluation_can_be_trained_on() -> None:
    accelerator = Accelerator(cpu=True)
    model = Lazy()
    evaluate(model, shared(Samples(20), 7, accelerator), accelerator)
    inputs = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    model(inputs).sum().backward()


def test_integer_buffers_are_the_main_process_s_too(tmp_path: Path) -> None:
    processes.run(check_integers, num_processes=2, folder=tmp_path)


def check_integers() -> None:
    with joined_processes() as accelerator:
        model = make_model()
        rank = accelerator.process_index
        model.register_buffer("flags", torch.tensor([rank == 0, False]))
        model.register_buffer("small", torch.full((3,), rank, dtype=torch.int16))
        model.register_buffer("count", torch.tensor(rank))
        evaluate(model, shared(Samples(9), 7, accelerator), accelerator)
        assert model.flags.tolist() == [True, False]
        assert (model.small.tolist(), model.count.item()) == ([0, 0, 0], 0)


class Computes(MeanLoss):
    """Computes what it was given."""

    def __init__(self, values: Any) -> None:
        vars(self).update(values=values)

    def compute(self, sums: Tensor) -> Any:
        return self.values


def evaluate_by(
    *metrics: Metric, task: Task | None = None, is_trial: bool = False
) -> dict[str, Any]:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    evaluator = Evaluator(
        Given(list(range(10)), num_samples=10),
        task=task or ClassificationTask(),
        metrics=metrics,
        accelerator=accelerator,
    )
    evaluation = EvaluationTrial(evaluator, None) if is_trial else evaluator
    return run_evaluation(evaluation, make_model(), accelerator)


def test_everything_a_metric_computes_comes_as_plain_values() -> None:
    computed = {
        "a": np.float32(0.5),
        "b": torch.tensor(3),
        "c": np.arange(2),
        "d": [torch.tensor(0.25)],
        "e": 7,
    }
    result = evaluate_by(Computes(computed))
    assert json.dumps(result) == '{"a": 0.5, "b": 3, "c": [0, 1], "d": [0.25], "e": 7}'


def test_a_result_that_cannot_be_kept_names_the_metric() -> None:
    with pytest.raises(EvaluationFailed, match="metric Computes: a holds an object of type object"):
        evaluate_by(Computes({"a": object()}))


@pytest.mark.parametrize("is_higher", [None, True, ["loss"], {"loss": "min"}])
def test_a_metric_must_say_which_numbers_can_select_the_best_checkpoint(is_higher: Any) -> None:
    """A text would count as true."""

    class Silent:
        higher_is_better = is_higher

    with pytest.raises(ConfigError, match="higher_is_better of Silent is .*: declare which num"):
        evaluate_by(Silent())  # type: ignore[arg-type]


def test_two_metrics_with_one_name_are_refused_before_training() -> None:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    loader = Given(list(range(10)), num_samples=10)
    with pytest.raises(ConfigError, match="two metrics report numbers named loss: remove one,"):
        Evaluator(
            loader,
            task=ClassificationTask(),
            metrics=[MeanLoss(), MeanLoss()],
            accelerator=accelerator,
        )


def test_two_metrics_that_compute_one_name_are_refused() -> None:
    """The second would replace the loss, and decide the best checkpoint."""

    class WithNumber(ClassificationTask):
        def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
            numbers = {"loss": torch.zeros(len(batch))}
            return super().eval_step(model, batch)._replace(numbers=numbers)

    for is_trial in (True, False):
        with pytest.raises(ConfigError, match="two metrics report numbers named loss"):
            evaluate_by(MeanLoss(), MeanNumber("loss"), task=WithNumber(), is_trial=is_trial)


class Counts(MeanLoss):
    """Computes numbers of several libraries, and what is no number."""

    def compute(self, sums: Tensor) -> dict[str, Any]:
        values = {"errors": np.int64(1234), "share": np.float32(0.25), "tensor": torch.tensor(0.5)}
        return {**values, "was_exact": True, "of_classes": np.eye(2), "word": "good"}


def train_and_count(folder: Path) -> None:
    workload.MeanLoss = Counts  # type: ignore[misc]
    workload.train(workload.make_config(folder))


def test_numbers_of_any_library_are_in_rows_lines_and_the_result(tmp_path: Path) -> None:
    job = processes.run(train_and_count, tmp_path / "run", folder=tmp_path / "logs")
    numbers = {"eval/errors": 1234, "eval/share": 0.25, "eval/tensor": 0.5}
    metrics = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    assert metrics.items() >= numbers.items()
    assert (metrics["eval/was_exact"], metrics["eval/of_classes"]) == (True, [[1, 0], [0, 1]])
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    rows = [row for row in rows if row["event"] == "eval"]
    assert len(rows) == 2
    for row in rows:
        assert row.items() >= numbers.items()
        assert not {"eval/was_exact", "eval/of_classes", "eval/word"} & row.keys(), (
            "no numbers to draw"
        )
    lines = [
        line
        for line in job.output().splitlines()
        if "eval errors 1,234  eval share 0.25  eval tensor 0.5" in line
    ]
    assert len(lines) == 3, "two rows, and the end"
    processes.run(train_and_count, tmp_path / "run", folder=tmp_path / "again")


def test_buffers_are_put_back_after_an_evaluation_that_fails() -> None:
    accelerator = Accelerator(cpu=True)
    model = Remembering()
    with pytest.raises(RuntimeError):
        evaluate(model, Given([0, 0], num_samples=2), accelerator)
    assert (int(model.calls), model.center.tolist()) == (0, [0] * NUM_CLASSES)
