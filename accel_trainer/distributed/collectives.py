"""Collectives that accelerate does not have: for bytes and errors, and sums in a fixed order.

Only tensors are sent, no pickled objects. All collectives also work with a single process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from ..core import errors
from ..core.errors import OneLineError
from ..core.filesystem import Chunk
from ..core.pairwise import sum_rows

Files = dict[str, Chunk]
"""The contents of files by name."""

_MAX_TEXT = 200
# Up to this many elements, over all processes, one exchange is faster than two (gloo).
_MAX_GATHERED = 2**20
_LOOK_INTERVAL_S = 0.02

# The errors of one process that are raised on all. A subclass is raised as its nearest ancestor in
# this table.
_ERRORS = {**vars(errors), "OSError": OSError}


def sum_pairwise(values: Tensor, accelerator: Accelerator) -> Tensor:
    """Replace `values` [N] by their sum over the processes, added in pairs, and return them.

    **Collective.**

    The number of processes must be a power of two. The sum is that of the first half of the
    processes plus that of the second half, each added in the same way: bit for bit the result of
    one process that adds in these pairs. Each process adds one slice, and receives
    no more bytes than in a ring all-reduce.
    """
    num_processes = accelerator.num_processes
    rank = accelerator.process_index
    if num_processes == 1:
        return values
    if num_processes * len(values) <= _MAX_GATHERED:
        return values.copy_(sum_rows(accelerator.gather(values[None])))
    slices = values.tensor_split(num_processes)
    sizes = [len(each) for each in slices]
    rows = values.new_empty(num_processes, sizes[rank])
    dist.all_to_all_single(rows.view(-1), values, [sizes[rank]] * num_processes, sizes)
    slices[rank].copy_(sum_rows(rows))
    for process, each in enumerate(slices):
        dist.broadcast(each, src=process)
    return values


def exchange_flattened(tensors: Sequence[Tensor], exchange: Callable[[Tensor], Tensor]) -> None:
    """Apply `exchange` to all tensors of a dtype at once, concatenated to one flat tensor.

    Each tensor is overwritten with its part of the result.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        mine = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = exchange(torch.cat([tensor.detach().reshape(-1) for tensor in mine]))
        parts = flat.split([tensor.numel() for tensor in mine])
        for tensor, values in zip(mine, parts, strict=True):
            tensor.detach().copy_(values.view(tensor.shape))


def broadcast_from_main(tensors: Sequence[Tensor], accelerator: Accelerator) -> None:
    """Overwrite `tensors`, of any dtype, with the main process's values. **Collective.**"""
    if accelerator.num_processes > 1:
        exchange_flattened(tensors, _send_from_main)


def _send_from_main(flat: Tensor) -> Tensor:
    dist.broadcast(flat.view(torch.uint8), src=0)  # as bytes: gloo sends neither bool nor int16
    return flat


def broadcast_bytes(data: Chunk, accelerator: Accelerator) -> Chunk:
    """Return the main process's `data` on every process. **Collective. Host sync.**"""
    if accelerator.num_processes == 1:
        return data
    # A group from before the run may only have NCCL, which sends from device to device.
    device = torch.device("cpu") if "cpu:" in dist.get_backend_config() else accelerator.device
    size = torch.tensor(len(data), device=device)
    dist.broadcast(size, src=0)
    if size == 0:
        return b""
    buffer = bytearray(data if accelerator.is_main_process else int(size))
    payload = torch.frombuffer(buffer, dtype=torch.uint8).to(device)
    dist.broadcast(payload, src=0)
    return payload.cpu().numpy().tobytes()


def run_on_main(action: Callable[[], Any], accelerator: Accelerator) -> Any:
    """Run `action` only on the main process, and return its result, a JSON value, on every process.

    **Collective.**

    A `OneLineError` of `action` is raised on every process, so none is left waiting.
    """
    captured = _capture(action) if accelerator.is_main_process else []
    try:
        captured = json.loads(bytes(broadcast_bytes(json.dumps(captured).encode(), accelerator)))
    except RuntimeError:
        # If a signal ends all processes, another may have left first.
        if captured[1:]:
            _reraise(captured)
        raise
    return _reraise(captured)


def _capture(action: Callable[[], Any]) -> list[Any]:
    """Return the result of `action`, or the name and the arguments of its OneLineError."""
    try:
        return [action()]
    except OneLineError as error:
        name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
        return [name, error.code, error.message]


def _reraise(captured: list[Any]) -> Any:
    """Return the result that `_capture` recorded, or raise the error."""
    result, *arguments = captured
    if arguments:
        raise _ERRORS[result](*arguments)
    return result


def broadcast_files(read: Callable[[], Files], accelerator: Accelerator) -> Files:
    """Return the files that `read` finds on the main process, contents by name, on every process.

    **Collective.** No shared disk is needed. Errors are raised as by `run_on_main`.
    """
    files: Files = {}

    def read_names() -> list[str]:
        files.update(read())
        return [*files]

    return {
        name: broadcast_bytes(files.get(name, b""), accelerator)
        for name in run_on_main(read_names, accelerator)
    }


