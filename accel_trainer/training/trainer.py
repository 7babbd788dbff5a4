"""The algorithm. Everything else serves these few functions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import islice
from traceback import clear_frames
from typing import Any

from accelerate import Accelerator
from accelerate.utils import release_memory
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.format import checkpoint_name
from ..checkpoint.manager import Checkpointer
from ..checkpoint.state_dict import StateDicts, TrainingState
from ..core.callback import Callback, RunResult
from ..core.train_state import BestCheckpoint, TrainState
from ..core.types import Loader, StepBatch, StepOutput, StepReport, Task
from ..data.dataloader import WaitClock
from ..distributed.accelerate_settings import reject_unsupported
from ..distributed.fsdp import sharded_copy
from ..fault_tolerance.nonfinite_guard import NonfiniteGuard
from ..fault_tolerance.out_of_memory import halve_micro_batch, is_out_of_memory, needs_restart
from ..fault_tolerance.preemption import StopFlag, stop_on_signals
from ..fault_tolerance.watchdog import Watchdog
from ..optim.ema import Ema
from ..optim.evaluation_weights import evaluation_weights
from ..optim.lr_scheduler import Schedule
from ..optim.optimizers import set_learning_rate
from ..optim.parameter_groups import set_training_mode
from ..optim.reduction import build_reduction
from .callback_runner import CallbackRunner
from .compile import compile_errors_explained
from .config import TrainerConfig
from .evaluation_file import read_details, write_details
from .evaluator import EvaluationStopped, Evaluator, MetricFailed, nonfinite_loss
from .first_step import FirstStep
from .optimizer_step import OptimizerStep, StepResult
from .progress import Progress
from .rehearsal import Rehearsal
from .task_output import check_step_output

_logger = logging.getLogger(__name__)
_AS_IT_IS = nullcontext()


class Trainer:
    """Trains `model` on the step batches of `loader`: one optimizer step per step batch, exact and resumable.

    `model` is the plain module on the accelerator's device and `optimizer` its plain optimizer; the trainer prepares
    both. Everything that varies is a collaborator; to change the algorithm itself, override `train_step`.
    """

    def __init__(
        self, config: TrainerConfig, *, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer,
        learning_rate_at: Schedule, task: Task, loader: Loader, evaluator: Evaluator, checkpointer: Checkpointer,
        seed: int, watchdog: Watchdog | None = None, on_micro_batch_halved: Callable[[int], None] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        reject_unsupported(accelerator)
        self.accelerator, self.loader, self.learning_rate_at = accelerator, loader, learning_rate_at
        self._config, self._task, self._evaluator, self._checkpointer = config, task, evaluator, checkpointer
        self._reduction = build_reduction(loader.plan, accelerator, seed=seed)
        self._run_folder = checkpointer.directory.parent
        self._progress = Progress(config, evaluator.metrics)
        self.state = self._progress.position
        self._watchdog = watchdog or Watchdog(StopFlag(num_processes=accelerator.num_processes))
        self._watchdog.position, self._stop_flag = self.state, self._watchdog.stop_flag
        self._data_wait, self._on_micro_batch_halved = WaitClock(), on_micro_batch_halved
        self._callback_runner = CallbackRunner(callbacks)
        self.raw_model, self.optimizer = model, optimizer
        copied = None if config.ema_decay is None else sharded_copy(model, accelerator)
        self._model, prepared_optimizer = self._reduction.prepare(model, optimizer)
        self._ema = None if config.ema_decay is None else Ema(model, decay=config.ema_decay, copied=copied)
        self._guard = NonfiniteGuard(
            may_skip=config.on_nonfinite == "skip", accelerator=accelerator, model=model, optimizer=optimizer,
            task=task, seed=seed, folder=self._run_folder,
        )  # fmt: skip
        self._update = OptimizerStep(
            accelerator=accelerator, model=self._model, optimizer=optimizer, prepared_optimizer=prepared_optimizer,
            reduction=self._reduction, guard=self._guard, max_grad_norm=config.max_grad_norm,
        )  # fmt: skip
        average, gathers = None if self._ema is None else self._ema.model, checkpointer.peers.group is None
        self._training_state = TrainingState(model, optimizer, average, accelerator.scaler, gathers=gathers)
        self._rehearsal = Rehearsal(
            model=model, optimizer=optimizer, parts={"task": task}, accelerator=accelerator, checkpointer=checkpointer
        )

    def fit(self) -> RunResult:
        """Train from `self.state` to the end; from a restored state this is an exact resume. **Collective.**"""
        observed = self._callback_runner.errors_observed(self, self._checkpointer)
        with stop_on_signals(self._stop_flag), observed, compile_errors_explained():
            self._start()
            while not self._stop_flag.agreed.is_preemption:
                if self._is_epoch_end:
                    self._end_epoch()
                elif self.is_finished or self._stop_flag.agreed:
                    break
                else:
                    self._train_epoch()
            return self._finish()

    def _train_epoch(self) -> None:
        """Train on what is left of the epoch, until something stops the run."""
        set_training_mode(self._model)
        try:
            for step_batch in self._data_wait.around(self._step_batches()):
                report = self.train_step(step_batch)
                self._notify("on_step_end", report)
                if self._rehearsal.num_steps_left and not report.was_skipped:
                    # Before training goes on: a run that cannot resume exactly ends here.
                    self._rehearsal.after_step(self._local_state)
                if self._stop_flag.poll() or self._progress.requested_stop:
                    break
                if self._checkpointer.config.is_due(self.state) and not self._is_epoch_end:
                    self._save()
        except (RuntimeError, MemoryError) as error:
            if not (self._update.is_open and is_out_of_memory(error)):
                raise
            self._halve_micro_batch(error)

    def train_step(self, step_batch: StepBatch) -> StepReport:
        """Take one optimizer step by the mean loss over all samples of the step batch, on all processes."""
        state = self.state
        learning_rate = self.learning_rate_at(state.optimizer_step)
        set_learning_rate(self._update.optimizer, learning_rate)
        output, update = self._compute(step_batch)
        state.advance(step_batch.num_samples)
        if self._ema is not None and not update.was_skipped:
            self._ema.update(optimizer_step=state.optimizer_step)
        return StepReport(
            state.optimizer_step, state.epoch, learning_rate, output.loss_sum, output.sums, step_batch.num_samples,
            update.grad_norm, update.was_skipped, output.num_items,
        )  # fmt: skip

    def _compute(self, step_batch: StepBatch) -> tuple[StepOutput, StepResult]:
        """Run forward, backward and update; return the losses and sums, and the result of the update."""
        accelerator, reduction = self.accelerator, self._reduction
        scale = reduction.loss_scale / step_batch.num_samples
        losses, sums, counts = [], [], []
        first = FirstStep(self._task, self.raw_model, accelerator) if self.state.optimizer_step == 0 else None
        task = first or self._task
        self._update.begin()
        for index, batch in enumerate(self._data_wait.around(step_batch.micro_batches)):
            self._watchdog.num_forwards += 1
            reduction.begin_forward(self.state.optimizer_step, index)
            is_last = index == len(step_batch.micro_batches) - 1
            with _AS_IT_IS if is_last else accelerator.no_sync(self._model):
                with accelerator.autocast() if accelerator.native_amp else _AS_IT_IS:
                    output = task.train_step(self._model, batch)
                check_step_output(output)
                self._update.backward(output.loss_sum, scale)
            if first is not None:
                first.check(batch, output)
            reduction.end_backward(len(batch))
            losses.append(output.loss_sum.detach())
            sums.append(output.sums)
            if output.num_items is not None:
                counts.append(output.num_items)
        output = self._update.reduce(losses, sums, counts, num_samples=step_batch.num_samples)
        return output, self._update.apply(self.state, step_batch, losses)

    def evaluate(self) -> dict[str, Any]:
        """Return the metrics of the model as `eval/...` and of its EMA as `eval_ema/...`. **Collective. Host sync.**

        Raises:
            EvaluationStopped: some process got a signal.
        """
        models = {"eval": self.raw_model} | ({} if self._ema is None else {"eval_ema": self._ema.model})
        metrics: dict[str, Any] = {}
        with self._watchdog.during("evaluation"), evaluation_weights(self.optimizer):
            for group, model in models.items():
                values = self._evaluator.run(model, stop_flag=self._stop_flag)
                metrics |= {f"{group}/{name}": value for name, value in values.items()}
        return metrics

    def request_stop(self, reason: str) -> None:
        """Stop at the next step boundary. Call it on every process at the same step."""
        self._progress.requested_stop = self._progress.requested_stop or reason

    def _save(self) -> None:
        """Pass a checkpoint of the current position to the writer. **Collective.**"""
        self._guard.flush()
        with self._watchdog.during("disk"):
            self._checkpointer.wait()
        with self._watchdog.during("save"):
            self._rehearsal.check_tensors()
            pieces = self.state_dict()
            if self.accelerator.is_main_process or self._checkpointer.peers.group is not None:
                self._checkpointer.save(self.state, pieces, best=self.best)
        self._notify("on_checkpoint", checkpoint_name(self.state))

    def restore(self, pieces: StateDicts, *, changes: Collection[str] = ()) -> None:
        """Restore a checkpoint's `pieces`, the same on every process.

        `changes` are the settings that were changed on purpose: callbacks then decide again whether to stop, and if
        the changes decide which samples a step has, the epoch in progress starts again.

        Raises:
            CheckpointError: they do not fit this run; nothing is changed then.
        """
        self._training_state.restore(pieces)
        progress = pieces["trainer"]
        self._progress.load_state_dict(progress, changes=changes)
        if self.accelerator.is_main_process:
            self._restore_details()
        self._guard.skipped_steps = progress["skipped_steps"]
        self._callback_runner.load_state_dict(progress["callbacks"])

    def _restore_details(self) -> None:
        """Let the metrics of the last evaluation have its details again, if their file is of that evaluation."""
        with suppress(OSError, ValueError):
            step, details = read_details(self._run_folder)
            if step == self._progress.evaluated_step:
                self._progress.metrics = {**details, **self._progress.metrics}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, as references to live tensors. **Collective.**"""
        return {**self._training_state.pieces(), "trainer": self._own_state()}

    def _local_state(self) -> dict[str, Any]:
        """Return the state with the shards of this process. **Collective** if that of a callback is."""
        return {**self._training_state.local_pieces(), "trainer": self._own_state()}

    def _own_state(self) -> dict[str, Any]:
        return {
            **self._progress.state_dict(),
            "skipped_steps": self._guard.skipped_steps,
            "callbacks": self._callback_runner.state_dict(),
        }

    @property
    def best(self) -> BestCheckpoint | None:
        """The best evaluation so far."""
        return self._progress.best

    @property
    def data_wait_s(self) -> float:
        """Seconds that training has waited for data in this attempt."""
        return self._data_wait.seconds

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to train."""
        return self._progress.end_reason is not None

    @property
    def _is_epoch_end(self) -> bool:
        return self.state.step_in_epoch >= self.loader.plan.steps_per_epoch

    def _start(self) -> None:
        self._notify("on_fit_start")
        self._stop_flag.may_leave = False
        self._stop_flag.agree()  # a signal may have reached a single process during the start
        self._watchdog.phase = "training"
        if self.state.optimizer_step == 0 and not self.is_finished:
            with self._watchdog.during("evaluation"):
                self._evaluator.rehearse(self.raw_model, monitored=self._progress.monitored)
        if self._on_micro_batch_halved and needs_restart(self.accelerator) and self.state.optimizer_step == 0:
            self._save()  # or there would be nothing to restart from

    def _step_batches(self) -> Iterator[StepBatch]:
        """Yield the step batches left of this epoch, or up to `max_steps`."""
        max_steps = self._config.max_steps
        left = None if max_steps is None else max_steps - self.state.optimizer_step
        return islice(self.loader.step_batches(self.state.epoch, self.state.step_in_epoch), left)

    def _halve_micro_batch(self, error: BaseException) -> None:
        """Undo the step that was out of memory; the next step batches begin with it, in forwards of half the size.

        Raises:
            OutOfMemoryError: the user has not asked for that, or a forward has a single sample.
            Preempted: it takes a restart.
        """
        plan = halve_micro_batch(
            self.loader.plan, accelerator=self.accelerator, step=self.state.optimizer_step + 1,
            remember=self._on_micro_batch_halved,
        )  # fmt: skip
        clear_frames(error.__traceback__)  # they hold the activations of the forwards
        self._update.undo()
        release_memory()
        self._save()  # where the size changes, so that a run killed after this has the same bits
        self._checkpointer.wait(must_succeed=True)
        if self._on_micro_batch_halved is not None:
            self._on_micro_batch_halved(plan.per_device_batch_size)
        self.loader.plan = plan

    def _end_epoch(self) -> None:
        """Evaluate if due, and move to the next epoch unless a signal ends the evaluation."""
        best_before, next_epoch = self.best, replace(self.state, epoch=self.state.epoch + 1, step_in_epoch=0)
        if self._config.evaluates_after(next_epoch.epoch) and not self._evaluate_at(next_epoch):
            return  # saved as not yet evaluated: a resume evaluates again
        self.state.finish_epoch()
        self._notify("on_epoch_end")
        if self.best is not best_before or self._checkpointer.config.is_due(self.state):
            self._save()

    def _evaluate_at(self, position: TrainState) -> bool:
        """Evaluate and notify; `position` is that of the checkpoint that will hold the weights. False: a signal."""
        try:
            metrics = self.evaluate()
            self._progress.record_evaluation(metrics, checkpoint_name(position))
        except EvaluationStopped:
            return False
        except Exception as error:
            # Once the cause is fixed, the same command has lost no step. All processes meet a failed metric.
            if isinstance(error, MetricFailed) or self.accelerator.num_processes == 1:
                self._save()
            raise
        if self.accelerator.is_main_process:
            write_details(self._run_folder, metrics, optimizer_step=position.optimizer_step)
            if found := nonfinite_loss(metrics):
                _logger.warning("%s at step %d: lower the learning rate", found, position.optimizer_step)
        self._notify("on_evaluate_end", metrics)
        return True

    def _finish(self) -> RunResult:
        """Save, evaluate the final weights if that is left to do, and return how the run ended. **Collective.**

        A stop inside an epoch evaluates after the checkpoint, which does not hold the result: a run that continues
        later is the same as one that never stopped, and a finished run that is started again evaluates the same.
        """
        self._stop_flag.drain()
        self._save()  # a position that is already saved is not saved again
        with self._watchdog.during("disk"):
            self._checkpointer.wait(must_succeed=True)
        if not self._progress.is_evaluated and not self._stop_flag.agreed.is_preemption:
            self._evaluate_at(self.state)
            if self.accelerator.is_main_process:
                self._checkpointer.record_best(self.best)
        result = self._progress.result(self._stop_flag.agreed)
        is_diverged = result.state != "preempted" and nonfinite_loss(result.metrics) is not None
        self._watchdog.phase = "diverged" if is_diverged else result.state
        self._notify("on_fit_end", result)
        return result

    def _notify(self, hook: str, *arguments: Any) -> None:
        self._callback_runner.notify(hook, self, *arguments)
