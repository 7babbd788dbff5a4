"""Each row of "A plain torch loop": the original and ours end with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accel_trainer import (
    BatchConfig,
    DatasetOptions,
    OptimizerConfig,
    RecipeConfig,
    ReduceLROnPlateau,
    RunConfig,
    StepOutput,
    TopKAccuracy,
    Trainer,
    TrainerConfig,
    build_trainer,
    exact_run,
    schedule_from_torch,
    start_run,
)

from .pages import ROOT

PAGE = ROOT / "docs" / "coming_from.md"
X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.sum(1) > 0).long() + (X[:, 0] > 0).long()
DATA = TensorDataset(X, Y)
OTHER = TensorDataset(X.flip(0), Y.flip(0))
EPOCHS = 3


def make_net() -> nn.Sequential:
    """Return a net of a body and a head, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh())
        return nn.Sequential(body, nn.Linear(8, 3)).double()


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], Tensor] | None = None,
    *,
    batches: Callable[[], Any] = lambda: DataLoader(DATA, 8),
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
    after_epoch: Callable[[], object] = lambda: None,
    every: int = 1,
) -> dict[str, Tensor]:
    """Train as people write it; return the weights."""
    loss_of = loss_of or (lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    for _ in range(EPOCHS):
        for index, batch in enumerate(batches()):
            (loss_of(batch) / every).backward()
            if (index + 1) % every == 0:
                before_step()
                optimizer.step()
                optimizer.zero_grad()
                after_step()
        after_epoch()
    return model.state_dict()


class Task:
    """A cross-entropy of each sample."""

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        logits = model(batch.inputs)
        return StepOutput(F.cross_entropy(logits, batch.targets, reduction="none"), logits)


def ours(
    folder: Path,
    model: nn.Module,
    task: Any = None,
    *,
    train_set: Any = DATA,
    batch: BatchConfig | None = None,
    trainer: dict[str, Any] | None = None,
    optimizer_config: OptimizerConfig | None = None,
    **parts: Any,
) -> Trainer:
    """Train the same samples in the same order."""
    config = RecipeConfig(
        batch=batch or BatchConfig(per_device_batch_size=8, order="stored"),
        trainer=TrainerConfig(num_epochs=EPOCHS, **(trainer or {})),
        optimizer=optimizer_config or OptimizerConfig(),
        run=RunConfig(output_dir=folder, quiet=True),
    )
    parts.setdefault("optimizer", sgd)
    parts.setdefault("schedule", lambda step: 0.1)
    with start_run(config, recipe="row") as run:
        built = build_trainer(
            run, model=model, task=task or Task(), train_set=train_set, eval_sets=OTHER, **parts
        )
        built.fit()
        return built


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def check(trainer: Trainer | nn.Module, expected: dict[str, Tensor]) -> None:
    model = trainer.model if isinstance(trainer, Trainer) else trainer
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=1e-11)


# --- a function for each row, by the row's first cell ---


def keeps_the_loop(folder: Path) -> None:
    before, model = make_net(), make_net()
    expected = loop(before, sgd(before))
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(DATA, 8))
    with exact_run(accelerator, folder, model=model, optimizer=optimizer, loader=loader) as run:
        for _ in run.epochs(EPOCHS):
            for inputs, targets in run.batches():
                accelerator.backward(F.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    check(model, expected)


def a_step(folder: Path) -> None:
    model = make_net()
    check(ours(folder, make_net()), loop(model, sgd(model)))


def an_optimizer(folder: Path) -> None:
    model = make_net()
    expected = loop(model, torch.optim.Adam(model.parameters(), lr=0.01))
    build = lambda model: torch.optim.Adam(model.parameters(), lr=0.01)  # noqa: E731
    check(ours(folder, make_net(), optimizer=build, schedule=lambda step: 0.01), expected)


def a_schedule_by_step(folder: Path) -> None:
    model = make_net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    expected = loop(model, optimizer, after_step=scheduler.step)
    schedule = schedule_from_torch(
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5),
        learning_rate=0.1,
    )
    check(ours(folder, make_net(), schedule=schedule), expected)


def a_schedule_by_epoch(folder: Path) -> None:
    model = make_net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    expected = loop(model, optimizer, after_epoch=scheduler.step)
    schedule = schedule_from_torch(
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        learning_rate=0.1,
        every="epoch",
    )
    check(ours(folder, make_net(), schedule=schedule), expected)


