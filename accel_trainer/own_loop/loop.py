"""What a user's own loop runs by: its epochs, its batches, its rows and its saves."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor

from ..callbacks.metrics_file import MetricsFile
from ..checks.loop_body import CarriedState
from ..core.digest import digest_of
from ..core.errors import ConfigError, Preempted
from ..core.registry import Pieces, Registry, StateDict, Stateful
from ..core.rng import fold_in, seed_generators
from ..core.train_state import TrainState
from ..distributed.collectives import gather_numbers
from ..run.joining import JoinedRun
from .attributes import Attributes
from .loader import OrderedLoader
from .means import Means, number_in
from .updates import Updates


class ExactRun(Stateful):
    """The run of a loop that its owner writes: see `exact_run`.

    All processes call its methods, in the same order.
    """

    def __init__(
        self,
        run: JoinedRun,
        loader: OrderedLoader,
        updates: Updates,
        *,
        seed: int,
        save_every: int | None,
        digest_every: int | None,
        history: MetricsFile | None,
    ) -> None:
        self._accelerator = run.accelerator
        self._activity = run.activity
        self._stop_flag = run.stop_flag
        self._loader = loader
        self._updates = updates
        self._seed = seed
        self._save_every = save_every or math.inf
        self._digest_every = digest_every or math.inf
        self._history = history
        self._carried: CarriedState | None = None
        self._means = Means(run.accelerator)
        self._saved_step = self.step
        self._loaded_at: TrainState | None = None
        self._loaded: dict[str, str] | None = None  # until what earlier starts have done is over
        self._is_unchecked = run.accelerator.num_processes > 1
        self._is_in_epoch = False
        self._is_boundary = True
        self.is_stopped = False
        self.metrics: dict[str, float] = {}
        """The values of the last row."""
        self.states: Registry
        """All parts of the run that have state, this object included."""
        self.attributes: Attributes
        """What the loop changes in these parts beside their state dicts."""
        self.store: Callable[[TrainState, Pieces], object]
        """Passes a checkpoint to the writer, on the main process."""
        self.check_same: Callable[[Pieces], None]
        """Checks that all processes have the same to store. **Collective.**"""
        self.reload: Callable[[], None]
        """Loads the checkpoint of this start once more. **Collective.**"""
        self.carried_by: Callable[[FrameType, str], CarriedState]
        """Looks at what the loop that takes items of a method carries from round to round."""

    @property
    def state(self) -> TrainState:
        """Where the loop is: `optimizer_step` are its steps, and `step_in_epoch` its batches."""
        return self._activity.state

    @property
    def step(self) -> int:
        """How many steps were taken so far: rounds of the loop in which an optimizer has stepped.

        In the body of a round, its own is not among them.
        """
        return self.state.optimizer_step

    @property
    def epoch(self) -> int:
        """The epoch in progress, counted from 0."""
        return self.state.epoch

    @property
    def batch_in_epoch(self) -> int:
        """How many batches of the epoch this process has taken: `enumerate` starts there."""
        return self.state.step_in_epoch

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Return the epochs that are left: the one in progress, and those up to `num_epochs`.

        Raises ConfigError if the loop leaves an epoch before its end, or if what an earlier start
        did before it was done again, and Preempted after a signal.
        """
        carried = self.carried_by(sys._getframe(1), "epochs")
        for epoch in self._epochs(lambda: (self.epoch, self.batch_in_epoch), (num_epochs, 0)):
            carried.mark()
            yield epoch
        carried.mark()

    def _epochs(self, place: Callable[[], tuple[int, ...]], end: tuple[int, ...]) -> Iterator[int]:
        self._carried = None  # its batches may be read by another loop
        while not self.is_stopped and place() < end:
            self._refuse_unfinished()
            self._refuse_repeated()
            if not self.batch_in_epoch:
                self._loaded = None
            self._is_in_epoch = True
            self._loader.begin(self.epoch)
            yield self.epoch
            self._refuse_unfinished()
            if self._updates.stepped:  # with gradients that the last rounds have left
                self._settle()
            if self.batch_in_epoch >= len(self._loader.batches):
                self._activity.state = self.state.after_epoch()
            is_end = self.is_stopped or self._save_every == math.inf or place() >= end
            if self._is_boundary:
                self._stop_flag.agree()
                self._save_if_due(is_end)
            elif is_end:
                self.save()
        if place() <= end:  # else it ended in an earlier start, with what follows it
            self._refuse_repeated()
            self._loaded = None
            self._seed_round()  # what follows is the same after a resume

    def batches(self) -> Iterator[Any]:
        """Return the batches of the epoch that are left, as the loader yields them.

        Raises ConfigError outside `epochs` and for a second pass, and Preempted after a signal,
        once all is saved.
        """
        if not self._is_in_epoch or self._activity.phase == "training":
            raise ConfigError(
                "LOOP",
                "run.batches() gives the batches of an epoch once, in a loop over run.epochs(n): "
                "for another pass, train another epoch",
            )
        return self._rounds("batches", math.inf)

    def steps(self, num_steps: int) -> Iterator[Any]:
        """Return batches, epoch after epoch, until `num_steps` steps were taken.

        Raises ConfigError and Preempted as `epochs` does.
        """
        for _ in self._epochs(lambda: (self.step,), (num_steps,)):
            yield from self._rounds("steps", num_steps)

    def log(self, name: str, value: float | Tensor) -> None:
        """Add a number, or a tensor [] on any device, to a mean of the next row. No host sync.

        What an earlier start has logged is not added again.
        """
        if self._loaded is None:
            self._means.add(name if "/" in name else f"train/{name}", value)

    def row(self, **values: float) -> None:
        """Write a row: the means of what was logged since the last one, and `values`.

        **Collective. Host sync** if anything was logged. What an earlier start has written is not
        written again.

        Raises ConfigError for a value that is not one number, and after the end of the run.
        """
        if self._activity.phase == "done":
            raise ConfigError("LOOP", "the run has ended: write the row inside its with block")
        if self._loaded is not None:
            return
        if means := self._means.read():
            self._write_row("train", means)
        if values:
            self.metrics = {
                f"eval/{name}": float(number_in(name, value)) for name, value in values.items()
            }
            self._write_row("eval", self.metrics)

    def save(self) -> None:
        """Save a checkpoint at the next boundary."""
        self._stop_flag.request_save()

    def stop(self) -> None:
        """End the loops as if this were the last step, and the last epoch. Use it for `break`."""
        self.is_stopped = True

    def state_dict(self) -> StateDict:
        """Return what a resume needs of the loop itself. **Collective. Host sync.**"""
        return {
            "means": self._means.state_dict(),
            "history_bytes": self._history.size if self._history else 0,
            "accelerate_step": self._accelerator.step,
            "orders": gather_numbers(self._loader.digest(), self._accelerator),
            "is_stopped": self.is_stopped,
            "metrics": self.metrics,
            "attributes": self.attributes.changes(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned."""
        self._means.load_state_dict(state["means"])
        self._accelerator.step = state["accelerate_step"]
        self.is_stopped = state["is_stopped"]
        self.metrics = dict(state["metrics"])
        if "attributes" in state:  # not in checkpoints of older versions
            self.attributes.restore(state["attributes"])
        if self._history is not None:
            self._history.kept_bytes = state["history_bytes"]

    def begin_loaded(self) -> None:
        """Remember the state that was just loaded. **Collective. Host sync.**

        Up to the place of the checkpoint, the code of this start has run in an earlier one.
        """
        self._loaded_at = self.state
        self._loaded = self._digests()

    def _refuse_repeated(self) -> None:
        """Raise ConfigError if code that an earlier start has run has changed what was loaded."""
        if changed := self._changed():
            raise ConfigError(
                "LOOP",
                f"the code before the loop changes {', '.join(changed)} again at each start: do it "
                "before the `with exact_run(...)`, or only where it is due, as by "
                "`if run.step == 0`",
            )

    def _undo_repeated(self) -> None:
        """Load again what the code before the batches of an epoch in progress has changed."""
        if any(gather_numbers(len(self._changed()), self._accelerator)):
            self.reload()
        self._loaded = None

    def _changed(self) -> list[str]:
        """Return what is not as it was loaded, until that is over. **Collective. Host sync.**"""
        if self._loaded is None:
            return []
        return sorted({name for name, _ in self._loaded.items() ^ self._digests().items()})

    def _digests(self) -> dict[str, str]:
        """Return digests of what is trained. **Collective. Host sync.**"""
        pieces = self.states.state_dict()
        return {name: digest_of(piece) for name, piece in pieces.items() if name != "loop"}

    def finish(self) -> None:
        """Save the end of the run. Raises ConfigError if the loop was left before its end."""
        self._refuse_unfinished()
        if self.state != self._loaded_at:  # a finished run stays as it is
            self._save()

    def _refuse_unfinished(self) -> None:
        if self._is_in_epoch:
            raise ConfigError(
                "LOOP",
                "the loop has left an epoch before its end, such as by break, return or islice: "
                "call run.stop() there, which ends both loops after the step",
            )

    def _rounds(self, method: str, num_steps: float) -> Iterator[Any]:
        """Yield what is left of the epoch, until `num_steps` steps were taken."""
        if self._carried is None:
            self._carried = self.carried_by(sys._getframe(1), method)
        if self._updates.stepped:
            raise ConfigError(
                "LOOP",
                "an optimizer has stepped before the first batch, which it would do again after a "
                "resume: take its steps in the loop over run.batches(), or after that loop",
            )
        if self._loaded is not None:
            self._undo_repeated()
        self._activity.phase = "training"  # from here on, a signal ends the run after a save
        for batch in self._loader.read(self.batch_in_epoch):
            self._seed_round()
            yield batch
            self._end_round()
            if self.is_stopped and self._is_boundary or self.step >= num_steps:
                self._loader.end()
                break
            # What follows the last round may use its names, which a resume would not have.
            if self._is_boundary and self.batch_in_epoch < len(self._loader.batches):
                self._stop_flag.poll()
                self._save_if_due()
        self._seed_round()  # what follows in the epoch is the same after a resume
        self._is_in_epoch = False
        self._activity.phase = "between epochs"  # which may take as long as the user's code needs

    def _end_round(self) -> None:
        """Move on, and write digests if they are due."""
        num_samples = len(self._loader.batches[self.batch_in_epoch])
        state = self.state.after_step(num_samples * self._accelerator.num_processes)
        self._activity.state = state._replace(optimizer_step=self.step)
        self._activity.num_forwards += 1
        self._settle()
        if self._is_boundary and self.step % self._digest_every == 0:
            digests = self._digests()
            self._write_row("digest", {f"digest/{name}": digests[name] for name in digests})

    def _settle(self) -> None:
        """Count the step, if optimizers have stepped."""
        has_stepped, self._is_boundary = self._updates.settle()
        self._activity.state = self.state._replace(optimizer_step=self.step + has_stepped)
        # Without an update, nothing else may change.
        if self._carried and has_stepped and not self._accelerator.optimizer_step_was_skipped:
            self._carried.mark()

    def _save_if_due(self, is_end: bool = False) -> None:
        is_due = self.step // self._save_every > self._saved_step // self._save_every
        stop = self._stop_flag.agreed
        if is_end or is_due or stop or self._stop_flag.is_save_agreed:
            self._save()
        elif self._is_unchecked:  # refused now, and not at a save an epoch later
            self.check_same(self.states.state_dict())
        self._is_unchecked = False
        if stop:
            line = f"{stop.reason}: saved step {self.step}: run the same command to continue"
            raise Preempted("PREEMPTED", line)

    def _save(self) -> None:
        self._stop_flag.is_save_agreed = False
        self._saved_step = self.step
        with self._activity.during("save"):
            pieces = self.states.state_dict()
            self.check_same(pieces)
            if self._accelerator.is_main_process:
                self.store(self.state, pieces)

    def _seed_round(self) -> None:
        place = (self.epoch, self.batch_in_epoch, self._accelerator.process_index)
        seed_generators(fold_in(self._seed, *place), self._accelerator.device)

    def _write_row(self, event: str, values: Mapping[str, Any]) -> None:
        if self._history is not None:
            epoch = self.epoch + (self.batch_in_epoch > 0)
            self._history.append(
                {"event": event, "optimizer_step": self.step, "epoch": epoch, **values}
            )
