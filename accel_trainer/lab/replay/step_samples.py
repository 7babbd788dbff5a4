"""A callback that writes the samples of one step of a replay into its folder.

Process 0 writes `samples-0.json`, and so on.
"""

from __future__ import annotations

import json

from torch import Tensor

from accel_trainer import Batch, Callback, StepOutput, StepReport, TrainerView
from accel_trainer.commands import JsonObject, filesystem, flatten
from accel_trainer.lab.rows import as_in_rows


class StepSamples(Callback):
    """Writes what each process trains on in `step`: a JSON object for each sample.

    It has the `id`, the `loss` (None: the task has only their mean), the `target` if it is a
    number, the `dtype` and `shape` of its inputs, and their `low` and `high`.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._seen: list[tuple[Batch, Tensor]] = []

    def on_micro_batch(self, trainer: TrainerView, batch: Batch, output: StepOutput) -> None:
        """Keep the batch and its losses until the end of the step."""
        self._seen.append((batch, output.losses))

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Write the file after the step. **Host sync.**"""
        seen, self._seen = self._seen, []
        if report.optimizer_step != self._step:
            return
        samples = [sample for batch, losses in seen for sample in _describe(batch, losses)]
        path = trainer.log.folder / f"samples-{trainer.accelerator.process_index}.json"
        filesystem.create_file(path, [json.dumps(samples).encode()])


def _describe(batch: Batch, losses: Tensor) -> list[JsonObject]:
    """Return an object for each sample of a batch, with the `losses` [B], or []."""
    tensors = [leaf for leaf in flatten(batch.inputs).values() if isinstance(leaf, Tensor)]
    inputs = next((leaf for leaf in tensors if leaf.ndim and len(leaf) == len(batch)), None)
    targets = batch.targets
    has_classes = isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_complex()
    samples = []
    for index, sample_id in enumerate(batch.sample_ids.tolist()):
        sample = {
            "id": sample_id,
            "loss": as_in_rows(losses[index].item()) if losses.ndim else None,
            "target": as_in_rows(targets[index].item()) if has_classes else None,
        }
        if inputs is not None:
            sample |= _describe_input(inputs[index].detach().cpu())
        samples.append(sample)
    return samples


def _describe_input(values: Tensor) -> JsonObject:
    """Return what is known of the input [...] of a sample."""
    facts: JsonObject = {"shape": [*values.shape], "dtype": str(values.dtype)[6:]}
    if values.is_complex() or not values.numel():
        return facts
    floats = values.float()
    known = floats[floats.isfinite()]
    low, high = (float(known.min()), float(known.max())) if known.numel() else (0.0, 0.0)
    return facts | {"low": low, "high": high}
