"""State of one's own, `build_trainer(states=...)`: stored by name, and watched at each start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    CheckpointError,
    ConfigError,
    StepBatch,
    StepOutput,
    StepReport,
    Trainer,
)

from .. import processes, workload


class Centre:
    """The running mean of the logits, from which the task pushes the logits away."""

    def __init__(self) -> None:
        self.value = torch.zeros(workload.NUM_CLASSES)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value = state["value"]


class Centred:
    """Classifies logits less the centre."""

    def __init__(self, centre: Centre) -> None:
        self.centre = centre

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        losses = F.cross_entropy(logits - self.centre.value, batch.targets, reduction="none")
        return StepOutput(losses, logits)


class MoveCentre(Callback):
    """Moves the centre after each step, by the logits of all processes, as docs/step.md does."""

    def __init__(self, centre: Centre) -> None:
        self.centre = centre
        self.sums: list[Tensor] = []

    def on_micro_batch(self, trainer: Trainer, batch: Batch, output: StepOutput) -> None:
        self.sums.append(output.outputs.sum(0))

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        total = trainer.accelerator.gather(torch.stack(self.sums)).sum(0)
        self.sums.clear()
        self.centre.value = self.centre.value.lerp(total / report.num_samples, 0.1)


def train(
    folder: Path, *, max_steps: int = 6, centre: Any = None, reduce: str = "float", **options: Any
) -> Any:
    centre = centre or Centre()
    size = 2 if reduce == "exact" else 8
    batch = BatchConfig(
        per_device_batch_size=size, global_batch_size=16, eval_batch_size=4, reduce=reduce
    )
    config = workload.make_config(folder, batch=batch)
    config = replace(config, trainer=replace(config.trainer, max_steps=max_steps))
    options = {"callbacks": (MoveCentre(centre),), "states": {"centre": centre}} | options
    workload.train(config, norm="batch", task=Centred(centre), **options)
    return centre


class Memory(Callback):
    """Keeps a matrix that begins anywhere in the file of a checkpoint; as a callback, too."""

    def __init__(self) -> None:
        self.tensors = {"short": torch.ones(3), "matrix": torch.ones(5, 7)}

    def state_dict(self) -> dict[str, Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.tensors = state


def test_a_state_is_loaded_into_memory_like_that_of_computed_tensors(tmp_path: Path) -> None:
    """On a CPU, how a product with a matrix rounds depends on where the matrix begins."""
    for max_steps in (1, 2):
        memory, callback = Memory(), Memory()
        states = {"memory": memory}
        train(tmp_path, max_steps=max_steps, states=states, callbacks=(callback,))
    loaded = [*memory.tensors.values(), *callback.tensors.values()]
    computed = torch.ones(5, 7).exp()
    assert {each.data_ptr() % 64 for each in loaded} == {computed.data_ptr() % 64}


class Changing:
    """Has inf, as a lowest number so far, and is empty after every second step."""

    def __init__(self) -> None:
        self.state = {"lowest": torch.tensor(torch.inf)}

    def state_dict(self) -> dict[str, Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.state = state


class Empty(Callback):
    def __init__(self, changing: Changing) -> None:
        self.changing = changing

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        is_odd = report.optimizer_step % 2
        self.changing.state = {"lowest": torch.tensor(torch.inf)} if is_odd else {}


def test_a_state_may_be_empty_and_hold_inf(tmp_path: Path) -> None:
    for max_steps in (1, 2, 3):
        states = {"changing": Changing(), "module": nn.Flatten()}
        callbacks = (Empty(states["changing"]),)
        train(tmp_path, max_steps=max_steps, states=states, callbacks=callbacks)
    assert states["changing"].state == {"lowest": torch.inf}


class Teacher(nn.Module):
    """Counts, and keeps a sum, where the state dict of a module has neither."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self.register_buffer("total", torch.zeros(3), persistent=False)
        self.register_buffer("stored", torch.zeros(3))


class MoveTeacher(Callback):
    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.teacher.num_steps += 1
        self.teacher.total += 1
        self.teacher.stored += 1


def test_what_the_state_dict_of_a_module_lacks_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = Teacher()
    with caplog.at_level(logging.WARNING):
        train(tmp_path, states={"teacher": teacher}, callbacks=(MoveTeacher(teacher),))
    assert "UNSAVED_STATE" in caplog.text
    assert "teacher.num_steps" in caplog.text
    assert "teacher.total" in caplog.text
    assert "teacher.stored" not in caplog.text


