"""A loss that is a mean over items, such as tokens, is the same for any split of the batch.

The batch is split into micro-batches and over processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

from accel_trainer import (
    Batch,
    BatchConfig,
    ConfigError,
    DatasetOptions,
    MeanLoss,
    OptimizerConfig,
    RunConfig,
    StepOutput,
    Task,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.callbacks.metric_logger import Meters
from accel_trainer.callbacks.samples_so_far import SamplesSoFar
from accel_trainer.core.rng import epoch_permutation
from accel_trainer.core.types import StepReport

from .. import processes, workload
from .planted import PlainTask

NUM_TEXTS = 40
VOCABULARY = 11
IGNORED = -100
EPOCHS = 2
LEARNING_RATE = 0.1


class Texts:
    """Token ids of very different lengths; the first has nothing to predict."""

    def __len__(self) -> int:
        return NUM_TEXTS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, VOCABULARY, (3 + index % 17,), generator=generator)
        return {
            "input_ids": tokens,
            "labels": torch.full_like(tokens, IGNORED) if index == 0 else tokens,
        }


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest of the micro-batch, as transformers' collators do."""
    return {
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence(
            [sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORED
        ),
    }


class LanguageModel(nn.Module):
    """Predicts each token from the two before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded = F.pad(self.embedding(input_ids), (0, 0, 2, 0))
        return self.head(torch.cat([embedded[:, :-2], embedded[:, 1:-1]], -1))


class NextToken:
    """Cross-entropy per token that is not ignored."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(**batch.inputs).transpose(1, 2)
        losses = F.cross_entropy(logits, batch.targets, ignore_index=IGNORED, reduction="none")
        num_items = (batch.targets != IGNORED).sum(1)
        return StepOutput(losses.sum(1), num_items=num_items)


class MeanOfTokens:
    """The same from a mean over the tokens of the micro-batch."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(**batch.inputs).transpose(1, 2)
        loss = F.cross_entropy(logits, batch.targets, ignore_index=IGNORED)
        return StepOutput.from_mean(loss, num_items=(batch.targets != IGNORED).sum())


def train(
    folder: Path,
    micro: int,
    accumulation: int,
    max_steps: int | None = None,
    dtype: str = "float64",
    task: Callable[[], Task] = NextToken,
) -> None:
    config = replace(
        workload.make_config(folder),
        batch=BatchConfig(
            per_device_batch_size=micro, accumulation_steps=accumulation, eval_batch_size=8
        ),
        trainer=TrainerConfig(num_epochs=EPOCHS, max_steps=max_steps, log_every_n_steps=1),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, momentum=0.0, weight_decay=0.0),
        run=RunConfig(output_dir=folder),
    )
    config = replace(config, schedule=replace(config.schedule, shape="constant", warmup_epochs=0))
    with start_run(config, recipe="texts") as run:
        model = LanguageModel().to(getattr(torch, dtype))
        build_trainer(
            run,
            model=model,
            task=task(),
            train_set=Texts(),
            eval_sets=Texts(),
            options=DatasetOptions(collate=collate),
            metrics=[MeanLoss()],
        ).fit()


def train_by_hand() -> tuple[dict[str, Tensor], list[float], float]:
    """Train in a plain loop over batches of 16; return weights, loss of each step, final loss."""
    torch.manual_seed(3)
    model = LanguageModel().double()
    task = NextToken()
    losses = []

    def batch_of(ids: Tensor) -> Batch:
        made = collate([Texts()[int(i)] for i in ids])
        return Batch({"input_ids": made["input_ids"]}, made["labels"], ids)

    for epoch in range(EPOCHS):
        for ids in epoch_permutation(NUM_TEXTS, seed=3, epoch=epoch).split(16):
            output = task.step(model, batch_of(ids))
            loss = output.losses.sum() / output.num_items.sum()
            losses.append(loss.item())
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                parameter.data.sub_(LEARNING_RATE * gradient)
    whole = task.step(model, batch_of(torch.arange(NUM_TEXTS)))
    return model.state_dict(), losses, (whole.losses.sum() / whole.num_items.sum()).item()


def rows(folder: Path, event: str, name: str) -> list[float]:
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return [row[name] for row in lines if row["event"] == event]


def final(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*")) / "model.safetensors"


@pytest.mark.parametrize(
    ("num_processes", "micro", "accumulation", "task"),
    [
        (1, 16, 1, NextToken),
        (1, 4, 4, NextToken),
        (2, 8, 1, NextToken),
        (2, 2, 4, NextToken),
        (1, 1, 16, MeanOfTokens),  # the mean over the text without tokens is NaN
        (2, 2, 4, MeanOfTokens),
    ],
)
def test_a_padded_language_model_trains_as_in_one_batch(
    tmp_path: Path, num_processes: int, micro: int, accumulation: int, task: Any
) -> None:
    processes.run(
        train,
        tmp_path / "run",
        micro,
        accumulation,
        None,
        "float64",
        task,
        num_processes=num_processes,
        folder=tmp_path / "logs",
    )
    weights, losses, eval_loss = train_by_hand()
    trained = load_file(final(tmp_path / "run"))
    for name, expected in weights.items():
        assert (trained[name] - expected).abs().max() <= 1e-10, name
    assert rows(tmp_path / "run", "train", "train/loss") == pytest.approx(losses, abs=1e-10)
    assert rows(tmp_path / "run", "eval", "eval/loss")[-1] == pytest.approx(eval_loss, abs=1e-10)


class Counts(PlainTask):
    """Classification that trains with the numbers of items that `count` makes from ones [B]."""

    def __init__(self, count: Callable[[Tensor, Batch], Any]) -> None:
        self.count = count

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        num_items = self.count(torch.ones(len(batch)), batch)
        return super().step(model, batch)._replace(num_items=num_items)


def train_counting(
    folder: Path, count: Any, *, micro: int = 8, task: PlainTask | None = None
) -> None:
    """Train on 32 samples in two steps of 16."""
    config = replace(
        workload.make_config(folder),
        batch=BatchConfig(global_batch_size=16, per_device_batch_size=micro),
        trainer=TrainerConfig(num_epochs=1, log_every_n_steps=1, max_grad_norm=5.0),
        run=RunConfig(output_dir=folder),
    )
    data = TensorDataset(
        torch.randn(32, 5, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3
    )
    with start_run(config, recipe="counts") as run:
        build_trainer(
            run,
            model=nn.Linear(5, 3),
            task=task or Counts(count),
            train_set=data,
            eval_sets=data,
            metrics=[MeanLoss()],
        ).fit()


class NumbersOnSome(PlainTask):
    """Returns a number in some steps, or for some micro-batches."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        hits = (output.losses < 1).double()
        return output._replace(numbers={"hits": hits} if 0 in batch.sample_ids else {})


@pytest.mark.parametrize("micro", [8, 16])
def test_numbers_that_come_and_go_are_one_line(tmp_path: Path, micro: int) -> None:
    with pytest.raises(ConfigError, match=r"batches only \(hits; none\): return") as caught:
        train_counting(tmp_path / "run", None, micro=micro, task=NumbersOnSome())
    assert "\n" not in str(caught.value)


def count_on_some(ones: Tensor, batch: Batch) -> Tensor | None:
    return ones if 0 in batch.sample_ids else None


def count_on_main(ones: Tensor, batch: Batch) -> Tensor | None:
    return ones if os.environ.get("RANK", "0") == "0" else None


@pytest.mark.parametrize(
    "count", [lambda ones, batch: 16, lambda ones, batch: ones.sum()], ids=["an int", "a sum"]
)
def test_num_items_that_are_not_one_for_each_sample_are_refused(tmp_path: Path, count: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_items are (an object of type int|float32 \[\])"):
        train_counting(tmp_path / "run", count)


@pytest.mark.parametrize("micro", [8, 16])
def test_items_that_are_counted_only_sometimes_are_refused(tmp_path: Path, micro: int) -> None:
    with pytest.raises(ConfigError, match=r"returned num_items or numbers for some micro"):
        train_counting(tmp_path / "run", count_on_some, micro=micro)


def train_counting_on_main(folder: Path) -> None:
    """Both processes must raise."""
    with pytest.raises(ConfigError, match=r"returned num_items or numbers for some micro"):
        train_counting(folder, count_on_main)


def test_items_that_only_one_process_counts_are_refused_by_both(tmp_path: Path) -> None:
    processes.run(
        train_counting_on_main, tmp_path / "run", num_processes=2, folder=tmp_path / "logs"
    )


def test_items_may_be_fractions(tmp_path: Path) -> None:
    """As token weights are: a step of 1/4 item has 64 times the gradient of one of 16 items."""
    train_counting(tmp_path / "small", lambda ones, batch: ones / 64)
    train_counting(tmp_path / "whole", lambda ones, batch: ones)
    for name in ("train/loss", "optim/grad_norm"):
        small, whole = (rows(tmp_path / folder, "train", name)[0] for folder in ("small", "whole"))
        assert small == pytest.approx(64 * whole), name


def test_the_mean_loss_over_fractions_of_items_is_divided_by_them() -> None:
    metric = MeanLoss()
    sums = torch.zeros(2, dtype=torch.float64)
    batch = Batch(None, torch.zeros(2), torch.arange(2))
    metric.update(sums, batch, StepOutput(torch.ones(2), torch.zeros(2), torch.full((2,), 0.125)))
    assert metric.compute(sums) == {"loss": 8.0}


@pytest.mark.parametrize("name", ["loss", "num_items", "grad_norm"])
def test_a_number_with_a_name_of_the_log_is_refused(name: str) -> None:
    """It would take the place of the number with that name, or divide all others."""
    report = StepReport(
        1, 0, 0.1, torch.ones(()), {name: torch.ones(())}, 8, None, was_skipped=False
    )
    with pytest.raises(ConfigError, match=f"a number named {name}, which is reserved: rename it"):
        Meters(Accelerator(), SamplesSoFar(Accelerator(), is_on=False)).update(report)
