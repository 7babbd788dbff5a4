"""Tasks for images: classification with test-time augmentation, and segmentation.

Shapes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.config import short_flag
from ..core.errors import ConfigError
from ..core.types import Batch, StepOutput
from ..core.wording import describe_tensor
from ..training.targets import trust
from ..training.tasks import ClassificationConfig, ClassificationTask, call_model, logits_of

Views = Literal["none", "flip", "flip_crop"]


@dataclass(frozen=True, kw_only=True)
class ImageClassificationConfig(ClassificationConfig):
    """The loss of a classifier of images, and the views of an image that an evaluation averages."""

    tta: Annotated[Views, short_flag("--tta")] = "none"
    """Test-time augmentation: `flip` averages logits over the mirror image, `flip_crop` also over
    two shifts."""


class ImageClassificationTask(ClassificationTask):
    """Classification of images [B, C, H, W].

    An evaluation averages the logits over the views of `tta`.
    """

    def __init__(
        self,
        config: ImageClassificationConfig | None = None,
        *,
        class_weights: Tensor | None = None,
        class_counts: Tensor | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(
            config,
            class_weights=class_weights,
            class_counts=class_counts,
            ignore_index=ignore_index,
        )
        self._tta: Views = "none" if config is None else config.tta

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the cross-entropies [B] and the mean logits [B, K].

        Raises ConfigError for other shapes.
        """
        if self._tta == "none":
            return super().eval_step(model, batch)
        averaged = partial(_average_over_views, model, tta=self._tta)
        return super().eval_step(cast(nn.Module, averaged), batch)


def _average_over_views(model: Callable[[Tensor], Any], images: Tensor, *, tta: Views) -> Any:
    """Return the mean logits [B, K]; an output that is not a tensor is returned unchanged."""
    outputs = [logits_of(model(view)) for view in _views(images, tta)]
    if not isinstance(outputs[0], Tensor):
        return outputs[0]
    return torch.stack([logits.float() for logits in outputs]).mean(0)


def _views(images: Tensor, tta: Views) -> list[Tensor]:
    """Return the views of images [B, C, H, W].

    `flip_crop` is the six-view scheme of K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single
    GPU" (arXiv 2404.00498), with equal weights.
    """
    if not isinstance(images, Tensor) or images.ndim != 4:
        fact = f"--tta {tta} mirrors images [B, C, H, W], the inputs are {describe_tensor(images)}"
        raise ConfigError("SHAPES", f"{fact}: set it to none")
    views = [images]
    if tta == "flip_crop":
        padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
        height, width = images.shape[-2:]
        views += [padded[..., 0:height, 0:width], padded[..., 2 : height + 2, 2 : width + 2]]
    return [view for image in views for view in (image, image.flip(-1))]


class SegmentationTask:
    """Cross-entropy per labelled pixel of logits [B, K, H, W] against class ids int64 [B, H, W].

    Pixels of the class `ignored` have no label. The loss is the mean over all labelled pixels of
    the whole step. Any other pixel that is no class is refused.
    """

    def __init__(self, *, ignored: int = 255) -> None:
        self._ignored = ignored

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return each sample's loss and number of labelled pixels [B], and the logits.

        Raises ConfigError for other shapes, and DataError for a pixel that is no class.
        """
        logits, targets = call_model(model, batch), batch.targets
        if logits.ndim != 4 or logits[:, 0].shape != targets.shape:
            found = describe_tensor(logits)
            fact = f"the model returns {found} for targets {describe_tensor(targets)}"
            fix = "segmentation needs logits [B, K, H, W] and class ids [B, H, W]"
            raise ConfigError("SHAPES", f"{fact}: {fix}")
        is_labelled = targets != self._ignored
        num_classes = logits.shape[1]
        fits = (targets >= 0) & (targets < num_classes) | ~is_labelled
        fix = (
            f"but the classes are 0 to {num_classes - 1}: correct it, or, if it means that a pixel "
            "has no label, set ignored={} of SegmentationTask"
        )
        factors = trust(batch, fits, fix)
        losses = F.cross_entropy(
            logits,
            targets.where(fits, self._ignored),
            ignore_index=self._ignored,
            reduction="none",
        )
        return StepOutput(losses.sum((1, 2)) * factors, logits, is_labelled.sum((1, 2)))
