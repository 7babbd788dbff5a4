"""Networks that step one after the other on the same batch: a task with `updates`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam

from accel_trainer import (
    Batch,
    Callback,
    ConfigError,
    Gradients,
    Position,
    StepBatch,
    StepOutput,
    StepReport,
    Trainer,
)
from accel_trainer.core.rng import epoch_permutation

from ... import processes
from ..test_exactness import final_files, history, largest_difference
from .test_turns import (
    NOISE,
    SIZE,
    Gan,
    WassersteinGan,
    checked,
    skipping,
    tensors_of,
    train,
)

CRITIC, GENERATOR = {"critic"}, {"generator"}


class OnOneBatch:
    """DCGAN: the critic steps on a batch, then the generator on the same batch and noise."""

    def updates(self, position: Position) -> Any:
        return ["critic", "generator"]

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return StepOutput(model(batch.inputs, batch.turn))

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        assert batch.turn == ""
        return StepOutput(model(batch.inputs, "critic"))


class FiveToOne(OnOneBatch):
    """WGAN-GP: the critic steps on each batch, the generator on each fifth."""

    def updates(self, position: Position) -> Any:
        return ["critic", "generator"] if position.step % 5 == 4 else ["critic"]


class Drawing(OnOneBatch):
    """With noise that each forward draws."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        noise = torch.randn(len(batch), NOISE, dtype=batch.inputs.dtype)
        inputs = torch.cat([batch.inputs[:, :SIZE], noise], dim=1)
        return StepOutput(model(inputs, batch.turn))


class Together(Drawing):
    """Now and then both step at once, and the critic once more."""

    def updates(self, position: Position) -> Any:
        if position.step % 3 == 0:
            return [("generator", "critic"), "critic"]
        return super().updates(position)


PROGRAMS: dict[str, dict[str, Any]] = {
    "gan": {"task": OnOneBatch},
    "drawing": {"task": Drawing},
    "wasserstein": {"model": lambda: WassersteinGan(nn.LayerNorm), "task": FiveToOne},
    "together": {"task": Together},
}


def torch_loop(model: Gan, updates: Callable[[int], list[str]], rate_at: Any) -> Gan:
    """Train as everybody does: no part of this package but the order of the samples."""
    inputs = torch.randn(80, SIZE + NOISE, generator=torch.Generator().manual_seed(1)).double()
    optimizers = {
        "critic": Adam(model.critic.parameters(), lr=4e-3, betas=(0.5, 0.99)),
        "generator": SGD(model.generator.parameters(), lr=1e-2, momentum=0.9),
    }
    for step in range(14):
        order = epoch_permutation(64, seed=3, epoch=step // 8)
        batch = inputs[:64][order[step % 8 * 8 : step % 8 * 8 + 8]]
        for name in updates(step):
            model.zero_grad()
            model(batch, name).mean().backward()
            optimizer = optimizers[name]
            optimizer.param_groups[0]["lr"] = rate_at(step) * (1 if name == "critic" else 2.5)
            clip_grad_norm_(getattr(model, name).parameters(), 5.0)
            optimizer.step()
    return model


ORIGINALS: dict[str, tuple[Callable[[], Gan], Any, Callable[[int], list[str]]]] = {
    "DCGAN": (lambda: Gan(nn.LayerNorm), OnOneBatch, lambda step: ["critic", "generator"]),
    "WGAN-GP": (
        lambda: WassersteinGan(nn.LayerNorm),
        FiveToOne,
        lambda step: ["critic"] + ["generator"] * (step % 5 == 4),
    ),
}


def train_original(folder: Path, name: str) -> Trainer:
    """Train in pieces that end in the middle of an epoch, as killed runs do."""
    model, task, _ = ORIGINALS[name]
    torch.manual_seed(0)
    weights = model().state_dict()

    def initial() -> Gan:
        made = model()
        made.load_state_dict(weights)
        return made

    for max_steps in (3, 9, 14):
        trainer = train(folder, model=initial, task=task, max_steps=max_steps, dtype=torch.float64)
    return trainer


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_gan_has_the_numbers_of_its_torch_loop(tmp_path: Path, name: str) -> None:
    trainer = train_original(tmp_path / "one", name)
    model, _, updates = ORIGINALS[name]
    torch.manual_seed(0)
    expected = torch_loop(model().double(), updates, trainer.learning_rate_at).state_dict()
    for key, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-9)
    rows = [row for row in history(tmp_path / "one") if row["event"] == "train"]
    spans = [0, 1, 2], [3, 4, 5], [6, 7], [8], [9, 10, 11], [12, 13]
    for row, steps in zip(rows, spans, strict=True):
        losses = {key: value for key, value in row.items() if key.endswith("/loss")}
        made = {f"train/{each}/loss" for step in steps for each in updates(step)}
        assert losses.keys() == {"train/loss", *made}
        assert losses.pop("train/loss") == sum(losses.values())


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_gan_trains_the_same_on_two_processes(tmp_path: Path, name: str) -> None:
    train_original(tmp_path / "one", name)
    processes.run(train_original, tmp_path / "two", name, num_processes=2, folder=tmp_path / "logs")
    assert largest_difference(tmp_path / "one", tmp_path / "two") <= 1e-12


