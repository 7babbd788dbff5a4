"""Networks that step in turn: several optimizers by name, and a task that says whose step it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Muon
from torch.utils.data import TensorDataset

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    CheckpointConfig,
    ConfigError,
    Gradients,
    Position,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    StepBatch,
    StepOutput,
    StepReport,
    Trainer,
    TrainerConfig,
    build_trainer,
    start_run,
)

from ... import processes
from ...joined import FSDP
from ...variants import NUM_THREADS
from ..test_exactness import final_files, history, largest_difference

SIZE = 6
NOISE = 3


def network(inputs: int, outputs: int, *, norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), norm(8), nn.LeakyReLU(0.2), nn.Linear(8, outputs))


class Gan(nn.Module):
    """A generator of vectors [B, SIZE] from noise [B, NOISE], and a critic of them."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.generator = network(NOISE, SIZE, norm=norm)
        self.critic = network(SIZE, 1, norm=norm)

    def forward(self, inputs: Tensor, turn: str | tuple[str, ...]) -> Tensor:
        """Return the loss of each sample. In its turn, the critic and its norm are called twice."""
        points, noise = inputs.split([SIZE, NOISE], dim=1)
        made = self.generator(noise)
        if turn == "generator":
            return F.softplus(-self.critic(made)).squeeze(1)
        made = made.detach() if turn == "critic" else made
        return (F.softplus(-self.critic(points)) + F.softplus(self.critic(made))).squeeze(1)


class WassersteinGan(Gan):
    """With a penalty on the gradient of the critic between real and made points."""

    def forward(self, inputs: Tensor, turn: str | tuple[str, ...]) -> Tensor:
        points, noise = inputs.split([SIZE, NOISE], dim=1)
        made = self.generator(noise)
        if turn == "generator":
            return -self.critic(made).squeeze(1)
        made = made.detach()
        between = points.lerp(made, noise.sigmoid()[:, :1])
        if not torch.is_grad_enabled():
            return (self.critic(made) - self.critic(points)).squeeze(1)
        between.requires_grad_()
        [slope] = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square()
        return (self.critic(made) - self.critic(points)).squeeze(1) + penalty


class InTurn:
    """One step of the critic, then one of the generator."""

    num_critic_steps = 1

    def turn(self, position: Position) -> str | tuple[str, ...]:
        is_last = position.step % (self.num_critic_steps + 1) == self.num_critic_steps
        return "generator" if is_last else "critic"

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        assert batch.turn == self.turn(batch.position)
        return StepOutput(model(batch.inputs, batch.turn))

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        assert batch.turn == ""
        return StepOutput(model(batch.inputs, "critic"))


class FiveToOne(InTurn):
    num_critic_steps = 5


class Together(InTurn):
    """Now and then, both step."""

    def turn(self, position: Position) -> str | tuple[str, ...]:
        return ("generator", "critic") if position.step % 3 == 0 else super().turn(position)


OPTIMIZERS: Any = {
    "critic": lambda model: Adam(model.critic.parameters(), lr=4e-3, betas=(0.5, 0.99)),
    "generator": lambda model: SGD(model.generator.parameters(), lr=1e-2, momentum=0.9),
}
PROGRAMS: dict[str, dict[str, Any]] = {
    "gan": {},
    "wasserstein": {"model": lambda: WassersteinGan(nn.LayerNorm), "task": FiveToOne},
    "together": {"task": Together},
}


def train(
    folder: Path,
    *,
    model: Callable[[], nn.Module] = Gan,
    task: Callable[[], Any] = InTurn,
    optimizer: Any = OPTIMIZERS,
    max_steps: int = 14,
    reduce: Any = "float",
    dtype: torch.dtype = torch.float32,
    scaler: torch.amp.GradScaler | None = None,
    config: Callable[[RecipeConfig], RecipeConfig] = lambda config: config,
    **options: Any,
) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(80, SIZE + NOISE, generator=generator).to(dtype)
    data, held_out = (TensorDataset(part, torch.zeros(len(part))) for part in inputs.split(64))
    run_config = RecipeConfig(
        seed=3,
        batch=BatchConfig(
            per_device_batch_size=2, global_batch_size=8, eval_batch_size=8, reduce=reduce
        ),
        trainer=TrainerConfig(
            num_epochs=2,
            max_steps=max_steps,
            log_every_n_steps=3,
            digest_every_n_steps=3,
            max_grad_norm=5.0,
            ema_decay=0.9,
        ),
        schedule=ScheduleConfig(shape="cosine"),
        checkpoint=CheckpointConfig(every_n_steps=1),
        runtime=RuntimeConfig(num_threads=NUM_THREADS, timeout_s=300),
        run=RunConfig(output_dir=folder),
    )
    with start_run(config(run_config), recipe="turns") as run:
        run.accelerator.scaler = scaler
        trainer = build_trainer(
            run,
            model=model().to(dtype),
            task=task(),
            train_set=data,
            eval_sets=held_out,
            optimizer=optimizer,
            **options,
        )
        trainer.fit()
    return trainer


