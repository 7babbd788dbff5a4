"""An evaluation that draws random numbers always measures the same.

Neither the time of the evaluation, nor a resume, nor the number of workers changes the result.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accel_trainer import ClassificationTask
from accel_trainer.core.types import Batch, StepOutput
from accel_trainer.data.loader import EvalLoader
from accel_trainer.data.workers import SampleReader
from accel_trainer.distributed.accelerator import RuntimeConfig, start_accelerator
from accel_trainer.training.evaluation.evaluation import run_evaluation
from accel_trainer.training.evaluation.evaluator import Evaluator
from accel_trainer.training.evaluation.metrics import MeanLoss

from ... import processes
from ...joined import joined_processes
from .test_evaluator import NUM_CLASSES, Samples


class Noisy(ClassificationTask):
    """Evaluates with noise from the generators of torch, numpy and Python."""

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().eval_step(model, batch)
        noise = torch.rand(len(batch)) + float(np.random.rand()) + random.random()
        return output._replace(losses=output.losses + noise)


class Bootstrapped(MeanLoss):
    """Draws when it is updated, and when it computes."""

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        super().update(sums, batch, output._replace(losses=output.losses * torch.rand(len(batch))))

    def compute(self, sums: Tensor) -> dict[str, Any]:
        return {"loss": super().compute(sums)["loss"] + random.random() + float(torch.rand(()))}


def make_evaluator(*, num_workers: int = 0, seed: int = 3) -> Evaluator:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    reader = SampleReader(Samples(40), accelerator.device, num_workers=num_workers)
    loader = EvalLoader(reader, batch_size=15, device=accelerator.device)
    return Evaluator(
        loader, task=Noisy(), metrics=[Bootstrapped()], accelerator=accelerator, seed=seed
    )


def evaluate(model: nn.Module, **options: int) -> dict[str, Any]:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    return run_evaluation(make_evaluator(**options), model, accelerator)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, NUM_CLASSES).double()


def draw() -> list[Any]:
    return [random.random(), np.random.rand(), torch.rand(3).tolist()]


def test_a_random_evaluation_repeats_itself_and_moves_no_generator() -> None:
    model = make_model()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    expected = [draw(), draw()]
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    first = evaluate(model)
    drawn = draw()
    second = evaluate(model)
    assert first == second
    assert [drawn, draw()] == expected
    assert evaluate(model, seed=4) != first


def test_a_random_evaluation_is_the_same_with_any_number_of_data_workers() -> None:
    assert evaluate(make_model()) == evaluate(make_model(), num_workers=2)


def evaluate_in_parts() -> None:
    with joined_processes() as accelerator:
        reader = SampleReader(Samples(97), accelerator.device)
        where = {
            "num_processes": accelerator.num_processes,
            "process_index": accelerator.process_index,
            "device": accelerator.device,
        }
        loader = EvalLoader(reader, batch_size=13, num_parts=4, **where)
        found = Evaluator(
            loader, task=Noisy(), metrics=[MeanLoss()], accelerator=accelerator, num_parts=4, seed=3
        )
        print(run_evaluation(found, make_model(), accelerator))


def test_an_exact_random_evaluation_is_the_same_on_2_processes(tmp_path: Path) -> None:
    jobs = [
        processes.run(evaluate_in_parts, num_processes=number, folder=tmp_path / str(number))
        for number in (1, 2)
    ]
    assert "loss" in jobs[0].output()
    assert jobs[0].output() == jobs[1].output()