def gather_rows(rows: Tensor, accelerator: Accelerator) -> Tensor:
    """Return the rows [N, K] of all processes on the CPU; N may differ. **Collective. Host sync.**

    The first column must not be negative, since -1 there marks padding.
    """
    if accelerator.num_processes > 1:
        padded = accelerator.pad_across_processes(rows.to(accelerator.device), dim=0, pad_index=-1)
        rows = accelerator.gather(padded)
    return rows[rows[:, 0] >= 0].cpu()


def gather_numbers(number: int, accelerator: Accelerator) -> list[int]:
    """Return the `number` of each process, of at most 64 bits. **Collective. Host sync.**"""
    if accelerator.num_processes == 1:
        return [number]
    mine = torch.tensor([number], device=accelerator.device)
    return accelerator.gather(mine).tolist()  # type: ignore[no-any-return]  # untyped


def gather_texts(text: str, accelerator: Accelerator) -> list[str]:
    """Return the `text` of each process, without zero bytes. **Collective. Host sync.**"""
    rows = torch.tensor([*text.encode(), 0], dtype=torch.int32)[:, None]
    gathered = bytes(gather_rows(rows, accelerator).flatten().tolist())
    return gathered.decode().split("\0")[:-1]


def differing_lines(text: str, accelerator: Accelerator) -> dict[int, str]:
    """Return the first line of a `text` that differs from the main process's, by its process.

    A line is cut to 200 characters. **Collective. Host sync.**
    """
    theirs = str(broadcast_bytes(text.encode(), accelerator), "utf-8").splitlines()
    pairs = zip_longest(text.splitlines(), theirs, fillvalue="nothing")
    found = next((f"{mine}; process 0: {other}" for mine, other in pairs if mine != other), "")
    texts = gather_texts(found[:_MAX_TEXT], accelerator)
    return {process: line for process, line in enumerate(texts) if line}


@dataclass(frozen=True)
class Peers:
    """Processes that work together in a background thread, such as to write a checkpoint.

    Without a `group`, the main process works alone.
    """

    process_index: int = 0
    num_processes: int = 1
    group: dist.ProcessGroup | None = None

    def agree(self, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on each process, and return all results, JSON values, by process index.

        **Collective.**

        An OSError or a OneLineError of one process is raised on all of them.
        """
        if self.group is None:
            return [action()]
        try:
            captured = _capture(action)
        except OSError as error:
            captured = [
                "OSError",
                error.errno,
                f"process {self.process_index}: {error.strerror or error}",
            ]
        data = json.dumps(captured).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_processes)]
        dist.all_gather(sizes, torch.tensor([len(data)]), self.group)
        rows = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
        padded = bytearray(data.ljust(len(rows[0])))  # with spaces, in which JSON may end
        dist.all_gather(rows, torch.frombuffer(padded, dtype=torch.uint8), self.group)
        return [_reraise(json.loads(row.numpy().tobytes())) for row in rows]


SINGLE_PROCESS = Peers()


def join_peers(accelerator: Accelerator, *, timeout_s: float) -> Peers:
    """Return all processes as peers, with a new process group: training may be using the others.

    **Collective.**
    """
    if accelerator.num_processes == 1:
        return SINGLE_PROCESS
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return Peers(accelerator.process_index, accelerator.num_processes, group)


def show_life(accelerator: Accelerator) -> None:
    """Show the others that the main process lives; ValueError once nobody can see it.

    Only that one reaches the store without a network: where a link is cut, a call would not return.
    """
    if accelerator.num_processes > 1 and accelerator.is_main_process:
        _get_default_store().add("life 0", 1)


def wait_for_main(accelerator: Accelerator, *, timeout_s: float) -> None:
    """Wait until the main process gets here, too, as long as it shows life. **Collective.**

    Before the end of a run it may work for as long as it needs, such as to upload a model. If it
    has not shown life for `timeout_s`, the next collective will fail.
    """
    if accelerator.num_processes == 1:
        return
    store = _get_default_store()
    seen = -1
    with suppress(RuntimeError):  # whoever serves it is gone, such as a launcher
        if accelerator.is_main_process:
            store.set("end", "")
        while not store.check(["end"]):
            if (life := store.add("life 0", 0)) != seen:
                seen, seen_s = life, time.monotonic()
            if time.monotonic() > seen_s + timeout_s:
                return
            time.sleep(_LOOK_INTERVAL_S)


_last_operations: list[dist.Work | None] = []


def shutdown(accelerator: Accelerator) -> None:
    """Wait for all processes, and destroy the process group. **Collective.**

    The handle of the last operation is kept forever. Otherwise gloo's thread may have to free it,
    for which it needs the interpreter lock, while this thread holds that lock and waits for gloo's
    thread: a deadlock in 1 of 40 runs (torch 2.13).
    """
    if accelerator.num_processes > 1:
        last = dist.barrier(async_op=True)
        last.wait()
        _last_operations.append(last)
    accelerator.end_training()