def a_plateau(folder: Path) -> None:
    model = make_net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.5
    )

    def judge() -> None:
        model.eval()
        with torch.no_grad():
            scheduler.step(F.cross_entropy(model(OTHER.tensors[0]), OTHER.tensors[1]).item())
        model.train()

    expected = loop(model, optimizer, after_epoch=judge)
    assert optimizer.param_groups[0]["lr"] < 0.1
    plateau = ReduceLROnPlateau(factor=0.5, patience=0, threshold=0.5, monitor="eval/loss")
    check(ours(folder, make_net(), callbacks=[plateau]), expected)


def drawn(epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(epoch)
    return torch.multinomial(1.0 + Y, 40, replacement=True, generator=generator)


def a_sampler(folder: Path) -> None:
    model = make_net()
    epochs = count()
    expected = loop(
        model, sgd(model), batches=lambda: DataLoader(DATA, 8, sampler=drawn(next(epochs)).tolist())
    )
    batch = BatchConfig(per_device_batch_size=8)
    check(ours(folder, make_net(), batch=batch, options=DatasetOptions(order=drawn)), expected)


def a_batch_sampler(folder: Path) -> None:
    def batches(epoch: int) -> list[list[int]]:
        return [[*range(start, 48, 6)] for start in range(epoch % 3, 6)][:3]

    model = make_net()
    epochs = count()
    expected = loop(
        model,
        sgd(model),
        batches=lambda: DataLoader(DATA, batch_sampler=batches(next(epochs))),
    )
    options = DatasetOptions(order=lambda epoch: sum(batches(epoch), []))
    batch = BatchConfig(per_device_batch_size=8)
    check(ours(folder, make_net(), batch=batch, options=options), expected)


def two_networks(folder: Path) -> None:
    model = make_net()
    first, second = sgd(model[0]), sgd(model[1])
    for _ in range(EPOCHS):
        for x, y in DataLoader(DATA, 8):
            for optimizer in (first, second):
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    class Alternating(Task):
        def updates(self, _: object) -> list[str]:
            return ["body", "head"]

    optimizers = {"body": lambda model: sgd(model[0]), "head": lambda model: sgd(model[1])}
    check(ours(folder, make_net(), Alternating(), optimizer=optimizers), model.state_dict())


def a_clipped_norm(folder: Path) -> None:
    model = make_net()
    expected = loop(
        model,
        sgd(model),
        before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    )
    check(ours(folder, make_net(), trainer={"max_grad_norm": 0.1}), expected)


def clipped_values(folder: Path) -> None:
    model = make_net()
    expected = loop(
        model,
        sgd(model),
        before_step=lambda: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    )
    check(ours(folder, make_net(), trainer={"max_grad_value": 0.01}), expected)


def a_sum(folder: Path) -> None:
    model = make_net()

    class Summed(Task):
        def step(self, model: nn.Module, batch: Any) -> StepOutput:
            losses, logits = super().step(model, batch)[:2]
            return StepOutput(losses, logits, reduction="sum")

    expected = loop(
        model, sgd(model), lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    )
    check(ours(folder, make_net(), Summed()), expected)


def accumulation(folder: Path) -> None:
    model = make_net()
    expected = loop(model, sgd(model), every=2)
    batch = BatchConfig(per_device_batch_size=8, accumulation_steps=2, order="stored")
    check(ours(folder, make_net(), batch=batch), expected)


def two_losses(folder: Path) -> None:
    model = make_net()

    def both(batch: Any) -> Tensor:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        return 0.5 * model(batch[0]).square().sum(1).mean()

    class Both:
        def step(self, model: nn.Module, batch: Any) -> StepOutput:
            first = F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")
            return StepOutput(first + 0.5 * model(batch.inputs).square().sum(1))

    check(ours(folder, make_net(), Both(), metrics=[]), loop(model, sgd(model), both))


class Pairs(Dataset[Any]):
    """The samples of two datasets side by side."""

    def __len__(self) -> int:
        return min(len(DATA), len(OTHER))

    def __getitem__(self, index: int) -> Any:
        (x, y), (u, _) = DATA[index], OTHER[index]
        return (x, u), y


def two_loaders(folder: Path) -> None:
    model = make_net()

    def loss_of(batch: Any) -> Tensor:
        (x, y), (u, _) = batch
        return F.cross_entropy(model(x), y) + model(u).square().mean()

    class Paired:
        def step(self, model: nn.Module, batch: Any) -> StepOutput:
            x, u = batch.inputs
            losses = F.cross_entropy(model(x), batch.targets, reduction="none")
            return StepOutput(losses + model(u).square().mean(1))

        def eval_step(self, model: nn.Module, batch: Any) -> StepOutput:
            return Task().step(model, batch)

    expected = loop(
        model,
        sgd(model),
        loss_of,
        batches=lambda: zip(DataLoader(DATA, 8), DataLoader(OTHER, 8), strict=True),
    )
    check(ours(folder, make_net(), Paired(), train_set=Pairs()), expected)


def a_frozen_part(folder: Path) -> None:
    model = make_net()
    model[0].eval()
    model[0].requires_grad_(False)
    expected = loop(model, sgd(model))
    config = OptimizerConfig(freeze=r"^0\.")
    trainer = ours(
        folder,
        make_net(),
        optimizer=lambda model: torch.optim.SGD(
            [each for each in model.parameters() if each.requires_grad], lr=0.1
        ),
        optimizer_config=config,
    )
    check(trainer, expected)


def an_evaluation(folder: Path) -> None:
    model = make_net()
    loop(model, sgd(model))
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(x) for x, _ in DataLoader(OTHER, 16)])
    hits = (logits.argmax(1) == OTHER.tensors[1]).double().mean()
    trainer = ours(folder, make_net(), metrics=[TopKAccuracy()])
    assert trainer.result is not None
    assert trainer.result.metrics["eval/accuracy"] == pytest.approx(float(hits), abs=1e-12)


