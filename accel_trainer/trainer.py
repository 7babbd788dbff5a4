"""The algorithm. Everything else serves these few functions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from traceback import clear_frames
from typing import Annotated, Any, Literal

import torch
import tyro
from accelerate import Accelerator
from accelerate.utils import DistributedType, release_memory
from torch import Tensor, nn
from torch.optim import Optimizer

from .accelerate_settings import reject_unsupported
from .callbacks.base import Callback
from .callbacks.observers import Observers
from .checkpoint import Checkpointer
from .checkpoint_files import checkpoint_name
from .checkpoint_folder import BestCheckpoint
from .collectives import run_on_main
from .ema import Ema
from .errors import ConfigError, Preempted
from .evaluation import EvaluationStopped, Evaluator, MetricFailed
from .memory import halve_micro_batch, is_out_of_memory
from .meters import WaitClock
from .nonfinite import NonfiniteGuard
from .optimizer import coming_state_bytes, set_learning_rate
from .preemption import StopFlag, stop_on_signals
from .ranges import ABOVE_ZERO, AT_LEAST_ONE
from .runtime import describe_memory
from .schedule import Schedule
from .seeding import fold, seed_forward
from .state import TrainState
from .training_state import Pieces, TrainingState
from .types import Loader, Metric, StepOutput, StepReport, Task, Window
from .update import Outcome, WeightUpdate
from .watchdog import Watchdog

_logger = logging.getLogger(__name__)

RESTARTS_EPOCH = frozenset({"seed", "data", "batch.global_batch_size", "batch.drop_last"})
"""Settings that say which samples a step has: changed on purpose, they start the epoch in progress again."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long to train, and what to look at on the way."""

    num_epochs: Annotated[int, tyro.conf.arg(aliases=["--epochs"])] = 10
    """Passes over the training data. The learning rate spans them, whatever stops the run earlier."""
    max_steps: Annotated[int | None, tyro.conf.arg(aliases=["--max-steps"])] = None
    """Stop after this optimizer step; None: train all epochs."""
    max_time_s: float | None = None
    """Stop after this many seconds; the same command continues the run. None: no limit."""
    max_grad_norm: float | None = None
    """Scale gradients down to this global L2 norm, and log the norm; None: neither."""
    on_nonfinite: Annotated[Literal["stop", "skip"], tyro.conf.arg(aliases=["--on-nonfinite"])] = "stop"
    """What to do about a gradient that is NaN or inf: end the run, or leave the step out. It is never applied, so
    that `skip` goes on with the weights that a way back to a checkpoint and around the step would come to."""
    ema_decay: Annotated[float | None, tyro.conf.arg(aliases=["--ema"])] = None
    """Keep, evaluate and export an exponential moving average of the weights with this decay; None: none."""
    evaluate_every_n_epochs: int = 1
    """Evaluate after every n-th epoch, and after the last."""
    monitor: str | None = None
    """The metric that decides which evaluation is best, such as `eval/accuracy`; None: the accuracy if a metric has it,
    else the first number that the metrics name, with an EMA that of the averaged weights."""
    monitor_mode: Literal["max", "min"] | None = None
    """Whether a larger or a smaller `monitor` is better; None: as its metric says."""
    patience: int | None = None
    """Stop after this many evaluations without a better one; None: never."""
    log_every_n_steps: int = 50
    """Write a row of training numbers every n optimizer steps, and at the end of each epoch."""

    def __post_init__(self) -> None:
        AT_LEAST_ONE.check(self, "trainer", "max_steps", "evaluate_every_n_epochs", "log_every_n_steps", "patience")
        ABOVE_ZERO.check(self, "trainer", "max_grad_norm", "max_time_s")
        if self.num_epochs < 0:
            raise ConfigError("CONFIG", f"--epochs is {self.num_epochs}: set it to 0 (evaluate only) or more")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError("CONFIG", f"--ema is {self.ema_decay}: set a decay between 0 and 1, such as 0.999")


