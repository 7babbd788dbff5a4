from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    Callback,
    CheckpointConfig,
    ConfigError,
    Position,
    RecipeConfig,
    ReduceLROnPlateau,
    RegressionTask,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    StepReport,
    Trainer,
    TrainerConfig,
    build_trainer,
    schedule_from_torch,
    start_run,
)
from accel_trainer.core.rng import epoch_permutation

from .. import processes
from ..training.test_exactness import final_files, history
from ..variants import NUM_THREADS

RULE: dict[str, Any] = {"factor": 0.5, "patience": 1, "threshold": 0.02, "cooldown": 1}
NUM_EPOCHS = 24


FAKE: Any = None


def prepared(plateau: ReduceLROnPlateau, mode: Any = "min", **state: Any) -> ReduceLROnPlateau:
    plateau.prepare({"eval/loss": mode}, lambda step: 0.1, num_steps=9)
    if state:
        plateau.load_state_dict(state)
    return plateau


def test_the_rule_is_that_of_torch() -> None:
    """Whatever the numbers, and although the callback is saved and loaded after each of them."""
    for seed in range(200):
        chosen = random.Random(seed)
        mode = chosen.choice(["min", "max"])
        rule = {
            "factor": chosen.choice([0.1, 0.3, 0.9]),
            "patience": chosen.randrange(4),
            "threshold": chosen.choice([0.0, 1e-4, 0.2]),
            "cooldown": chosen.randrange(3),
            "min_lr": chosen.choice([0.0, 1e-3, 0.04, 0.2]),
        }
        rates = [0.1, 0.03, 1e-7]
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
        optimizer = SGD(groups)
        torchs = lr_scheduler.ReduceLROnPlateau(optimizer, mode=mode, **rule)
        state: dict[str, Any] = {}
        for _ in range(40):
            value = chosen.choice([chosen.gauss(0, 1), 1 / (1 + chosen.random()), float("nan")])
            torchs.step(value)
            ours = prepared(ReduceLROnPlateau(**rule), mode, **state)
            ours.on_evaluate_end(FAKE, {"eval/loss": value})
            state = ours.state_dict()
            found = [ours.reduced_rate(rate) for rate in rates]
            assert found == [group["lr"] for group in optimizer.param_groups], seed


def test_a_new_number_is_judged_anew_but_keeps_the_reductions() -> None:
    state: dict[str, Any] = {}
    for mode, values in (("min", [1.0, 2.0, 1.5]), ("max", [0.1])):
        ours = prepared(ReduceLROnPlateau(patience=0), mode, **state)
        for value in values:
            ours.on_evaluate_end(FAKE, {"eval/loss": value})
        state = ours.state_dict()
        assert ours.num_reductions == 2


# --- runs ---


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(56, 5, generator=generator, dtype=torch.float64)
    noise = torch.randn(56, 1, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).sin() + 0.5 * noise


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def optimizer_of(model: nn.Module) -> SGD:
    first, _, last = model
    groups = [{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.1}]
    return SGD(groups, lr=0.3, momentum=0.9)


def train(
    folder: Path,
    *callbacks: Callback,
    trainer_config: TrainerConfig | None = None,
    schedule: Callable[..., float] | None = None,
    shape: Any = "constant",
    max_steps: int | None = None,
    evaluation: Any = None,
    allow_change: tuple[str, ...] = (),
    **options: Any,
) -> Trainer:
    inputs, targets = data()
    config = RecipeConfig(
        seed=3,
        batch=BatchConfig(per_device_batch_size=8, global_batch_size=16),
        trainer=trainer_config
        or TrainerConfig(num_epochs=NUM_EPOCHS, max_steps=max_steps, log_every_n_steps=1),
        schedule=ScheduleConfig() if schedule else ScheduleConfig(shape=shape),
        checkpoint=CheckpointConfig(every_n_steps=1),
        runtime=RuntimeConfig(num_threads=NUM_THREADS, timeout_s=300),
        run=RunConfig(output_dir=folder, quiet=True, allow_change=allow_change),
    )
    with start_run(config, recipe="plateau") as run:
        trainer = build_trainer(
            run,
            model=net(),
            task=RegressionTask(),
            train_set=TensorDataset(inputs[:40], targets[:40]),
            eval_sets=evaluation or TensorDataset(inputs[40:], targets[40:]),
            optimizer=optimizer_of,
            schedule=schedule,
            callbacks=callbacks,
            **options,
        )
        trainer.fit()
    return trainer


