"""Samples that are read from their beginning, such as those of a torch `IterableDataset`."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from ..core.batch_plan import ENDLESS
from ..core.config import AT_LEAST_ONE
from ..core.errors import ConfigError, DataError
from ..core.logger import logger
from ..core.types import Batch
from .reader import Reader
from .samples import datasets_in, set_epoch
from .workers import Collate, SampleError, make_batch


@dataclass(eq=False)
class StreamReader(Reader):
    """The first `num_samples` samples that `stream(epoch)` yields, in their order.

    None: all of them; training then needs `--steps`, and has no epochs: `epoch` stays 0.

    `stream` is called with None in evaluations. Samples are `(input, target)` pairs, or what
    `collate` accepts. Every process reads the whole stream and keeps its part; a resume reads the
    stream again up to its position, or begins there if the stream has `seek(position)`, where
    position counts samples. A run is exact if `stream(epoch)` yields the same samples in every
    process and at every call. The stream itself must shuffle, depending on the epoch.

    Raises:
        ConfigError: `stream` is not a function, or `num_samples` is below 1.
    """

    stream: Callable[[Any], Iterable[Any]]
    num_samples: int | None = None
    _: KW_ONLY
    collate: Collate = default_collate

    def __post_init__(self) -> None:
        if not callable(self.stream):
            raise ConfigError(
                "DATA_STREAM",
                f"an object of type {type(self.stream).__name__} cannot start a stream: "
                "pass a function for which stream(epoch) yields samples",
            )
        AT_LEAST_ONE.check(self, "StreamReader", "num_samples")

    def __len__(self) -> int:
        return ENDLESS if self.num_samples is None else int(self.num_samples)

    def fingerprint(self) -> str:
        """Return an empty string: a stream is not read twice."""
        return ""

    def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        """Yield a batch for each tensor of increasing positions, up to the end of the stream.

        An empty batch is cut from a batch of one sample: sample 0, or the last one that was read.

        Raises:
            ConfigError: the positions go back.
            DataError: the stream ends before `num_samples`, or samples cannot be collated.
        """
        samples: Iterator[tuple[int, Any]] | None = None
        position, sample = -1, None
        for batch_ids in ids:
            rows = []
            for wanted in batch_ids.tolist() or [max(0, position)]:
                samples = samples or self.samples_from(epoch, wanted)
                if wanted < position:
                    raise ConfigError(
                        "ORDER",
                        f"a stream cannot go back from sample {position} to {wanted}: "
                        "let build_trainer or build_train_loader make its loader",
                    )
                while position < wanted:
                    position, sample = next(samples, (len(self), None))
                if position > wanted:
                    if self.num_samples is None:
                        return
                    raise DataError(
                        "DATA_STREAM",
                        f"the stream ended before sample {wanted}, counted from 0: "
                        "lower num_samples, or yield more samples",
                    )
                rows.append((position, sample))
            try:
                batch = make_batch(rows, collate=self.collate)
            except SampleError as error:
                raise error.as_data_error() from error
            yield batch if len(batch_ids) else batch.map(lambda tensor: tensor[:0])
        if epoch == 0 and position + 1 == self.num_samples and next(samples or iter(()), None):
            logger.warning(
                "[DATA_STREAM] the stream has more than num_samples=%d, and epochs train only on "
                "these: to train on all, leave num_samples out and set --steps",
                self.num_samples,
            )

    def samples_from(self, epoch: int | None, position: int) -> Iterator[tuple[int, Any]]:
        """Return the samples of the stream with their positions, from `position` or before it."""
        stream = self.stream(epoch)
        if epoch is not None:
            set_epoch(datasets_in(stream), epoch)
        # The position in a file counts bytes.
        if position == 0 or not hasattr(stream, "seek") or isinstance(stream, io.IOBase):
            return enumerate(stream)
        stream.seek(position)
        return enumerate(stream, position)
