"""The data of a run: the loaders of its training, evaluation and test sets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoint.format import Manifest
from ..checks.agreement import check_same_everywhere
from ..checks.parts import check_part, check_parts
from ..core.batch_plan import BatchConfig, BatchPlan
from ..core.errors import ConfigError, DataError
from ..core.logger import logger
from ..core.types import EvalSource, Loader, Metric, Samples, Task
from ..data.fingerprint import join_fingerprints
from ..data.loader import (
    DatasetOptions,
    EvalLoader,
    build_eval_loader,
    build_train_loader,
    check_order_is_free,
)
from ..data.reader import Reader
from ..training.evaluation.evaluation import Evaluation, check_directions
from ..training.evaluation.metrics import MeanLoss
from .session import Run

Metrics = Sequence[Metric] | Mapping[str, Sequence[Metric]]
"""The metrics of all sets, or those of each set by its name."""

EvalSet = Samples | Reader | EvalSource | Evaluation
"""What can be evaluated on."""

TEST_SET = "test_set"
"""The name of the set that is evaluated at the end, beside those of the evaluation sets."""

MAX_EVAL_SAMPLES = 512
"""What a dry run evaluates on, over all processes."""

_SET_NAME = re.compile(r"(?!ema|test_set$)[a-z0-9_]{1,40}")


@dataclass(frozen=True)
class RunData:
    """The loader of the training set, and the evaluation sets: loaders, and evaluations.

    They are by name: "" for an unnamed one, `TEST_SET` for the test set, which is the last.
    """

    train: Loader
    evaluation: Mapping[str, EvalSource | Evaluation]

    @property
    def plan(self) -> BatchPlan:
        """How the steps of an epoch are split."""
        return self.train.plan

    @property
    def loaders(self) -> dict[str, Any]:
        """All loaders, by the argument that gave the set."""
        named = {
            name if name == TEST_SET else "eval_sets" + f"[{name!r}]" * bool(name): each
            for name, each in self.evaluation.items()
            if not isinstance(each, Evaluation)
        }
        return {"train_set": self.train, **named}

    @property
    def eval_loaders(self) -> list[EvalSource]:
        """The loaders of the evaluation sets, that of the test set last."""
        return [each for each in self.evaluation.values() if not isinstance(each, Evaluation)]

    def limited(self) -> RunData:
        """Return the data of a dry run, which evaluates few samples, and none of the test set."""
        few = {
            name: loader.first(MAX_EVAL_SAMPLES) if isinstance(loader, EvalLoader) else loader
            for name, loader in self.evaluation.items()
            if name != TEST_SET
        }
        return RunData(self.train, few)

    def identify(self, run: Run, fingerprint: str | None) -> Manifest:
        """Return what identifies the samples of training and evaluation, for the manifest.

        **Collective.**

        Raises ConfigError if processes have different data.
        """
        # Asked for in any case: a loader warns of samples that cannot be read again.
        loaders = (self.train, *self.eval_loaders)
        found = [fingerprint_of(getattr(loader, "reader", loader)) for loader in loaders]
        if fingerprint is None:
            fingerprint = join_fingerprints(found)
            is_repeated = {
                "eval_sets": found[1:2] == found[:1],
                "test_set": self.evaluation.get(TEST_SET) in self.eval_loaders[-1:]
                and found[-1] in found[:-1],
            }
            for name, repeats in is_repeated.items():
                if fingerprint and repeats:
                    logger.warning(
                        "[%s] %s= has the same samples as another set, so its numbers will be too "
                        "good: pass separate samples",
                        name.upper(),
                        name,
                    )
        order = getattr(self.train, "order", None)
        # A balanced epoch may be shorter than the samples that it is drawn from.
        size = self.plan.num_samples if order is None else len(order.kept)
        identity = {
            "data_fingerprint": str(fingerprint),
            "eval_fingerprint": join_fingerprints(found[1:]),
            "num_samples": [
                None if self.plan.is_endless else size,
                *(each.num_samples for each in self.eval_loaders),
            ],
            "order": "" if order is None else order.fingerprint,
        }
        check_same_everywhere({"data": str(identity)}, run.accelerator)
        return identity


def build_data(
    run: Run, train_set: Any, eval_sets: Any, test_set: Any, options: DatasetOptions
) -> RunData:
    """Return the loaders of datasets and readers; loaders and evaluations stay as they are.

    Raises:
        ConfigError: something is no dataset, reader, loader or evaluation, a name cannot be in a
            row, or a loader has an order of its own.
        DataError: there are fewer samples than processes, or a set has none.
    """
    check_part("options", options)
    batch = run.config.batch
    if hasattr(train_set, "step_batches"):
        check_part("train_set", train_set)
        asked = BatchConfig() if hasattr(train_set, "order") else batch
        check_order_is_free(train_set, asked, options)
        train = train_set
    else:
        train = build_train_loader(
            train_set,
            batch,
            seed=run.config.seed,
            accelerator=run.accelerator,
            options=options,
        )

    def evaluated(name: str, part: Any) -> EvalSource | Evaluation:
        if isinstance(part, Evaluation) and not isinstance(part, type):
            check_directions(part, "monitors")
            return part
        if not hasattr(part, "batches"):
            part = build_eval_loader(
                part,
                batch,
                num_parts=train.plan.num_parts,
                accelerator=run.accelerator,
                options=options,
            )
        check_part(name, part)
        if part.num_samples < 1:
            raise DataError("DATA_TOO_SMALL", f"{name}= has a set without samples: add some")
        return part  # type: ignore[no-any-return]  # checked

    # A mapping from numbers may be a dataset.
    is_named = isinstance(eval_sets, Mapping) and {*map(type, eval_sets)} <= {str}
    named = eval_sets if is_named else {"": eval_sets}
    if not named:
        raise ConfigError("CONFIG", "eval_sets= has no set: give one or more")
    for name in named:
        if is_named and not _SET_NAME.fullmatch(name):
            raise ConfigError(
                "CONFIG",
                f"an evaluation set is called {name!r}: "
                "use 1 to 40 lowercase letters, digits and _, without ema at the start, and not "
                "test_set",
            )
    evaluation = {name: evaluated("eval_sets", part) for name, part in named.items()}
    if test_set is not None:
        evaluation[TEST_SET] = evaluated(TEST_SET, test_set)
    return RunData(train, evaluation)


def fingerprint_of(part: Any) -> str:
    """Return the hash that identifies the content of a part; empty if it has none."""
    return str(part.fingerprint()) if hasattr(part, "fingerprint") else ""


def choose_metrics(
    metrics: Metrics | None, task: Task, data: RunData
) -> dict[str, Sequence[Metric]]:
    """Return the metrics of each set with a loader by its name, the test set's as `test_set`.

    A set that a dict does not name has the metrics of the first set.

    Raises ConfigError for something that is no metric, and for a dict that names an unknown set, or
    not the first.
    """
    if metrics is None:
        metrics = getattr(task, "metrics", None) or [MeanLoss()]
    names = [name for name, each in data.evaluation.items() if not isinstance(each, Evaluation)]
    if not isinstance(metrics, Mapping):
        metrics = dict.fromkeys(names, metrics)
    if not {*names[:1]} <= metrics.keys() <= {*names}:
        raise ConfigError(
            "CONFIG",
            f"metrics= has {[*metrics]}, and the sets are {names}: "
            "give a list for all, or name the first, and others of these",
        )
    listed = {name: check_parts("metrics", of_set) for name, of_set in metrics.items()}
    return {name: listed.get(name, listed[names[0]]) for name in names}
