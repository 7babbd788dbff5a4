"""The rehearsal of a resume at each start: a run that could not continue exactly ends with its first step.

A resume builds every object again and loads a checkpoint into it. So what is not in a checkpoint,
or cannot be loaded again, is lost. State that changes only later, such as in an evaluation, is not
seen here; `--dry-run` sees more.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.serialization import decode, encode
from ..checkpoint.state_dict import EXTRA_STATE, equal_bits, fitted_optimizer_state
from ..core.errors import CheckpointError
from ..core.shards import is_shard, local_part
from ..core.types import Task
from ..distributed.collectives import differing_lines, run_on_main
from .first_step import FirstStep
from .metrics import describe_tensor
from .unseen_state import listed, mark_tensor, mark_unseen, sum_of_bits

if TYPE_CHECKING:
    from ..checkpoint.manager import Checkpointer

_logger = logging.getLogger(__name__)

_BUILT_IN = ("torch", "accel_trainer")


Identities = Mapping[str, tuple[int | None, str]]


class Rehearsal:
    """Compares what a resume would have with what is live, after each of the first two steps of a start.

    Create it with the objects as a resume builds them: before anything is restored. `parts` are the
    user's objects whose attributes are looked at, by name.

    Raises:
        CheckpointError: the model has state that cannot be stored or loaded.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        parts: Mapping[str, object],
        accelerator: Accelerator,
        checkpointer: Checkpointer,
    ) -> None:
        self.num_steps_left = 2
        self._first: FirstStep | None = None
        self._model, self._optimizer = model, optimizer
        self._accelerator, self._checkpointer = accelerator, checkpointer
        self._parts = {"model": model, "optimizer": optimizer, **parts}
        self._before = _identify(model)
        self._fresh_optimizer = _copy_optimizer(optimizer)
        self._marks = [mark_unseen(self._parts, model=model)]
        self._restored: set[str] = set()

    def first_task(self, task: Task) -> Task:
        """Return `task` for the first step, which checks what it returns."""
        self._first = FirstStep(task, self._model, self._accelerator)
        return self._first

    def after_step(self, read_state: Callable[[], Mapping[str, Any]]) -> None:
        """Check the state that a checkpoint would hold, perhaps with shards of this process.

        **Collective.**

        Raises:
            CheckpointError: a resume could not load the checkpoint, or would have something else
                than what is live on some process, or a checkpoint has no room.
        """
        self.num_steps_left -= 1
        if self._first is not None:
            self._first.check_loss_is_sum()
            self._first = None
        self.check_tensors()
        if not self.num_steps_left:
            run_on_main(self._warn_of_unseen, self._accelerator)
            return
        state = read_state()
        if self._accelerator.num_processes > 1:
            leaves = flatten({"optimizer": state["optimizer"]})
            lines = [
                f"{path} {_describe(leaf)}" for path, leaf in leaves.items() if not is_shard(leaf)
            ]
            self._check_same_everywhere(lines)
        # on each process: what users load of shards may be collective
        if self._fresh_optimizer is not None:
            self._check_optimizer(self._fresh_optimizer, state["optimizer"])
            self._fresh_optimizer = None
        run_on_main(lambda: self._check_room(state), self._accelerator)
        self._marks.append(mark_unseen(self._parts, model=self._model))

    def check_tensors(self) -> None:
        """Check that the model has the tensors of a new one; user code can replace them at any time. **Collective.**

        Raises:
            CheckpointError: a resume could not load the model, or the optimizer steps parameters
                that it no longer has, or processes have other values of a parameter.
        """
        now = _identify(self._model)
        run_on_main(lambda: self._compare(now), self._accelerator)
        weights = {
            name: each for name, each in self._model.named_parameters() if not is_shard(each)
        }
        if self._accelerator.num_processes > 1 and weights:
            # one host sync
            sums = torch.stack([sum_of_bits(each) for each in weights.values()]).to("cpu")
            self._check_same_everywhere(
                [f"model.{name} bits {each}" for name, each in zip(weights, sums, strict=True)]
            )

    def _compare(self, now: Identities) -> None:
        for name in sorted(self._before.keys() | now.keys()):
            (old, shape), (new, new_shape) = (
                each.get(name, (None, "nothing")) for each in (self._before, now)
            )
            if shape != new_shape:
                fact = f"training changed {name} of the model from {shape} to {new_shape}"
                raise _inexact(f"{fact}, which a new model could not load: make it so in __init__")
            if old != new:
                fact = f"training replaced the parameter {name}, and the optimizer still updates the old one"
                raise _inexact(f"{fact}: change it in place, by copy_ under torch.no_grad()")

    def _check_same_everywhere(self, lines: list[str]) -> None:
        """Check that the processes have the same `lines` of what a checkpoint stores once.

        **Collective.**
        """
        for process, found in enumerate(differing_lines("\n".join(lines), self._accelerator)):
            if found:
                fact = f"processes differ after a step (process {process}: {found}), and a checkpoint has one value"
                fix = "compute it from what all processes have, reduce it over them, or make it a buffer of the model"
                raise _inexact(f"{fact}: {fix}")

    def _check_room(self, pieces: Mapping[str, Any]) -> None:
        encoded = [encode(piece, name=name) for name, piece in pieces.items()]
        self._checkpointer.check_room(
            sum(tensor.nbytes for each in encoded for tensor in each.tensors.values())
        )

    def _check_optimizer(self, fresh: Optimizer, state: Mapping[str, Any]) -> None:
        """Load `state` into an optimizer as a resume builds it, and compare that with the live one."""
        encoded = encode(state, name="optimizer")
        piece = decode(encoded.skeleton, encoded.tensors)
        name = type(fresh).__name__
        parameters = [parameter for group in fresh.param_groups for parameter in group["params"]]
        before = [parameter.detach().clone() for parameter in parameters]
        try:
            fresh.load_state_dict(fitted_optimizer_state(fresh, self._model, piece))
            found = fresh.state_dict()
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise _inexact(
                f"{name}.load_state_dict cannot load what {name}.state_dict returned ({reason})"
            ) from error
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        identities = {id(parameter) for parameter in parameters}
        if any(isinstance(part, Mapping) and identities & part.keys() for part in found.values()):
            fact = f"{name}.state_dict has the address of a parameter as a key, and it is another in each start"
            raise _inexact(f"{fact}: use the parameter's number")
        if path := first_difference(self._optimizer.state_dict(), found):
            fact = f"{name}.load_state_dict does not restore the optimizer's {path}"
            raise _inexact(f"{fact}: a resumed run would have other weights")
        live, loaded = (
            mark_unseen({"optimizer": each}, model=self._model) for each in (self._optimizer, fresh)
        )
        self._restored = {key for key, mark in live.items() if loaded.get(key) == mark}

    def _warn_of_unseen(self) -> None:
        """Warn of values that each of two steps changed: something set up in the first step changes only there."""
        first, second, third = [*self._marks, mark_unseen(self._parts, model=self._model)]
        self._marks = []
        unseen = [
            name
            for name in first.keys() & second.keys() & third.keys() - self._restored
            if first[name][0] == second[name][0] == third[name][0]
            and first[name][1] != second[name][1] != third[name][1]
        ]
        if unseen:
            fact = f"training changes {listed(unseen)}, and no checkpoint holds it"
            fix = "keep it in a buffer of the model (register_buffer) or in the optimizer's state_dict"
            rest = f"if not, set unsaved_attributes = ({min(unseen).rpartition('.')[2]!r},) on the class that has it"
            _logger.warning(
                "[UNSEEN_STATE] %s: if --dry-run shows that it matters, %s; %s", fact, fix, rest
            )


