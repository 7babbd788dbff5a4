"""An order of the user's own: a function that returns the samples of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from ..core.errors import ConfigError
from ..core.registry import StateDict
from ..core.wording import counted
from ..distributed.collectives import differing_lines
from .fingerprint import hash_value
from .order import Ids, SampleOrder, number_repetitions, to_tensor


class OwnOrder:
    """Asks `numbers_of` for the sample numbers of each epoch, and drops those that are not `kept`.

    It is asked twice for each epoch, when that is first used, and the answers of all processes are
    compared. As a part of a checkpoint, it has a digest of those of the last epoch. `samples` is
    the order as loaders take it.
    """

    def __init__(
        self, numbers_of: Callable[[int], Any], kept: Ids, size: int, accelerator: Accelerator
    ) -> None:
        self._numbers_of = numbers_of
        self._is_kept = torch.zeros(size, dtype=torch.bool)
        self._is_kept[to_tensor(kept)] = True
        self._accelerator = accelerator
        self._expected: dict[int, str] = {}  # digests, by the epoch
        self._last: dict[str, Any] = {}
        ids = self.draw(epoch=0)
        digest = hash_value([kept, ids]).hex()
        self.samples = SampleOrder(kept, len(ids), self.draw, digest, state=self)

    def draw(self, *, epoch: int, seed: int = 0) -> Tensor:
        """Return the drawn ids of an epoch. **Collective** for another one than the last time.

        Raises ConfigError if they are no sample numbers, follow from more than the epoch, or are
        not as many as those of epoch 0.
        """
        if epoch != self._last.get("epoch"):
            self._ids = self._read(epoch, self._last.get("num_samples"))
        return self._ids

    def _read(self, epoch: int, num_samples: int | None) -> Tensor:
        size = len(self._is_kept)
        found = []
        for _ in range(2):
            numbers = self._numbers_of(epoch)
            has_items = np.iterable(numbers) and not hasattr(numbers, "dtype")
            ids = np.asarray([*numbers] if has_items else numbers)
            is_list = ids.ndim == 1 and ids.size and ids.dtype.kind in "iu"
            if not is_list or ids.min() < 0 or ids.max() >= size:
                raise ConfigError(
                    "ORDER",
                    f"order= returned {numbers!r:.60} for epoch {epoch}: return a list or tensor "
                    f"of sample numbers, from 0 to {size - 1}",
                )
            found.append(torch.tensor(ids).long())
        kept = found[0][self._is_kept[found[0]]]
        digest = hash_value([kept]).hex()
        other = ""
        if differing_lines(digest, self._accelerator):
            other = "on another process"
        elif not torch.equal(*found):
            other = "when it is called again"
        elif digest != self._expected.get(epoch, digest):
            other = "than before the resume"
        if other:
            raise ConfigError(
                "ORDER",
                f"order= returns different numbers for epoch {epoch} {other}: "
                "compute them from the epoch alone, such as with a generator that it seeds",
            )
        if num_samples not in (None, len(kept)):
            raise ConfigError(
                "ORDER",
                f"order= has {counted(len(kept), 'sample')} in epoch {epoch} and {num_samples} in "
                "epoch 0, without those left out: return as many in each",
            )
        self._last = {"epoch": epoch, "digest": digest, "num_samples": len(kept)}
        return number_repetitions(kept, size)

    def state_dict(self) -> StateDict:
        """Return the digest of the last epoch, and what identifies the order."""
        return {"fingerprint": self.samples.fingerprint, **self._last}

    def load_state_dict(self, state: StateDict) -> None:
        """Expect the same numbers again, unless the order was changed on purpose."""
        if state["fingerprint"] == self.samples.fingerprint:
            self._expected = {state["epoch"]: state["digest"]}
