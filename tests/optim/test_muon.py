from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_trainer import BatchConfig, CheckpointConfig, OptimizerConfig, build_optimizer
from accel_trainer.checkpoint.state_dict import training_state
from accel_trainer.optim.muon import Muon, orthogonalized

from .. import processes, workload
from ..training.test_exactness import ALWAYS, ONCE, largest_difference, resume_everywhere
from .test_optimizers import as_stored, small_net, train, weights

CONFIG = OptimizerConfig(name="muon", learning_rate=0.05, momentum=0.85, weight_decay=0.01)


@pytest.mark.parametrize("shape", [(24, 216), (64, 600), (300, 40)])
def test_the_singular_values_of_an_orthogonalized_matrix_are_near_1(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalized(matrix))
    assert 0.65 < float(values.min()) < float(values.max()) < 1.25


def test_orthogonalizing_keeps_singular_vectors_and_forgets_the_length() -> None:
    matrix = torch.randn(6, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.T @ orthogonalized(matrix) @ right.T
    torch.testing.assert_close(inner, torch.diag(inner.diagonal()), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        orthogonalized(1000 * matrix), orthogonalized(matrix), rtol=1e-6, atol=1e-8
    )


def test_filters_step_by_muon_and_all_else_by_sgd() -> None:
    model, twin = small_net(), small_net()
    optimizer = build_optimizer(model, CONFIG)
    reference = build_optimizer(twin, replace(CONFIG, name="sgd"))
    filters = [name for name, parameter in model.named_parameters() if parameter.ndim == 4]
    before = weights(model)
    images = torch.randn(
        8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    for net in (model, twin):
        net(images).square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    reference.step()
    assert isinstance(optimizer, Muon)
    assert len(filters) == 2
    for name, after in weights(model).items():
        if name not in filters:
            assert torch.equal(after, weights(twin)[name]), name
            continue
        # The first Nesterov momentum points where the gradient does; the old filters have norm
        # sqrt(out).
        start = before[name] * len(after) ** 0.5 / before[name].norm()
        expected = start - 0.05 * orthogonalized(1.6 * gradients[name].flatten(1)).view_as(after)
        torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("start", [0.0, 1e-42])
def test_filters_that_begin_at_zero_or_next_to_it_are_trained(start: float) -> None:
    model = nn.Conv2d(3, 4, 3, bias=False)
    nn.init.constant_(model.weight, start)
    optimizer = build_optimizer(model, CONFIG)
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    norms = []
    for _ in range(3):
        (model(images) - 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(model.weight.detach().norm()))
    assert 0 < norms[0] < 0.2, "a step of the learning rate, in up to four directions"
    assert norms[1:] == pytest.approx([2, 2], abs=0.2), (
        "then the square root of the number of filters, and a step"
    )


def test_a_step_that_is_not_to_be_taken_leaves_no_trace() -> None:
    model = small_net(dtype=torch.float32)
    optimizer = build_optimizer(model, CONFIG)
    train(model, optimizer, range(2))
    before = as_stored(training_state(model, {"": optimizer}, None, None).state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]  # as the guard and GradScaler do
    optimizer.step()
    after = training_state(model, {"": optimizer}, None, None).state_dict()
    for name, weight in after["model"].items():
        assert torch.equal(weight, before["model"][name]), name
    for index, state in after["optimizer"]["state"].items():
        assert torch.equal(
            state["momentum_buffer"], before["optimizer"]["state"][index]["momentum_buffer"]
        )


def test_a_loss_scale_changes_nothing() -> None:
    model, twin = small_net(), small_net()
    optimizer, scaled = build_optimizer(model, CONFIG), build_optimizer(twin, CONFIG)
    for seed in range(3):
        images = torch.randn(
            8, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        # of another size each step, so that momentum must be kept unscaled
        scale = 2.0 ** (8 + seed)
        scaled.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
        for factor, net, stepped in ((1.0, model, optimizer), (scale, twin, scaled)):
            (net(images).square().sum() * factor).backward()
            stepped.step()
            stepped.zero_grad()
    theirs = weights(twin)
    for name, mine in weights(model).items():
        torch.testing.assert_close(mine, theirs[name], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_resume_after_every_step_is_bitwise_equal(tmp_path: Path) -> None:
    arguments = (tmp_path / "run", "muon", 0.9, 1, None, [*ONCE, ALWAYS])
    processes.run(resume_everywhere, *arguments, folder=tmp_path / "logs")


def test_two_processes_train_the_model_that_one_does(tmp_path: Path) -> None:
    for num_processes in (1, 2):
        folder, logs = tmp_path / str(num_processes), tmp_path / f"logs-{num_processes}"
        processes.run(run_muon, folder, num_processes, num_processes=num_processes, folder=logs)
    assert largest_difference(tmp_path / "1", tmp_path / "2") <= 1e-12


def run_muon(folder: Path, num_processes: int) -> None:
    batch = BatchConfig(per_device_batch_size=16 // num_processes, eval_batch_size=10)
    config = workload.make_config(
        folder, batch=batch, optimizer=CONFIG, checkpoint=CheckpointConfig()
    )
    workload.train(config, num_train=72, dtype=torch.float64)


def test_a_net_without_filters_is_trained_only_by_sgd() -> None:
    optimizer = build_optimizer(nn.Linear(4, 2), CONFIG)
    assert all("filter_momentum" not in group for group in optimizer.param_groups)
