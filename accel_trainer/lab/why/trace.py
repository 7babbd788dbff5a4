"""Callbacks that record every operator of one step of a replay, with hashes of its tensors.

The rows are written into `trace.jsonl` of the replay.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info

from accel_trainer import Batch, Gradients, Reader, StepOutput, StepReport, TrainerView
from accel_trainer.commands import (
    JsonObject,
    Observer,
    digest_of,
    filesystem,
    flatten,
    mark_unsaved,
    named_parts,
)

UNINITIALISED = "uninitialised"
_ENGINE = str(Path(__file__).parents[2])
_NO_CODE_OF_USERS = (sysconfig.get_paths()["stdlib"], _ENGINE, "<")


class Trace(Observer):
    """Records one step: the state before it, its batch, its operators, and its gradients.

    `kept` is what to keep in `kept.safetensors`, such as `(57, "outputs", 0)`: output 0 of row 57.
    A compiled model is not looked into: its losses and gradients are recorded. Other processes than
    the main one record nothing.
    """

    def __init__(self, step: int, kept: tuple[int, str, int] | None = None) -> None:
        self.step = step
        self.phase = "before the step"
        self.is_on = False
        self._model: nn.Module | None = None
        self._is_compiled = False
        self._dataset: Any = None
        self._rows: list[JsonObject] = []
        self._to_keep = kept
        self._kept: Any = None
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        self._module_of_node: dict[int, str] = {}
        self._owned: dict[int, str] = {}
        self._uninitialised: set[int] = set()
        self._mode = _Operators(self)
        self._watching = ExitStack()

    # --- where the step is ---

    def build_data(self, build: Callable[..., Any], run: Any, train_set: Any, *others: Any) -> Any:
        """Watch the samples of a dataset; a reader or loader has a way of its own to read them."""
        if not (isinstance(train_set, Reader) or hasattr(train_set, "step_batches")):
            self._dataset = train_set
            train_set = WatchedDataset(train_set, self)
        return build(run, train_set, *others)

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Watch the modules, and the end of the update."""
        if not trainer.accelerator.is_main_process:
            return
        self._model = model = trainer.model
        self._names = {id(module): name for name, module in model.named_modules()}
        compiled = (getattr(module, "_compiled_call_impl", None) for module in model.modules())
        self._is_compiled = any(compiled)
        for optimizer in trainer.optimizers.values():
            optimizer.register_step_pre_hook(partial(self._enter_phase, "update"))
            optimizer.register_step_post_hook(partial(self._enter_phase, "after the update"))
        if not self._is_compiled:
            register_module_forward_pre_hook(self._enter_module)
            register_module_forward_hook(self._leave_module, always_call=True)
        self._begin(trainer)

    @property
    def is_recording(self) -> bool:
        """Whether what happens now belongs to the step, and not to an evaluation before it."""
        is_training = self._model is not None and self._model.training
        return self.is_on and (self.phase != "data" or is_training)

    def _begin(self, trainer: TrainerView) -> None:
        """Record the state, and from here on all operators, if the step comes next."""
        if self._model is None or trainer.state.optimizer_step != self.step - 1:
            return
        self._watching.close()
        self._rows.clear()
        self.is_on = False
        self.phase = "before the step"
        self._record_state(trainer)
        self.is_on = True
        self.phase = "data"
        self._watching.enter_context(self._mode)

    def on_evaluate_end(self, trainer: TrainerView, metrics: Mapping[str, Any]) -> None:
        """Forget what the evaluation before the step has computed."""
        self._begin(trainer)

    def on_checkpoint(self, trainer: TrainerView, name: str) -> None:
        """Forget what was computed for the checkpoint before the step."""
        self._begin(trainer)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Forget what the user's callbacks have computed before the step."""
        self._begin(trainer)

    def before_micro_batch(self, trainer: TrainerView, batch: Batch) -> None:
        """Record the batch; what comes next is the forward."""
        if not self.is_on:
            return
        task = trainer.task
        for name, value in vars(task).items() if hasattr(task, "__dict__") else ():
            if isinstance(value, nn.Module):
                for path, module in value.named_modules(prefix=f"task.{name}"):
                    self._names.setdefault(id(module), path)
        with self._paused():
            self._record_batch(batch)
        self.phase = "before the forward"
        if self._is_compiled:
            self._watching.close()

    def on_micro_batch(self, trainer: TrainerView, batch: Batch, output: StepOutput) -> None:
        """Record the losses; what comes next is the backward."""
        if self.is_on:
            with self._paused():
                self.record("loss", "the losses", outputs=[output.losses])
            self.phase = "backward"

    def before_update(self, trainer: TrainerView, gradients: Gradients) -> None:
        """Record the gradients; what comes next is the update."""
        if self.is_on:
            self.phase = "update"
            with self._paused():
                for name, gradient in gradients.items():
                    if gradient is not None:
                        self.record("gradient", name, outputs=[gradient])
            if self._is_compiled:
                self._watching.enter_context(self._mode)

    def _enter_phase(self, phase: str, *_: Any) -> None:
        self.phase = phase

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Write the rows after the step, and after the hooks of the user's callbacks."""
        if self.is_on and report.optimizer_step == self.step:
            self._watching.close()
            self.is_on = False
            self._write(trainer.log.folder)
        self._begin(trainer)

    def _write(self, folder: Path) -> None:
        lines = [f"{json.dumps(row)}\n".encode() for row in self._rows]
        filesystem.create_file(folder / "trace.jsonl", lines)
        if isinstance(self._kept, Tensor):
            kept = save({"kept": self._kept.contiguous()})
            filesystem.create_file(folder / "kept.safetensors", [kept])
        elif self._kept is not None:
            filesystem.create_file(folder / "kept.txt", [repr(self._kept).encode()])

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if self.is_recording:
            self._modules.append(self._names.get(id(module), type(module).__name__))
            if self.phase == "before the forward" and module is self._model:
                self.phase = "forward"

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.is_recording and self._modules:
            self._modules.pop()
            if self.phase == "forward" and module is self._model:
                self.phase = "loss"

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Record in the block without recording the operators that this needs itself."""
        self.is_on = False
        yield
        self.is_on = True

    # --- what is recorded ---

    def record(
        self,
        kind: str,
        name: str,
        *,
        inputs: Iterable[Any] = (),
        outputs: Iterable[Any] = (),
        **more: Any,
    ) -> None:
        """Add a row with the hashes of tensors, and of other values; texts are hashes already."""
        values = {"inputs": [*inputs], "outputs": [*outputs]}
        hashes = {place: [*map(self.hash_of, found)] for place, found in values.items()}
        if (kept := self._kept_next()) is not None:
            place, position = kept
            # After a race, another row may be here than in the replay before.
            value = dict(enumerate(values[place])).get(position)
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(value)
            if isinstance(value, Tensor):
                self._kept = _local(value.detach()).cpu().clone()
            elif not isinstance(value, str):
                self._kept = value
        self._rows.append({"kind": kind, "name": name, "phase": self.phase, **more, **hashes})

    def _kept_next(self) -> tuple[str, int] | None:
        """Return the place and the position of what is to be kept of the next row, if anything."""
        if self._to_keep is None or len(self._rows) != self._to_keep[0]:
            return None
        return self._to_keep[1:]

    def hash_of(self, value: Any) -> str:
        """Return the hash of a value; of memory that nobody has written, always the same."""
        if isinstance(value, str):
            return value
        if isinstance(value, Tensor) and _memory_of(value) in self._uninitialised:
            return UNINITIALISED
        return hash_of(value)

    def _record_state(self, trainer: TrainerView) -> None:
        model = trainer.model
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._owned[_memory_of(tensor)] = name
            self.record("state", name, outputs=[tensor])
        optimizers = named_parts(trainer.optimizers)
        states = {name: each.state_dict() for name, each in optimizers.items()}
        for name, value in flatten(states).items():
            if ".param_names" in name:  # torch gives them to a new optimizer, and loads none
                continue
            if isinstance(value, Tensor):
                self._owned.setdefault(_memory_of(value), name)
            self.record("state", name, outputs=[value])
        parts = {"model": model, **optimizers, "task": trainer.task, "dataset": self._dataset}
        for name, mark in mark_unsaved(parts, model=model).items():
            self.record("unsaved", name, outputs=[repr(mark)[:200]])

    def _record_batch(self, batch: Batch) -> None:
        """Hash each sample by itself, and what is not divided into samples as a whole."""
        leaves = flatten({"inputs": batch.inputs, "targets": batch.targets})
        ids = batch.sample_ids.tolist()
        by_sample = {
            name: leaf
            for name, leaf in leaves.items()
            if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == len(ids)
        }
        self.record("batch", "the ids of the samples", outputs=[batch.sample_ids])
        for index, sample_id in enumerate(ids):
            outputs = [leaf[index] for leaf in by_sample.values()]
            self.record("batch", f"sample {sample_id}", outputs=outputs, tensors=[*by_sample])
        for name in leaves.keys() - by_sample.keys():
            self.record("batch", name, outputs=[leaves[name]])

    def read(self, dataset: Any, index: Any) -> Any:
        """Return a sample of the dataset, and record it."""
        name = f"sample {index}"
        self._modules.append(name)
        sample = dataset[index]
        self._modules.pop()
        leaves = [leaf for leaf in tree_leaves(sample) if leaf is not None]
        with self._paused():
            self.record("sample", name, outputs=leaves)
        return sample

    # --- operators ---

    def operator(self, function: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Call an operator and record it."""
        given = [*arguments, *named.values()]
        tensors = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
        kept = self._kept_next()
        # A clone, since the operator may write into it.
        inputs: list[Any] = [*map(self.hash_of, tensors)]
        if kept is not None and kept[0] == "inputs" and kept[1] < len(tensors):
            inputs[kept[1]] = tensors[kept[1]].detach().clone()
        if self.phase not in ("backward", "update"):
            # Autograd numbers its nodes, and has made this operator's before it is called.
            node = torch._C._autograd._get_sequence_nr() - 1
            self._module_of_node.setdefault(node, self._module())
        result = function(*arguments, **named)
        written = _written_tensors(function, arguments, named)
        outputs = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        self._note_memory(function, outputs, written)
        changed = [*{id(each): each for each in (*outputs, *written)}.values()]  # each once
        self.record(
            "operator",
            str(function),
            inputs=inputs,
            outputs=changed,
            module=self._module() if self.phase != "backward" else self._module_of_backward(),
            plain=[*map(_plain, tree_leaves(given))],
            is_random=torch.Tag.nondeterministic_seeded in function.tags,
            owned=[self._owned.get(_memory_of(each), "") for each in changed],
            line=_line_of_user(),
        )
        return result

    def _module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _module_of_backward(self) -> str:
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        if hasattr(node, "variable"):
            return self._owned.get(_memory_of(node.variable), "")
        return self._module_of_node.get(node._sequence_nr(), "")

    def _note_memory(self, function: Any, outputs: list[Tensor], written: list[Tensor]) -> None:
        """Note memory that is allocated without a value, until it is written as a whole."""
        if "empty" in str(function):
            self._uninitialised |= {_memory_of(each) for each in outputs}
            return
        is_view = any(
            each.alias_info and not each.alias_info.is_write for each in function._schema.returns
        )
        new = [] if is_view else outputs
        for tensor in (*new, *written):
            if tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes():
                self._uninitialised.discard(_memory_of(tensor))