def _inexact(message: str) -> CheckpointError:
    return CheckpointError("CKPT_INEXACT", message)


def _identify(model: nn.Module) -> Identities:
    """Return, for each tensor of a checkpoint, its identity if it is a parameter, and its shape.

    Raises CheckpointError for what a checkpoint could not hold.
    """
    tensors = model.state_dict()
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            fact = f"{name} of the model is a {type(value).__name__}"
            raise _inexact(
                f"{fact}: return a tensor from get_extra_state, or keep each value in a buffer"
            )
    # Only now: `state_dict` puts back the shards of a parameter that FSDP keeps whole after an
    # evaluation.
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    return {
        name: (identities.get(name), describe_tensor(value))
        for name, value in tensors.items()
        if not name.endswith(EXTRA_STATE)
    }


def _copy_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return a copy of a user's optimizer over the same parameters; None for torch's own, or a failure."""
    shared = {
        id(parameter): parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    if type(optimizer).__module__.partition(".")[0] in _BUILT_IN:
        return None
    copied = object.__new__(type(optimizer))
    try:
        vars(copied).update(copy.deepcopy(vars(optimizer), {id(optimizer): copied, **shared}))
    except Exception:  # it holds something that cannot be copied, such as a lock
        return None
    return copied


def _describe(leaf: Any) -> str:
    """Return a line for a plain value, or for the bits of a tensor."""
    return (
        f"bits {zlib.crc32(repr(mark_tensor(leaf)).encode()):08x}"
        if isinstance(leaf, Tensor)
        else repr(leaf)
    )


def first_difference(one: Any, other: Any) -> str | None:
    """Return the path to the first difference of two states, such as `state[0].exp_avg`; None if there is none."""
    mine, theirs = flatten(one), flatten(other)
    paths = dict.fromkeys([*mine, *theirs])
    return next(
        (p for p in paths if p not in mine or p not in theirs or not _is_same(mine[p], theirs[p])),
        None,
    )


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return what `value` holds by its path, such as `state[0].exp_avg`; an empty container is a value."""
    parts = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    if not isinstance(parts, Mapping) or not parts:
        return {path: value}
    found: dict[str, Any] = {}
    for key, part in parts.items():
        found |= flatten(
            part, f"{path}{'.' * bool(path)}{key}" if isinstance(key, str) else f"{path}[{key!r}]"
        )
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or equal_bits(local_part(one), local_part(other).to(one.device))
    return type(one) is type(other) and repr(one) == repr(other)
