"""The evaluation of a run's best weights on its test set, once, at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..callbacks.export import load_best
from ..checkpoint.state_dict import ModelWeights
from ..training.evaluator import Evaluator
from ..training.trainer import Trainer
from .resume import Source, load_for_all
from .session import Run


@dataclass(frozen=True)
class FinalTest:
    """Evaluates the weights that a run exports: the best ones, or else those of the last step.

    The trainer calls it when its last checkpoint is durable.
    """

    run: Run
    evaluator: Evaluator

    def __call__(self, trainer: Trainer) -> dict[str, Any]:
        """Return the metrics as `test/...`. **Collective. Host sync.**

        The model has its own weights again afterwards.

        Raises:
            EvaluationStopped: some process got a signal.
        """
        model = trainer.model
        live = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        part = ModelWeights(model, name="model")
        try:
            config = self.run.config.trainer
            _, weights = load_best(self._load, trainer.best, trainer.state, config.last_weights)
            part.load_state_dict(part.validated(weights))
            values = self.evaluator.run(
                model, position=trainer.position, stop_flag=self.run.stop_flag
            )
        finally:
            model.load_state_dict(live)
        return {f"test/{name}": value for name, value in values.items()}

    def _load(self, name: str) -> Any:
        """Return a checkpoint, on every process. **Collective.**"""
        source = Source(str(self.run.folder), name)
        timeout_s = self.run.config.runtime.timeout_s
        return load_for_all(source, self.run.accelerator, timeout_s=timeout_s)