class _Operators(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self._trace.is_recording or func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        return self._trace.operator(func, args, kwargs or {})


class WatchedDataset:
    """A dataset whose samples are recorded if this process reads them in the step."""

    def __init__(self, dataset: Any, trace: Trace | None) -> None:
        self.dataset = dataset
        self._trace = trace

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if self._trace is None or get_worker_info() or not self._trace.is_recording:
            return self.dataset[index]
        return self._trace.read(self.dataset, index)

    def __getattr__(self, name: str) -> Any:
        # `set_epoch` is also called of datasets within datasets.
        if name in ("dataset", "set_epoch"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __reduce__(self) -> Any:
        return WatchedDataset, (self.dataset, None)  # for a data worker


def _written_tensors(
    function: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> list[Tensor]:
    """Return the arguments that the operator's schema says it writes into."""
    values = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = arguments[index] if index < len(arguments) else named.get(argument.name)
            values += [each for each in tree_leaves(given) if isinstance(each, Tensor)]
    return values


def _memory_of(tensor: Tensor) -> int:
    try:
        return int(_local(tensor).untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # it has no memory, such as a sparse one
        return 0


def _plain(value: Any) -> Any:
    """Return a value that is equal in equal calls."""
    if isinstance(value, Tensor | torch.Generator):
        return type(value).__name__
    is_shown = isinstance(value, str | int | float | complex | None | torch.dtype | torch.device)
    return str(value) if is_shown else type(value).__name__


def hash_of(value: Any) -> str:
    """Return the hash of a tensor's dtype, shape and bytes in logical order, or of a value."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        value = _local(value)
    elif hasattr(value, "tobytes"):  # a picture, a number of numpy
        value = value.tobytes()
    try:
        return digest_of(value)
    except (RuntimeError, NotImplementedError, TypeError):  # such as a sparse tensor
        return type(value).__name__


def _line_of_user() -> str | None:
    """Return the innermost line of the user's code that this package has called; None: none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_ENGINE) and name != __file__:
            return None
        if _is_users(name):
            return f"{os.path.relpath(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None


@cache
def _is_users(file: str) -> bool:
    return not file.startswith(_NO_CODE_OF_USERS) and "-packages" not in file


def _local(tensor: Tensor) -> Tensor:
    """Return this process's part of `tensor`, or `tensor` itself if it is not a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
