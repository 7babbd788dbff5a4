"""Train a small U-Net to label every pixel of scikit-learn's digits on a canvas.

python recipes/segmentation.py
"""

from dataclasses import dataclass

from accel_trainer import (
    BatchConfig,
    MeanLoss,
    OptimizerConfig,
    RecipeConfig,
    RunResult,
    TorchMetric,
    TrainerConfig,
    build_trainer,
    main,
    start_run,
)
from accel_trainer.vision import SegmentationTask

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import random_split
from torchmetrics.classification import MulticlassJaccardIndex

NUM_CLASSES = 11
BACKGROUND = 10
UNLABELLED = 255


@dataclass(frozen=True)
class Config(RecipeConfig):
    """The settings of every recipe, with AdamW and smaller batches."""

    batch: BatchConfig = BatchConfig(per_device_batch_size=16)
    optimizer: OptimizerConfig = OptimizerConfig(name="adamw", learning_rate=5e-3)
    trainer: TrainerConfig = TrainerConfig(num_epochs=6)


class Scenes:
    """Three digits at random heights: images float32 [1, 32, 32], labels int64 [32, 32].

    The first and the last row have no labels.
    """

    def __init__(self) -> None:
        digits = load_digits()
        self._images = torch.tensor(digits.images).float() / 16
        self._labels = digits.target.tolist()

    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.zeros(1, 32, 32)
        labels = torch.full((32, 32), BACKGROUND)
        for left in (2, 12, 22):
            digit = int(torch.randint(len(self._images), (), generator=generator))
            top = int(torch.randint(24, (), generator=generator))
            image[0, top : top + 8, left : left + 8] = self._images[digit]
            labels[top : top + 8, left : left + 8] = self._labels[digit]
        labels[[0, -1]] = UNLABELLED
        return image, labels


def _block(in_channels: int, out_channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Two levels with a skip connection: [B, 1, H, W] -> logits [B, 11, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.down = _block(1, 24)
        self.bottom = _block(24, 96)
        self.up = _block(120, 48)
        self.head = nn.Conv2d(48, NUM_CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of every pixel."""
        fine = self.down(images)
        coarse = self.bottom(F.max_pool2d(fine, 4))
        enlarged = F.interpolate(coarse, scale_factor=4)
        return self.head(self.up(torch.cat([fine, enlarged], 1)))


def train(config: Config) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    train_set, test_set = random_split(Scenes(), [1000, 200], torch.Generator().manual_seed(0))
    with start_run(config, recipe="segmentation") as run:
        mean_iou = MulticlassJaccardIndex(NUM_CLASSES, ignore_index=UNLABELLED)
        trainer = build_trainer(
            run,
            model=UNet(),
            task=SegmentationTask(ignored=UNLABELLED),
            train_set=train_set,
            eval_sets=test_set,
            metrics=[TorchMetric("mean_iou", mean_iou), MeanLoss()],
        )
        return trainer.fit()


if __name__ == "__main__":
    main(train, Config)