def train_in_parts(folder: Path, options: dict[str, Any]) -> None:
    train(folder / "whole", **options)
    for max_steps in (1, 9, 14):
        train(folder / "parts", max_steps=max_steps, **options)
    assert final_files(folder / "parts") == final_files(folder / "whole")


def train_in_float64(folder: Path, name: str) -> None:
    """Without norms over the batch, of which each process has a part of its own."""
    model = PROGRAMS[name].get("model", lambda: Gan(nn.LayerNorm))
    train(folder, **{**PROGRAMS[name], "model": model, "dtype": torch.float64})


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_processes_train_the_networks_of_one(name: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    train_in_float64(one, name)
    processes.run(train_in_float64, two, name, num_processes=2, folder=tmp_path / "logs")
    assert largest_difference(one, two) <= 1e-12


def train_all_exactly(folder: Path) -> None:
    for name, program in PROGRAMS.items():
        train(folder / name, **program, reduce="exact")


def test_exact_sums_give_the_same_bytes_on_one_and_two_processes(tmp_path: Path) -> None:
    train_all_exactly(tmp_path / "one")
    processes.run(train_all_exactly, tmp_path / "two", num_processes=2, folder=tmp_path / "logs")
    for name in PROGRAMS:
        assert final_files(tmp_path / "one" / name) == final_files(tmp_path / "two" / name)


# --- a turn ---


class Watch(Callback):
    """Notes which parameters require gradients, have one, and change, by the step."""

    def __init__(self) -> None:
        self.required: list[set[str]] = []
        self.reached: list[set[str]] = []
        self.changed: list[set[str]] = []
        self.averaged: list[set[str]] = []
        self.before: dict[str, Tensor] = {}

    def on_micro_batch(self, trainer: Trainer, batch: Batch, output: StepOutput) -> None:
        named = trainer.model.named_parameters()
        self.required.append({network_of(name) for name, each in named if each.requires_grad})

    def before_update(self, trainer: Trainer, gradients: Gradients) -> None:
        assert all(each.requires_grad for each in trainer.model.parameters())
        self.reached.append(
            {network_of(name) for name, each in gradients.items() if each is not None}
        )
        self.before = tensors_of(trainer)

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        now = tensors_of(trainer)
        changed = {name for name, each in now.items() if not torch.equal(each, self.before[name])}
        names = [*dict(trainer.model.named_parameters())]
        self.changed.append({network_of(name) for name in names if name in changed})
        self.averaged.append({network_of(name) for name in names if f"average.{name}" in changed})


def network_of(name: str) -> str:
    return name.partition(".")[0]


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    assert trainer.average_model is not None
    tensors = dict(trainer.model.named_parameters())
    tensors |= {f"average.{name}": p for name, p in trainer.average_model.named_parameters()}
    return {name: each.detach().clone() for name, each in tensors.items()}


def test_only_those_that_have_the_turn_are_trained_and_averaged(tmp_path: Path) -> None:
    watch = Watch()
    train(tmp_path, task=Together, max_steps=4, callbacks=[watch])
    turns = [{"critic", "generator"}, {"generator"}, {"critic"}, {"critic", "generator"}]
    assert watch.required == [turn for turn in turns for _ in range(4)]  # micro-batches
    assert watch.reached == watch.changed == watch.averaged == turns


def test_the_average_of_a_network_begins_with_its_own_steps(tmp_path: Path) -> None:
    """Its decay is (1 + n) / (10 + n) at its n-th step, and at most that of the config."""
    weights: list[tuple[Tensor, Tensor]] = []

    class Note(Callback):
        def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
            models = (trainer.model, trainer.average_model)
            weights.append(tuple(each.generator[0].weight.detach().clone() for each in models))

    train(tmp_path, task=FiveToOne, max_steps=12, callbacks=[Note()])
    for number, step in enumerate((6, 12), start=1):
        (_, before), (weight, after) = weights[step - 2], weights[step - 1]
        assert torch.equal(after, before.lerp(weight, 1 - (1 + number) / (10 + number)))


def test_each_optimizer_has_its_state_and_its_learning_rate_by_name(tmp_path: Path) -> None:
    trainer = train(tmp_path)
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    pieces = {path.stem for path in newest.glob("optimizer*.safetensors")}
    assert pieces == {"optimizer-critic", "optimizer-generator"}
    critic = load_file(newest / "optimizer-critic.safetensors")
    assert any("critic.0.weight.exp_avg" in name for name in critic)
    assert not any("generator" in name for name in critic)
    for row in history(tmp_path):
        if row["event"] == "train":
            rates = row["optim/critic/learning_rate"], row["optim/generator/learning_rate"]
            assert rates[0] == trainer.learning_rate_at(row["optimizer_step"] - 1)
            assert rates[1] == pytest.approx(2.5 * rates[0])
            digests = {name for name in row if name.startswith("digest/optimizer")}
            is_due = row["optimizer_step"] % 3 == 0
            assert digests == {f"digest/{piece}" for piece in pieces if is_due}
    assert [*trainer.optimizers] == ["critic", "generator"]
    with pytest.raises(
        ConfigError, match=r"TRAINER.*names \(critic, generator\).*trainer\.optimizers"
    ):
        assert trainer.optimizer


def test_muon_and_adamw_side_by_side_resume_to_the_same_bytes(tmp_path: Path) -> None:
    processes.run(train_by_muon, tmp_path / "two", num_processes=2, folder=tmp_path / "logs")
    train_by_muon(tmp_path / "one")


class BothAtOnce:
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return StepOutput(sum(model(batch.inputs, name) for name in ("critic", "generator")))


def train_by_muon(folder: Path) -> None:
    options: dict[str, Any] = {
        "model": lambda: Gan(nn.LayerNorm),
        "task": BothAtOnce,
        "optimizer": {
            "matrices": lambda model: Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01),
            "rest": lambda model: AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.001),
        },
    }
    train(folder / "whole", **options)
    train(folder / "parts", **options, max_steps=5)
    train(folder / "parts", **options)
    assert final_files(folder / "parts") == final_files(folder / "whole")


