"""A recipe with an operation that does not repeat itself."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from accel_trainer import (
    ClassificationTask,
    RecipeConfig,
    RunResult,
    build_trainer,
    main,
    start_run,
)

NOISE = torch.Generator()
NOISE.seed()


class Zoom(nn.Module):
    """Enlarges the middle of images [B, C, H, W] to 64 x 64 pixels.

    In the backward pass hundreds of pixels add to one gradient, on a GPU in any order. A CPU has
    one order: there noise that nothing seeds takes the place of the rounding, and an operation that
    torch lists takes that of the kernel.
    """

    def forward(self, images: Tensor) -> Tensor:
        if images.is_cuda:
            shrink = torch.eye(2, 3, device=images.device) / 10
            shape = [*images.shape[:2], 64, 64]
            grid = F.affine_grid(shrink.expand(len(images), 2, 3), shape, align_corners=False)
            return F.grid_sample(images, grid, align_corners=False)
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return images * (1 + 1e-6 * torch.rand(images.shape, generator=NOISE))


def train(config: RecipeConfig) -> RunResult:
    """Train a small network on random images."""
    with start_run(config, recipe="planted") as run:
        seeded = torch.Generator().manual_seed(0)
        images = torch.randn(512, 3, 32, 32, generator=seeded)
        labels = torch.randint(0, 10, (512,), generator=seeded)
        dataset = TensorDataset(images, labels)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            Zoom(),
            nn.Conv2d(16, 16, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )
        return build_trainer(
            run, model=model, task=ClassificationTask(), train_set=dataset, eval_sets=dataset
        ).fit()


if __name__ == "__main__":
    main(train, RecipeConfig)
