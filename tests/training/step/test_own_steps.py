"""Steps of one's own, by the public halves of the trainer's: they resume exactly, too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    ConfigError,
    DivergedError,
    Gradients,
    OptimizerConfig,
    StepBatch,
    StepOutput,
    StepReport,
    Trainer,
)

from ... import processes, workload
from ..test_exactness import final_files, weights


class Sam(Trainer):
    """Sharpness-aware minimisation: the gradient at the worst weights nearby is applied here."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        weights = dict(self.model.named_parameters())
        gradients = self.compute_gradients(step_batch)
        reached = {name: each for name, each in gradients.items() if each is not None}
        norm = torch.stack([each.norm() for each in reached.values()]).norm()
        before = {name: weights[name].detach().clone() for name in reached}
        with torch.no_grad():
            for name, gradient in reached.items():
                weights[name].add_(gradient, alpha=0.05 / float(norm))
        sharp = self.compute_gradients(step_batch)
        with torch.no_grad():
            for name, weight in before.items():
                weights[name].copy_(weight)
        return self.apply_gradients(sharp)


class Noisy(Trainer):
    """Adds noise to the gradients."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        gradients = self.compute_gradients(step_batch)
        return self.apply_gradients(
            gradients.map(lambda each: each + 0.01 * torch.randn_like(each))
        )


class Twice(Trainer):
    """Computes the gradients again, and applies the first ones."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        gradients = self.compute_gradients(step_batch)
        self.compute_gradients(step_batch)
        return self.apply_gradients(gradients)


def train(folder: Path, trainer_class: type[Trainer] = Trainer, **options: Any) -> None:
    reduce = options.pop("reduce", "float")
    batch = BatchConfig(
        per_device_batch_size=4, global_batch_size=16, eval_batch_size=4, reduce=reduce
    )
    config = workload.make_config(folder, batch=batch)
    trainer = replace(
        config.trainer,
        max_steps=options.pop("max_steps", 6),
        check_every_n_steps=options.pop("check_every", None),
    )
    config = replace(config, trainer=trainer)
    if "optimizer" in options:
        config = replace(config, optimizer=OptimizerConfig())
    workload.train(config, norm="batch", dropout=0.2, trainer_class=trainer_class, **options)


def train_all(folder: Path, *trainer_classes: type[Trainer], **options: Any) -> None:
    for trainer_class in trainer_classes:
        train(folder / trainer_class.__name__, trainer_class, **options)


@pytest.mark.parametrize("reduce", ["float", "exact"])
def test_a_second_call_of_a_step_leaves_no_trace(tmp_path: Path, reduce: str) -> None:
    train_all(tmp_path, Trainer, Twice, reduce=reduce)
    assert final_files(tmp_path / "Twice") == final_files(tmp_path / "Trainer")


def test_steps_of_ones_own_are_the_same_on_one_and_two_processes(tmp_path: Path) -> None:
    """The noise of a gradient is the same on all processes, so that their weights stay equal."""
    train_all(tmp_path / "one", Sam, Noisy, reduce="exact")
    processes.run(train_both_exactly, tmp_path / "two", num_processes=2, folder=tmp_path / "logs")
    for name in ("Sam", "Noisy"):
        assert final_files(tmp_path / "two" / name) == final_files(tmp_path / "one" / name)


def train_both_exactly(folder: Path) -> None:
    train_all(folder, Sam, Noisy, reduce="exact")


