"""Tries a Reader of the user's: a sample is to depend on its id and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import torch
from accelerate import Accelerator

from ..core.errors import ConfigError
from ..core.logger import logger
from ..core.rng import preserved_generators, seed_generators
from ..data.loader import TrainLoader
from ..data.reader import Reader, checked
from ..data.stream import StreamReader
from .unsaved_state import is_of_user
from .used_up import hash_of


def try_reader(loader: Any, accelerator: Accelerator) -> None:
    """Read two samples of a user's Reader as a training does, one after the other and alone.

    Warns of a sample that is another one then, as in a resume, which begins with any sample.

    Raises ConfigError for a batch without the ids that were asked for.
    """
    reader = loader.reader if isinstance(loader, TrainLoader) else None
    if reader is None or isinstance(reader, StreamReader) or not is_of_user(type(reader)):
        return
    # Not the first, which a counter would find, too.
    ids = sorted({len(reader) // 2, len(reader) - 1})
    with preserved_generators(accelerator.device):
        together = [*_samples(reader, ids, accelerator)]
        alone = [each for index in ids[::-1] for each in _samples(reader, [index], accelerator)]
    for index, one, another in zip(ids, together, alone[::-1], strict=True):
        if one != another:
            logger.warning(
                "[UNSAVED_STATE] sample %d of %s differs when it is read again, or after other "
                "samples, so a resumed run would train on different samples: let its randomness "
                "follow from the id and the epoch alone",
                index,
                type(reader).__name__,
            )
            return


def _samples(reader: Reader, ids: list[int], accelerator: Accelerator) -> Iterator[bytes]:
    """Yield a hash of each sample of a reading in epoch 0."""
    seed_generators(len(ids))  # differs, as it does after a resume
    asked = [torch.tensor([index]) for index in ids]
    batches = chain(reader.read(asked, 0), repeat(None))
    for index, batch in zip(ids, batches, strict=False):
        batch = checked(reader, batch, 1)
        found = [*map(int, batch.sample_ids)]
        if [each % len(reader) for each in found] != [index]:
            raise ConfigError(
                "DATASET",
                f"{type(reader).__name__} returned sample_ids {found} for the ids {[index]}: "
                "return the ids that it was given, of the samples that they name",
            )
        finished = reader.finish(batch.to(accelerator.device), 0)
        yield hash_of([finished.inputs, finished.targets])
