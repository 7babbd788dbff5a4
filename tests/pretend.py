"""An accelerator that only pretends: its tensors lie on the CPU, its rules are those of a GPU.

Importing this makes `pretend` the accelerator of the process, for good: import it in a process of
its own (see `processes.py`). There
- a CPU tensor among those of the device is refused,
- whatever makes the host wait for the device is noted in `device.syncs`,
- what a GPU would launch is noted in `device.operations`,
- a copy between the device and pinned memory is garbage until a stream or an event has waited for
  it,
- the device has random numbers of its own, and no float64 if `device.refuses_float64`,
- the backend `pretendccl` carries tensors of the device, and only those, between processes.
Autocast and torch.compile know no device that is made in Python: it has neither. Its bits are those
of the CPU, but for GroupNorm's backward and dropout, which torch computes otherwise on an
accelerator.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, library
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

aten = torch.ops.aten
c10d = torch.ops.c10d

_LAUNCH_NOTHING = {
    aten.detach.default,
    aten.empty_like.default,
    aten.record_stream.default,
    aten.set_.source_Tensor,
}


class Copy:
    """A requested transfer: `target` holds garbage until it arrives, as late as it may."""

    def __init__(self, target: Tensor, source: Tensor, *, to_host: bool) -> None:
        # What the device computes later comes after the copy. What the host writes later comes
        # before it.
        self.target = target
        self.source = source.clone() if to_host else source
        self.to_host = to_host
        self.has_arrived = False
        target.fill_(torch.nan if target.is_floating_point() else torch.iinfo(target.dtype).max)

    def arrive(self) -> None:
        if not self.has_arrived:
            self.target.copy_(self.source)
            self.has_arrived = True


class Event:
    """A point in the work of a stream."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = list(copies)

    def synchronize(self) -> None:
        for copy in self._copies:
            copy.arrive()

    def query(self) -> bool:
        return all(copy.has_arrived for copy in self._copies)


class Stream:
    """Work in its order, of which only the copies take any time."""

    def __init__(self, device: Any = None) -> None:
        self.copies: list[Copy] = []

    def __enter__(self) -> None:
        self._outer = device.stream
        device.stream = self

    def __exit__(self, *error: object) -> None:
        device.stream = self._outer

    def __deepcopy__(self, memo: object) -> Stream:
        return self

    def record_event(self, event: Event | None = None) -> Event:
        return Event(self.copies)

    def wait_stream(self, other: Stream) -> None:
        self.copies += other.copies

    def synchronize(self) -> None:
        device.note_sync("synchronize")
        self.record_event().synchronize()

    def reach_next_operation(self) -> None:
        """Let arrive what was sent to the device: the next operation may read it."""
        for copy in self.copies:
            if not copy.to_host:
                copy.arrive()
        self.copies = [copy for copy in self.copies if not copy.has_arrived]


class Device(_DummyBackendModule):
    """What `torch.cuda` is for CUDA, and what the device has seen."""

    def __init__(self) -> None:
        self.refuses_float64 = False
        self.syncs: list[str] = []
        self.operations: list[str] = []
        self.stream = Stream()
        self._generator = torch.Generator()

    def note_sync(self, what: str) -> None:
        stack = traceback.extract_stack()
        ours = [f for f in stack if "site-packages" not in f.filename and f.filename != __file__]
        where = f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno}" if ours else "backward"
        self.syncs.append(f"{where} {what}")

    def note_operation(self, func: Any) -> None:
        if not (func.is_view or func in _LAUNCH_NOTHING):
            self.operations.append(str(func))

    def current_stream(self, device: Any = None) -> Stream:
        return self.stream

    def synchronize(self, device: Any = None) -> None:
        self.stream.synchronize()

    def manual_seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self._generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self._generator.set_state(state)

    @contextmanager
    def random_numbers(self) -> Iterator[None]:
        """Let operations on the host draw from the device's generator."""
        host = torch.default_generator
        before = host.get_state()
        host.set_state(self._generator.get_state())
        yield
        self._generator.set_state(host.get_state())
        host.set_state(before)


