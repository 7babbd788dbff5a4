"""The weights that a run exports, for the evaluation of its test set at its end."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..callbacks.export import load_best
from ..checkpoint.state_dict import ModelWeights
from ..training.trainer import Trainer
from .resume import Source, load_for_all
from .session import Run


@contextmanager
def best_weights(run: Run, trainer: Trainer) -> Iterator[None]:
    """Give the model the weights that `run` exports, for the block: the best, or else the last.

    **Collective.** The last checkpoint must be durable.
    """

    def load(name: str) -> Any:
        return load_for_all(
            Source(str(run.folder), name),
            run.accelerator,
            timeout_s=run.config.runtime.timeout_s,
        )

    model = trainer.model
    live = copy.deepcopy(model.state_dict())
    part = ModelWeights(model, name="model")
    try:
        _, weights = load_best(load, trainer.best, trainer.state, run.config.trainer.last_weights)
        part.load_state_dict(part.validated(weights))
        yield
    finally:
        model.load_state_dict(live)
