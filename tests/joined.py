"""How a test's process joins the others of its launch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator

from accel_trainer.collectives import leave
from accel_trainer.runtime import RuntimeConfig, start_accelerator


@contextmanager
def joined_processes() -> Iterator[Accelerator]:
    """Give this process's accelerator; leave together, so that none misses a peer. Warnings are errors."""
    warnings.simplefilter("error")
    accelerator = start_accelerator(RuntimeConfig(num_threads=1, timeout_s=60))
    yield accelerator
    leave(accelerator)