class Keeps:
    def __init__(self) -> None:
        whole = torch.ones(4, 5)
        self.tensors = {"slice": whole[1:], "clone": whole[1:].clone(), "turned": whole.T}

    def state_dict(self) -> dict[str, Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.tensors = state


def test_a_state_in_memory_that_a_resume_does_not_repeat_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        train(tmp_path, max_steps=1, states={"keeps": Keeps()}, callbacks=())
    assert "is kept in keeps.slice, keeps.turned, where a resume" in caplog.text


def test_a_state_that_is_not_given_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        train(tmp_path, states={})
    assert "UNSAVED_STATE" in caplog.text
    assert "centre.value" in caplog.text


def test_a_module_is_a_state_with_the_errors_of_a_model(tmp_path: Path) -> None:
    train(tmp_path, states={"teacher": nn.Linear(3, 2)}, max_steps=3)
    with pytest.raises(CheckpointError, match=r"CKPT_WEIGHTS.*teacher does not fit"):
        train(tmp_path, states={"teacher": nn.Linear(3, 5)})


def test_a_checkpoint_without_a_state_is_refused(tmp_path: Path) -> None:
    train(tmp_path, states={}, max_steps=3)
    with pytest.raises(CheckpointError, match=r"CKPT_MISSING.*no centre"):
        train(tmp_path)


def test_a_state_that_is_gone_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, max_steps=3)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, states={}, callbacks=())
    assert "the checkpoint has centre, which this run does not have" in caplog.text


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([Centre()], "not a dict"),
        ({"model": Centre()}, "'model'"),
        ({"My centre": Centre()}, "'My centre'"),
        ({"centre": object()}, "centre, .*no attribute 'load_state_dict'"),
        ({"centre": Centre}, r"centre, .*state_dict\(\) missing"),
    ],
)
def test_states_that_cannot_be_stored_are_one_line(tmp_path: Path, states: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, states=states)
    assert not (tmp_path / "checkpoints").exists()


# --- what the first two steps refuse ---


class MovesBeforeSaves(Callback):
    def __init__(self, centre: Centre) -> None:
        self.centre = centre

    def before_save(self, trainer: Trainer) -> None:
        self.centre.value = self.centre.value + 0.1


def by_micro_batch(centre: Centre) -> dict[str, Any]:
    class Moves(MoveCentre):
        def on_micro_batch(self, trainer: Trainer, batch: Batch, output: StepOutput) -> None:
            self.centre.value = self.centre.value + 0.1

        def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
            pass

    return {"callbacks": (Moves(centre),)}


def by_save(centre: Centre) -> dict[str, Any]:
    return {"callbacks": (MovesBeforeSaves(centre),)}


@pytest.mark.parametrize(
    ("options", "said"),
    [(by_micro_batch, "a micro-batch changes centre"), (by_save, "before_save changes centre")],
)
def test_a_state_that_changes_at_a_wrong_time_ends_the_run(
    tmp_path: Path, options: Callable[[Centre], dict[str, Any]], said: str
) -> None:
    """A step that is checked or skipped, or a save more, would change it once more."""
    centre = Centre()
    with pytest.raises(CheckpointError, match=rf"CKPT_INEXACT.*{said}.*on_step_end"):
        train(tmp_path, centre=centre, **options(centre))


def check_processes_differ(folder: Path) -> None:
    class Differs(MoveCentre):
        def __init__(self, centre: Centre, step: int) -> None:
            super().__init__(centre)
            self.step = step

        def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
            if report.optimizer_step == self.step:
                self.centre.value = self.centre.value + trainer.accelerator.process_index

    for step in (1, 4):
        centre = Centre()
        with pytest.raises(CheckpointError, match=r"processes differ.*centre\.value"):
            train(folder / str(step), centre=centre, callbacks=(Differs(centre, step),))


def test_a_state_that_differs_by_process_ends_the_run(tmp_path: Path) -> None:
    processes.run(check_processes_differ, tmp_path, num_processes=2, folder=tmp_path / "logs")


class LosesItsWay(Trainer):
    def train_step(self, step_batch: StepBatch) -> StepReport:
        self.compute_gradients(step_batch)
        with torch.no_grad():
            next(self.model.parameters()).add_(0.1)
        return self.apply_gradients(self.compute_gradients(step_batch))


def test_weights_that_a_step_does_not_put_back_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"train_step changes model\..*restore"):
        train(tmp_path, trainer_class=LosesItsWay)
