"""What the checks look at: the parts of a run that a resume builds again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from ..core.digest import digest_of, flatten
from ..core.errors import CheckpointError, listed
from ..core.logger import logger
from ..core.parameters import Optimizers
from ..core.shards import is_shard
from ..training.callback import Callback
from .unsaved_state import Mark, Parts, mark_unsaved

UNSAVED = "and no checkpoint stores it"
NOT_NEEDED = "set unsaved_attributes = ({key!r},) on its class"

Marks = Mapping[str, Mark]
"""The marks of values, by name."""


@dataclass(eq=False)
class Subject:
    """The parts of a run, as a resume builds them: create it before anything is restored."""

    _: KW_ONLY
    model: nn.Module
    optimizers: Optimizers
    parts: Parts
    train_set: object
    states: Mapping[str, Any]
    accelerator: Accelerator

    def __post_init__(self) -> None:
        modules = {name: each for name, each in self.states.items() if isinstance(each, nn.Module)}
        self.unstored = {
            name: each for name, each in {**self.parts, **modules}.items() if not is_stored(each)
        }
        """The parts whose state is not in a checkpoint, or not as a whole."""
        self._named: set[str] = set()

    def mark(self, parts: Parts, *, is_first: bool = False) -> Marks:
        """Return marks of the values that `parts` keep where no checkpoint has them.

        The first ones have the defaults of classes, too, which later values are compared with.
        """
        return mark_unsaved(parts, model=self.model, stored=self._stored(), has_defaults=is_first)

    def _stored(self) -> list[object]:
        """Return the user's states, and their tensors, which other parts may hold, too.

        Not modules themselves: besides their tensors, they may keep what no state dict has.
        """
        others = [each for each in self.states.values() if not isinstance(each, nn.Module)]
        found = [
            each.state_dict(keep_vars=True) if isinstance(each, nn.Module) else each.state_dict()
            for each in self.states.values()
        ]
        return [*others, *(each for each in flatten(found).values() if isinstance(each, Tensor))]

    @contextmanager
    def watching(self, parts: Parts, what: str, fix: str) -> Iterator[None]:
        """Warn of what `what`, which runs in the block, changes in `parts` and nothing stores."""
        before = self.mark(parts, is_first=True)
        yield
        fix = f"{fix}, or if no result depends on it, {NOT_NEEDED}"
        self.warn(f"{what} changes", changed(before, self.mark(parts)), fix)

    def warn(self, what: str, names: set[str], fix: str, why: str = UNSAVED) -> None:
        """Warn once of each of the `names`; `fix` may contain the `key` of the first."""
        if new := names - self._named:
            logger.warning(
                "[UNSAVED_STATE] %s %s, %s: %s",
                what,
                listed(new),
                why,
                fix.format(key=min(new).rpartition(".")[2]),
            )
        self._named |= names


def is_stored(part: object) -> bool:
    """Whether a checkpoint stores what a part, such as a callback, returns as its state."""
    return isinstance(part, Callback) and type(part).state_dict is not Callback.state_dict


def inexact(message: str) -> CheckpointError:
    """Return the error of a run that could not resume exactly."""
    return CheckpointError("CKPT_INEXACT", message)


def changed(before: Marks, after: Marks) -> set[str]:
    """Return the names of the values that kept their type and changed their content."""
    return {
        name
        for name in before.keys() & after.keys()
        if before[name][0] == after[name][0] and before[name][1] != after[name][1]
    }


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    """Return the names of what differs, or is there only before or after."""
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


def refuse_changes(
    what: str, before: Mapping[str, object], after: Mapping[str, object], fix: str
) -> None:
    """Raise CheckpointError if `what` has changed something that `before` and `after` describe."""
    if found := differing(before, after):
        raise inexact(f"{what} changes {listed(found)}: {fix}")


def first_difference(one: Any, other: Any) -> str | None:
    """Return the path, such as `state[0].exp_avg`, to the first difference of two states."""
    mine = digests_in(one)
    theirs = digests_in(other)
    return next((path for path in mine | theirs if mine.get(path) != theirs.get(path)), None)


def digests_in(state: Any) -> dict[str, tuple[bool, str]]:
    """Return for each leaf whether it is a shard, and its digest. **Collective** with shards."""
    return {path: (is_shard(leaf), digest_of(leaf)) for path, leaf in flatten(state).items()}
