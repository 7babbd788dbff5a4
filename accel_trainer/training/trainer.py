"""The training loop: steps, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from ..core.config import answers_unknown
from ..core.digest import digest_of
from ..core.errors import CheckpointError, ConfigError, DataError, PartFailed
from ..core.learning_rate import Decay, Schedule, set_learning_rate
from ..core.logger import logger
from ..core.parameters import preserved_weights
from ..core.registry import Pieces, Registry
from ..core.train_state import BestCheckpoint, TrainState, checkpoint_name
from ..core.types import Gradients, Loader, Position, Results, StepBatch, StepReport
from ..core.wording import describe_tensor
from ..fault_tolerance.preemption import EvaluationStopped, StopFlag, stop_on_signals
from ..optim.evaluation_weights import evaluation_weights
from .callback import Callback, RunResult
from .callback_runner import CallbackRunner
from .config import TrainerConfig
from .evaluation.evaluation import (
    TEST,
    Evaluations,
    groups_of,
    nonfinite_loss,
    run_evaluation,
)
from .inspector import Inspector
from .log import Log
from .progress import LoopState, Progress
from .step.turns import in_turn, joined, takes_turns, updates_at

if TYPE_CHECKING:
    from .assembly import Assembly


_READ_ONLY = {"accelerator", "learning_rate_at", "loader", "log", "model", "optimizers", "task"}


class Trainer:
    """Trains on the step batches of `loader`, one optimizer step each; resumes exactly.

    `evaluations` are by name, such as `eval_hard`. The one called `TEST` runs with the weights that
    `load_best` gives the model. Everything that varies is an argument; to change the algorithm
    itself, override `train_step`. `decay` is where a trunk decays. The `inspector` looks on.
    """

    def __new__(cls, config: object = None, *_: object, **parts: object) -> Trainer:
        """Return a new trainer. Raises ConfigError for arguments as other toolkits take them."""
        if not isinstance(config, TrainerConfig):
            given = ", ".join(f"{name}=" for name in parts) or describe_tensor(config)
            raise ConfigError(
                "TRAINER",
                f"{cls.__name__} was called with {given}: give settings to start_run(epochs=...), "
                "and parts to build_trainer(run, model=..., task=..., ...), which makes trainers, "
                f"those of a subclass with trainer_class={cls.__name__}",
            )
        return super().__new__(cls)

    def __init__(
        self,
        config: TrainerConfig,
        assembly: Assembly,
        *,
        loader: Loader,
        evaluations: Evaluations,
        schedule: Schedule,
        decay: Decay | None = None,
        stop_flag: StopFlag,
        callbacks: Sequence[Callback] = (),
        load_best: Callable[[Trainer], str],
        inspector: Inspector | None = None,
    ) -> None:
        of_subclass = {*vars(self)}
        self._step = step = assembly.step
        self.accelerator = step.strategy.accelerator
        self.loader = loader
        self.learning_rate_at = schedule
        self._decay = decay
        self.model = step.model
        self._config = config
        self.optimizers = step.optimizers
        self.task = step.task
        self._takes_turns = takes_turns(step.task)
        self._average = assembly.average
        self._set_training_mode = assembly.set_training_mode
        self._trained = assembly.states
        self._inspector = inspector or Inspector()
        self._checkpointer = assembly.checkpointer
        self._evaluations = evaluations
        self._load_best = load_best
        self._progress = Progress(config, evaluations)
        self._stop_flag = stop_flag
        self._activity = step.activity
        self._callback_runner = CallbackRunner(callbacks)
        self._reduced_rate = self._callback_runner.reduced_rate
        listeners = self._callback_runner.listeners
        is_observed = listeners["before_micro_batch"] or listeners["on_micro_batch"]
        self._notify_micro_batch = self._notify if is_observed else None
        self.log = Log(
            self._checkpointer.run_folder, step.activity, self.accelerator.is_main_process
        )
        loop = LoopState(self._progress, step.nonfinite, self._callback_runner, self.log)
        self._states = Registry({**self._trained.parts, "trainer": loop})
        # Where the last checkpoint was taken; where a run begins, none is due.
        self._saved_state = self.state
        self.metadata: dict[str, Any] = {}
        """Plain JSON values that every checkpoint stores; those of the main process count."""
        self.result: RunResult | None = None
        """How the run ended; None while it runs."""
        # Set last: what is set later is a subclass's, too.
        self._engine_attributes = {*vars(self), "_engine_attributes"} - of_subclass

    def __setattr__(self, name: str, value: Any) -> None:
        is_public = name[0] != "_"  # a step sets some that are not
        if is_public and (
            isinstance(getattr(type(self), name, None), property)
            or (name in _READ_ONLY and name in vars(self))
        ):
            raise ConfigError(
                "TRAINER",
                f"trainer.{name} cannot be assigned: use a different name for your own value, "
                "and pass parts of the training to build_trainer",
            )
        super().__setattr__(name, value)

    @answers_unknown
    def fit(self) -> RunResult:
        """Train from `self.state` to the end; from a restored state this is an exact resume.

        **Collective.**
        """
        with self.running() as reports:
            for _ in reports:
                pass
        assert self.result is not None
        return self.result

    @contextmanager
    def running(self) -> Iterator[Iterator[StepReport]]:
        """Give the loop to the block: it gets an iterator that trains a step for each report.

        **Collective.**

        Leaving the block early saves a checkpoint, as the end of the run does. All processes must
        leave it after the same step. Afterwards `result` says how the run ended.
        """
        if self._checkpointer.is_closed:
            raise ConfigError("TRAINER", "the run has ended: train inside `with start_run(...)`")
        observed = self._callback_runner.errors_observed(self, self._checkpointer)
        with stop_on_signals(self._stop_flag, self._activity), observed:
            self._start()
            with closing(self._steps()) as steps:
                yield steps
            self._activity.result = self._finish()

    def _steps(self) -> Generator[StepReport]:
        """Train, evaluate and save until nothing is left or something stops the run."""
        while self._do_what_is_due():
            yield from self._train_epoch()

    def _do_what_is_due(self) -> bool:
        """Evaluate and save what is due between two steps; return whether another step follows."""
        if self._stop_flag.agreed.is_preemption:
            return False
        if self._is_epoch_end:
            self._end_epoch()
        elif self._is_evaluation_due:  # perhaps a stop came before it, or during it
            self._evaluate_at(self.state)
        if self._is_save_due and self._goes_on:  # else `_finish` saves
            self._save()
        return self._goes_on

    def _train_epoch(self) -> Generator[StepReport]:
        """Train to the end of the epoch, or to a boundary in it that no step follows."""
        self._set_training_mode()
        state = self.state
        step_batches = self.loader.step_batches(state.epoch, state.step_in_epoch)
        for step_batch in self._step.data_wait.around(step_batches):
            yield self._take_step(step_batch)
            self._stop_flag.poll()
            # The end of an epoch comes once its batches have ended.
            if not (self._is_epoch_end or self._do_what_is_due()):
                return
        if not self._is_epoch_end:
            self._save()
            step = self.state.optimizer_step
            raise DataError(
                "DATA_STREAM",
                f"the training data ended after step {step}, which is saved, but the run "
                "has more steps: yield more samples"
                + f", or end the run here with --steps {step} --allow-change trainer.num_steps"
                * (step > 0),
            )

    def _take_step(self, step_batch: StepBatch) -> StepReport:
        """Take one step, and show it to the hooks. Raises ConfigError if `train_step` does not."""
        self._inspector.step()
        step = self._step
        step_batches = [step_batch]
        if self._takes_turns:
            step.updates = updates_at(self.position, self.task, self.optimizers, self.accelerator)
            # Each later update gets an unmodified copy: a task may change its batch in place.
            step_batches[:0] = [step_batch.copied() for _ in step.updates[1:]]
        step.num_updates = 0
        reports = []
        for turn, each in zip(step.updates, step_batches, strict=True):
            step.turn = turn
            reports.append(self.train_step(each))
            self._check_update(reports[-1], step.num_updates - len(reports))
        self._inspector.stepped()
        report = joined(reports) if hasattr(self.task, "updates") else reports[0]
        self._notify("on_step_end", report)
        inspector = self._inspector.boundary(report)
        if inspector is not self._inspector:
            self._inspector = inspector
        return report

    def _check_update(self, report: object, num_more: int) -> None:
        """Raise ConfigError unless `train_step` has made one update, and returned its `report`."""
        if not isinstance(report, StepReport):
            raise ConfigError(
                "TRAINER",
                f"train_step returned {describe_tensor(report)}: "
                "return what super().train_step(step_batch) returns",
            )
        if num_more:
            raise ConfigError(
                "TRAINER",
                f"train_step took {1 + num_more} steps for a step batch: call apply_gradients or "
                "super().train_step once. For several backward passes call compute_gradients "
                "more than once; for larger batches use --accumulate; to train networks in "
                "turn, give each an optimizer by name, and the task a method turn, or updates",
            )

    def train_step(self, step_batch: StepBatch) -> StepReport:
        """Take one optimizer step by the mean loss over the step batch of all processes.

        **Collective.** Override it to change the algorithm. With `updates` of the task, it is
        called for each of them, with the same step batch.
        """
        return self.apply_gradients(self.compute_gradients(step_batch))

    def compute_gradients(self, step_batch: StepBatch) -> Gradients:
        """Return the gradients of the mean loss over the step batch of all processes.

        **Collective. Host sync** with `--check-every`.

        `.grad` is None afterwards, and each process has the same generators: noise that is added to
        the gradients is the same everywhere. `train_step` may call it more than once, such as at
        changed weights, which it restores itself: all forwards start from the same buffers and draw
        the same random numbers, and the first call decides which buffers the step ends with.

        Raises:
            ConfigError: the task does not return what a step needs, or gives the turn to no
                optimizer, a backward of the user's has left gradients, or a second call would need
                loss scaling.
        """
        micro_batches = getattr(step_batch, "micro_batches", ())
        if not hasattr(micro_batches, "__len__") or not micro_batches:
            found = micro_batches if isinstance(step_batch, StepBatch) else step_batch
            raise ConfigError(
                "TRAINER",
                f"compute_gradients got {describe_tensor(found)}: give it the step batch that "
                "train_step got, or one with different micro-batches, in a list",
            )
        step = self._step
        step_batch = StepBatch(micro_batches, step_batch.num_samples, self.position, step.turn)
        self._inspector.computing()
        gradients = step.compute_gradients(step_batch, self._notify_micro_batch)
        self._inspector.computed()
        return gradients

    def apply_gradients(self, gradients: Gradients) -> StepReport:
        """Update the weights and their average; after the last update, move to the next position.

        **Collective. Host sync** with loss scaling. Call it once in a step or update.

        Raises:
            ConfigError: `gradients` are not of this step, or do not fit the parameters.
            DivergedError: a gradient is NaN or inf, and the run must end.
        """
        if not isinstance(gradients, Gradients):
            raise ConfigError(
                "TRAINER",
                f"apply_gradients got {describe_tensor(gradients)}: pass what compute_gradients "
                "returned, or dataclasses.replace(gradients, tensors=...) to change its tensors",
            )
        state = self._progress.state
        number = state.optimizer_step + 1
        step, step_batch = self._step, gradients.step_batch
        of_step, turn = step_batch.position.step + 1, step_batch.turn
        if of_step != number or turn != step.turn:
            raise ConfigError(
                "TRAINER",
                f"apply_gradients got the gradients of step {of_step} {turn}".rstrip()
                + f" in step {number} {step.turn}".rstrip()
                + ": call it once in each step, with what compute_gradients returned",
            )
        self._inspector.update()
        self._notify("before_update", gradients)
        learning_rate = self.learning_rate_at(state.optimizer_step)
        reduced = self._reduced_rate
        for optimizer in self.optimizers.values():
            set_learning_rate(optimizer, learning_rate, reduced)
        grad_norm, was_skipped = step.apply_gradients(state, gradients)
        is_last = step.num_updates >= len(step.updates)
        if is_last:
            self._move_to(state.after_step(step_batch.num_samples))
        num_steps = {"": number} if is_last else {}
        for name in in_turn(self.optimizers, turn):
            if name:
                self._progress.num_turns[name] += 1
                num_steps[name] = self._progress.num_turns[name]
        if self._average is not None and not was_skipped:
            self._average.update(num_steps)
        sums = gradients.sums
        # Positional, in the order of its fields: keywords would first make a dict.
        return StepReport(
            number,
            state.epoch,
            learning_rate if reduced is None else reduced(learning_rate),
            sums.loss,
            sums.numbers,
            step_batch.num_samples,
            grad_norm,
            was_skipped,
            sums.num_items,
            gradients.sample_ids,
            turn,
        )

    def evaluate(self) -> Results:
        """Return the metrics of the model as `eval/...` and of its EMA as `eval_ema/...`.

        **Collective. Host sync.** Those of a named set are `eval_<name>/...`.

        Raises:
            EvaluationStopped: some process got a signal.
        """
        with self._activity.during("evaluation"), evaluation_weights(self.optimizers):
            return self._measure(*(name for name in self._evaluations if name != TEST))

    def _measure(self, *names: str) -> Results:
        """Return what the evaluations `names` measure of the model, and perhaps of its average."""
        models = [each.model for each in (self._step, self._average) if each is not None]
        metrics: dict[str, Any] = {}
        for name in names:
            evaluation = self._evaluations[name]
            for group, model in zip(groups_of(name, evaluation), models, strict=False):
                with self._inspector.measuring(group, model):
                    values = run_evaluation(
                        evaluation,
                        model,
                        self.accelerator,
                        seed=self._step.strategy.seed,
                        position=self.position,
                        stop_flag=self._stop_flag,
                    )
                metrics |= {f"{group}/{number}": value for number, value in values.items()}
        return metrics

    def load_best(self) -> str:
        """Give the model the weights that the run exports: the best, or else the last; say which.

        **Collective.** Call it once the run has ended, inside the block of `start_run` or in
        `on_fit_end`: after `fit`, the model has the weights of the last step.

        Raises ConfigError before the end of the run.
        """
        if self.result is None:
            raise ConfigError(
                "TRAINER",
                "load_best was called before the end of the run, which would continue from "
                "different weights: call it after fit, or in on_fit_end",
            )
        return self._load_best(self)

    def request_stop(self, reason: str) -> None:
        """End the run after this step, as if training were complete; the first `reason` counts.

        Call it on every process at the same step.
        """
        self._progress.requested_stop = self._progress.requested_stop or reason

    def request_save(self) -> None:
        """Save a checkpoint at the next step boundary, and go on training.

        Any process may call it at any time. All save after the same step: with several processes,
        that is one step later. After an evaluation, the checkpoint holds its result.
        """
        self._stop_flag.request_save()

    def _save(self) -> None:
        """Pass a checkpoint of the current position to the writer. **Collective.**"""
        self._stop_flag.is_save_agreed = False
        self._saved_state = self.state
        self._step.check.settle()
        with self._activity.during("disk"):
            self._checkpointer.wait()
        with self._activity.during("save"):
            self._notify("before_save")
            local = self._states.state_dict()
            self._inspector.save(local)
            pieces = self._step.strategy.gather(local)
            if self.accelerator.is_main_process or self._checkpointer.peers.group is not None:
                self._checkpointer.save(
                    self.state,
                    pieces,
                    best=self.best,
                    metadata=self.metadata,
                )
        self._notify("on_checkpoint", checkpoint_name(self.state))

    def restore(self, pieces: Pieces, *, changes: Collection[str] = ()) -> None:
        """Restore a checkpoint's `pieces`, the same on every process.

        `changes` are the settings that were changed on purpose. If there are any, callbacks decide
        again whether to stop. If they change the samples of a step, the epoch in progress starts
        again.

        Raises:
            CheckpointError: a piece is missing, or does not fit a part of the run; nothing is
                changed then. Any other error may leave the trainer partly restored.
        """
        self._states.load_state_dict(pieces, changes=changes)
        self._progress.go_on_with(changes)
        self._move_to(self.state)
        self._saved_state = self.state
        for name in sorted(pieces.keys() - self._states.parts.keys()):
            logger.warning("the checkpoint has %s, which this run does not have: it is lost", name)
        self._callback_runner.warn_of_lost(pieces["trainer"]["callbacks"])

    def state_dict(self) -> Pieces:
        """Return the state of the run, as references to live tensors. **Collective. Host sync.**"""
        return self._step.strategy.gather(self._states.state_dict())

    def digests(self) -> dict[str, str]:
        """Return a digest of each part that a checkpoint stores, such as `model` and `optimizer`.

        **Collective** with shards. **Host sync.**
        """
        return {name: digest_of(state) for name, state in self._trained.state_dict().items()}

    @property
    def state(self) -> TrainState:
        """How far training has come."""
        return self._progress.state

    @property
    def best(self) -> BestCheckpoint | None:
        """The best evaluation so far."""
        return self._progress.best

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of a run that names none. Raises ConfigError if they have names."""
        if "" not in self.optimizers:
            raise ConfigError(
                "TRAINER",
                f"the optimizers have names ({', '.join(self.optimizers)}): "
                "use trainer.optimizers[name]",
            )
        return self.optimizers[""]

    @property
    def average_model(self) -> nn.Module | None:
        """The model with the averaged weights, in evaluation mode; None without `--ema`.

        What its modules compute from the weights is of the weights as they are now: ask for it in
        each hook.
        """
        return None if self._average is None else self._average.evaluated()

    @property
    def data_wait_s(self) -> float:
        """Seconds that training has waited for data in this attempt."""
        return self._step.data_wait.seconds

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to train."""
        return self._progress.end_reason is not None

    @property
    def _goes_on(self) -> bool:
        return self._progress.end_reason is None and not self._stop_flag.agreed

    @property
    def _is_epoch_end(self) -> bool:
        return self._progress.state.step_in_epoch >= self.loader.plan.steps_per_epoch

    @property
    def _is_evaluation_due(self) -> bool:
        """Whether the weights of this position are to be evaluated, and have not been."""
        state = self._progress.state
        return (
            self._config.evaluates_after(state, self.loader.plan.steps_per_epoch)
            and state.step_in_epoch > 0
            and not self._progress.is_evaluated
        )

    @property
    def _is_save_due(self) -> bool:
        state = self._progress.state
        is_due = self._stop_flag.is_save_agreed or self._checkpointer.config.is_due(state)
        if self._progress.is_evaluated:
            best = self._progress.best
            is_best = best is not None and best.name == checkpoint_name(state)
            is_due |= is_best or self._config.num_steps is not None
        return is_due and state != self._saved_state

    def _move_to(self, state: TrainState) -> None:
        self._progress.state = state
        self._activity.state = state

    @property
    def position(self) -> Position:
        """The place of the next step in the whole training."""
        step, epoch, step_in_epoch, _ = self._progress.state
        steps_per_epoch = self.loader.plan.steps_per_epoch
        if self._decay is not None:  # until then, it is the same for any length
            progress = self._decay.fraction_done(step)
        elif num_steps := self._config.num_steps:
            progress = step / num_steps
        else:
            epochs = epoch + step_in_epoch / steps_per_epoch
            progress = epochs / (self._config.num_epochs or 1)
        return Position(step, epoch, progress, step_in_epoch, steps_per_epoch)

    def _start(self) -> None:
        self._notify("on_fit_start")
        # Somebody may have caught what a signal raised, on some of the processes.
        self._stop_flag.agree()
        # From here on, a signal ends the run only after a checkpoint.
        self._activity.phase = "training"
        self._inspector.begin(self, self._states.state_dict, self._attributes_of_subclass)

    def _attributes_of_subclass(self) -> dict[str, object]:
        """Return the attributes that a subclass has set."""
        known = self._engine_attributes
        return {name: value for name, value in vars(self).items() if name not in known}

    def _end_epoch(self) -> None:
        """Evaluate if due, and move to the next epoch unless a signal ends the evaluation."""
        next_epoch = self.state.after_epoch()
        with self._inspector.epoch_end():
            if self._is_evaluation_due and not self._evaluate_at(next_epoch):
                return  # `_finish` saves the position as not yet evaluated: a resume evaluates it
            self._move_to(next_epoch)
            self._notify("on_epoch_end")

    def _evaluate_at(self, state: TrainState) -> bool:
        """Evaluate the weights and notify; return False if a signal stopped the evaluation.

        `state` is the one in the checkpoint that will hold these weights.
        """
        try:
            metrics = self.evaluate()
            unusable = self._progress.record_evaluation(metrics, checkpoint_name(state))
        except EvaluationStopped:
            return False
        except CheckpointError:  # the evaluation has changed what would be saved
            raise
        except Exception as error:
            # Once the cause is fixed, the same command continues without the loss of a step. A save
            # is collective: all processes know of a failed metric, but not of other errors.
            if isinstance(error, PartFailed) or self.accelerator.num_processes == 1:
                self._save()
            raise
        if found := nonfinite_loss(metrics):
            logger.warning("%s at step %d: lower the learning rate", found, state.optimizer_step)
        elif unusable:
            logger.warning(
                "[METRIC] %s decides the best checkpoint and is NaN or inf at step %d: this "
                "evaluation is never the best, and counts as no improvement",
                unusable,
                state.optimizer_step,
            )
        self._notify("on_evaluate_end", metrics)
        return True

    def _finish(self) -> RunResult:
        """Save, evaluate the final weights if they have not been, and return how the run ended.

        **Collective.**

        A run that stops inside an epoch is evaluated after its checkpoint is saved, which does not
        hold the result: the run that continues later is then the same as one that never stopped,
        and a finished run that is started again evaluates the same.
        """
        self._stop_flag.drain()
        self._save()  # the checkpointer does not write a position twice
        with self._activity.during("disk"):
            self._checkpointer.wait(must_succeed=True)
        progress = self._progress
        if not progress.is_evaluated and not self._stop_flag.agreed.is_preemption:
            requested = progress.requested_stop
            self._evaluate_at(self.state)
            # No checkpoint holds this evaluation, so it cannot end a run that continues later.
            progress.requested_stop = requested
            if self.accelerator.is_main_process:
                self._checkpointer.record_best(self.best)
        result = progress.result(self._stop_flag.agreed, self.log.folder)
        if result.state == "done" and TEST in self._evaluations:
            try:
                with self._activity.during("evaluation"), preserved_weights(self.model):
                    self._load_best(self)
                    result = replace(result, metrics={**result.metrics, **self._measure(TEST)})
            except EvaluationStopped:  # a resume tests
                result = replace(
                    result, state="preempted", stop_reason=self._stop_flag.agreed.reason or ""
                )
        is_diverged = result.state != "preempted" and nonfinite_loss(result.metrics) is not None
        self._activity.phase = "diverged" if is_diverged else result.state
        self.result = result
        self._notify("on_fit_end", result)
        return result

    def _notify(self, hook: str, *arguments: Any) -> None:
        if self._callback_runner.listeners[hook]:
            watch = self._inspector.hook(hook)
            self._callback_runner.notify(hook, self, arguments, watch)
