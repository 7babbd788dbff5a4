"""The digest of all samples that a run was trained on."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor

from ..core.digest import sum_of_samples
from ..core.types import StepReport

_MAX_PENDING = 256  # micro-batches that are kept and added together, which costs less


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
        self._pending: list[tuple[int, Tensor]] = []

    def update(self, report: StepReport) -> None:
        """Add a step, unless it was skipped. **Host sync** in a few steps."""
        if self._is_known and not report.was_skipped:
            self._pending += [(report.optimizer_step, ids) for ids in report.sample_ids]
            if len(self._pending) >= _MAX_PENDING:
                self._add_pending()

    def _add_pending(self) -> None:
        if self._pending:
            self._local += sum_of_samples(self._pending)
            self._pending = []

    def total(self) -> int | None:
        """Return the sum over all processes, None if it is not known. **Collective. Host sync.**"""
        if not self._is_known:
            return None
        self._add_pending()
        if self._accelerator.num_processes == 1:
            return int(self._local)
        local = self._local.to(self._accelerator.device)
        return int(self._accelerator.reduce(local, reduction="sum"))
