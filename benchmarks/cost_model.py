"""Predicts the time of a step on P processes: compute and data as on one, plus the visible part of
a ring all-reduce.

    step(P) = compute + data + (1 - overlap) * all_reduce(P)
    all_reduce(P) = 2 (P - 1) / P * bytes / bandwidth + 2 (P - 1) * latency

A ring sends each of the P parts of the gradients 2 (P - 1) times. For many processes real libraries
use trees, whose latency grows with log P, so the model is too pessimistic there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The constants of a model, a machine and a network."""

    compute_s: float
    """Forward, backward and update of one process with a core or GPU to itself."""
    data_s: float
    """What a step waits for its batch."""
    gradient_bytes: float
    bytes_per_s: float
    """Bandwidth from each process to the next."""
    latency_s: float
    """Of one message."""
    overlap: float
    """Share of the all-reduce that hides behind backward: 0 to 1."""

    def all_reduce_s(self, num_processes: int) -> float:
        """Seconds to sum the gradients over all processes, without overlap."""
        others = num_processes - 1
        return (
            2 * others / num_processes * self.gradient_bytes / self.bytes_per_s
            + 2 * others * self.latency_s
        )

    def step_s(self, num_processes: int, *, processes_per_core: float = 1.0) -> float:
        """Seconds of a step; processes that share a core take turns."""
        own = (self.compute_s + self.data_s) * max(1.0, processes_per_core)
        return own + (1 - self.overlap) * self.all_reduce_s(num_processes)

    def efficiency(self, num_processes: int) -> float:
        """Images per second of P processes, of P times those of one."""
        return self.step_s(1) / self.step_s(num_processes)
