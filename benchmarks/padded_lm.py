"""A padded language model, split differently: how far is each toolkit from one big batch after 10
steps?

All train the same small transformer on the same texts of unequal lengths, in the same order, in
float64: 8 texts a step, as one batch, in two processes, in four micro-batches, and both. The texts
are padded to the longest of a micro-batch. Each toolkit is set up as its documentation says. About
20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accel_trainer.core.rng import epoch_permutation

from . import results

NUM_STEPS, BATCH_SIZE, VOCABULARY, WIDTH, IGNORED = 10, 8, 50, 32, -100
NUM_TEXTS, LEARNING_RATE = NUM_STEPS * BATCH_SIZE, 1e-3
LAYOUTS = {  # processes, texts of a micro-batch, micro-batches
    "1 x 8": (1, 8, 1),
    "2 x 4": (2, 4, 1),
    "1 x 4 micro-batches of 2": (1, 2, 4),
    "2 x 2 micro-batches of 2": (2, 2, 2),
}


SETTINGS = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}


class Texts:
    """Random tokens, 3 to 40 of them, each with the next one as its label; in the order of our
    first epoch."""

    def __init__(self, seed: int, *, is_ordered: bool = True) -> None:
        order = epoch_permutation(NUM_TEXTS, seed=seed, epoch=0)
        self._numbers = order.tolist() if is_ordered else list(range(NUM_TEXTS))
        self._seed = seed

    def __len__(self) -> int:
        return NUM_TEXTS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self._seed + self._numbers[index])
        length = int(torch.randint(4, 42, (), generator=generator))
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to [B, T], with labels that are ignored."""
    return {
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence(
            [sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORED
        ),
    }


class LanguageModel(nn.Module):
    """A causal transformer of one layer: [B, T] -> [B, T, V].

    Padding on the right changes no other logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        mask = torch.full((length, length), -torch.inf, dtype=self.head.weight.dtype).triu(1)
        hidden = self.tokens(input_ids) + self.places.weight[:length]
        logits: Tensor = self.head(self.layer(hidden, src_mask=mask, is_causal=True))
        return logits


def make_model(seed: int) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel().double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def loss_of(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def loader_of(seed: int, size: int) -> DataLoader[Any]:
    return DataLoader(Texts(seed), batch_size=size, collate_fn=collate)  # type: ignore[arg-type]  # Texts is no Dataset


def plain_torch(seed: int, size: int, accumulation: int) -> nn.Module:
    """One big batch a step: what the others are compared with."""
    model = make_model(seed)
    optimizer = make_optimizer(model)
    for batch in loader_of(seed, size):
        loss_of(model(batch["input_ids"]), batch["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def ours(seed: int, size: int, accumulation: int) -> nn.Module:
    """The task returns its number of tokens."""
    from accel_trainer import (
        Batch,
        BatchConfig,
        DatasetOptions,
        MeanLoss,
        RecipeConfig,
        RunConfig,
        RuntimeConfig,
        ScheduleConfig,
        StepOutput,
        TrainerConfig,
        build_trainer,
        start_run,
    )

    class NextToken:
        def step(self, model: nn.Module, batch: Batch) -> StepOutput:
            logits = model(**batch.inputs)
            losses = F.cross_entropy(
                logits.transpose(1, 2), batch.targets, ignore_index=IGNORED, reduction="none"
            )
            return StepOutput(losses.sum(1), num_items=(batch.targets != IGNORED).sum(1))

    config = RecipeConfig(
        seed=seed,
        batch=BatchConfig(per_device_batch_size=size, accumulation_steps=accumulation),
        trainer=TrainerConfig(num_epochs=1),
        schedule=ScheduleConfig(shape="constant"),
        runtime=RuntimeConfig(num_threads=1),
        run=RunConfig(runs_dir=Path(tempfile.mkdtemp()), quiet=True),
    )
    model, texts = make_model(seed), Texts(seed, is_ordered=False)
    with start_run(config, recipe="texts") as run:
        build_trainer(
            run,
            model=model,
            task=NextToken(),
            train_set=texts,
            eval_sets=texts,
            options=DatasetOptions(collate=collate),
            metrics=[MeanLoss()],
            optimizer=make_optimizer,
        ).fit()
    return model


def accelerate(seed: int, size: int, accumulation: int) -> nn.Module:
    """`accelerator.accumulate` around the mean loss, as in its guide to gradient accumulation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = make_model(seed)
    module, optimizer, loader = accelerator.prepare(
        model, make_optimizer(model), loader_of(seed, size)
    )
    for batch in loader:
        with accelerator.accumulate(module):
            accelerator.backward(loss_of(module(batch["input_ids"]), batch["labels"]))
            optimizer.step()
            optimizer.zero_grad()
    return model


def accelerate_by_hand(seed: int, size: int, accumulation: int) -> nn.Module:
    """Its guide's section on samples of variable size: the loop counts and gathers the tokens
    itself."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = make_model(seed)
    module, optimizer, loader = accelerator.prepare(
        model, make_optimizer(model), loader_of(seed, size)
    )
    batches = iter(loader)
    for _ in range(NUM_STEPS):
        window = [next(batches) for _ in range(accumulation)]
        num_items = (
            accelerator.gather(sum((batch["labels"] != IGNORED).sum() for batch in window))
            .sum()
            .item()
        )
        for place, batch in enumerate(window):
            is_last = place == accumulation - 1
            with contextlib.nullcontext() if is_last else accelerator.no_sync(module):
                loss_sum = loss_of(module(batch["input_ids"]), batch["labels"], "sum")
                accelerator.backward(
                    loss_sum * accumulation * accelerator.num_processes / num_items
                )
        optimizer.step()
        optimizer.zero_grad()
    return model


def lightning(seed: int, size: int, accumulation: int) -> nn.Module:
    """`training_step` returns the mean loss; the Trainer is given `accumulate_grad_batches`."""
    import lightning as L

    class Module(L.LightningModule):  # type: ignore[misc]  # of any type where lightning is not installed
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(seed)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return loss_of(self.model(batch["input_ids"]), batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    module = Module()
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    L.Trainer(
        accelerator="cpu",
        devices=num_processes,
        strategy="ddp" if num_processes > 1 else "auto",
        precision="64-true",
        max_epochs=1,
        accumulate_grad_batches=accumulation,
        default_root_dir=tempfile.mkdtemp(),
        **quiet,
    ).fit(module, loader_of(seed, size))
    return module.model


def hf_trainer(seed: int, size: int, accumulation: int) -> nn.Module:
    """The model returns its mean loss, as a model of one's own does."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(seed)

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.model(input_ids), labels)}

    model = Model()
    _hf_train(model, seed, size, accumulation)
    return model.model


