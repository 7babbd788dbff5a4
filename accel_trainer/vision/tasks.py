"""Tasks for images: classification with test-time augmentation, and segmentation.

Shapes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.config import short_flag
from ..core.errors import ConfigError
from ..core.types import Batch, StepOutput
from ..core.wording import describe_tensor
from ..training.evaluation.metrics import returns_logits
from ..training.step.targets import trust
from ..training.tasks.tasks import ClassificationConfig, ClassificationTask, call_model, logits_of
from .data.eval_transform import Views, views_of


@dataclass(frozen=True, kw_only=True)
class ImageClassificationConfig(ClassificationConfig):
    """The loss of a classifier of images, and the views of an image that an evaluation averages."""

    tta: Annotated[Views, short_flag("--tta")] = "none"
    """Test-time augmentation: `flip` averages logits over the mirror image, `flip_crop` also over
    two shifts."""


class ImageClassificationTask(ClassificationTask):
    """Classification of images [B, C, H, W].

    An evaluation averages the logits over the views of `tta`, if an `ImageClassificationConfig`
    is given.
    """

    @returns_logits
    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the cross-entropies [B] and the mean logits [B, K].

        Raises ConfigError for other shapes.
        """
        return super().eval_step(self.evaluated(model), batch)

    def evaluated(self, model: nn.Module) -> nn.Module:
        """Return what an evaluation computes: the model, averaged over the views of `tta`."""
        tta: Views = getattr(self.config, "tta", "none")
        return model if tta == "none" else AveragedOverViews(model, tta)


class AveragedOverViews(nn.Module):
    """A classifier whose logits [B, K] are the mean over the views of images [B, C, H, W].

    An output that is not a tensor is returned unchanged. Raises ConfigError for other inputs.
    """

    def __init__(self, model: nn.Module, tta: Views) -> None:
        super().__init__()
        self.model = model
        self._tta: Views = tta

    def forward(self, images: Tensor) -> Any:
        """Return the mean logits in float32."""
        if not isinstance(images, Tensor) or images.ndim != 4:
            found = describe_tensor(images)
            fact = f"--tta {self._tta} mirrors images [B, C, H, W], the inputs are {found}"
            raise ConfigError("SHAPES", f"{fact}: set it to none")
        outputs = [logits_of(self.model(view)) for view in views_of(images, self._tta)]
        if not isinstance(outputs[0], Tensor):
            return outputs[0]
        return torch.stack([logits.float() for logits in outputs]).mean(0)


class SegmentationTask:
    """Cross-entropy per labelled pixel of logits [B, K, H, W] against class ids int64 [B, H, W].

    Pixels of the class `ignored` have no label. The loss is the mean over all labelled pixels of
    the whole step. Any other pixel that is no class is an error.
    """

    def __init__(self, *, ignored: int = 255) -> None:
        self._ignored = ignored

    @returns_logits
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
