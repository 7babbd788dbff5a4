"""Train a diffusion model (DDPM) on digits, with an average of its weights and pictures of samples.

python recipes/diffusion.py
"""

from __future__ import annotations

from dataclasses import dataclass

from accel_trainer import (
    Batch,
    Callback,
    OptimizerConfig,
    RecipeConfig,
    RunResult,
    StepOutput,
    TrainerConfig,
    TrainerView,
    build_trainer,
    main,
    start_run,
)
from accel_trainer.vision import to_png

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

NUM_LEVELS = 100
# What is left of the picture at each level of noise, as in Ho et al. (arXiv 2006.11239).
SIGNAL = torch.cumprod(1 - torch.linspace(1e-4, 0.1, NUM_LEVELS), dim=0)
FIXED_NOISE = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Config(RecipeConfig):
    """The settings of every recipe, with AdamW, more epochs, and an average of the weights."""

    optimizer: OptimizerConfig = OptimizerConfig(name="adamw", learning_rate=2e-3)
    trainer: TrainerConfig = TrainerConfig(num_epochs=40, ema_decay=0.99)


class Denoiser(nn.Module):
    """Predicts the noise in pictures: [B, 1, 8, 8] and levels int64 [B] -> [B, 1, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Embedding(NUM_LEVELS, 64)
        self.first = nn.Conv2d(1, 64, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(4))
        self.last = nn.Conv2d(64, 1, 3, padding=1)

    def forward(self, noisy: Tensor, levels: Tensor) -> Tensor:
        """Return the predicted noise."""
        hidden = self.first(noisy) + self.level(levels)[:, :, None, None]
        for block in self.blocks:
            hidden = hidden + block(F.silu(hidden))
        return self.last(F.silu(hidden))


class Denoise:
    """The mean squared error of the predicted noise, for each of B pictures."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the losses [B] at random levels."""
        levels = torch.randint_like(batch.targets, NUM_LEVELS)
        return self._output(model, batch, levels, torch.randn_like(batch.inputs))

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the losses [B]: of a picture for the same noise and level each time."""
        noise = FIXED_NOISE.to(batch.inputs)
        return self._output(model, batch, batch.sample_ids.to(noise.device) % NUM_LEVELS, noise)

    def _output(self, model: nn.Module, batch: Batch, levels: Tensor, noise: Tensor) -> StepOutput:
        signal = SIGNAL.to(noise)[levels][:, None, None, None]
        predicted = model(signal.sqrt() * batch.inputs + (1 - signal).sqrt() * noise, levels)
        return StepOutput((predicted - noise).square().flatten(1).mean(1))


class Samples(Callback):
    """Logs a picture of 16 samples of the averaged model after each epoch."""

    @torch.no_grad()
    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Remove the noise from pure noise, level by level (DDIM, arXiv 2010.02502)."""
        model = trainer.average_model or trainer.model
        pictures = torch.randn(16, 1, 8, 8, device=trainer.accelerator.device)
        for level in range(NUM_LEVELS - 1, 0, -1):
            noise = model(pictures, torch.full((16,), level, device=pictures.device))
            now, before = SIGNAL[level], SIGNAL[level - 1]
            clean = (pictures - (1 - now).sqrt() * noise) / now.sqrt()
            pictures = before.sqrt() * clean + (1 - before).sqrt() * noise
        trainer.log.picture("samples", to_png(torch.cat(list(pictures), 2) / 2 + 0.5))


def train(config: Config) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    pictures = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    samples = [(picture, 0) for picture in pictures]
    with start_run(config, recipe="diffusion") as run:
        return build_trainer(
            run,
            model=Denoiser(),
            task=Denoise(),
            train_set=samples[200:],
            eval_sets=samples[:200],
            callbacks=[Samples()],
        ).fit()


if __name__ == "__main__":
    main(train, Config)