def hf_trainer_with_items(seed: int, size: int, accumulation: int) -> nn.Module:
    """With `compute_loss_func`, which is given the number of tokens of all micro-batches and
    processes."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(seed)

        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
            return {"logits": self.model(input_ids)}

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        mean: Tensor = loss_of(outputs["logits"], labels, "sum") / num_items_in_batch
        return mean

    model = Model()
    _hf_train(model, seed, size, accumulation, compute_loss_func=loss)
    return model.model


def _hf_train(model: nn.Module, seed: int, size: int, accumulation: int, **options: Any) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=1,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    Trainer(
        model,
        arguments,
        train_dataset=Texts(seed),
        data_collator=collate,
        optimizers=(make_optimizer(model), None),
        **options,
    ).train()


@dataclass(frozen=True)
class Way:
    """A toolkit, and the package that it needs."""

    train: Callable[[int, int, int], nn.Module]
    needs: str = "torch"


WAYS = {
    "ours: the task returns num_items": Way(ours),
    "accelerate: accumulate() and the mean loss": Way(accelerate),
    "accelerate: tokens counted and gathered in the loop": Way(accelerate_by_hand),
    "Lightning": Way(lightning, "lightning"),
    "HF Trainer: the model returns its mean loss": Way(hf_trainer, "transformers"),
    "HF Trainer: compute_loss_func with num_items_in_batch": Way(
        hf_trainer_with_items, "transformers"
    ),
}
REFERENCE = "plain torch"


def train_and_save(name: str, layout: str, seeds: int, folder: Path) -> None:
    """Train with each seed, in every process of a launch; the first one stores the weights."""
    torch.set_num_threads(1)
    way = Way(plain_torch) if name == REFERENCE else WAYS[name]
    _, size, accumulation = LAYOUTS[layout]
    for seed in range(seeds):
        model = way.train(seed, size, accumulation)
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            torch.save(model.state_dict(), folder / f"{seed}.pt")


def measure(name: str, layout: str, seeds: int) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Yield the weights after 10 steps, and the loss per token over all texts, of each seed."""
    num_processes = LAYOUTS[layout][0]
    with tempfile.TemporaryDirectory() as folder:
        module = "benchmarks.padded_lm"
        command = [sys.executable, "-W", "ignore", "-m"]
        command += [
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={num_processes}",
            "-m",
        ] * (num_processes > 1)
        command += [module, "--one", name, layout, folder, "--seeds", str(seeds)]
        run = subprocess.run(
            command, cwd=results.ROOT, env=os.environ | SETTINGS, capture_output=True, text=True
        )
        if run.returncode:
            raise RuntimeError(f"{name}, {layout} failed:\n{run.stderr[-3000:]}")
        for seed in range(seeds):
            weights = torch.load(Path(folder) / f"{seed}.pt", weights_only=True)
            model = make_model(seed)
            model.load_state_dict(weights)
            whole = next(iter(loader_of(seed, NUM_TEXTS)))
            with torch.no_grad():
                yield weights, loss_of(model(whole["input_ids"]), whole["labels"]).item()
    print(".", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train_and_save(options.one[0], options.one[1], options.seeds, Path(options.one[2]))
        return
    started = results.environment()
    references = list(measure(REFERENCE, "1 x 8", options.seeds))
    start = make_model(0).state_dict()
    way_gone = max(float((references[0][0][key] - start[key]).abs().max()) for key in start)
    rows = []
    for name in options.ways:
        if importlib.util.find_spec(WAYS[name].needs) is None:
            print(f"{name}: left out, {WAYS[name].needs} is not installed")
            continue
        for layout in options.layouts:
            weights, losses = [], []
            for (trained, loss), (expected, expected_loss) in zip(
                measure(name, layout, options.seeds), references, strict=True
            ):
                weights.append(
                    max(float((trained[key] - expected[key]).abs().max()) for key in expected)
                )
                losses.append(abs(loss - expected_loss))
            rows.append(
                {
                    "way": name,
                    "layout": layout,
                    "largest difference of a weight": f"{statistics.median(weights):.1e}",
                    "of the loss": f"{statistics.median(losses):.1e}",
                    "most of a weight": f"{max(weights):.1e}",
                    "most of the loss": f"{max(losses):.1e}",
                    "n": len(weights),
                    "samples": list(zip(weights, losses, strict=True)),
                }
            )
    print()
    worst = max(
        (float(row["most of a weight"]) for row in rows if row["way"].startswith("ours")),
        default=0.0,
    )
    results.write(
        "padded_lm",
        title="A padded language model, split differently",
        how=f"A causal transformer of one layer in float64, {NUM_TEXTS} texts of 3 to 40 tokens, "
        f"AdamW with a learning rate of {LEARNING_RATE:g}, {NUM_STEPS} steps of {BATCH_SIZE} "
        "texts in the same order. Absolute differences from a plain loop over whole batches "
        f"after 10 steps: the largest of any weight, which it moves by up to {way_gone:.2g}, "
        f"and of the loss per token over all texts, which is {references[0][1]:.2f}. Median "
        "and most over seeds of data and weights.",
        tables={"After 10 steps": rows},
        goals=[f"At most 1e-10 for ours: {worst:.1e}."],
        started=started,
    )


if __name__ == "__main__":
    main()
