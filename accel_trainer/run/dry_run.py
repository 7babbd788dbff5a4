"""What `--dry-run` changes in a run: it evaluates fewer samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

from accelerate import Accelerator

from ..core.types import Batch, EvalLoader

MAX_EVAL_SAMPLES = 512


class FewSamples:
    """The first `num_local` samples of each process, with new ids from 0 on."""

    def __init__(self, loader: EvalLoader, num_local: int, accelerator: Accelerator) -> None:
        self.num_samples = num_local * accelerator.num_processes
        self._loader = loader
        first = num_local * accelerator.process_index
        self._ids = range(first, first + num_local)

    def batches(self) -> Iterator[Batch]:
        """Yield this process's samples."""
        left = self._ids
        for batch in self._loader.batches():
            ids = left[: len(batch)]
            left = left[len(batch) :]
            cut = batch.map(itemgetter(slice(len(ids))))
            yield replace(cut, sample_ids=cut.sample_ids.new_tensor(ids))
            if not left:
                return


def limit_evaluation(loader: EvalLoader, accelerator: Accelerator) -> EvalLoader:
    """Return a loader of at most `MAX_EVAL_SAMPLES` samples, if `loader` is one of this package."""
    is_ours = type(loader).__module__.startswith(f"{__name__.partition('.')[0]}.")
    # No process has fewer: a loader of this package shares its samples out evenly.
    num_local = MAX_EVAL_SAMPLES // accelerator.num_processes
    if is_ours and num_local and loader.num_samples > MAX_EVAL_SAMPLES:
        return FewSamples(loader, num_local, accelerator)
    return loader
