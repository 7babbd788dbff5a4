"""Train a GAN (DCGAN) on digits: the critic steps on a batch, then the generator on the same one.

python recipes/gan.py

Each network has its own Adam, and is averaged after its own update (`ema_decay`). The generator's
update draws the same noise, and sees the updated critic. The other network is frozen meanwhile and
gets no gradients. Rows have the losses of both: `train/critic/loss` and `train/generator/loss`.
Evaluations see the model, and its average, without its DDP wrapper and in evaluation mode. Settings
that are not in this file, such as the batch size, are those of `--help`. After a kill at any
moment, the same command continues the run to the same weights.
"""

from dataclasses import dataclass

from accel_trainer import (
    Batch,
    Callback,
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
from torch.optim import Adam

FIXED_NOISE = torch.randn(256, 16, 2, 2, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Config(RecipeConfig):
    """The settings of every recipe, with more epochs, and an average of the weights."""

    trainer: TrainerConfig = TrainerConfig(num_epochs=40, ema_decay=0.99)


def _up(inputs: int, outputs: int) -> nn.Module:
    convolution = nn.ConvTranspose2d(inputs, outputs, 4, 2, 1)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def _down(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 4, 2, 1), nn.LeakyReLU(0.2))


class Gan(nn.Module):
    """A generator of pictures [B, 1, 8, 8] from noise [B, 16, 2, 2], and a critic of them: [B]."""

    def __init__(self) -> None:
        super().__init__()
        last = nn.ConvTranspose2d(64, 1, 4, 2, 1)
        self.generator = nn.Sequential(_up(16, 64), last, nn.Sigmoid())
        layers = [_down(1, 32), _down(32, 64), nn.Flatten(), nn.Linear(256, 1), nn.Flatten(0)]
        self.critic = nn.Sequential(*layers)

    def forward(self, pictures: Tensor, turn: str) -> Tensor:
        """Return the losses [B] of the network that has the turn."""
        made = self.generator(torch.randn(len(pictures), 16, 2, 2, device=pictures.device))
        if turn == "generator":
            return F.softplus(-self.critic(made))
        return F.softplus(-self.critic(pictures)) + F.softplus(self.critic(made.detach()))


class GanTask:
    """An update of the critic in each step, then one of the generator."""

    def updates(self, _: object) -> list[str]:
        """Return the keys of the optimizers that step, one after the other, on a step batch."""
        return ["critic", "generator"]

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the losses [B] of one of the networks."""
        return StepOutput(model(batch.inputs, batch.turn))

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the distance [B] of each real picture to the most similar of 256 made ones.

        They stand for losses: the mean is `eval/loss`, and chooses the best checkpoint.
        """
        made = model.generator(FIXED_NOISE.to(batch.inputs))
        return StepOutput(torch.cdist(batch.inputs.flatten(1), made.flatten(1)).amin(1))


class Watch(Callback):
    """Draws a picture of 16 samples after each epoch."""

    @torch.no_grad()
    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Draw what the generator, if possible its average, makes of the same noise each time."""
        generator = (trainer.average_model or trainer.model).generator
        was_training = generator.training
        made = generator.eval()(FIXED_NOISE[:16].to(trainer.accelerator.device))
        generator.train(was_training)  # in training mode, a forward would change BatchNorm's means
        trainer.log.picture("made", to_png(torch.cat(list(made), 2)))


def train(config: Config) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    pictures = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    samples = [(picture, 0) for picture in pictures]
    with start_run(config, recipe="gan") as run:
        return build_trainer(
            run,
            model=Gan(),
            task=GanTask(),
            train_set=samples[200:],
            eval_sets=samples[:200],
            optimizer={
                "critic": lambda model: Adam(model.critic.parameters(), 4e-4, (0.5, 0.999)),
                "generator": lambda model: Adam(model.generator.parameters(), 2e-4, (0.5, 0.999)),
            },
            callbacks=[Watch()],
        ).fit()


if __name__ == "__main__":
    main(train, Config)