def choose_monitor(config: TrainerConfig, metrics: Sequence[Metric]) -> tuple[str, Literal["max", "min"]] | None:
    """Return the metric that decides which evaluation is best, and its direction; None if there is none to judge by.

    Raises:
        ConfigError: the metric that the config asks for is none of those that `metrics` name.
    """
    groups = ("eval",) if config.ema_decay is None else ("eval_ema", "eval")
    named = {name: is_higher for metric in metrics for name, is_higher in metric.higher_is_better.items()}
    known = {f"{group}/{name}": is_higher for group in groups for name, is_higher in named.items()}
    name = config.monitor or next((n for n in known if n.endswith("/accuracy")), next(iter(known), None))
    if name is None and config.patience is None:
        return None
    if name not in known:
        choices = f"set --trainer.monitor to one of {', '.join(known)}" if known else "the metrics name none"
        raise ConfigError("CONFIG", f"no metric {name or ''!r} to monitor: {choices}")
    return name, config.monitor_mode or ("max" if known[name] else "min")


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `metrics` are those of the last evaluation; `state` is `done`, `stopped` or `preempted`."""

    state: Literal["done", "stopped", "preempted"]
    stop_reason: str
    position: TrainState
    metrics: Mapping[str, Any]
    best: BestCheckpoint | None


class Trainer:
    """Trains `model` on the windows of `loader`: one optimizer step per window, exact and resumable.

    `model` is the plain module on the accelerator's device and `optimizer` the plain optimizer over
    its parameters; the trainer prepares both. Everything that varies is a collaborator; to change
    the algorithm itself, override `train_window`.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        learning_rate_at: Schedule,
        task: Task,
        loader: Loader,
        evaluator: Evaluator,
        checkpointer: Checkpointer,
        seed: int,
        watchdog: Watchdog | None = None,
        on_micro_batch_halved: Callable[[int], None] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        reject_unsupported(accelerator)
        self.config, self.accelerator, self.task, self.loader = config, accelerator, task, loader
        self.learning_rate_at, self.evaluator, self.checkpointer = learning_rate_at, evaluator, checkpointer
        self.seed = seed
        self.process_key = fold(seed, accelerator.process_index)
        self.state = TrainState()
        self.best: BestCheckpoint | None = None
        self.metrics: Mapping[str, Any] = {}
        self._monitored = choose_monitor(config, evaluator.metrics)
        self.watchdog = watchdog or Watchdog(StopFlag(num_processes=accelerator.num_processes))
        self.watchdog.position, self.stop_flag = self.state, self.watchdog.stop_flag
        self.data_wait = WaitClock()
        self._on_micro_batch_halved = on_micro_batch_halved
        self._evaluated_step: int | None = None
        self._requested_stop: str | None = None
        self._observers = Observers(callbacks)
        self.raw_model, self.optimizer = model, optimizer
        self.model, prepared_optimizer = accelerator.prepare(model, optimizer)
        # The average refers to the model's tensors, so it comes after `prepare`, which moves the model
        # once more: `.to("cpu:0")` puts new buffers into it each time (torch 2.13).
        self.ema = None if config.ema_decay is None else Ema(model, decay=config.ema_decay)
        self._guard = NonfiniteGuard(
            may_skip=config.on_nonfinite == "skip",
            accelerator=accelerator,
            model=model,
            optimizer=optimizer,
            task=task,
            seed=seed,
            folder=checkpointer.directory.parent,
        )
        self.update = WeightUpdate(
            accelerator=accelerator,
            model=self.model,
            optimizer=optimizer,
            prepared_optimizer=prepared_optimizer,
            guard=self._guard,
            max_grad_norm=config.max_grad_norm,
        )
        ema_model = None if self.ema is None else self.ema.model
        self._training_state = TrainingState(model, optimizer, ema_model, accelerator.scaler)

    def fit(self) -> RunResult:
        """Train from `self.state` to the end; on a restored state this is an exact resume. **Collective.**"""
        state = self.state
        with stop_on_signals(self.stop_flag), self._errors_observed():
            self._notify("on_fit_start")
            self.stop_flag.may_leave = False
            self.stop_flag.agree()  # a signal may have come to one process during the start
            self.watchdog.phase = "training"
            if self._on_micro_batch_halved and self._has_peers and state.optimizer_step == 0:
                self.save()  # or there would be nothing to start from again
            while not self.stop_flag.agreed.is_preemption:
                if self._is_epoch_end:
                    self._end_epoch()
                    continue
                if self.is_finished or self.stop_flag.agreed:
                    break
                self.model.train()
                try:
                    for window in self.data_wait.around(self._windows()):
                        report = self.train_window(window)
                        self._notify("on_step_end", report)
                        if self.stop_flag.poll() or self._requested_stop:
                            break
                        if self.checkpointer.is_due(state) and not self._is_epoch_end:
                            self.save()
                except (RuntimeError, MemoryError) as error:
                    if not (self.update.is_open and is_out_of_memory(error)):
                        raise
                    self._retry_in_halves(error)
            result = self._finish()
            self.watchdog.phase = result.state
            self._notify("on_fit_end", result)
        return result

    def _retry_in_halves(self, error: BaseException) -> None:
        """Let the next windows begin with the step that was out of memory, with half the samples in a forward.

        A process on its own can do that. Of several, the one that is out of memory never comes to the collective in
        which the others wait: they end, and the same command continues with less.

        Raises:
            OutOfMemoryError: that is not wanted, or cannot be.
            Preempted: it takes another start.
        """
        plan, step, callback = self.loader.plan, self.state.optimizer_step + 1, self._on_micro_batch_halved
        memory = describe_memory(self.accelerator)
        fact = f"out of memory at step {step} with {plan.per_device_batch_size} per device ({memory})"
        finer = halve_micro_batch(plan, fact=fact, may_continue=callback is not None)
        assert callback is not None
        split = f"{finer.per_device_batch_size} x {finer.accumulation_steps}"
        if self._has_peers:
            callback(finer.per_device_batch_size)
            raise Preempted("OUT_OF_MEMORY", f"{fact}: the same command, started again, continues with {split}")
        _logger.warning("%s: continuing with %s", fact, split)
        clear_frames(error.__traceback__)  # they hold what the forwards left
        self.update.undo()
        release_memory()
        self.save()  # where the parts change, so that a run killed from here on has the same bits
        self.checkpointer.wait(must_succeed=True)
        callback(finer.per_device_batch_size)
        self.loader.plan = finer

    def train_window(self, window: Window) -> StepReport:
        """Take one optimizer step: the gradient of the mean loss over all samples of the window, on all processes."""
        state = self.state
        learning_rate = self.learning_rate_at(state.optimizer_step)
        set_learning_rate(self.update.optimizer, learning_rate)
        output, update = self.compute(window)
        state.advance(window.num_items)
        if self.ema is not None and not update.was_skipped:
            self.ema.update(optimizer_step=state.optimizer_step)
        return StepReport(
            optimizer_step=state.optimizer_step,
            epoch=state.epoch,
            learning_rate=learning_rate,
            loss_sum=output.loss_sum,
            sums=output.sums,
            num_items=window.num_items,
            grad_norm=update.grad_norm,
            was_skipped=update.was_skipped,
        )

    def compute(self, window: Window) -> tuple[StepOutput, Outcome]:
        """Run forward, backward and update; return what the task made of the window, and what became of the update."""
        accelerator, step = self.accelerator, self.state.optimizer_step
        share = accelerator.num_processes / window.num_items  # DDP averages gradients over the processes
        losses, sums = [], []
        self.update.begin()
        for index, batch in enumerate(self.data_wait.around(window.micro_batches)):
            self.watchdog.num_forwards += 1
            seed_forward(self.process_key, optimizer_step=step, micro_batch=index, device=accelerator.device)
            is_last = index == len(window.micro_batches) - 1
            with nullcontext() if is_last else accelerator.no_sync(self.model):
                with accelerator.autocast() if accelerator.native_amp else nullcontext():
                    output = self.task.train_step(self.model, batch)
                self.update.add_gradients(output.loss_sum, share)
            losses.append(output.loss_sum.detach())
            sums.append(output.sums)
        outcome = self.update.apply(self.state, window, losses)
        return StepOutput(_total(losses), {name: _total([part[name] for part in sums]) for name in sums[0]}), outcome

    def evaluate(self) -> dict[str, Any]:
        """Return the metrics of the model as `eval/...` and of its EMA as `eval_ema/...`. **Collective. Host sync.**

        Raises:
            EvaluationStopped: a signal came, to whichever process.
        """
        models = {"eval": self.raw_model} | ({} if self.ema is None else {"eval_ema": self.ema.model})
        metrics: dict[str, Any] = {}
        with self.watchdog.during("evaluation"):
            for group, model in models.items():
                values = self.evaluator.run(model, stop_flag=self.stop_flag)
                metrics |= {f"{group}/{name}": value for name, value in values.items()}
        return metrics

    def request_stop(self, reason: str) -> None:
        """Stop at the next step boundary. Call it on every process at the same step, or use `stop_flag`."""
        self._requested_stop = self._requested_stop or reason

    def save(self) -> None:
        """Hand a checkpoint of the current position to the writer. **Collective.**"""
        self._guard.flush()
        with self.watchdog.during("disk"):
            self.checkpointer.wait()
        with self.watchdog.during("save"):
            pieces = self._pieces()
            if self.accelerator.is_main_process:
                self.checkpointer.save(self.state, pieces, best=self.best)
        self._notify("on_checkpoint", checkpoint_name(self.state))

    def restore(self, pieces: Pieces, *, changes: Collection[str] = ()) -> None:
        """Put the run where a checkpoint's `pieces` were taken; the same on every process.

        `changes` are the settings that were changed on purpose: whether to stop is then for the callbacks to decide
        again, and if they say which samples a step has, the epoch in progress starts again.

        Raises:
            CheckpointError: they do not fit this run; nothing is changed then.
        """
        self._training_state.restore(pieces)
        progress = pieces["trainer"]
        self.state.load_state_dict(progress["position"])
        if progress["best"] is not None and self._monitored is not None:
            # Of an older version, it has no mode.
            best = BestCheckpoint(**{"mode": self._monitored[1], **progress["best"]})
            self.best = best if (best.metric, best.mode) == self._monitored else None
        self.metrics, self._evaluated_step = progress["metrics"], progress["evaluated_step"]
        self._requested_stop = None if changes else progress["requested_stop"]
        if RESTARTS_EPOCH & set(changes):
            self.state.step_in_epoch = 0
        self._guard.skipped_steps = progress["skipped_steps"]
        self._observers.load_state_dict(progress["callbacks"])

    def prepare_checkpoints(self) -> None:
        """Check, before any work, that a checkpoint can be stored and has room. **Collective.**"""
        pieces = self._pieces()

        def prepare() -> bytes:
            self.checkpointer.prepare(pieces, coming_bytes=coming_state_bytes(self.optimizer))
            return b""

        run_on_main(prepare, self.accelerator)

    def _pieces(self) -> dict[str, Any]:
        """Return the state of the whole run, as references to live tensors. **Collective.**"""
        progress = {
            "position": self.state.state_dict(),
            "best": None if self.best is None else asdict(self.best),
            "metrics": dict(self.metrics),
            "evaluated_step": self._evaluated_step,
            "requested_stop": self._requested_stop,
            "skipped_steps": self._guard.skipped_steps,
            "callbacks": self._observers.state_dict(),
        }
        return {**self._training_state.pieces(), "trainer": progress}

    @property
    def _has_peers(self) -> bool:
        return bool(self.accelerator.distributed_type != DistributedType.NO)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to train."""
        config, state = self.config, self.state
        is_last_step = config.max_steps is not None and state.optimizer_step >= config.max_steps
        return state.epoch >= config.num_epochs or is_last_step or self._requested_stop is not None

    @property
    def _is_epoch_end(self) -> bool:
        return self.state.step_in_epoch >= self.loader.plan.steps_per_epoch

    def _windows(self) -> Iterator[Window]:
        """Yield the windows left of this epoch, or up to `max_steps`."""
        max_steps = self.config.max_steps
        left = None if max_steps is None else max_steps - self.state.optimizer_step
        return islice(self.loader.windows(self.state.epoch, self.state.step_in_epoch), left)

    def _end_epoch(self) -> None:
        """Evaluate if it is due, and move on to the next epoch, unless a signal ends the evaluation."""
        state, config = self.state, self.config
        epoch = state.epoch + 1
        best_before = self.best
        if epoch % config.evaluate_every_n_epochs == 0 or epoch == config.num_epochs:
            next_position = replace(state, epoch=epoch, step_in_epoch=0)
            if not self._evaluate_at(next_position):
                return  # saved as not yet evaluated: a resume evaluates again
        state.finish_epoch()
        self._notify("on_epoch_end")
        if self.best is not best_before or self.checkpointer.is_due(state):
            self.save()

    def _evaluate_at(self, position: TrainState) -> bool:
        """Evaluate, compare with the best and notify; `position` is that of the checkpoint that will hold the weights.

        Returns False if a signal ended the evaluation: it has no result.
        """
        try:
            self.metrics = self.evaluate()
        except EvaluationStopped:
            return False
        except Exception as error:
            # So that the same command, once this is fixed, has lost no step. A failed metric is met by all.
            if isinstance(error, MetricFailed) or self.accelerator.num_processes == 1:
                self.save()
            raise
        self._evaluated_step = self.state.optimizer_step
        self._take_best(position)
        self._notify("on_evaluate_end", self.metrics)
        return True

    def _take_best(self, position: TrainState) -> None:
        """Remember the evaluation just made if it is the best. NaN never is."""
        if self._monitored is None:
            return
        name, mode = self._monitored
        value, sign = self.metrics[name], 1 if mode == "max" else -1
        if not math.isnan(value) and (self.best is None or sign * value > sign * self.best.value):
            self.best = BestCheckpoint(checkpoint_name(position), name, value, mode)

    def _finish(self) -> RunResult:
        """Save, evaluate the final weights unless that has been done, and return how the run ended. **Collective.**

        An evaluation inside an epoch, where only a stop has put it, comes after the checkpoint and is not part of it:
        a run that continues from here later is the same as one that never stopped, and starting a finished run again
        comes to the same evaluation.
        """
        self.stop_flag.drain()
        self.save()  # a position that is already saved is not saved again
        with self.watchdog.during("disk"):
            self.checkpointer.wait(must_succeed=True)
        reason = self._requested_stop or self._natural_end
        if self._evaluated_step != self.state.optimizer_step and not self.stop_flag.agreed.is_preemption:
            self._evaluate_at(self.state)
            if self.accelerator.is_main_process:
                self.checkpointer.record_best(self.best)
        stop, is_evaluated = self.stop_flag.agreed, self._evaluated_step == self.state.optimizer_step
        kind: Literal["done", "stopped", "preempted"] = "done"
        if reason is None or not is_evaluated:
            kind = "preempted" if stop.is_preemption else "stopped"
            reason = stop.reason
        return RunResult(kind, reason or "", replace(self.state), self.metrics, self.best)

    @property
    def _natural_end(self) -> str | None:
        """Why nothing is left to train, unless a callback asked for a stop."""
        if self.state.epoch >= self.config.num_epochs:
            return "num_epochs reached"
        return "max_steps reached" if self.is_finished else None

    @contextmanager
    def _errors_observed(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._observers.notify_error(self, error)
            with suppress(Exception):
                self.checkpointer.wait()  # a save in flight holds good state: let it end
            raise

    def _notify(self, hook: str, *arguments: Any) -> None:
        self._observers.notify(hook, self, *arguments)


def _total(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(list(values)).sum(0)
