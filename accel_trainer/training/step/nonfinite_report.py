"""Reports the samples behind a gradient that is NaN or inf, and ends the run or lets it go on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors import DivergedError
from ...core.json_files import write_json
from ...core.logger import logger
from ...core.train_state import TrainState
from ...core.training_mode import evaluation_mode
from ...core.types import Batch, StepBatch, Task, Turn, eval_step_of
from ...distributed.collectives import gather_rows
from ..strategy.base import Strategy

_MAX_RECENT = 10
# So many skipped steps, within so many steps, end the run.
_TOO_OFTEN = ((3, 3), (_MAX_RECENT, 1000))


class PendingUpdate(NamedTuple):
    """An update that is about to be applied."""

    position: TrainState
    """The position before the step."""
    step_batch: StepBatch
    losses: Sequence[Tensor]
    """The loss sum [] of each micro-batch."""


@dataclass(eq=False)
class NonfiniteReport:
    """Records a step whose gradient is NaN or inf, which has not been applied.

    The run then ends; with `may_skip` it continues without the update, unless that happens too
    often. `skipped_steps` are the latest of these steps, a part of the checkpoint. Each is
    described by a file in `folder`.
    """

    strategy: Strategy
    _: KW_ONLY
    may_skip: bool
    model: nn.Module
    task: Task
    folder: Path
    skipped_steps: list[int] = field(default_factory=list)

    def __call__(self, update: PendingUpdate) -> None:
        """Record the step, and warn or end the run. **Collective. Host sync.**

        Raises:
            DivergedError: the run must end.
        """
        record = self._build_record(update)
        fact = self._write(record, update.step_batch.turn)
        # A step may have several bad updates.
        steps = dict.fromkeys([*self.skipped_steps, record["optimizer_step"]])
        self.skipped_steps = [*steps][-_MAX_RECENT:]
        if not self.may_skip:
            raise DivergedError(
                "NONFINITE",
                f"{fact}: lower the learning rate, correct the "
                "data, or skip such steps with --on-nonfinite skip",
            )
        if skips_too_often(self.skipped_steps):
            raise DivergedError(
                "NONFINITE", f"{fact}, which happened too often: lower the learning rate"
            )
        logger.warning("%s; training continues", fact)

    def _write(self, record: Mapping[str, Any], turn: Turn) -> str:
        """Write the record of a step into a file on the main process; return it as a message.

        The first bad update of a step counts.
        """
        path = self.folder / f"nonfinite-step-{record['optimizer_step']:010d}.json"
        is_first = record["optimizer_step"] not in self.skipped_steps
        if is_first and self.strategy.accelerator.is_main_process:
            with suppress(OSError):  # a full disk must not hide the error itself
                write_json(path, record)
        samples = "no single sample"
        if ids := record["nonfinite_sample_ids"]:
            samples = f"sample ids {', '.join(map(str, ids[:8]))}{' ...' * (len(ids) > 8)}"
        return (
            f"step {record['optimizer_step']}, epoch {record['position']['epoch'] + 1}"
            f"{f', {turn}' * bool(turn)}: the gradient is NaN or inf, so it was not applied "
            f"(loss sum {record['loss_sum']:.4}, {samples}; see {path.name})"
        )

    def _build_record(self, update: PendingUpdate) -> dict[str, Any]:
        """Return the step and the samples that caused it, as JSON values.

        **Collective. Host sync.**
        """
        *_, position, turn = update.step_batch
        # A row for each sample of a bad micro-batch: its id, and whether it is a cause.
        rows = [
            torch.stack(
                [batch.sample_ids, self._are_suspect(batch.at(position, turn)).long()], dim=1
            )
            for batch, loss_sum in zip(update.step_batch.micro_batches, update.losses, strict=True)
            if not torch.isfinite(loss_sum)
        ]
        none = torch.zeros(0, 2, dtype=torch.int64, device=self.strategy.accelerator.device)
        found = gather_rows(torch.cat([none, *rows]), self.strategy.accelerator)
        # Norm layers spread a NaN to good samples and processes. If no sample is known to be a
        # cause, all samples of the bad micro-batches are listed.
        blamed = found[found[:, 1] > 0] if found[:, 1].any() else found
        total = float(self.strategy.accelerator.reduce(torch.stack([*update.losses]).sum()))
        return {
            "optimizer_step": update.position.optimizer_step + 1,
            "position": update.position._asdict(),
            "loss_sum": total if math.isfinite(total) else str(total),
            "nonfinite_sample_ids": sorted(blamed[:, 0].tolist()),
        }

    def _are_suspect(self, batch: Batch) -> Tensor:
        """Return for each sample [B] of a bad micro-batch whether its own loss is NaN or inf.

        None is if that cannot be known: an `eval_step` may need other samples than `step`.
        """
        suspect = torch.zeros_like(batch.sample_ids)
        if self.strategy.has_collective_forward:
            return suspect
        # In training mode, batch norms mix the samples.
        with (
            evaluation_mode(self.model),
            suppress(Exception),
            torch.no_grad(),
            self.strategy.accelerator.autocast(),
        ):
            output = eval_step_of(self.task)(self.model, batch)
            # The mean of a micro-batch blames nobody.
            suspect = ~torch.isfinite(output.losses).expand(len(batch)) & output.is_per_sample
        return suspect


def skips_too_often(steps: Sequence[int]) -> bool:
    """Whether a run that skipped `steps`, in order, must end: 3 in a row, or 10 within 1000."""
    return any(
        len(steps) >= count and steps[-1] - steps[-count] < num_steps
        for count, num_steps in _TOO_OFTEN
    )
