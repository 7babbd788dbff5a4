from __future__ import annotations

import numpy as np
import pytest
import torch

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.types import Batch
from accel_trainer.vision import (
    ImageClassificationConfig,
    ImageClassificationTask,
    SegmentationTask,
)

from ..training.tasks.test_tasks import (
    LABELS,
    LOGITS,
    Gives,
    batch_of,
    cross_entropy,
    make_batch,
    make_model,
    of,
)


def reference_views(images: np.ndarray, tta: str) -> list[np.ndarray]:
    """The views by numpy: shifts by one pixel to either corner with mirrored borders; then all of
    them mirrored."""
    views = [images]
    if tta == "flip_crop":
        padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
        views += [padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]]
    return views + [view[..., ::-1].copy() for view in views]


@pytest.mark.parametrize(("tta", "num_views"), [("flip", 2), ("flip_crop", 6)])
def test_augmented_evaluation_averages_the_logits_of_its_views(tta: str, num_views: int) -> None:
    model, batch = make_model().float(), make_batch()
    batch = Batch(batch.inputs.float(), batch.targets, batch.sample_ids)
    task = ImageClassificationTask(ImageClassificationConfig(tta=tta))  # type: ignore[arg-type]
    output = task.eval_step(model, batch)
    views = reference_views(batch.inputs.numpy(), tta)
    assert len(views) == num_views
    expected = torch.stack([model(torch.from_numpy(view)) for view in views]).double().mean(0)
    torch.testing.assert_close(output.outputs.double(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        output.losses.detach(), cross_entropy(output.outputs, batch.targets), rtol=1e-5
    )


def test_flipped_evaluation_does_not_tell_an_image_from_its_mirror_image() -> None:
    model, batch = make_model(), make_batch()
    mirrored = Batch(batch.inputs.flip(-1), batch.targets, batch.sample_ids)
    task = ImageClassificationTask(ImageClassificationConfig(tta="flip"))
    one, other = task.eval_step(model, batch), task.eval_step(model, mirrored)
    torch.testing.assert_close(one.outputs, other.outputs, rtol=1e-6, atol=1e-6)


def test_only_images_have_a_mirror_image() -> None:
    batch = Batch(torch.zeros(4, 8), LABELS, torch.arange(4))
    task = ImageClassificationTask(ImageClassificationConfig(tta="flip"))
    with pytest.raises(ConfigError, match=r"--tta flip mirrors images \[B, C, H, W\], the inputs"):
        task.eval_step(Gives(LOGITS), batch)


def test_segmentation_counts_the_labelled_pixels_only() -> None:
    logits, targets = torch.randn(3, 4, 5, 6), torch.randint(0, 4, (3, 5, 6))
    targets[0, :2] = 255
    targets[2] = 255
    result = SegmentationTask().step(of(logits), batch_of(targets))
    assert result.num_items is not None
    assert result.num_items.tolist() == [18, 30, 0]
    total = 0.0
    for b, y, x in (targets != 255).nonzero().tolist():
        total -= float(logits[b, :, y, x].log_softmax(0)[targets[b, y, x]])
    assert result.losses.sum().item() == pytest.approx(total, rel=1e-5)
