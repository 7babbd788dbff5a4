"""Looks at the first reading of each set: can it begin again, and is it the same everywhere?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from accelerate import Accelerator

from ..core.errors import ConfigError, listed
from ..core.logger import logger
from ..core.rng import preserved_generators, seed_generators
from ..data.loader import EvalLoader, TrainLoader
from ..data.stream import StreamReader
from ..distributed.collectives import differing_lines, gather_numbers
from .subject import Marks, changed
from .unsaved_state import mark_unsaved
from .used_up import NUM_FIRST, hash_of, start_again

_NUM_COMPARED = 16  # samples

Samples = Iterator[tuple[int, Any]]
"""Samples and their positions in the stream."""


class FirstReadings:
    """Watches the first readings of streams, and of loaders of the user's, by the names of sets."""

    def __init__(self, loaders: Mapping[str, Any], accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._streams: dict[str, _FirstReading] = {}
        for name, loader in loaders.items():
            reader = getattr(loader, "reader", None)
            if isinstance(reader, StreamReader):
                if all(each.reader is not reader for each in self._streams.values()):
                    self._streams[name] = _FirstReading(name, reader)
                    _replace_once(reader, "samples_from", self._streams[name].samples_from)
            elif not isinstance(loader, TrainLoader | EvalLoader):
                for method in ("step_batches", "batches"):
                    if hasattr(loader, method):
                        start = partial(start_again, name, getattr(loader, method))
                        _replace_once(loader, method, start)

    def compare(self) -> None:
        """Check that all processes have read the same samples of each stream. **Collective.**

        Call it once they have read some: each reads a stream from its start, even after a resume,
        but for one with `seek`, of which the first sample is read again.

        Raises ConfigError for a stream whose samples depend on the process.
        """
        if self._accelerator.num_processes == 1:
            self._streams.clear()
        for name, each in [*self._streams.items()]:
            num_common = min(gather_numbers(len(each.hashes), self._accelerator))
            if not num_common:
                continue
            del self._streams[name]
            if not self._differ(each.hashes[:num_common]):
                continue
            # What a stream draws from the global generators may differ, and the place of a `seek`.
            has_place = any(gather_numbers(each.position, self._accelerator))
            again = each.read_again(1 if has_place else num_common)
            if process := self._differ(again):
                raise ConfigError(
                    "DATA_STREAM",
                    f"processes 0 and {process} read different samples of the stream {name}, which "
                    "is divided over the processes a second time: yield all samples in each of "
                    "them, in the same order (without split_dataset_by_node, split_by_node, or "
                    "the rank)",
                )

    def _differ(self, hashes: Iterable[bytes]) -> int:
        """Return the first process with other hashes than the main one, 0 if there is none."""
        return next(iter(differing_lines("\n".join(map(bytes.hex, hashes)), self._accelerator)), 0)


@dataclass(eq=False)
class _FirstReading:
    """The first reading of a stream: hashes of its first samples, and where it began."""

    name: str
    reader: StreamReader
    hashes: list[bytes] = field(default_factory=list)
    position: int = 0
    _epoch: int | None = None

    def samples_from(self, epoch: int | None, position: int) -> Samples:
        """Yield what that of the reader does; hash the first samples, and look at what they change.

        Only where reading changes something is the stream read again.
        """
        self._epoch = epoch
        before = self._mark()
        opened = start_again(self.name, self.reader.stream, epoch)
        this = copy(self.reader)
        this.stream = lambda _: opened
        samples = this.samples_from(epoch, position)
        for number in range(_NUM_COMPARED):
            if (found := next(samples, None)) is None:
                return
            # What follows a `yield` runs with the second sample.
            if number == 1 and (names := changed(before, self._mark())):
                if self.read_again(NUM_FIRST) != self.read_again(NUM_FIRST):
                    logger.warning(
                        "[UNSAVED_STATE] %s yields different samples when an epoch is read "
                        "again, as after a resume, because reading changes %s: derive all that "
                        "it yields from the epoch alone",
                        self.name,
                        listed(names),
                    )
                with preserved_generators():
                    samples = self.reader.samples_from(epoch, position)
                    next(islice(samples, 1, None), None)
            self.position = found[0] - number
            self.hashes.append(hash_of(found[1]))
            yield found
        yield from samples

    def _mark(self) -> Marks:
        return mark_unsaved({self.name: self.reader.stream}, has_defaults=True)

    def read_again(self, number: int) -> list[bytes]:
        """Return the hashes of the first samples, read with generators that are seeded alike."""
        with preserved_generators():
            seed_generators(0)
            samples = self.reader.samples_from(self._epoch, 0)
            return [hash_of(sample) for _, sample in islice(samples, number)]


def _replace_once(owner: Any, method: str, first: Callable[..., Any]) -> None:
    """Let `first` take the place of a method of `owner` in its next call."""

    def call(*arguments: Any) -> Any:
        delattr(owner, method)
        return first(*arguments)

    with suppress(AttributeError):  # an object without a `__dict__` has nothing at hand, either
        setattr(owner, method, call)
