"""The evaluation of a run's best weights on its test set, once, at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..checkpoint.state_dict import ModelWeights
from ..core.errors import CheckpointError
from ..core.train_state import checkpoint_name
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
            part.load_state_dict(part.fit(self._load(trainer)))
            values = self.evaluator.run(
                model, position=trainer.position, stop_flag=self.run.stop_flag
            )
        finally:
            model.load_state_dict(live)
        return {f"test/{name}": value for name, value in values.items()}

    def _load(self, trainer: Trainer) -> Any:
        """Return the weights to evaluate, on every process. **Collective.**"""
        if trainer.best is not None:
            try:
                return self._read(trainer.best.name)[trainer.best.weights]
            except CheckpointError:
                pass  # a branch does not have the best checkpoint of the run that it left
        weights = "model" if self.run.config.trainer.ema_decay is None else "ema"
        return self._read(checkpoint_name(trainer.state))[weights]

    def _read(self, name: str) -> Any:
        loaded = load_for_all(
            Source(str(self.run.folder), name),
            self.run.accelerator,
            timeout_s=self.run.config.runtime.timeout_s,
        )
        assert loaded is not None
        return loaded.pieces