class Sam(Trainer):
    """Computes the gradients twice in a turn."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        self.compute_gradients(step_batch)
        return self.apply_gradients(self.compute_gradients(step_batch))


def checked(config: RecipeConfig) -> RecipeConfig:
    return replace(config, trainer=replace(config.trainer, check_every_n_steps=1))


def test_a_turn_may_be_computed_twice(tmp_path: Path) -> None:
    train(tmp_path / "plain")
    train(tmp_path / "twice", trainer_class=Sam)
    train(tmp_path / "checked", config=checked)
    assert final_files(tmp_path / "twice") == final_files(tmp_path / "plain")
    assert final_files(tmp_path / "checked") == final_files(tmp_path / "plain")


class Spoils(Trainer):
    """Puts NaN into the gradients of a step of the generator."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        gradients = self.compute_gradients(step_batch)
        factor = float("nan") if self.state.optimizer_step == 3 else 1.0
        return self.apply_gradients(gradients.map(lambda each: each * factor))


def skipping(config: RecipeConfig) -> RecipeConfig:
    return replace(config, trainer=replace(config.trainer, on_nonfinite="skip"))


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_turn_that_is_skipped_changes_nothing(tmp_path: Path, is_scaled: bool) -> None:
    watch = Watch()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if is_scaled else None
    options = {"config": skipping, "trainer_class": Spoils, "callbacks": [watch]}
    train(tmp_path, max_steps=6, scaler=scaler, **options)
    critic, generator = {"critic"}, {"generator"}
    assert watch.changed == watch.averaged == [critic, generator, critic, set(), critic, generator]


# --- what is refused ---


def task_with(turn: Any) -> Callable[[], Any]:
    class Own(InTurn):
        def turn(self, position: Position) -> Any:
            return turn if position.step >= 0 else None

    return Own


def critic(model: Any) -> Adam:
    return Adam(model.critic.parameters())


