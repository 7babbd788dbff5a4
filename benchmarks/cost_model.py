"""What a step costs on P processes: compute and data as on one, and the part of a ring all-reduce that is not hidden.

    step(P) = compute + data + (1 - overlap) * all_reduce(P)
    all_reduce(P) = 2 (P - 1) / P * bytes / bandwidth + 2 (P - 1) * latency

A ring passes each of P parts of the gradients on 2 (P - 1) times. Real libraries use trees for many processes, whose
latency grows with log P: the model errs to the side of too slow there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The constants of a model, a machine and a network."""

    compute_s: float
    """Forward, backward and update of one process on a core, or a GPU, of its own."""
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
        """Seconds that summing the gradients over all processes takes by itself."""
        others = num_processes - 1
        return 2 * others / num_processes * self.gradient_bytes / self.bytes_per_s + 2 * others * self.latency_s

    def step_s(self, num_processes: int, *, processes_per_core: float = 1.0) -> float:
        """Seconds of a step; processes that share a core compute in turn."""
        own = (self.compute_s + self.data_s) * max(1.0, processes_per_core)
        return own + (1 - self.overlap) * self.all_reduce_s(num_processes)

    def efficiency(self, num_processes: int) -> float:
        """Images per second of P processes, of P times those of one."""
        return self.step_s(1) / self.step_s(num_processes)