class Watch(Callback):
    """Notes what the hooks of a step get."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def before_micro_batch(self, trainer: Trainer, batch: Batch) -> None:
        self.seen.append(("before", batch.sample_ids.tolist(), batch.position.step))

    def on_micro_batch(self, trainer: Trainer, batch: Batch, output: StepOutput) -> None:
        assert not output.losses.requires_grad
        assert not output.outputs.requires_grad
        self.seen.append(("after", batch.sample_ids.tolist(), float(output.losses.sum())))

    def before_update(self, trainer: Trainer, gradients: Gradients) -> None:
        names = [name for name, _ in trainer.model.named_parameters()]
        assert [*gradients] == names
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        self.seen.append(("update", float(gradients.sums.loss)))

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.seen.append(("end", float(report.loss_sum)))


@pytest.mark.parametrize("check_every", [None, 1])
def test_the_hooks_of_a_step_see_each_sample_once(tmp_path: Path, check_every: int | None) -> None:
    """Steps of `--check-every` are computed twice, and seen once."""
    watch = Watch()
    train(tmp_path, callbacks=(watch,), max_steps=2, check_every=check_every)
    kinds = "".join(each[0][0] for each in watch.seen)
    assert kinds == "babababaue" * 2
    losses = [each[2] for each in watch.seen if each[0] == "after"]
    before = [each[1] for each in watch.seen if each[0] == "before"]
    assert before == [each[1] for each in watch.seen if each[0] == "after"]
    assert len({sample for ids in before for sample in ids}) == 32
    assert sum(losses[:4]) == pytest.approx(watch.seen[8][1])


def test_gradients_of_a_different_step_are_refused(tmp_path: Path) -> None:
    class Late(Trainer):
        kept: Gradients | None = None
        unsaved_attributes = ("kept",)

        def train_step(self, step_batch: StepBatch) -> StepReport:
            self.kept = self.kept or self.compute_gradients(step_batch)
            return self.apply_gradients(self.kept)

    with pytest.raises(ConfigError, match=r"TRAINER.*step 1 in step 2.*compute_gradients"):
        train(tmp_path, Late)


@pytest.mark.parametrize("change", [lambda each: each[:1], lambda each: each.double(), str])
def test_a_gradient_that_does_not_fit_is_refused(tmp_path: Path, change: Any) -> None:
    class Misfit(Trainer):
        def train_step(self, step_batch: StepBatch) -> StepReport:
            return self.apply_gradients(self.compute_gradients(step_batch).map(change))

    with pytest.raises(ConfigError, match=r"TRAINER.*gradient of layers\.0\.\w+ does not fit"):
        train(tmp_path, Misfit)


def left_out(gradients: Gradients) -> Any:
    return replace(gradients, tensors={})


@pytest.mark.parametrize(
    ("change", "said"),
    [(dict, "object of type dict.*replace"), (left_out, r"missing.*layers\.0\.weight")],
)
def test_gradients_of_ones_own_that_are_none_are_refused(
    tmp_path: Path, change: Any, said: str
) -> None:
    class Own(Trainer):
        def train_step(self, step_batch: StepBatch) -> StepReport:
            return self.apply_gradients(change(self.compute_gradients(step_batch)))

    with pytest.raises(ConfigError, match=f"TRAINER.*{said}"):
        train(tmp_path, Own)


def test_a_batch_that_is_no_step_batch_is_refused(tmp_path: Path) -> None:
    class Part(Trainer):
        def train_step(self, step_batch: StepBatch) -> StepReport:
            return self.apply_gradients(self.compute_gradients(step_batch.micro_batches[0]))

    with pytest.raises(ConfigError, match=r"TRAINER.*compute_gradients got.*Batch"):
        train(tmp_path, Part)


@pytest.mark.parametrize("change", [iter, partial(map, lambda batch: batch), lambda _: []])
def test_micro_batches_that_a_first_call_uses_up_are_refused(tmp_path: Path, change: Any) -> None:
    class UsedUp(Trainer):
        def train_step(self, step_batch: StepBatch) -> StepReport:
            changed = step_batch._replace(micro_batches=change(step_batch.micro_batches))
            return self.apply_gradients(self.compute_gradients(changed))

    with pytest.raises(ConfigError, match=r"TRAINER.*compute_gradients got.*in a list"):
        train(tmp_path, UsedUp)


class LeavesGradients(Callback):
    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        trainer.model(torch.ones(2, 3, 8, 8)).sum().backward()


def test_a_gradient_that_a_callback_leaves_is_refused(tmp_path: Path) -> None:
    """The next step would add its own to it, but not after a resume."""
    with pytest.raises(ConfigError, match=r"TRAINER.*your own backward.*layers\.0\.weight"):
        train(tmp_path, callbacks=(LeavesGradients(),))


class RunsOut(Callback):
    """Raises in the second micro-batch of the run, once."""

    num_forwards = 0

    def on_micro_batch(self, trainer: Trainer, batch: Batch, output: StepOutput) -> None:
        self.num_forwards += 1
        if self.num_forwards == 2:
            raise MemoryError


def test_a_step_does_not_begin_again_after_an_error(tmp_path: Path) -> None:
    """It would start from the buffers, and add to the gradients, of the first attempt."""

    class Again(Trainer):
        def train_step(self, step_batch: StepBatch) -> StepReport:
            try:
                return super().train_step(step_batch)
            except Exception:
                return super().train_step(step_batch)

    with pytest.raises(ConfigError, match=r"TRAINER.*after it has failed"):
        train(tmp_path, Again, callbacks=(RunsOut(),))


def test_a_second_call_with_loss_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TRAINER.*twice.*fp16.*bf16"):
        train(tmp_path, Twice, scaler=torch.amp.GradScaler("cpu"))


class WarmHead(Callback):
    """Gives the first group a schedule of its own: its learning rate rises for four steps."""

    def before_update(self, trainer: Trainer, gradients: Gradients) -> None:
        group = trainer.optimizer.param_groups[0]
        group["learning_rate_scale"] = min(1.0, (trainer.state.optimizer_step + 1) / 4)


def two_groups(model: nn.Module) -> SGD:
    weights = [*model.parameters()]
    groups = [{"params": weights[-2:]}, {"params": weights[:-2]}]
    return SGD(groups, lr=0.05, momentum=0.9)


def test_a_schedule_for_a_group_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": two_groups, "callbacks": (WarmHead(),)}
    train(tmp_path / "whole", **options)
    train(tmp_path / "parts", max_steps=3, **options)
    train(tmp_path / "parts", **options)
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")
    train(tmp_path / "plain", optimizer=two_groups)
    plain, warm = (torch_weights(tmp_path / name) for name in ("plain", "whole"))
    assert not torch.equal(plain, warm)


def torch_weights(folder: Path) -> Tensor:
    tensors = weights(folder)
    return torch.cat([tensor.flatten().double() for tensor in tensors.values()])


def test_a_nan_that_a_step_puts_into_scaled_gradients_is_not_applied(tmp_path: Path) -> None:
    """The scaler has looked for NaN before, and would apply it."""

    class Spoils(Trainer):
        def train_step(self, step_batch: StepBatch) -> StepReport:
            gradients = self.compute_gradients(step_batch)
            factor = float("nan") if self.state.optimizer_step == 2 else 1.0
            return self.apply_gradients(gradients.map(lambda each: each * factor))

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(DivergedError, match=r"NONFINITE.*step 3"):
        train(tmp_path, Spoils, scaler=scaler)
