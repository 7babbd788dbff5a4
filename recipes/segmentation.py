"""Train a small U-Net to label every pixel of scikit-learn's digits on a canvas.

python recipes/segmentation.py --optimizer.name adamw --lr 0.005 --batch-size 16 --epochs 6
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import random_split
from torchmetrics.classification import MulticlassJaccardIndex

from accel_trainer import (
    MeanLoss,
    RecipeConfig,
    RunResult,
    TorchMetric,
    build_dataset_loaders,
    build_trainer,
    main,
    start_run,
)
from accel_trainer.vision import SegmentationTask

NUM_CLASSES, BACKGROUND, UNLABELLED = 11, 10, 255


class Scenes:
    """Three digits at random heights: images float32 [1, 32, 32], labels int64 [32, 32].

    The edges have no label.
    """

    def __init__(self) -> None:
        digits = load_digits()
        self._images, self._labels = (
            torch.tensor(digits.images).float() / 16,
            digits.target.tolist(),
        )

    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        image, labels = torch.zeros(1, 32, 32), torch.full((32, 32), BACKGROUND)
        for column in (2, 12, 22):
            digit, row = (
                int(torch.randint(high, (), generator=generator))
                for high in (len(self._images), 24)
            )
            area = slice(row, row + 8), slice(column, column + 8)
            image[0][area], labels[area] = self._images[digit], self._labels[digit]
        labels[[0, -1]] = UNLABELLED
        return image, labels


def _block(channels: int, out: int) -> nn.Module:
    first, second = (nn.Conv2d(size, out, 3, padding=1, bias=False) for size in (channels, out))
    return nn.Sequential(
        first, nn.BatchNorm2d(out), nn.ReLU(), second, nn.BatchNorm2d(out), nn.ReLU()
    )


class UNet(nn.Module):
    """Two levels with a skip connection: [B, 1, H, W] -> logits [B, 11, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom, self.up = _block(1, 24), _block(24, 96), _block(120, 48)
        self.head = nn.Conv2d(48, NUM_CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of every pixel."""
        fine = self.down(images)
        coarse = nn.functional.interpolate(
            self.bottom(nn.functional.max_pool2d(fine, 4)), scale_factor=4
        )
        return self.head(self.up(torch.cat([fine, coarse], 1)))


def train(config: RecipeConfig) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    train_set, test_set = random_split(Scenes(), [1000, 200], torch.Generator().manual_seed(0))
    with start_run(config, recipe="segmentation") as run:
        options = {"seed": config.seed, "accelerator": run.accelerator}
        data = build_dataset_loaders(train_set, test_set, run.config.batch, **options)
        mean_iou = TorchMetric(
            "mean_iou", MulticlassJaccardIndex(NUM_CLASSES, ignore_index=UNLABELLED)
        )
        task, metrics = SegmentationTask(ignored=UNLABELLED), [mean_iou, MeanLoss()]
        return build_trainer(
            run, model=UNet(), task=task, loader=data[0], eval_loader=data[1], metrics=metrics
        ).fit()


if __name__ == "__main__":
    main(train, RecipeConfig, description=__doc__.splitlines()[0])