def saved_weights(folder: Path) -> None:
    trainer = ours(folder, make_net())
    stored = load_file(folder / "export" / "model.safetensors")
    torch.testing.assert_close(stored, dict(trainer.model.state_dict()), rtol=0, atol=0)


def in_float64(folder: Path) -> None:
    model = make_net()
    trainer = ours(folder, make_net())
    assert {each.dtype for each in trainer.model.parameters()} == {torch.float64}
    check(trainer, loop(model, sgd(model)))


def a_collate_function(folder: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        x, y = zip(*samples, strict=True)
        return torch.stack(x) * 2, torch.stack(y)

    model = make_net()
    expected = loop(model, sgd(model), batches=lambda: DataLoader(DATA, 8, collate_fn=collate))
    check(ours(folder, make_net(), options=DatasetOptions(collate=collate)), expected)


ROWS = {
    "`for epoch in ...: for x, y in loader:`": keeps_the_loop,
    "`criterion(model(x), y).backward()`": a_step,
    "`Adam(model.parameters(), lr=0.01)`": an_optimizer,
    "`scheduler.step()` after each step": a_schedule_by_step,
    "`scheduler.step()` after each epoch": a_schedule_by_epoch,
    "`scheduler.step(loss)` of ReduceLROnPlateau": a_plateau,
    "`DataLoader(..., sampler=...)`": a_sampler,
    "`DataLoader(..., batch_sampler=...)`": a_batch_sampler,
    "`loss_d.backward(); opt_d.step(); loss_g.backward(); opt_g.step()`": two_networks,
    "`clip_grad_norm_(model.parameters(), 0.1)`": a_clipped_norm,
    "`clip_grad_value_(model.parameters(), 0.01)`": clipped_values,
    '`F.cross_entropy(..., reduction="sum")`': a_sum,
    "`(loss / 2).backward()`, and a step after every second batch": accumulation,
    "`loss_a.backward(); loss_b.backward()`": two_losses,
    "`for (x, y), (u, _) in zip(loader_a, loader_b):`": two_loaders,
    "`model.body.eval()`, `requires_grad_(False)`": a_frozen_part,
    "`model.eval()`, `torch.no_grad()`, `hits += ...`": an_evaluation,
    "`torch.save(model.state_dict(), path)`": saved_weights,
    "`model.double()`": in_float64,
    "`DataLoader(..., collate_fn=collate)`": a_collate_function,
}


def rows_of_the_page() -> list[str]:
    section = PAGE.read_text().partition("\n## A plain torch loop\n")[2].partition("\n## ")[0]
    return [
        line.split(" | ")[0].removeprefix("| ") for line in section.splitlines()[2:] if "|" in line
    ]


def test_the_page_has_the_rows_that_are_tried() -> None:
    assert [row for row in rows_of_the_page() if row.startswith("`")] == [*ROWS]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_gives_the_numbers_of_the_original(row: str, tmp_path: Path) -> None:
    ROWS[row](tmp_path / "run")
