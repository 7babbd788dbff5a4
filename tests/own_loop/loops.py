"""Loops as users write them over accelerate, each in an exact run, which may be killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from accel_trainer import exact_run

NUM_EPOCHS = 3
IGNORED = {"ignore": ("rounds",)}  # which count a start's rounds


class Kill(NamedTuple):
    """Which process kills itself, in which round of this start, by which signal.

    Each round takes `pause_s` longer, for those who kill it from outside.
    """

    round: int = 0
    signal: int = 0
    process: int = 0
    pause_s: float = 0.0


class Rounds:
    """Counts the rounds of a start, and kills the process in the chosen one."""

    def __init__(self, kill: Kill | None, accelerator: Accelerator) -> None:
        torch.set_num_threads(1)  # the same for each way to start
        self._kill = kill
        self._process = accelerator.process_index
        self._number = 0

    def begin(self) -> None:
        self._number += 1
        kill = self._kill
        if kill is not None:
            time.sleep(kill.pause_s)
        if kill is not None and (kill.round, kill.process) == (self._number, self._process):
            os.kill(os.getpid(), kill.signal)


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Pictures [3, 8, 8] of 4 classes, with noise that is drawn at each read."""

    def __init__(self, num_samples: int = 44) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pictures = torch.randn(num_samples, 3, 8, 8, generator=generator)
        self.labels = torch.randint(0, 4, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(3, 8, 8) if torch.rand(()) < 0.5 else 0
        return self.pictures[index] + noise, self.labels[index]


def build_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(4 * 36, 4),
    )


