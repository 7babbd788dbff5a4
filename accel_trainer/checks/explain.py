"""What to do about an error that torch raises: one line in place of a traceback."""

from __future__ import annotations

from accelerate import Accelerator

from ..core.batch_plan import BatchConfig
from ..core.errors import ConfigError, reason_of
from ..fault_tolerance.activity import Activity
from ..training.compile import MAX_VARIANTS
from .out_of_memory import explain_out_of_memory, is_out_of_memory


def explain(
    error: Exception, batch: BatchConfig, activity: Activity, accelerator: Accelerator
) -> ConfigError | None:
    """Return an error that says what to do about `error`, None if nothing is known."""
    if is_out_of_memory(error):
        return explain_out_of_memory(batch, activity, accelerator)
    # By name, since importing torch._dynamo takes seconds.
    names = [kind.__name__ for kind in type(error).__mro__]
    if "FailOnRecompileLimitHit" in names:
        return ConfigError(
            "COMPILE",
            f"--compile has compiled a forward {MAX_VARIANTS} times, "
            "once for each input shape and Python number: "
            "pad to a few lengths, read no number from a tensor in the forward, "
            "or leave out --compile",
        )
    if "BackendCompilerFailed" in names:
        return ConfigError(
            "COMPILE", f"--compile cannot compile this model ({reason_of(error)}): leave it out"
        )
    return None
