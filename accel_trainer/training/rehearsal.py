"""Rehearses a resume at each start: a run that could not resume exactly ends at its first step.

A resume builds every object again and loads a checkpoint into it. State that is not in the
checkpoint, or cannot be loaded, is lost. State that only later steps change is not found here;
`chaos` finds more. It is no replay of a recorded run: nothing is recorded yet, and it needs
no second process.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial, reduce
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.optimizer_state import OptimizerState
from ..checkpoint.serialization import decode, encode
from ..checkpoint.state_dict import EXTRA_STATE
from ..core.callback import Callback
from ..core.digest import digest_of, flatten
from ..core.errors import CheckpointError, listed
from ..core.parameters import Optimizers, named_parts, parameters_of, preserved_parameters
from ..core.registry import Pieces
from ..core.shards import is_shard, local_part
from ..core.tensor_memory import sum_of_bits
from ..core.user_code import describe_error
from ..core.wording import describe_tensor
from ..distributed.collectives import differing_lines, run_on_main
from .callback_runner import named
from .evaluation import Evaluation, check_monitored, groups_of, run_evaluation
from .evaluator import Evaluator
from .model_watch import StepUse, mark_model, watched_read, watched_step
from .unsaved_state import Mark, is_of_user, mark_unsaved

if TYPE_CHECKING:
    from ..checkpoint.manager import Checkpointer

_logger = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes, of the memory of a new tensor
_UNSAVED = "and no checkpoint stores it"
_NOT_NEEDED = "set unsaved_attributes = ({key!r},) on its class"
_ONE_VALUE = (
    "a checkpoint stores one value: compute it from values that are the same on all processes, "
    "reduce it over them, or make it a buffer of the model"
)

Identities = Mapping[str, tuple[int | None, str]]
"""For each tensor of a checkpoint, by name: its `id` if it is a parameter, and dtype and shape."""

Marks = Mapping[str, Mark]
"""The marks of values, by name."""

TrainerAttributes = Callable[[], Mapping[str, object]]
"""Returns what a user's subclass of Trainer keeps, by the names of the attributes."""


