from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from accel_trainer import Trainer, TrainerConfig
from accel_trainer.training.callback import TrainerView

from .test_trainer_paths import Batches, make_model, make_trainer


def assemble(folder: Path, *, ema_decay: float | None = None) -> Trainer:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    return make_trainer(
        TrainerConfig(num_epochs=1, ema_decay=ema_decay),
        folder,
        accelerator=accelerator,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
        loader=Batches(2),
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