def generator(model: Any) -> Adam:
    return Adam(model.generator.parameters())


def everything(model: Any) -> Adam:
    return Adam(model.parameters())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown name": (
        {"task": task_with("discriminator")},
        r"TASK.*returned 'discriminator' at step 0.*critic, generator",
    ),
    "nobody": ({"task": task_with(())}, r"TASK.*returned \(\) at step 0.*critic, generator"),
    "no name": ({"task": task_with(None)}, r"TASK.*returned None at step 0"),
    "a list": ({"task": task_with(["critic"])}, r"TASK.*returned \['critic'\].*a tuple"),
    "one optimizer": (
        {"optimizer": everything},
        r"TASK.*returned 'critic' at step 0.*give build_trainer a dict of functions",
    ),
    "none by name": ({"optimizer": {}}, r"TASK.*returned 'critic' at step 0.*optimizer= has none"),
    "a name of letters that no file should have": (
        {"optimizer": {"Critic/1": critic, "generator": generator}},
        "CONFIG.*optimizer= has the name 'Critic/1'",
    ),
    "an optimizer instead of a function": (
        {"optimizer": {"critic": critic(Gan()), "generator": generator}},
        "CONFIG.*optimizer= is an object of type Adam: pass a function",
    ),
    "a parameter in two": (
        {"optimizer": {"critic": everything, "generator": generator}},
        r"CONFIG.*more than one.*\(critic, generator\).*generator\.0\.weight",
    ),
    "a parameter in none": (
        {"optimizer": {"critic": critic}, "task": task_with("critic")},
        r"CONFIG.*optimizer has 6 parameters, without generator\.0\.",
    ),
    "a dict of modules": (
        {"model": lambda: nn.ModuleDict({"a": nn.Linear(2, 2)})},
        "MODEL.*ModuleDict.*cannot be called",
    ),
    "a list of modules": (
        {"model": lambda: nn.ModuleList([nn.Linear(2, 2)])},
        "MODEL.*ModuleList.*cannot be called",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_turns_that_cannot_be_taken_are_refused_before_work(tmp_path: Path, case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as refused:
        train(tmp_path / "run", **options)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_later_turn_that_names_no_optimizer_is_refused_at_its_step(tmp_path: Path) -> None:
    class Later(InTurn):
        def turn(self, position: Position) -> str:
            return "critic" if position.step < 2 else "crtic"

    with pytest.raises(ConfigError, match=r"TASK.*'crtic' at step 2.*critic, generator"):
        train(tmp_path, task=Later)


def train_in_shards(folder: Path) -> None:
    os.environ.update(FSDP)
    train(folder)


def test_several_optimizers_are_refused_with_shards(tmp_path: Path) -> None:
    job = processes.run(train_in_shards, tmp_path / "run", folder=tmp_path / "logs", codes=[1, 1])
    assert "error[FSDP]: a dict of optimizers does not work with FSDP" in job.output()


class OwnGradient(Trainer):
    """Gives the critic a gradient in each step, also when the generator has the turn."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        gradients = self.compute_gradients(step_batch)
        bias = torch.ones_like(self.model.critic[0].bias)
        return self.apply_gradients(
            replace(gradients, tensors={**gradients, "critic.0.bias": bias})
        )


def test_a_gradient_without_a_turn_is_refused_at_its_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TRAINER.*no turn.*: critic\.0\.bias:"):
        train(tmp_path, trainer_class=OwnGradient)
    rows = [row for row in history(tmp_path) if row["event"] == "train"]
    assert not rows, "the first step was the critic's, the second is refused"
    train(tmp_path / "together", task=task_with(("critic", "generator")), trainer_class=OwnGradient)


class ByProcess(InTurn):
    """As a turn that follows from the loss of this process's own samples."""

    def turn(self, position: Position) -> str:
        return "critic" if position.step < 3 or os.environ["RANK"] == "0" else "generator"


def train_by_process(folder: Path) -> None:
    for reduce in ("float", "exact"):
        with pytest.raises(ConfigError, match="TASK.*turn returned.*at step 3.*on another process"):
            train(folder / reduce, task=ByProcess, reduce=reduce)


def test_a_turn_that_differs_between_processes_is_refused_on_all(tmp_path: Path) -> None:
    processes.run(train_by_process, tmp_path, num_processes=2, folder=tmp_path / "logs")
