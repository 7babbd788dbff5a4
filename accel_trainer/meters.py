"""Running sums of the training path, kept on the device if it has float64; reading them is its only host sync."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from .metrics import sums_device
from .types import StepReport

_FOLD_AFTER = 256

T = TypeVar("T")


class WaitClock:
    """How long the host has waited for items, in `seconds`. Costs 0.3 us an item."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items`, and count the time that each takes to come."""
        clock = time.perf_counter
        start_s = clock()
        for item in items:
            self.seconds += clock() - start_s
            yield item
            start_s = clock()


class Meters:
    """Sums step reports between two log lines, without a kernel or a sync per step.

    Reports are kept as they are and folded in float64 when read. A float32 has 24 bits: their float64
    sums are exact over any realistic interval, so that the means do not depend on when they were
    folded or saved.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._device = sums_device(accelerator.device)
        self._clear()

    def _clear(self) -> None:
        self._pending: list[StepReport] = []
        self._local: dict[str, Tensor] = {}
        self._counts = dict.fromkeys(("num_items", "num_updates", "num_skipped"), 0)

    @property
    def num_steps(self) -> int:
        """Steps since the last read."""
        return len(self._pending) + self._counts["num_updates"] + self._counts["num_skipped"]

    def update(self, report: StepReport) -> None:
        """Take a step into the sums; of one that was skipped, only that it was."""
        self._pending.append(report)
        if len(self._pending) >= _FOLD_AFTER:
            self._fold()

    def _fold(self) -> None:
        if not self._pending:
            return
        # A skipped step's loss may be NaN, which would be all that the mean says.
        reports = [report for report in self._pending if not report.was_skipped]
        self._counts["num_skipped"] += len(self._pending) - len(reports)
        self._pending = []
        if not reports:
            return
        columns = {"loss": [report.loss_sum for report in reports]}
        for name in reports[0].sums:
            columns[name] = [report.sums[name] for report in reports]
        if norms := [report.grad_norm for report in reports if report.grad_norm is not None]:
            columns["grad_norm"] = norms
        for name, column in columns.items():
            total = torch.stack(column).to(self._device).double().sum()
            if name == "grad_norm" and not self._accelerator.is_main_process:
                total.zero_()  # every process has the same norm: it is counted once
            self._local[name] = self._local[name] + total if name in self._local else total
        self._counts["num_items"] += sum(report.num_items for report in reports)
        self._counts["num_updates"] += len(reports)

    def _global_sums(self) -> dict[str, float]:
        """**Collective. Host sync.**"""
        self._fold()
        if not self._local:
            return {}
        sums = self._accelerator.reduce(torch.stack(list(self._local.values())), reduction="sum")
        return dict(zip(self._local, sums.tolist(), strict=True))

    def read(self) -> dict[str, float]:
        """Return the means since the last read, over all processes, and start anew. **Collective. Host sync.**"""
        sums, means = self._global_sums(), {}  # first: this counts the steps that are pending
        for name, value in sums.items():
            if name == "grad_norm":
                means["optim/grad_norm"] = value / self._counts["num_updates"]
            else:
                means[f"train/{name}"] = value / max(1, self._counts["num_items"])
        if self._counts["num_skipped"]:
            means["optim/skipped_steps"] = float(self._counts["num_skipped"])
        self._clear()
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return the global sums. **Collective. Host sync.**"""
        return {"sums": self._global_sums(), **self._counts}  # in this order: the first counts what is pending

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums on the main process; the others start at zero, for any number of processes."""
        share = float(self._accelerator.is_main_process)
        self._clear()
        self._local = {
            name: torch.tensor(share * value, dtype=torch.float64, device=self._device)
            for name, value in state["sums"].items()
        }
        self._counts = {name: state[name] for name in self._counts}
