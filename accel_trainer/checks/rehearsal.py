"""Rehearses a resume at each start: a run that could not resume exactly ends at its first step.

A resume builds every object again and loads a checkpoint into it. State that is not in the
checkpoint, or cannot be loaded, is lost. State that only later steps change is not found here;
`chaos` finds more. It is no replay of a recorded run: nothing is recorded yet, and it needs
no second process.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.optimizer_state import OptimizerState
from ..checkpoint.serialization import decode, encode
from ..core.digest import digest_of
from ..core.errors import listed
from ..core.logger import logger
from ..core.parameters import (
    named_parts,
    parameters_of,
    preserved_parameters,
)
from ..core.registry import Pieces
from ..core.types import StepReport
from ..core.user_code import describe_error
from ..distributed.collectives import run_on_main
from ..fault_tolerance.activity import Activity
from ..training.callback import Callback, TrainerView
from ..training.callback_runner import Watch, named
from ..training.config import TrainerConfig
from ..training.evaluation.evaluation import (
    Evaluation,
    Evaluations,
    check_monitored,
    groups_of,
    run_evaluation,
)
from ..training.evaluation.evaluator import Evaluator
from ..training.inspector import Inspector, ReadAttributes, ReadState
from ..training.progress import choose_monitor
from .batch_norms import has_lone_sample, lone_samples_refused
from .boundaries import IN_STEPS, BoundaryChecks
from .evaluation_trial import EvaluationTrial
from .hook_arguments import HookArguments
from .model_watch import StepUse, flags_noted, mark_model, watched_read, weights_in
from .same_everywhere import check_same_lines, lines_of
from .subject import (
    NOT_NEEDED,
    Marks,
    Subject,
    changed,
    first_difference,
    inexact,
    refuse_changes,
)
from .unchanged import left_unchanged
from .unsaved_state import Parts, Walk, is_of_user, mark_unsaved
from .untrained import untrained_named
from .used_before import noted_changes

if TYPE_CHECKING:
    from ..checkpoint.manager import Checkpointer


@dataclass(eq=False)
class Rehearsal(Inspector):
    """Compares what a resume would have with the live state, in the first two steps of a start.

    `boundaries` look at the evaluations and saves, and at the rest of the run.
    """

    subject: Subject
    boundaries: BoundaryChecks
    _: KW_ONLY
    config: TrainerConfig
    evaluations: Evaluations
    checkpointer: Checkpointer
    activity: Activity

    def __post_init__(self) -> None:
        self._model = self.subject.model
        self._optimizers = named_parts(self.subject.optimizers)
        self._fresh = {name: _copy_optimizer(each) for name, each in self._optimizers.items()}
        self._watching = ExitStack()
        self._reading = ExitStack()
        self._whole_run = ExitStack()
        self._arguments = HookArguments(self._model)
        self._uses: list[StepUse] = []
        self._weights: list[Mapping[str, object]] = []
        self._read: set[str] = set()
        self._restored: set[str] = set()

    def close(self) -> None:
        """Stop looking at a step that has failed."""
        self._watching.close()
        self._reading.close()
        self._whole_run.close()

    # --- before the first step ---

    def begin(
        self, trainer: TrainerView, read_state: ReadState, attributes: ReadAttributes
    ) -> None:
        """Note the state, and try the evaluations. **Collective. Host sync.**

        Raises:
            ConfigError: a norm would get a single value.
            EvaluationRefused: what is monitored, such as `eval/loss`, is not one number.
            Exception: an evaluation cannot work.
        """
        self._read_state = read_state
        self._trainer = trainer
        self.boundaries.begin(trainer, read_state, attributes)
        self._marks = [self._mark(is_first=True)]
        is_new = trainer.state.optimizer_step == 0
        self._whole_run.enter_context(noted_changes(self._used_parts(), is_new=is_new))
        if is_new:
            self._whole_run.enter_context(untrained_named(self.subject.optimizers, trainer))
        plan = trainer.loader.plan
        # A resume on other processes may split a step otherwise.
        if (is_new or has_lone_sample(plan)) and not trainer.is_finished:
            watched = lone_samples_refused(self._model, plan, self.config)
            with self.activity.during("evaluation"), watched:
                self._try_evaluations(trainer.loader)

    def _used_parts(self) -> Parts:
        """Return what a run may change, and a later one in this process may be given again."""
        parts = dict(self.subject.parts)
        parts |= {f"the state {name}": each for name, each in self.subject.states.items()}
        for name, each in self.evaluations.items():
            metrics = named(each.metrics) if isinstance(each, Evaluator) else {}
            parts |= {f"{metric} of {name}": part for metric, part in metrics.items()}
        return parts

    def _mark(self, *, is_first: bool = False) -> Marks:
        return self.subject.mark(self.boundaries.parts(), is_first=is_first)

    def _try_evaluations(self, train_loader: object) -> None:
        """Call each `run` that has a `limit`, and warn of what it changes and no checkpoint holds.

        The first set stands for the training, too.
        """
        monitored = next(iter(choose_monitor(self.config, self.evaluations)), "")
        group, _, number = monitored.partition("/")
        for name, evaluation in self.evaluations.items():
            tried: Evaluation = evaluation
            changing: Sequence[object] = [evaluation]
            if isinstance(evaluation, Evaluator):
                tried, changing = EvaluationTrial(evaluation, train_loader), evaluation.metrics
                train_loader = None
            if "limit" not in inspect.signature(tried.run).parameters:
                continue
            watching = self.subject.watching(
                named(changing), "an evaluation", "compute each result from one evaluation alone"
            )
            # The trial must not change what compiles.
            with watching, torch.compiler.set_stance("force_eager"):
                values = run_evaluation(tried, self._model, self.subject.accelerator, limit=1)
            if group in groups_of(name, evaluation):
                check_monitored(values, number)

    # --- in a step ---

    def step(self) -> None:
        """Note what the step uses of the model."""
        self._before = mark_model(self._model)
        self._used: dict[str, bool] = {}
        self._watching.enter_context(flags_noted(self._model, self._used))
        if len(self._marks) > 1:
            self._watch_reads()

    def stepped(self) -> None:
        """Note what the step has left of that."""
        self._watching.close()
        self._uses.append(StepUse(self._before, self._used, mark_model(self._model)))

    def computing(self) -> None:
        """Note the user's states, which micro-batches leave as they are. **Host sync.**"""
        self._states_before = self._digest_states()

    def computed(self) -> None:
        """Check these states, and the samples of streams. **Collective. Host sync.**

        Raises:
            CheckpointError: a state has changed.
            ConfigError: processes have read different samples.
        """
        self.boundaries.readings.compare()
        refuse_changes(
            "a micro-batch",
            self._states_before,
            self._digest_states(),
            "keep what it needs in on_micro_batch, and change it in on_step_end; call eval() on a "
            "module whose norms change their statistics",
        )
        self._weights.append(weights_in(self._model))

    def update(self) -> None:
        """Check that the weights are those of the step's first gradients.

        Raises CheckpointError if `train_step` has changed them.
        """
        if len(self._weights) > 1:
            refuse_changes(
                "train_step",
                self._weights[0],
                weights_in(self._model),
                "restore what train_step changes between two calls of compute_gradients",
            )
        self._weights.clear()

    def _digest_states(self) -> dict[str, str]:
        return {name: digest_of(state.state_dict()) for name, state in self.subject.states.items()}

    def _watch_reads(self) -> None:
        """Watch the attributes that the first step has set: does the second one read them?

        Or one of its hooks.
        """
        first, second = self._marks
        late = [
            name
            for name, (kind, _) in second.items()
            if first.get(name, (NoneType,))[0] is NoneType is not kind
        ]
        owners = Walk(self.boundaries.parts(), self._model).owners if late else {}
        for name in late:
            owner, key = owners.get(name, (self._trainer, name.removeprefix("trainer.")))
            with suppress(AttributeError, TypeError):  # of a class, a file or a function
                self._reading.enter_context(watched_read(owner, key, name, self._read))

    # --- between steps ---

    def measuring(self, name: str, model: nn.Module) -> AbstractContextManager[None]:
        """Look at it as later ones, but not before a step, whose forward may set up a model."""
        return self.boundaries.measuring(name, model) if self._uses else nullcontext()

    def epoch_end(self) -> AbstractContextManager[None]:
        """Look at it as later ones."""
        return self.boundaries.epoch_end()

    def save(self, pieces: Pieces) -> None:
        """Look at it as later ones."""
        self.boundaries.save(pieces)

    def hook(self, name: str) -> Watch | None:
        """Watch the hooks of a step, too, and what they are called with."""
        return self._watching_in_step if name in IN_STEPS else self.boundaries.hook(name)

    @contextmanager
    def _watching_in_step(
        self, name: str, callback: Callback, arguments: Sequence[Any]
    ) -> Iterator[None]:
        with self.boundaries.watching_hook(name, callback, arguments), ExitStack() as watching:
            if is_of_user(type(callback)):
                watching.enter_context(self._arguments.watching(name, arguments))
            yield

    def boundary(self, report: StepReport) -> Inspector:
        """Check the state that a checkpoint would hold, perhaps with this process's shards.

        **Collective. Host sync.** Before the next step, so that a run that cannot resume exactly
        loses no work.

        Raises:
            CheckpointError: a resume could not load the checkpoint, or would differ from the live
                state of some process, or there is no room for a checkpoint.
        """
        self._reading.close()
        if report.was_skipped:
            return self
        with left_unchanged("a state_dict", self._model):
            state = self._read_state()
        self.boundaries.save(state)
        accelerator = self.subject.accelerator
        if len(self._marks) > 1:
            run_on_main(self._warn_of_unsaved, accelerator)
            return self.boundaries
        check_same_lines(lines_of({name: state[name] for name in self._optimizers}), accelerator)
        # On each process: a user's optimizer may run collectives to load shards.
        while self._fresh:
            name, fresh = self._fresh.popitem()
            if fresh is not None:
                self._check_optimizer(name, fresh, state[name])
        run_on_main(lambda: self.checkpointer.check_room(state), accelerator)
        self._marks.append(self._mark())
        return self

    def _check_optimizer(self, part: str, fresh: Optimizer, state: Mapping[str, Any]) -> None:
        """Load `state` into `fresh`, as a resume does, and compare it with the live optimizer."""
        encoded = encode(state, name=part)
        piece = decode(encoded.skeleton, encoded.tensors)
        name = type(fresh).__name__
        try:
            with preserved_parameters(fresh):
                fresh.load_state_dict(OptimizerState(fresh, self._model).validated(piece))
                found = fresh.state_dict()
        except Exception as error:
            raise inexact(
                f"{name}.load_state_dict cannot load what {name}.state_dict returned "
                f"({describe_error(error)})"
            ) from error
        addresses = {id(parameter) for parameter in parameters_of(fresh)}
        if any(isinstance(each, Mapping) and addresses & each.keys() for each in found.values()):
            raise inexact(
                f"{name}.state_dict has the address of a parameter as a key, which "
                "changes with each start: use the number of the parameter"
            )
        if path := first_difference(self._optimizers[part].state_dict(), found):
            raise inexact(
                f"{name}.load_state_dict does not restore the optimizer's {path}: a resumed "
                "run would have other weights"
            )
        live = mark_unsaved({part: self._optimizers[part]}, model=self._model)
        loaded = mark_unsaved({part: fresh}, model=self._model)
        # The copy shares classes, functions and files: they show nothing.
        same = {key for key, mark in live.items() if loaded.get(key) == mark}
        self._restored |= {key for key in same if key.startswith(f"{part}.")}

    def _warn_of_unsaved(self) -> None:
        """Warn of values that both steps have changed.

        A value that only the first step changes is set up there, and would be after a resume, too.
        """
        first, second, third = [*self._marks, self._mark()]
        one, two = self._uses[0], self._uses[-1]
        warn = self.subject.warn
        warn(
            "a step changes",
            one.changed_late(two),
            "set it before it is used, or before build_trainer",
        )
        self._warn_of_unreached(one, two)
        created = {
            name
            for name in third.keys() - first.keys()
            if isinstance(kind := third[name][0], tuple) and kind[0] is nn.Parameter
        }
        warn(
            "the first step creates",
            created,
            "a resume would draw other random numbers for it, so create it before build_trainer",
        )
        # What is None until the first step is often kept for a log alone: nothing reads it.
        kept = changed(first, second) | self._read
        unsaved = kept & changed(second, third) - self._restored
        warn(
            "training changes",
            # Parameters may take turns: what a step leaves of `requires_grad` is compared above.
            {name for name in unsaved if not name.endswith(".requires_grad")},
            "if --dry-run shows that it matters, keep it in a buffer of the model "
            "(register_buffer), in the state_dict of the optimizer or a callback, or in states= of "
            "build_trainer; if not, " + NOT_NEEDED,
        )

    def _warn_of_unreached(self, one: StepUse, two: StepUse) -> None:
        """Warn of trained parameters without a gradient, unless some have turns of their own."""
        trained = {
            each
            for each in {**one.used, **two.used}
            if each.endswith("_grad") and two.after.get(each)
        }
        reached = {each for each in trained if one.used.get(each) or two.used.get(each)}
        handler = self.subject.accelerator.ddp_handler
        may_skip = getattr(handler, "find_unused_parameters", False)
        unreached = trained - reached
        if reached and unreached and not may_skip:
            logger.warning(
                "[UNUSED_PARAMETERS] %d of %d trained parameters got no gradient in the first two "
                "steps (%s): freeze them (requires_grad=False), or look for a detach() or "
                "no_grad() between them and the loss",
                len(unreached),
                len(trained),
                listed(each.removesuffix(".requires_grad") for each in unreached),
            )


def _copy_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return a copy of a user's optimizer over the same parameters.

    None for an optimizer of torch or of this package, and for one that cannot be copied.
    """
    if type(optimizer).__module__.partition(".")[0] in ("torch", "accel_trainer"):
        return None
    shared = {id(parameter): parameter for parameter in parameters_of(optimizer)}
    copied = object.__new__(type(optimizer))
    try:
        vars(copied).update(copy.deepcopy(vars(optimizer), {id(optimizer): copied, **shared}))
    except Exception:  # it holds something that cannot be copied, such as a lock
        return None
    return copied