class Pretend(Tensor):
    """A tensor of the device; its values lie in `host`."""

    host: Tensor
    streams: list[Stream]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> Pretend:
        if host.dtype == torch.float64 and device.refuses_float64:
            raise TypeError(
                "Cannot convert a pretend tensor to float64 dtype: "
                "the device does not support float64"
            )
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        # Otherwise it could not be a view of a tensor from outside (torch 2.13).
        with torch.inference_mode(False):
            made = Tensor._make_wrapper_subclass(
                cls, host.shape, dtype=host.dtype, device="pretend:0", **layout
            )
        made.host = host
        made.streams = [device.stream]
        return made

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, new: Pretend) -> None:
        Tensor.data.__set__(self, new)
        self.host = new.host

    def __repr__(self) -> str:
        return f"pretend {self.host}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is aten.copy_.default:
            return copied(*args, **kwargs or {})
        if func is aten._to_copy.default:
            return converted(*args, **kwargs or {})
        if func._can_decompose():  # as in inference mode, where torch 2.13 has not done it before
            return func.decompose(*args, **kwargs or {})
        # gloo, unlike NCCL, wants the shape of the parts.
        if func is c10d._allgather_base_.default:
            args = (args[0].view(-1, *args[1].shape[1:]), *args[1:])
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operation makes of tensors of the device and of numbers."""
    inputs: dict[int, Pretend] = {}

    def on_host(tensor: Pretend) -> Tensor:
        if device.stream not in tensor.streams:
            raise RuntimeError(
                f"{func}: memory of another stream, which may be in use again: "
                "record_stream is missing"
            )
        inputs[id(tensor.host)] = tensor
        return tensor.host

    def on_device(result: Tensor) -> Pretend:
        mine = inputs.get(id(result))  # changed in place
        if mine is not None and mine.shape != result.shape:
            mine.data = Pretend(result)
        return Pretend(result) if mine is None else mine

    leaves = tree_leaves((args, kwargs))
    if any(
        isinstance(leaf, Tensor) and not isinstance(leaf, Pretend) and leaf.ndim for leaf in leaves
    ):
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found pretend:0 and cpu!"
        )
    device.stream.reach_next_operation()
    if is_sync(func, leaves):
        device.note_sync(str(func))
    device.note_operation(func)
    args, kwargs = tree_map_only(Pretend, on_host, (args, dict(kwargs)))
    if func.namespace == "c10d":
        args = tree_map_only(torch.ScriptObject, group_on_host, args)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    if torch.Tag.nondeterministic_seeded in func.tags:
        with device.random_numbers():
            result = func(*args, **kwargs)
    else:
        result = func(*args, **kwargs)
    return tree_map_only(Tensor, on_device, result)


def is_sync(func: Any, leaves: Sequence[Any]) -> bool:
    """Return whether the host must wait: for values to return, or for the shape of an output."""
    if func in (aten.index.Tensor, aten.index_put_.default):
        return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in leaves[1:])
    return (
        torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    )


def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy `source` into `target`, perhaps across sides: later, if the host's memory is pinned."""
    into, out_of = (
        tensor.host if isinstance(tensor, Pretend) else tensor for tensor in (target, source)
    )
    to_host, from_host = not isinstance(target, Pretend), not isinstance(source, Pretend)
    if not from_host:
        device.stream.reach_next_operation()
    where = " to the host" if to_host else " from the host" if from_host else ""
    device.operations.append(f"copy{where}")
    if not (to_host or from_host):
        into.copy_(out_of)
    elif non_blocking and is_pinned(into if to_host else out_of):
        device.stream.copies.append(Copy(into, out_of, to_host=to_host))
    else:
        device.note_sync(f"copy{where}")
        device.stream.record_event().synchronize()
        into.copy_(out_of)
    return target


def converted(
    source: Pretend, *, device: Any = None, non_blocking: bool = False, **options: Any
) -> Tensor:
    """Return a copy, here or on the host: in pinned memory if it may be late, as torch does."""
    if device is None or device.type == "pretend":
        return computed(aten._to_copy.default, [source], options)
    options.pop("pin_memory", None)
    target = torch.empty_like(source.host, **options)
    return copied(pin(target) if non_blocking else target, source, non_blocking)


_groups: dict[Any, dist.ProcessGroup] = {}


def group_on_host(value: Any) -> Any:
    """Return the same processes as a group for tensors of the host, if `value` is a group."""
    try:
        backend = dist.ProcessGroup.unbox(value)._get_backend(torch.device("pretend"))
    except RuntimeError:
        return value
    if backend not in _groups:
        _groups[backend] = dist.ProcessGroup(dist.HashStore(), backend.rank(), backend.size())
        _groups[backend]._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        _groups[backend]._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend
        )
    return _groups[backend].boxed()


def _prepare_backend(
    state: PartialState, cpu: bool = False, *others: Any
) -> tuple[str | None, DistributedType]:
    if cpu or "LOCAL_RANK" not in os.environ:
        return _accelerates_choice(state, cpu, *others)
    return "pretendccl", DistributedType.MULTI_CPU


_pinned: dict[int, Tensor] = {}  # kept for good, so that no address is used twice


def pin(tensor: Tensor, device: Any = None) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    _pinned[made.untyped_storage().data_ptr()] = made
    return made


def is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def _empty(
    size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **options: Any
) -> Pretend:
    return Pretend(torch.empty(size, dtype=dtype, memory_format=memory_format))


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **options: Any
) -> Pretend:
    return Pretend(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return copied(target, source, non_blocking)


def _empty_on_host(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
    made = _torch_empty(*size, **options)
    return pin(made) if pin_memory else made


device = Device()
os.environ["ACCELERATE_TORCH_DEVICE"] = "pretend:0"
_setup_privateuseone_for_python_backend("pretend", device)
_kernels = library.Library("aten", "IMPL")
for name, kernel in {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
}.items():
    _kernels.impl(name, kernel, "PrivateUse1")
# A device made in Python has no pinned memory of torch's, and streams that nothing can be seen of
# (torch 2.13).
_torch_empty = torch.empty
torch.empty = _empty_on_host
Tensor.pin_memory = pin
Tensor.is_pinned = is_pinned
torch.Stream = Stream
torch.Event = Event
torch.accelerator.current_stream = device.current_stream
torch.accelerator.synchronize = device.synchronize
dist.Backend.register_backend(
    "pretendccl", lambda *launch: dist.ProcessGroupGloo(*launch), devices=["pretend"]
)
_accelerates_choice = PartialState._prepare_backend
PartialState._prepare_backend = _prepare_backend
