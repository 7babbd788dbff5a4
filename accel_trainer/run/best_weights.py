"""The weights that a run exports, in its live model."""

from __future__ import annotations

from ..callbacks.export import load_best
from ..checkpoint.format import LoadedCheckpoint
from ..checkpoint.frozen import complete_frozen
from ..checkpoint.state_dict import load_weights
from ..training.trainer import Trainer
from .resume import Source, load_for_all
from .session import Run


def load_best_weights(run: Run, trainer: Trainer) -> str:
    """Give the model the weights that `run` exports: the best, or else the last; say which.

    **Collective.** The last checkpoint must be durable.
    """

    def load(name: str) -> LoadedCheckpoint:
        source = Source(str(run.folder), name)
        loaded = load_for_all(source, run.accelerator, timeout_s=run.config.runtime.timeout_s)
        complete_frozen(loaded, trainer.model)
        return loaded

    source, weights = load_best(load, trainer.best, trainer.state, run.config.trainer.last_weights)
    load_weights(trainer.model, weights)
    return source
