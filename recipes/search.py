"""Search a learning rate and a weight decay with optuna, which stops bad trials early.

A search that was killed continues where it stopped, even within a trial.

python recipes/search.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_trainer import (
    Callback,
    ClassificationTask,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    TrainerView,
    build_trainer,
    start_run,
)

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

try:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
except ImportError as missing:
    needed = f"recipes/search.py needs {missing.name}: pip install 'accel-trainer[search]'"
    raise SystemExit(needed) from None


class Pruning(Callback):
    """Tells optuna each evaluation, and ends the trial if it is worse than the others were."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_evaluate_end(self, trainer: TrainerView, metrics: Mapping[str, Any]) -> None:
        """Report the accuracy."""
        self.trial.report(metrics["eval/accuracy"], trainer.state.optimizer_step)
        if self.trial.should_prune():
            trainer.request_stop("pruned")


def train(trial: optuna.Trial, folder: Path) -> float:
    """Train one trial, or the rest of it, and return its best accuracy."""
    rate = trial.suggest_float("rate", 1e-3, 1.0, log=True)
    decay = trial.suggest_float("decay", 1e-6, 1e-2, log=True)
    config = RecipeConfig(
        optimizer=OptimizerConfig(learning_rate=rate, weight_decay=decay),
        run=RunConfig(output_dir=folder / f"rate-{rate:.6g}-decay-{decay:.6g}", quiet=True),
    )
    digits = load_digits()
    inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
    samples = TensorDataset(inputs, torch.tensor(digits.target))
    with start_run(config, recipe="search") as run:
        trainer = build_trainer(
            run,
            model=nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
            task=ClassificationTask(),
            train_set=Subset(samples, range(400, len(samples))),
            eval_sets=Subset(samples, range(400)),
            callbacks=[Pruning(trial)],
        )
        result = trainer.fit()
    if result.stop_reason == "pruned":
        raise optuna.TrialPruned
    return result.best.value


def search(folder: Path, num_trials: int) -> optuna.Study:
    """Return the study in `folder` with at least `num_trials` that have ended."""
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(folder / "study.log"))),
        study_name="search",
        sampler=optuna.samplers.TPESampler(seed=0),
        direction="maximize",
        load_if_exists=True,
    )
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        # Its process was killed. A trial of the same values continues the run in their folder.
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(trial.params)
    has_ended = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    num_left = num_trials - len(study.get_trials(states=has_ended))
    study.optimize(lambda trial: train(trial, folder), n_trials=max(0, num_left))
    return study


if __name__ == "__main__":
    best = search(Path("runs/search"), num_trials=20).best_trial
    print(f"best accuracy {best.value:.4f} with {best.params}")
