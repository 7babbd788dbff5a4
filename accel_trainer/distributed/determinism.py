"""Torch's settings for deterministic results, and operations without a deterministic kernel."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ..core.errors import ConfigError
from ..core.logger import logger

_NO_KERNEL = re.compile(r"(\S+(?: with \S+)?) does not have a deterministic implementation")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def prepare_cuda() -> None:
    """Set variables that torch and CUDA's libraries read only once."""
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    # Otherwise torch's search for GPUs starts CUDA, and no process can be forked afterwards.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def is_too_late_for_cublas() -> bool:
    """Return whether CUDA was started before cuBLAS was told to be deterministic."""
    return torch.cuda.is_initialized() and _WORKSPACE not in os.environ


def allow_tf32(is_allowed: bool) -> None:
    """Set whether CUDA may compute float32 as TF32.

    torch has two APIs for it, and reading one is an error after only the other was set: both are
    set here, so that both can be read.
    """
    cuda: Any = torch.backends.cuda  # the stubs lack the newer API
    cudnn: Any = torch.backends.cudnn
    cuda.matmul.allow_tf32 = is_allowed
    cudnn.allow_tf32 = is_allowed
    for backend in (cuda.matmul, cudnn.conv, cudnn.rnn):
        backend.fp32_precision = "tf32" if is_allowed else "ieee"


def choose_kernels(deterministic: bool | Literal["strict"]) -> None:
    """Use deterministic CUDA kernels where there are any.

    With `strict`, an operation that has none raises RuntimeError.
    """
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = bool(deterministic)
    torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic != "strict")
    # Otherwise torch launches a kernel for every new tensor, to fill it with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in its stubs


@contextmanager
def nondeterminism_named() -> Iterator[set[str]]:
    """Collect operations without a deterministic kernel, and warn once of each.

    torch reports such an operation by a Python warning that points into its own sources: this
    replaces it. Raises ConfigError where torch refuses the operation, as with `strict`.
    """
    operations: set[str] = set()
    show = warnings.showwarning

    def record_it(message: Any, *where: Any, **more: Any) -> None:
        found = _NO_KERNEL.search(str(message))
        if found is None:
            show(message, *where, **more)
        elif found[1] not in operations:
            operations.add(found[1])
            logger.warning(
                "%s has no deterministic kernel here: a resumed run is close, not equal bit "
                "for bit; --runtime.deterministic strict ends a run there instead",
                found[1],
            )

    warnings.showwarning = record_it
    try:
        yield operations
    except RuntimeError as error:
        if (found := _NO_KERNEL.search(str(error))) is None:
            raise
        raise ConfigError(
            "NONDETERMINISTIC",
            f"{found[1]} has no deterministic kernel here, and --runtime.deterministic is strict "
            "or a step did not repeat itself: replace it in the model, or set "
            "--runtime.deterministic True without --check-every, without the promise of the same "
            "bits",
        ) from error
    finally:
        warnings.showwarning = show