@dataclass(eq=False)
class Rehearsal:
    """Compares what a resume would have with the live state, in the first two steps of a start.

    Create it with the objects as a resume builds them, before anything is restored.

    Raises:
        CheckpointError: the model has state that cannot be stored or loaded.
    """

    _: KW_ONLY
    model: nn.Module
    optimizers: Optimizers
    parts: Mapping[str, object]
    train_set: object
    accelerator: Accelerator
    checkpointer: Checkpointer
    states: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.num_steps_left = 2
        self._optimizers = named_parts(self.optimizers)
        modules = {name: each for name, each in self.states.items() if isinstance(each, nn.Module)}
        self._parts = {
            name: each for name, each in {**self.parts, **modules}.items() if not _is_stored(each)
        }
        self._weights: list[Mapping[str, int]] = []
        self._before = _identify(self.model)
        self._fresh = {name: _copy_optimizer(each) for name, each in self._optimizers.items()}
        self._marks: list[Marks] = []
        self._uses: list[StepUse] = []
        self._num_calls: Counter[str] = Counter()
        self._read: set[str] = set()
        self._restored: set[str] = set()
        self._named: set[str] = set()

    def begin(self, trainer: TrainerAttributes) -> None:
        """Note the state before the first step; `trainer` returns the attributes of a subclass."""
        self._trainer = trainer
        self._marks = [self._mark()]

    def _all_parts(self) -> dict[str, object]:
        return self._parts | {f"trainer.{name}": each for name, each in self._trainer().items()}

    def _mark(self) -> Marks:
        return mark_unsaved(self._all_parts(), model=self.model, stored=self._stored())

    def _stored(self) -> list[object]:
        """Return the user's states, and their tensors, which other parts may hold, too.

        Not modules themselves: besides their tensors, they may keep what no state dict has.
        """
        modules = [each for each in self.states.values() if isinstance(each, nn.Module)]
        others = [each for each in self.states.values() if not isinstance(each, nn.Module)]
        found = [each.state_dict(keep_vars=True) for each in modules]
        found += [each.state_dict() for each in others]
        return [*others, *(each for each in flatten(found).values() if isinstance(each, Tensor))]

    def try_evaluations(
        self, evaluations: Mapping[str, Evaluation], monitored: tuple[str, str] | None
    ) -> None:
        """Call each `run` that has a `limit`, and warn of what it changes and no checkpoint holds.

        **Collective. Host sync.**

        Raises:
            EvaluationRefused: what is `monitored`, such as `eval/loss`, is not one number.
            Exception: an evaluation cannot work.
        """
        group, _, number = (monitored or ("",))[0].partition("/")
        for name, evaluation in evaluations.items():
            if "limit" not in inspect.signature(evaluation.run).parameters:
                continue
            changing = evaluation.metrics if isinstance(evaluation, Evaluator) else [evaluation]
            watching = self._watching_parts(
                named(changing), "an evaluation", "compute each result from one evaluation alone"
            )
            # The trial must not change what compiles.
            with watching, torch.compiler.set_stance("force_eager"):
                values = run_evaluation(evaluation, self.model, self.accelerator, limit=1)
            if group in groups_of(name, evaluation):
                check_monitored(values, number)

    def watching_epoch_end(self) -> AbstractContextManager[None]:
        """Warn of values that the end of an epoch changes, as callbacks may do."""
        # Reading samples may fill a cache of the data, so steps are not compared.
        parts = {**self._all_parts(), "train_set": self.train_set}
        return self._watching_parts(
            parts, "the end of an epoch", "compute it from `batch.position`"
        )

    def watching_hook(self, name: str, callback: Callback) -> AbstractContextManager[None]:
        """Warn if the first calls of a user's hook change the model; a stored callback may."""
        self._num_calls[name] += 1
        is_trusted = _is_stored(callback) or not is_of_user(type(callback))
        if is_trusted or ".on_fit_" in name or self._num_calls[name] > 2:
            return nullcontext()
        return self._watching(
            f"the callback {name}",
            self._mark_model,
            # A checkpoint stores some of it, such as weights, but none stores a mode or a hook.
            "which only a step should",
            "undo it in the same hook, or change the model in on_fit_start or in a step",
        )

    def _mark_model(self) -> Marks:
        return {name: (None, mark) for name, mark in mark_model(self.model).items()}

    def _watching_parts(
        self, parts: Mapping[str, object], what: str, fix: str
    ) -> AbstractContextManager[None]:
        mark = partial(mark_unsaved, parts, model=self.model, stored=self._stored())
        return self._watching(
            what, mark, _UNSAVED, f"{fix}, or if no result depends on it, {_NOT_NEEDED}"
        )

    @contextmanager
    def _watching(self, what: str, mark: Callable[[], Marks], why: str, fix: str) -> Iterator[None]:
        """Warn of what `what`, which runs in the block, changes of the marks."""
        before = mark()
        yield
        self._say(f"{what} changes", _changed(before, mark()), fix, why)

    def _say(self, what: str, names: set[str], fix: str, why: str = _UNSAVED) -> None:
        """Warn once of each of the `names`; `fix` may contain the `key` of the first."""
        if (new := names - self._named) and self.accelerator.is_main_process:
            _logger.warning(
                "[UNSAVED_STATE] %s %s, %s: %s",
                what,
                listed(new),
                why,
                fix.format(key=min(new).rpartition(".")[2]),
            )
        self._named |= names

    @contextmanager
    def watching_step(self) -> Iterator[None]:
        """Note what the step in the block uses of the model."""
        with watched_step(self.model) as use, ExitStack() as watching:
            if len(self._marks) > 1:
                self._watch_reads(watching)
            yield
        self._uses.append(use)

    @contextmanager
    def watching_gradients(self) -> Iterator[None]:
        """Check that the micro-batches in the block leave the user's states as they are.

        In the first two steps. **Host sync** then.

        Raises CheckpointError for a state that has changed.
        """
        if not self.num_steps_left:
            yield
            return
        before = self._digest_states()
        yield
        _refuse_changes(
            "a micro-batch",
            before,
            self._digest_states(),
            "keep what it needs in on_micro_batch, and change it in on_step_end; call eval() on a "
            "module whose norms change their statistics",
        )
        self._weights.append(self._sum_weights())

    def check_restored(self) -> None:
        """Check that the weights are those of the step's first gradients, before its update.

        In the first two steps. Raises CheckpointError if `train_step` has changed them.
        """
        if len(self._weights) > 1:
            _refuse_changes(
                "train_step",
                self._weights[0],
                self._sum_weights(),
                "restore what train_step changes between two calls of compute_gradients",
            )
        self._weights.clear()

    def _sum_weights(self) -> dict[str, int]:
        return {
            f"model.{name}": int(sum_of_bits(local_part(each)))
            for name, each in self.model.named_parameters()
        }

    def _digest_states(self) -> dict[str, str]:
        return {name: digest_of(state.state_dict()) for name, state in self.states.items()}

    @contextmanager
    def watching_save(self, read_state: Callable[[], Pieces]) -> Iterator[None]:
        """Check that the first hooks before a save, in the block, change nothing that is saved.

        **Collective** with shards. **Host sync.**

        Raises CheckpointError for what has changed.
        """
        self._num_calls["before_save"] += 1
        if self._num_calls["before_save"] > 2:
            yield
            return
        before = _digests(read_state())
        yield
        _refuse_changes(
            "before_save",
            before,
            _digests(read_state()),
            "change it in on_step_end, since a run that is killed saves more often",
        )

    def after_step(self, read_state: Callable[[], Pieces]) -> None:
        """Check the state that a checkpoint would hold, perhaps with this process's shards.

        **Collective.**

        Raises:
            CheckpointError: a resume could not load the checkpoint, or would differ from the live
                state of some process, or there is no room for a checkpoint.
        """
        self.num_steps_left -= 1
        self.check_tensors()
        if not self.num_steps_left:
            run_on_main(self._warn_of_unsaved, self.accelerator)
            return
        state = read_state()
        if self.accelerator.num_processes > 1:
            self._check_same_everywhere(_lines({name: state[name] for name in self._optimizers}))
        # On each process: a user's optimizer may run collectives to load shards.
        while self._fresh:
            name, fresh = self._fresh.popitem()
            if fresh is not None:
                self._check_optimizer(name, fresh, state[name])
        run_on_main(lambda: self.checkpointer.check_room(state), self.accelerator)
        self._marks.append(self._mark())

    def check_tensors(self) -> None:
        """Check that the model still has the tensors of a new one. **Collective. Host sync.**

        The user's code can replace them at any time.

        Raises:
            CheckpointError: a resume could not load the model, or the optimizer updates parameters
                that the model no longer has, or processes differ in a parameter, in a state of the
                user's or in the training mode of a module.
        """
        now = _identify(self.model)
        run_on_main(lambda: self._compare(now), self.accelerator)
        self._warn_of_views()
        self.check_mode()
        weights = {name: each for name, each in self.model.named_parameters() if not is_shard(each)}
        if self.accelerator.num_processes > 1:
            lines = _lines({name: each.state_dict() for name, each in self.states.items()})
            if weights:
                # Stacked, so that there is one host sync.
                sums = torch.stack([sum_of_bits(each) for each in weights.values()]).to("cpu")
                lines += [
                    f"model.{name} bits {each}" for name, each in zip(weights, sums, strict=True)
                ]
            self._check_same_everywhere(lines)

    def _warn_of_views(self) -> None:
        """Warn of tensors in the user's states that lie in memory as no loaded one does."""
        states = {
            name: each.state_dict()
            for name, each in self.states.items()
            if not isinstance(each, nn.Module)
        }
        views = {
            name
            for name, each in flatten(states).items()
            if isinstance(each, Tensor)
            and not is_shard(each)
            and each.numel() > 1
            and (each.data_ptr() % _ALIGNMENT or not each.is_contiguous())
        }
        self._say(
            "a slice, a transposed tensor or memory of numpy is kept in",
            views,
            "keep a clone()",
            "where a resume has a tensor of its own: products with it may round differently",
        )

    def check_mode(self) -> None:
        """Check that the processes train in the same mode. **Collective. Host sync.**

        Call it before an evaluation, too, which sets the mode.

        Raises CheckpointError if a module is in evaluation mode on some of them.
        """
        self._check_same_everywhere(
            [
                f"training of {name or 'the model'} is {each.training}"
                for name, each in self.model.named_modules()
            ],
            "call train() and eval() on all processes",
        )

    def _compare(self, now: Identities) -> None:
        for name in sorted(self._before.keys() | now.keys()):
            old, old_shape = self._before.get(name, (None, "nothing"))
            new, new_shape = now.get(name, (None, "nothing"))
            if old_shape != new_shape:
                raise _inexact(
                    f"training changed {name} of the model from {old_shape} to {new_shape}, which "
                    "a new model could not load: make it so in __init__"
                )
            if old != new:
                raise _inexact(
                    f"training replaced the parameter {name}, and the optimizer still updates the "
                    "old one: change it in place, by copy_ under torch.no_grad()"
                )

    def _check_same_everywhere(self, lines: list[str], fix: str = _ONE_VALUE) -> None:
        """Check that the processes have the same `lines`; `fix` says how they will.

        **Collective.**
        """
        for process, found in enumerate(differing_lines("\n".join(lines), self.accelerator)):
            if found:
                raise _inexact(f"processes differ after a step (process {process}: {found}): {fix}")

    def _check_optimizer(self, part: str, fresh: Optimizer, state: Mapping[str, Any]) -> None:
        """Load `state` into `fresh`, as a resume does, and compare it with the live optimizer."""
        encoded = encode(state, name=part)
        piece = decode(encoded.skeleton, encoded.tensors)
        name = type(fresh).__name__
        try:
            with preserved_parameters(fresh):
                fresh.load_state_dict(OptimizerState(fresh, self.model).validated(piece))
                found = fresh.state_dict()
        except Exception as error:
            raise _inexact(
                f"{name}.load_state_dict cannot load what {name}.state_dict returned "
                f"({describe_error(error)})"
            ) from error
        addresses = {id(parameter) for parameter in parameters_of(fresh)}
        if any(isinstance(each, Mapping) and addresses & each.keys() for each in found.values()):
            raise _inexact(
                f"{name}.state_dict has the address of a parameter as a key, which "
                "changes with each start: use the number of the parameter"
            )
        if path := first_difference(self._optimizers[part].state_dict(), found):
            raise _inexact(
                f"{name}.load_state_dict does not restore the optimizer's {path}: a resumed "
                "run would have other weights"
            )
        live = mark_unsaved({part: self._optimizers[part]}, model=self.model)
        loaded = mark_unsaved({part: fresh}, model=self.model)
        self._restored |= {key for key, mark in live.items() if loaded.get(key) == mark}

    def _warn_of_unsaved(self) -> None:
        """Warn of values that both steps have changed.

        A value that only the first step changes is set up there, and would be after a resume, too.
        """
        first, second, third = [*self._marks, self._mark()]
        self._marks = []
        one, two = self._uses[0], self._uses[-1]
        self._say(
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
        self._say(
            "the first step creates",
            created,
            "a resume would draw other random numbers for it, so create it before build_trainer",
        )
        # What is None until the first step is often kept for a log alone: nothing reads it.
        kept = _changed(first, second) | self._read
        unsaved = kept & _changed(second, third) - self._restored
        self._say(
            "training changes",
            # Parameters may take turns: what a step leaves of `requires_grad` is compared above.
            {name for name in unsaved if not name.endswith(".requires_grad")},
            "if --dry-run shows that it matters, keep it in a buffer of the model "
            "(register_buffer), in the state_dict of the optimizer or a callback, or in states= of "
            "build_trainer; if not, " + _NOT_NEEDED,
        )

    def _watch_reads(self, watching: ExitStack) -> None:
        """Watch the attributes that the first step has set: does the second one read them?"""
        first, second = self._marks
        for name, (kind, _) in second.items():
            if first.get(name, (NoneType,))[0] is NoneType is not kind:
                part, *path = name.split(".")
                with suppress(LookupError, AttributeError, TypeError):  # of a class or a file
                    owner = reduce(getattr, path[:-1], self._all_parts()[part])
                    watching.enter_context(watched_read(owner, path[-1], name, self._read))

    def _warn_of_unreached(self, one: StepUse, two: StepUse) -> None:
        """Warn of trained parameters without a gradient, unless some have turns of their own."""
        trained = {
            each
            for each in {**one.used, **two.used}
            if each.endswith("_grad") and two.after.get(each)
        }
        reached = {each for each in trained if one.used.get(each) or two.used.get(each)}
        may_skip = getattr(self.accelerator.ddp_handler, "find_unused_parameters", False)
        unreached = trained - reached
        if reached and unreached and not may_skip:
            _logger.warning(
                "[UNUSED_PARAMETERS] %d of %d trained parameters got no gradient in the first two "
                "steps (%s): freeze them (requires_grad=False), or look for a detach() or "
                "no_grad() between them and the loss",
                len(unreached),
                len(trained),
                listed(each.removesuffix(".requires_grad") for each in unreached),
            )


def _changed(before: Marks, after: Marks) -> set[str]:
    """Return the names of the values that kept their type and changed their content."""
    return {
        name
        for name in before.keys() & after.keys()
        if before[name][0] == after[name][0] and before[name][1] != after[name][1]
    }


def _refuse_changes(
    what: str, before: Mapping[str, object], after: Mapping[str, object], fix: str
) -> None:
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if changed:
        raise _inexact(f"{what} changes {listed(changed)}: {fix}")


def _inexact(message: str) -> CheckpointError:
    return CheckpointError("CKPT_INEXACT", message)


def _is_stored(part: object) -> bool:
    return isinstance(part, Callback) and type(part).state_dict is not Callback.state_dict


def _identify(model: nn.Module) -> Identities:
    """Return the identities of the model's tensors, without its extra state.

    Raises CheckpointError for a value that a checkpoint could not hold.
    """
    tensors = model.state_dict()
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise _inexact(
                f"{name} of the model is {describe_tensor(value)}: "
                "return a tensor from get_extra_state, or keep each value in a buffer"
            )
    # Only after `state_dict`: it makes shards again of a parameter that FSDP keeps whole after an
    # evaluation.
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    return {
        name: (identities.get(name), describe_tensor(value))
        for name, value in tensors.items()
        if not name.endswith(EXTRA_STATE)
    }


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


def _lines(state: Mapping[str, Any]) -> list[str]:
    """Return a line for each value in `state` that is no shard."""
    return [
        f"{path} {_describe(leaf)}" for path, leaf in flatten(state).items() if not is_shard(leaf)
    ]


def _describe(leaf: Any) -> str:
    """Return a text for a plain value, or for the bits of a tensor."""
    return f"bits {digest_of(leaf)}" if isinstance(leaf, Tensor) else repr(leaf)


def first_difference(one: Any, other: Any) -> str | None:
    """Return the path, such as `state[0].exp_avg`, to the first difference of two states."""
    mine = _digests(one)
    theirs = _digests(other)
    return next((path for path in mine | theirs if mine.get(path) != theirs.get(path)), None)


def _digests(state: Any) -> dict[str, tuple[bool, str]]:
    """Return for each leaf whether it is a shard, and its digest. **Collective** with shards."""
    return {path: (is_shard(leaf), digest_of(leaf)) for path, leaf in flatten(state).items()}