def torch_loop(scheduler_of: Callable[[Any], Any], *, on_plateau: bool) -> tuple[nn.Module, list]:
    """Train as everybody does; return the rates of each step, too."""
    inputs, targets = data()
    model = net()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    rates = []
    for epoch in range(NUM_EPOCHS):
        order = epoch_permutation(40, seed=3, epoch=epoch)
        for ids in order.split(16):
            optimizer.zero_grad()
            (model(inputs[ids]) - targets[ids]).square().mean().backward()
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
        with torch.no_grad():
            loss = (model(inputs[40:]) - targets[40:]).square().mean()
        scheduler.step(*[loss] * on_plateau)
    return model, rates


def rates_in(folder: Path) -> list[list[float]]:
    names = ("optim/learning_rate", "optim/learning_rate_2")
    return [[row[name] for name in names] for row in history(folder) if row["event"] == "train"]


def train_in_parts(folder: Path) -> Trainer:
    """End within an epoch, after its last step, and after its evaluation."""
    for max_steps in (1, 9, 20, 33, None):
        trainer = train(folder, ReduceLROnPlateau(**RULE, min_lr=0.02), max_steps=max_steps)
    return trainer


def test_a_run_has_the_numbers_of_its_torch_loop_and_resumes_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = train_in_parts(tmp_path / "parts")
    assert not caplog.records, "nothing is said of an honest run"
    model, rates = torch_loop(
        lambda o: lr_scheduler.ReduceLROnPlateau(o, **RULE, min_lr=0.02), on_plateau=True
    )
    assert rates_in(tmp_path / "parts") == [pytest.approx(each, rel=1e-15) for each in rates]
    assert [rates[0], rates[-1]] == [[0.3, 0.1], [0.02, 0.02]]
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-9)
    train(tmp_path / "whole", ReduceLROnPlateau(**RULE, min_lr=0.02))
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")


def test_two_processes_reduce_as_one(tmp_path: Path) -> None:
    processes.run(train_in_parts, tmp_path / "two", num_processes=2, folder=tmp_path / "logs")
    train_in_parts(tmp_path / "one")
    assert rates_in(tmp_path / "one") == rates_in(tmp_path / "two")


class Halve(Callback):
    def before_update(self, trainer: Trainer, gradients: Any) -> None:
        for group in trainer.optimizer.param_groups:
            group["learning_rate_scale"] = 0.5


def test_rates_are_the_product_of_all_factors_and_no_warmup_is_raised(tmp_path: Path) -> None:
    reports: list[StepReport] = []

    class Note(Callback):
        def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
            reports.append(report)
            assert {g["learning_rate_scale"] for g in trainer.optimizer.param_groups} == {0.5}

    plateau = ReduceLROnPlateau(factor=0.5, patience=0, threshold=0.9, min_lr=0.03)
    train(tmp_path, plateau, Halve(), Note(), schedule=lambda step: 0.3 * min(1, (step + 1) / 6))
    (first, _), (last, second) = rates_in(tmp_path)[0], rates_in(tmp_path)[-1]
    assert first == 0.3 / 6 / 2
    assert last == second == 0.03
    assert reports[-1].learning_rate == 0.03
    assert all(
        rate <= 0.15 * min(1, (step + 1) / 6) for step, (rate, _) in enumerate(rates_in(tmp_path))
    )


