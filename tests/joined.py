"""How a test's process joins the others of its launch, and with which settings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator

from accel_trainer.distributed.accelerator import RuntimeConfig, start_accelerator
from accel_trainer.distributed.collectives import shutdown

FSDP = {  # as of accelerate_configs/fsdp.yaml, but for a net of 956 parameters
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    "FSDP_MIN_NUM_PARAMS": "100",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


@contextmanager
def joined_processes() -> Iterator[Accelerator]:
    """Give this process's accelerator; leave together, so that none misses a peer.

    Warnings are errors.
    """
    warnings.simplefilter("error")
    accelerator = start_accelerator(RuntimeConfig(num_threads=1, timeout_s=300))
    yield accelerator
    shutdown(accelerator)