def train_all_exactly(folder: Path) -> None:
    for name, program in PROGRAMS.items():
        if name in ("gan", "wasserstein"):  # the others draw by the place of a micro-batch, too
            train(folder / name, **program, reduce="exact")


def test_exact_sums_of_updates_are_the_same_on_one_and_two_processes(tmp_path: Path) -> None:
    train_all_exactly(tmp_path / "one")
    processes.run(train_all_exactly, tmp_path / "two", num_processes=2, folder=tmp_path / "logs")
    for name in ("gan", "wasserstein"):
        assert final_files(tmp_path / "one" / name) == final_files(tmp_path / "two" / name)


# --- an update ---


class Watch(Callback):
    """Notes what is seen of each step, and which networks it changes."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = [[]]
        self.reports: list[StepReport] = []
        self.inputs: list[Tensor] = []
        self.changed: list[set[str]] = []
        self.averaged: list[set[str]] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.before = tensors_of(trainer)

    def on_micro_batch(self, trainer: Trainer, batch: Batch, output: StepOutput) -> None:
        self.steps[-1].append(f"micro-batch {batch.turn}")

    def before_update(self, trainer: Trainer, gradients: Gradients) -> None:
        reached = {name.partition(".")[0] for name, each in gradients.items() if each is not None}
        self.steps[-1].append(f"update {'+'.join(sorted(reached))}")

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        now = tensors_of(trainer)
        changed = {name for name, each in now.items() if not torch.equal(each, self.before[name])}
        self.before = now
        names = {name: name.removeprefix("average.").partition(".")[0] for name in changed}
        self.changed.append({names[each] for each in names if not each.startswith("average.")})
        self.averaged.append({names[each] for each in names if each.startswith("average.")})
        self.steps.append([])
        self.reports.append(report)


def test_hooks_see_each_update_and_one_step(tmp_path: Path) -> None:
    watch = Watch()
    trainer = train(tmp_path, task=Together, max_steps=2, callbacks=[watch])
    both, critic, generator = (
        [*[f"micro-batch {turn}"] * 4, f"update {name}"]
        for turn, name in (
            (("generator", "critic"), "critic+generator"),
            ("critic", "critic"),
            ("generator", "generator"),
        )
    )
    assert watch.steps == [both + critic, critic + generator, []]
    assert trainer.state.optimizer_step == 2
    assert trainer.state.samples_seen == 16
    first = watch.reports[0]
    assert [each.turn for each in first.updates] == [("generator", "critic"), "critic"]
    assert first.loss_sum == sum(each.loss_sum for each in first.updates)


def test_rows_have_the_loss_and_the_norm_of_each_update(tmp_path: Path) -> None:
    train(tmp_path, task=Together, max_steps=6)
    row = [row for row in history(tmp_path) if row["event"] == "train"][-1]
    names = {"critic", "generator", "generator+critic"}
    assert {key for key in row if key.startswith("train/")} == {
        "train/loss",
        *(f"train/{name}/loss" for name in names),
    }
    assert row["train/loss"] == sum(row[f"train/{name}/loss"] for name in names)
    assert {key for key in row if key.endswith("grad_norm")} == {
        f"optim/{name}/grad_norm" for name in names
    }


class Halved(Together):
    """Halves what it is called with."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return super().step(model, replace(batch, inputs=batch.inputs / 2))


