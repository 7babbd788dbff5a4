"""Looks at evaluations, ends of epochs, saves and their hooks, for as long as a run trains."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from ..callbacks.metric_logger import MetricLogger
from ..callbacks.pretrained import PretrainedExport
from ..checkpoint.state_dict import EXTRA_STATE
from ..core.digest import flatten
from ..core.registry import Pieces
from ..core.shards import is_shard
from ..core.wording import describe_tensor
from ..distributed.collectives import run_on_main
from ..training.callback import Callback, TrainerView
from ..training.callback_runner import Watch
from ..training.inspector import Inspector, ReadAttributes, ReadState
from .first_reading import FirstReadings
from .model_watch import mark_model
from .same_everywhere import check_same_lines, check_same_parts, check_same_states
from .subject import (
    Subject,
    digests_in,
    inexact,
    is_stored,
    refuse_changes,
)
from .unchanged import left_unchanged
from .unsaved_state import Parts, defaults_of, is_of_user

_ALIGNMENT = 64  # bytes, of the memory of a new tensor
IN_STEPS = {"before_micro_batch", "on_micro_batch", "before_update", "on_step_end"}
_MAX_WATCHED_CALLS = 2  # of each hook and evaluation

Identities = Mapping[str, tuple[int | None, str]]
"""For each tensor of a checkpoint, by name: its `id` if it is a parameter, and dtype and shape."""


class BoundaryChecks(Inspector):
    """Compares what a resume would have with the live state, between steps.

    Raises:
        CheckpointError: the model has state that cannot be stored or loaded.
    """

    def __init__(self, subject: Subject, readings: FirstReadings) -> None:
        self._subject = subject
        self.readings = readings
        self._first = _identify(subject.model)
        self._num_calls = Counter[str]()

    def begin(
        self, trainer: TrainerView, read_state: ReadState, attributes: ReadAttributes
    ) -> None:
        """Note where to find what changes later."""
        self._trainer = trainer
        self._read_state = read_state
        self._attributes = attributes

    def parts(self) -> Parts:
        """Return the parts that no checkpoint holds as a whole, by name."""
        kind = type(self._trainer)
        unneeded = getattr(self._trainer, "unsaved_attributes", ())
        kept = {
            f"trainer.{name}": each
            for name, each in {**defaults_of(kind), **self._attributes()}.items()
            if name not in unneeded
        }
        return self._subject.unstored | kept | {"trainer": kind, "os.environ": dict(os.environ)}

    def measuring(self, name: str, model: nn.Module) -> AbstractContextManager[None]:
        """Refuse what the first evaluations of this name leave changed in a model.

        **Collective. Host sync.** Raises CheckpointError if processes train in different modes.
        """
        self._check_modes()
        self._num_calls[name] += 1
        if self._num_calls[name] > _MAX_WATCHED_CALLS:
            return nullcontext()
        average = None if model is self._subject.model else model
        return left_unchanged(f"the evaluation {name}", self._subject.model, average)

    def epoch_end(self) -> AbstractContextManager[None]:
        """Warn of values that the end of an epoch changes, as callbacks may do."""
        # Reading samples may fill a cache of the data, so steps are not compared.
        parts = {**self.parts(), "train_set": self._subject.train_set}
        return self._subject.watching(
            parts, "the end of an epoch", "compute it from `batch.position`"
        )

    def hook(self, name: str) -> Watch | None:
        """Return what watches the first calls of the hook of this name, but of those in steps."""
        self._num_calls[name] += 1
        is_late = self._num_calls[name] > _MAX_WATCHED_CALLS
        if is_late or name in {"on_fit_start", *IN_STEPS}:
            return None
        return self._watching_save if name == "before_save" else self.watching_hook

    def watching_hook(
        self, name: str, callback: Callback, arguments: Sequence[Any]
    ) -> AbstractContextManager[None]:
        """Warn if a user's hook changes the model; a stored callback may.

        At the end of the run, all of the user's may. Also if trackers, or a `save_pretrained`, do,
        which hooks of this package call.
        """
        may_change = is_stored(callback) or name.endswith(".on_fit_end")
        is_users = is_of_user(type(callback)) and not may_change
        has_trackers = isinstance(callback, MetricLogger) and len(callback.sinks) > 1
        is_watched = is_users or has_trackers or isinstance(callback, PretrainedExport)
        return self._watching_model(name) if is_watched else nullcontext()

    @contextmanager
    def _watching_model(self, name: str) -> Iterator[None]:
        before = mark_model(model := self._subject.model)
        yield
        after = mark_model(model)
        names = {name for name, mark in before.items() if mark != after.get(name, mark)}
        if name.endswith(".on_step_end"):  # once a step, before a save, which has the weights
            names -= dict(model.named_parameters("model")).keys()
        self._subject.warn(
            f"the callback {name} changes",
            names,
            "undo it in the same hook, or change weights in on_step_end, all else in on_fit_start",
            # A checkpoint stores some of it, such as weights, but none stores a mode or a hook.
            "which only a step should",
        )

    @contextmanager
    def _watching_save(
        self, name: str, callback: Callback, arguments: Sequence[Any]
    ) -> Iterator[None]:
        """Check that a hook before a save changes nothing that is saved.

        **Collective** with shards. **Host sync.**

        Raises CheckpointError for what has changed.
        """
        with self.watching_hook(name, callback, arguments):
            before = digests_in(self._read_state())
            yield
            refuse_changes(
                name,
                before,
                digests_in(self._read_state()),
                "change it in on_step_end, since a run that is killed saves more often",
            )

    def save(self, pieces: Pieces) -> None:
        """Check that a new model could load the tensors, and that all processes store the same.

        **Collective. Host sync.** The user's code can change that at any time.

        Raises:
            CheckpointError: a resume could not load the model, or the optimizer updates parameters
                that the model no longer has, or processes differ in a parameter, in the training
                mode of a module or in what else is stored once.
            ConfigError: processes have read different samples of a stream.
        """
        subject = self._subject
        self.readings.compare()
        now = _identify(subject.model)
        run_on_main(lambda: self._compare(now), subject.accelerator)
        self._warn_of_views()
        self._check_modes()
        check_same_states({"model": subject.model}, pieces, subject.accelerator)
        check_same_parts(pieces, subject.accelerator)

    def _check_modes(self) -> None:
        """Raise CheckpointError if a module is in evaluation mode on some processes alone."""
        check_same_lines(
            (
                f"training of {name or 'the model'} is {each.training}"
                for name, each in self._subject.model.named_modules()
            ),
            self._subject.accelerator,
            "call train() and eval() on all processes",
        )

    def _warn_of_views(self) -> None:
        """Warn of tensors in the user's states that lie in memory as no loaded one does."""
        states = {
            name: each.state_dict()
            for name, each in self._subject.states.items()
            if not isinstance(each, nn.Module)
        }
        views = {
            name
            for name, each in flatten(states).items()
            if isinstance(each, Tensor)
            and not is_shard(each)
            and each.numel() > 1
            and (each.data_ptr() % _ALIGNMENT or not each.is_contiguous())
        }
        self._subject.warn(
            "a slice, a transposed tensor or memory of numpy is kept in",
            views,
            "keep a clone()",
            "where a resume has a tensor of its own: products with it may round differently",
        )

    def _compare(self, now: Identities) -> None:
        for name in sorted(self._first.keys() | now.keys()):
            old, old_shape = self._first.get(name, (None, "nothing"))
            new, new_shape = now.get(name, (None, "nothing"))
            if old_shape != new_shape:
                raise inexact(
                    f"training changed {name} of the model from {old_shape} to {new_shape}, which "
                    "a new model could not load: make it so in __init__"
                )
            if old != new:
                raise inexact(
                    f"training replaced the parameter {name}, and the optimizer still updates the "
                    "old one: change it in place, by copy_ under torch.no_grad()"
                )


def _identify(model: nn.Module) -> Identities:
    """Return the identities of the model's tensors, without its extra state.

    Raises CheckpointError for a value that a checkpoint could not hold.
    """
    tensors = model.state_dict()
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise inexact(
                f"{name} of the model is {describe_tensor(value)}: "
                "return a tensor from get_extra_state, or keep each value in a buffer"
            )
    # Only after `state_dict`: it makes shards again of a parameter that FSDP keeps whole after an
    # evaluation.
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    return {
        name: (identities.get(name), describe_tensor(value))
        for name, value in tensors.items()
        if not name.endswith(EXTRA_STATE)
    }
