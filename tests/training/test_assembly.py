from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from accel_trainer import CheckpointConfig, ClassificationTask, Evaluator, Trainer, TrainerConfig
from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.core.callback import TrainerView
from accel_trainer.training.assembly import assemble_trainer
from accel_trainer.training.strategy.plain import PlainStrategy

from .test_trainer_paths import Batches, learning_rate_at, make_model


def assemble(
    folder: Path, *, ema_decay: float | None = None, trainer_class: type[Trainer] = Trainer
) -> Trainer:
    accelerator = Accelerator(cpu=True)
    model = make_model(dropout=0.0)
    loader = Batches(2)
    task = ClassificationTask()
    return assemble_trainer(
        TrainerConfig(num_epochs=1, ema_decay=ema_decay),
        strategy=PlainStrategy(accelerator, seed=0),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
        schedule=learning_rate_at,
        task=task,
        loader=loader,
        evaluators={"": Evaluator(loader, task=task, metrics=[], accelerator=accelerator)},
        checkpointer=Checkpointer(folder, config=CheckpointConfig(), metadata={}),
        trainer_class=trainer_class,
    )


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_the_state_of_an_assembled_trainer_has_an_average_if_asked_for(
    tmp_path: Path, ema_decay: float | None
) -> None:
    expected = {"model", "optimizer", "trainer"} | ({"ema"} if ema_decay else set())
    assert set(assemble(tmp_path, ema_decay=ema_decay).state_dict()) == expected


def test_the_average_of_an_assembled_trainer_is_a_copy_of_its_model(tmp_path: Path) -> None:
    state = assemble(tmp_path, ema_decay=0.9).state_dict()
    for name, weight in state["model"].items():
        assert torch.equal(state["ema"][name], weight)
        assert state["ema"][name].data_ptr() != weight.data_ptr()


def test_an_assembled_trainer_has_what_a_callback_may_read_of_it(tmp_path: Path) -> None:
    trainer = assemble(tmp_path)
    assert [
        name
        for name in vars(TrainerView)
        if not name.startswith("_") and not hasattr(trainer, name)
    ] == []


def test_an_assembled_trainer_is_of_the_class_that_is_asked_for(tmp_path: Path) -> None:
    class Own(Trainer):
        pass

    assert type(assemble(tmp_path, trainer_class=Own)) is Own