class HalvedInPlace(Together):
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        batch.inputs.div_(2)
        return super().step(model, batch)


def test_a_task_may_change_a_batch_in_place_in_each_update(tmp_path: Path) -> None:
    train(tmp_path / "new", task=Halved, max_steps=3)
    train(tmp_path / "in place", task=HalvedInPlace, max_steps=3)
    assert final_files(tmp_path / "in place") == final_files(tmp_path / "new")


class Sam(Trainer):
    """Computes the gradients twice in an update."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        self.compute_gradients(step_batch)
        return self.apply_gradients(self.compute_gradients(step_batch))


def test_an_update_may_be_computed_twice(tmp_path: Path) -> None:
    program = {"task": Together, "max_steps": 6}
    train(tmp_path / "plain", **program)
    train(tmp_path / "twice", trainer_class=Sam, **program)
    train(tmp_path / "checked", config=checked, **program)
    assert final_files(tmp_path / "twice") == final_files(tmp_path / "plain")
    assert final_files(tmp_path / "checked") == final_files(tmp_path / "plain")


def spoiling(name: str) -> type[Trainer]:
    class Spoils(Trainer):
        """Puts NaN into the gradients of one update of the fourth step."""

        def train_step(self, step_batch: StepBatch) -> StepReport:
            gradients = self.compute_gradients(step_batch)
            is_bad = self.state.optimizer_step == 3 and gradients.step_batch.turn == name
            factor = float("nan") if is_bad else 1.0
            return self.apply_gradients(gradients.map(lambda each: each * factor))

    return Spoils


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("name", ["critic", "generator"])
def test_an_update_that_is_skipped_leaves_the_others(
    tmp_path: Path, name: str, is_scaled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if is_scaled else None
    train(
        tmp_path,
        task=OnOneBatch,
        max_steps=6,
        scaler=scaler,
        config=skipping,
        trainer_class=spoiling(name),
        callbacks=[watch],
    )
    both = CRITIC | GENERATOR
    assert watch.changed == watch.averaged == [both, both, both, both - {name}, both, both]
    assert sum(row.get("optim/skipped_steps", 0) for row in history(tmp_path)) == 1
    if not is_scaled:
        assert f"step 4, epoch 1, {name}: the gradient is NaN" in caplog.text


# --- what is refused ---


def updates_with(updates: Any) -> Callable[[], Any]:
    class Own(OnOneBatch):
        def updates(self, position: Position) -> Any:
            return updates

    return Own


class Both(OnOneBatch):
    def turn(self, position: Position) -> str:
        return "critic"


REFUSED: dict[str, tuple[Any, str]] = {
    "both": (Both, r"TASK.*Both has turn.*updates.*remove one"),
    "a name": (updates_with("critic"), r"TASK.*updates returned 'critic'.*a list"),
    "a tuple": (
        updates_with(("critic", "generator")),
        r"TASK.*updates returned \('critic'.*a list",
    ),
    "nothing": (updates_with([]), r"TASK.*updates returned \[\] at step 0"),
    "an empty turn": (updates_with([()]), r"TASK.*updates returned \[\(\)\] at step 0"),
    "lists in it": (updates_with([["critic"]]), r"TASK.*updates returned \[\['critic'\]\]"),
    "an unknown name": (updates_with(["critic", "crtic"]), "TASK.*'crtic'.*critic, generator"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_updates_that_cannot_be_made_are_refused_before_work(tmp_path: Path, case: str) -> None:
    task, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as refused:
        train(tmp_path / "run", task=task)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run" / "checkpoints").exists()


class Late(Trainer):
    """Gives the generator the gradients of the critic."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        found = self.compute_gradients(step_batch)
        self.kept = getattr(self, "kept", found)
        return self.apply_gradients(self.kept)


class AllAtOnce(Trainer):
    """Makes both updates in the first call."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        super().train_step(step_batch)
        return super().train_step(step_batch)


@pytest.mark.parametrize(
    ("trainer_class", "message"),
    [(Late, "step 1 critic in step 1 generator"), (AllAtOnce, "took 2 steps for a step batch")],
)
def test_an_update_is_made_once_with_its_own_gradients(
    tmp_path: Path, trainer_class: type[Trainer], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"TRAINER.*{message}"):
        train(tmp_path, task=OnOneBatch, trainer_class=trainer_class)