@pytest.mark.parametrize("monitor", [None, "eval_ema/loss"])
def test_the_models_number_counts_unless_the_averages_is_asked_for(
    tmp_path: Path, monitor: str | None
) -> None:
    plateau = ReduceLROnPlateau(**RULE, monitor=monitor)
    config = TrainerConfig(num_epochs=NUM_EPOCHS, ema_decay=0.97)
    train(tmp_path, plateau, trainer_config=config)
    values = [row[monitor or "eval/loss"] for row in history(tmp_path) if row["event"] == "eval"]
    expected = prepared(ReduceLROnPlateau(**RULE))
    for value in values:
        expected.on_evaluate_end(FAKE, {"eval/loss": value})
    assert plateau.num_reductions == expected.num_reductions > 0


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a schedule that falls": (
        lambda: {"shape": "cosine"},
        r"SCHEDULE.*falls from 0\.3.*constant",
    ),
    "a function that falls": (
        lambda: {"schedule": lambda step: 0.3 * 0.99**step},
        r"SCHEDULE.*falls from 0\.3",
    ),
    "an unknown number": (
        lambda: {"plateau": ReduceLROnPlateau(monitor="eval/f1")},
        "CONFIG.*'eval/f1' to monitor: set monitor= to one of eval/loss",
    ),
    "a factor of 1": (
        lambda: {"plateau": ReduceLROnPlateau(factor=1.0)},
        "CONFIG.*ReduceLROnPlateau.factor",
    ),
    "an unknown mode": (lambda: {"plateau": ReduceLROnPlateau(mode="low")}, "CONFIG.*min or max"),
    "torch's": (
        lambda: {"schedule": schedule_from_torch(lr_scheduler.ReduceLROnPlateau, learning_rate=1)},
        r"SCHEDULE.*callbacks=\[accel_trainer.ReduceLROnPlateau",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_reduced_is_refused_before_a_step(tmp_path: Path, case: str) -> None:
    options, message = REFUSED[case]

    class Never(Callback):
        def before_update(self, trainer: Trainer, gradients: Any) -> None:
            raise AssertionError("a step was taken")

    def attempt() -> None:
        given = options()
        train(tmp_path, given.pop("plateau", ReduceLROnPlateau()), Never(), **given)

    with pytest.raises(ConfigError, match=message) as refused:
        attempt()
    assert "\n" not in str(refused.value)


class NeverBest:
    """Its score, which decides the best checkpoint, is never a number, and its loss never falls."""

    monitors = {"score": True, "loss": False}

    def run(self, model: nn.Module, position: Position, stop_flag: Any) -> dict[str, Any]:
        return {"score": float("nan"), "loss": 1.0}


def test_a_resume_goes_on_counting_where_no_evaluation_is_the_best(tmp_path: Path) -> None:
    for name, stops in (("whole", (None,)), ("parts", (4, 7, 10, None))):
        for max_steps in stops:
            plateau = ReduceLROnPlateau(patience=2, monitor="eval/loss")
            train(tmp_path / name, plateau, evaluation=NeverBest(), max_steps=max_steps)
    assert rates_in(tmp_path / "whole")[9:12:2] == [[0.3, 0.1], [0.3, 0.1]]
    assert rates_in(tmp_path / "whole")[12] == [pytest.approx(0.03), pytest.approx(0.01)]
    assert rates_in(tmp_path / "parts") == rates_in(tmp_path / "whole")
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")


@pytest.mark.parametrize("is_other", [False, True])
def test_numbers_of_other_evaluation_data_are_judged_anew(tmp_path: Path, is_other: bool) -> None:
    train(tmp_path, ReduceLROnPlateau(**RULE), max_steps=9)
    inputs, targets = data()
    evaluation = TensorDataset(inputs[40:] * 2, targets[40:] + 9) if is_other else None
    plateau = ReduceLROnPlateau(**RULE)
    start: dict[str, Any] = {}
    plateau.on_step_end = lambda trainer, report: start.setdefault("best", plateau._best)  # type: ignore[method-assign]
    train(tmp_path, plateau, evaluation=evaluation, allow_change=("data",), max_steps=10)
    assert (start["best"] is None) == is_other


class Unmonitored:
    monitors: dict[str, bool] = {}

    def run(self, model: nn.Module, position: Position, stop_flag: Any) -> dict[str, Any]:
        return {"size": 1.0}


def test_without_a_number_to_monitor_it_is_refused(tmp_path: Path) -> None:
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=8),
        schedule=ScheduleConfig(shape="constant"),
        run=RunConfig(output_dir=tmp_path, quiet=True),
    )
    inputs, targets = data()
    with (
        start_run(config, recipe="plateau") as run,
        pytest.raises(ConfigError, match="CONFIG.*that a metric declares"),
    ):
        build_trainer(
            run,
            model=net(),
            task=RegressionTask(),
            train_set=TensorDataset(inputs, targets),
            eval_sets=Unmonitored(),
            callbacks=[ReduceLROnPlateau()],
        )


# --- other schedules by epochs ---


def test_a_torch_schedule_by_epochs_has_the_numbers_of_its_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def factory(optimizer: Any) -> Any:
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_EPOCHS)

    model, rates = torch_loop(factory, on_plateau=False)
    schedule = schedule_from_torch(factory, learning_rate=0.3, every="epoch")
    with caplog.at_level(logging.WARNING):
        for max_steps in (10, None):
            trainer = train(tmp_path, schedule=schedule, max_steps=max_steps)
    assert not caplog.records
    assert rates_in(tmp_path) == [pytest.approx(each, rel=1e-12) for each in rates]
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-9)
    with pytest.raises(ConfigError, match="SCHEDULE.*every= is 'epochs'"):
        schedule_from_torch(factory, learning_rate=0.3, every="epochs")


def test_functions_and_positions_know_the_steps_of_an_epoch(tmp_path: Path) -> None:
    positions: list[Position] = []

    class Note(Callback):
        def before_update(self, trainer: Trainer, gradients: Any) -> None:
            positions.append(gradients.step_batch.position)

    def schedule(step: int, *, steps_per_epoch: int) -> float:
        return 0.1 / (1 + step // steps_per_epoch)

    train(tmp_path, Note(), schedule=schedule, max_steps=7)
    assert [(each.step_in_epoch, each.steps_per_epoch) for each in positions] == [
        (step % 3, 3) for step in range(7)
    ]
    assert [rate for rate, _ in rates_in(tmp_path)] == [0.1 / (1 + step // 3) for step in range(7)]
