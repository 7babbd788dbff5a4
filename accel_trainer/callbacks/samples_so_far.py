"""The digest of all samples that a run was trained on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator

from ..core.digest import sum_of_samples
from ..core.types import StepReport


class SamplesSoFar:
    """A sum over the samples of all steps, which does not depend on how they were split.

    `is_on`: whether steps are counted. A run that was not counted from its start has no sum.
    """

    def __init__(self, accelerator: Accelerator, *, is_on: bool) -> None:
        self._accelerator = accelerator
        self.restore(0 if is_on else None)

    def restore(self, total: int | None) -> None:
        """Go on from what `total` returned, on any number of processes."""
        self._is_known = total is not None
        # On the host, so that a save of one process waits for no device.
        self._local = torch.tensor((total or 0) * self._accelerator.is_main_process)

    def add(self, reports: Iterable[StepReport]) -> None:
        """Add steps that were not skipped, which costs less for many together. **Host sync.**"""
        parts = [(report.optimizer_step, ids) for report in reports for ids in report.sample_ids]
        if self._is_known and parts:
            self._local += sum_of_samples(parts)

    def total(self) -> int | None:
        """Return the sum over all processes, None if it is not known. **Collective. Host sync.**"""
        if not self._is_known:
            return None
        if self._accelerator.num_processes == 1:
            return int(self._local)
        return int(self._accelerator.reduce(self._local.to(self._accelerator.device)))
