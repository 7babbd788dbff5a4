"""What decides the bits of a result: torch's settings for GPUs, and operations without a deterministic kernel."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ..core.errors import ConfigError

_logger = logging.getLogger(__name__)

_NO_KERNEL = re.compile(r"(\S+(?: with \S+)?) does not have a deterministic implementation")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def prepare_cuda() -> None:
    """Set what CUDA's libraries read once, when they are first used."""
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    # Or torch's search for GPUs would start CUDA, and no process could be forked afterwards.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def is_too_late_for_cublas() -> bool:
    """Return whether CUDA is in use already and cuBLAS was not told to be deterministic before."""
    return torch.cuda.is_initialized() and _WORKSPACE not in os.environ


def allow_tf32(is_allowed: bool) -> None:
    """Let CUDA compute float32 as TF32, or not.

    torch 2.9 and later have two ways to say so, and an error for whoever asks by one after the
    other was used alone: with both, all who ask get an answer.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_allowed
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn  # its stubs lack what is new
    if hasattr(cuda.matmul, "fp32_precision"):
        for backend in (cuda.matmul, cudnn.conv, cudnn.rnn):
            backend.fp32_precision = "tf32" if is_allowed else "ieee"


def choose_kernels(deterministic: bool | Literal["strict"]) -> None:
    """Use deterministic CUDA kernels where there are any; `strict`: an operation without one raises RuntimeError."""
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = bool(deterministic)
    torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic != "strict")
    if deterministic:
        # Or torch would fill every new tensor with NaN, with a kernel each.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in its stubs


@contextmanager
def nondeterminism_named(*, says_it: bool) -> Iterator[set[str]]:
    """Collect the operations that have no deterministic kernel here, and warn once of each if `says_it`.

    torch says so in a Python warning when it runs the operation, which would be shown as a warning
    of its sources.

    Raises ConfigError where torch refuses the operation instead, as with `strict`.
    """
    operations: set[str] = set()
    show = warnings.showwarning

    def name_it(message: Any, *where: Any, **more: Any) -> None:
        found = _NO_KERNEL.search(str(message))
        if found is None:
            show(message, *where, **more)
        elif found[1] not in operations:
            operations.add(found[1])
            if says_it:
                fact = f"{found[1]} has no deterministic kernel here: a resumed run is close, not equal bit for bit"
                _logger.warning("%s; --runtime.deterministic strict ends a run there instead", fact)

    warnings.showwarning = name_it
    try:
        yield operations
    except RuntimeError as error:
        if (found := _NO_KERNEL.search(str(error))) is None:
            raise
        fact = f"{found[1]} has no deterministic kernel here, and --runtime.deterministic is strict"
        fix = "replace it in the model, or set --runtime.deterministic True, without the promise of the same bits"
        raise ConfigError("NONDETERMINISTIC", f"{fact}: {fix}") from error
    finally:
        warnings.showwarning = show