def vision(folder: Path, kill: Kill | None) -> None:
    """The loop of accelerate's vision example: a schedule by step, and an evaluation."""
    accelerator = Accelerator(cpu=True)
    rounds = Rounds(kill, accelerator)
    model = build_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Pictures(), batch_size=6, shuffle=True)
    evaluation = DataLoader(Pictures(20), batch_size=6)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.01, epochs=NUM_EPOCHS, steps_per_epoch=len(loader)
    )
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, **IGNORED}
    with exact_run(
        accelerator, folder, **parts, states={"scheduler": scheduler}, save_every=2
    ) as run:
        for _ in run.epochs(NUM_EPOCHS):
            model.train()
            for pictures, labels in run.batches():
                rounds.begin()
                loss = cross_entropy(model(pictures), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                run.log("loss", loss)
            model.eval()
            correct = total = 0
            for pictures, labels in evaluation:
                with torch.no_grad():
                    found = model(pictures).argmax(1)
                found, labels = accelerator.gather_for_metrics((found, labels))
                correct += int((found == labels).sum())
                total += len(labels)
            run.row(accuracy=correct / total)


def accumulation(folder: Path, kill: Kill | None) -> None:
    """accelerate's accumulation, with clipping, an average and an evaluation of that."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    rounds = Rounds(kill, accelerator)
    model = build_net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Pictures(), batch_size=3, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, **IGNORED}
    with exact_run(accelerator, folder, **parts, states={"average": average}, seed=1) as run:
        for _ in run.epochs(NUM_EPOCHS):
            model.train()
            for pictures, labels in run.batches():
                rounds.begin()
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(pictures), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    average.update_parameters(accelerator.unwrap_model(model))
                run.log("loss", loss)
            size = sum(each.abs().sum() for each in average.state_dict().values())
            # Each process has buffers of its own.
            run.row(size=float(accelerator.gather(torch.as_tensor(size)[None]).sum()))


def by_hand(folder: Path, kill: Kill | None) -> None:
    """Three batches a step, counted by hand, and a step on those that an epoch leaves."""
    accelerator = Accelerator(cpu=True)
    rounds = Rounds(kill, accelerator)
    model = build_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Pictures(), batch_size=3, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with exact_run(
        accelerator,
        folder,
        model=model,
        optimizer=optimizer,
        loader=loader,
        save_every=2,
        **IGNORED,
    ) as run:
        for _ in run.epochs(NUM_EPOCHS):
            for number, (pictures, labels) in enumerate(run.batches(), run.batch_in_epoch + 1):
                rounds.begin()
                loss = cross_entropy(model(pictures), labels)
                accelerator.backward(loss)
                if number % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                run.log("loss", loss)
            optimizer.step()
            optimizer.zero_grad()
            run.row()


def gan(folder: Path, kill: Kill | None) -> None:
    """Two networks: the critic steps in two rounds of three, the generator gathers two rounds."""
    accelerator = Accelerator(cpu=True)
    rounds = Rounds(kill, accelerator)
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizers = {
        "generator": torch.optim.Adam(generator.parameters(), lr=0.01),
        "critic": torch.optim.RMSprop(critic.parameters(), lr=0.01),
    }
    real_data = TensorDataset(torch.randn(40, 8))
    loader = DataLoader(real_data, batch_size=4, shuffle=True)
    generator, critic, loader = accelerator.prepare(generator, critic, loader)
    optimizers = {name: accelerator.prepare(each) for name, each in optimizers.items()}
    with exact_run(
        accelerator,
        folder,
        model={"generator": generator, "critic": critic},
        optimizer=optimizers,
        loader=loader,
        save_every=3,
        **IGNORED,
    ) as run:
        for _ in run.epochs(NUM_EPOCHS):
            for number, (real,) in enumerate(run.batches(), run.batch_in_epoch):
                rounds.begin()
                fake = generator(torch.randn(len(real), 4))
                if run.step % 3 < 2:
                    loss = critic(fake.detach()).mean() - critic(real).mean()
                    optimizers["critic"].zero_grad()
                    accelerator.backward(loss)
                    optimizers["critic"].step()
                    run.log("critic", loss)
                loss = -critic(fake).mean()
                accelerator.backward(loss)
                critic.zero_grad()
                if run.step % 2 == 1 or number + 1 == len(loader):
                    optimizers["generator"].step()
                    optimizers["generator"].zero_grad()
                run.log("generator", loss)
            run.row()


def vit(folder: Path, kill: Kill | None) -> None:
    """A model of transformers, whose forward returns the loss, and a schedule of its own."""
    import transformers  # takes seconds

    accelerator = Accelerator(cpu=True)
    rounds = Rounds(kill, accelerator)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "image_size": 8, "patch_size": 4}
    config = transformers.ViTConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=2, num_labels=4, hidden_dropout_prob=0.1
    )
    model = transformers.ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Pictures(), batch_size=6, shuffle=True)
    scheduler = transformers.get_scheduler("cosine", optimizer, 2, NUM_EPOCHS * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, **IGNORED}
    with exact_run(
        accelerator, folder, **parts, states={"scheduler": scheduler}, save_every=2
    ) as run:
        for _ in run.epochs(NUM_EPOCHS):
            model.train()
            for pictures, labels in run.batches():
                rounds.begin()
                loss = model(pixel_values=pictures, labels=labels).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                run.log("loss", loss)
            run.row()


def spawned(folder: Path, kill: Kill | None) -> None:
    """As `sampler`, with workers that are sent the dataset."""
    sampler(folder, kill, context="spawn")


def sampler(folder: Path, kill: Kill | None, context: str | None = None) -> None:
    """Two data workers, a weighted sampler, and a schedule by epoch."""
    accelerator = Accelerator(cpu=True)
    rounds = Rounds(kill, accelerator)
    model = build_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = Pictures()
    loader = DataLoader(
        data,
        batch_size=6,
        sampler=WeightedRandomSampler((1.0 + data.labels).tolist(), 30),
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=context,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, **IGNORED}
    with exact_run(
        accelerator, folder, **parts, states={"scheduler": scheduler}, save_every=2
    ) as run:
        for _ in run.epochs(NUM_EPOCHS):
            for pictures, labels in run.batches():
                rounds.begin()
                loss = cross_entropy(model(pictures), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.log("loss", loss)
            scheduler.step()
            run.row(rate=scheduler.get_last_lr()[0])


def scaler(folder: Path, kill: Kill | None) -> None:
    """A gradient scaler of its own, whose first steps overflow, and rows by step."""
    accelerator = Accelerator(cpu=True)
    rounds = Rounds(kill, accelerator)
    model = build_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    loader = DataLoader(Pictures(), batch_size=6, shuffle=True)
    model, loader = accelerator.prepare(model, loader)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, **IGNORED}
    with exact_run(
        accelerator, folder, **parts, states={"scaling": own_scaler}, save_every=1
    ) as run:
        for pictures, labels in run.steps(14):
            rounds.begin()
            loss = mse_loss(model(pictures)[:, 0], labels.float())
            own_scaler.scale(loss).backward()
            own_scaler.step(optimizer)
            own_scaler.update()
            optimizer.zero_grad()
            run.log("loss", loss)
            if run.step % 5 == 0:
                run.row()


class CountedAverage:
    """An average whose rate depends on a count that its state dict leaves out."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: each.clone() for name, each in model.state_dict().items()}
        self.number = 0

    def update(self, model: nn.Module) -> None:
        self.number += 1
        for name, each in model.named_parameters():
            self.weights[name].lerp_(each.detach(), 1 / (1 + self.number))

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def changing(folder: Path, kill: Kill | None) -> None:
    """A dropout rate, modes, a frozen layer and counts, which differ by process."""
    accelerator = Accelerator(cpu=True)
    rounds = Rounds(kill, accelerator)
    net: Any = build_net()
    net.share = 1.0
    average = CountedAverage(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = DataLoader(Pictures(), batch_size=6, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, **IGNORED}
    with exact_run(accelerator, folder, **parts, states={"average": average}, save_every=2) as run:
        for epoch in run.epochs(NUM_EPOCHS):
            for pictures, labels in run.batches():
                rounds.begin()
                loss = cross_entropy(model(pictures), labels) * net.share
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                average.update(net)
                net.share *= 0.9 if accelerator.is_main_process else 0.8
                net[4].p = min(0.8, net[4].p + 0.02)
                run.log("loss", loss)
            if epoch == 0:
                net[1].eval()
                # DDP would wait for its gradient.
                net[0].weight.requires_grad_(accelerator.num_processes > 1)
            run.row()


LOOPS: dict[str, Callable[[Path, Kill | None], Any]] = {
    loop.__name__: loop
    for loop in (vision, accumulation, by_hand, gan, vit, sampler, scaler, spawned, changing)
}
