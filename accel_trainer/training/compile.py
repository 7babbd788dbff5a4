"""torch.compile for exact runs, decided once before the first step; its time is counted apart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, fx, nn

from ..core.errors import ConfigError
from ..core.timing import Stopwatch

_logger = logging.getLogger(__name__)
# Of one forward. torch's default of 8 is too few for batches that are cut to their longest sample.
MAX_VARIANTS = 128


class Compiler:
    """Compiles a model in place with torch's inductor, separately for each shape of its inputs.

    By default, torch generates kernels for any shape when it meets a second one, and runs eagerly
    after the eighth. The kernels, and thus the last bits, would then depend on where a run was
    resumed (torch 2.13).

    `preparation` counts the time spent compiling.
    """

    def __init__(self, preparation: Stopwatch) -> None:
        self._preparation = preparation

    def decide(self, accelerator: Accelerator, *, decided: bool | None) -> bool:
        """Return whether a run compiles; `decided` is what its checkpoint says, None without one.

        **Collective.**

        Each process compiles a trial function. If that fails on one, such as for lack of a C++
        compiler, all processes run in eager mode until the end of the run.

        Raises:
            ConfigError: the run was compiled so far, and cannot be here.
        """
        if decided is False:
            if accelerator.is_main_process:
                _logger.warning(
                    "--compile could not compile where this run began: it continues in eager mode"
                )
            return False
        failure = self._try(accelerator.device)
        num_failures = torch.tensor(float(failure is not None), device=accelerator.device)
        if not accelerator.reduce(num_failures):
            return True
        reason = failure or "on another process"
        if decided:
            raise ConfigError(
                "COMPILE",
                f"this run's model was compiled, and --compile fails here ({reason}): "
                "install what is missing, "
                "or continue with --runtime.no-compile --allow-change runtime.compile",
            )
        if accelerator.is_main_process:
            _logger.warning(
                "--compile cannot compile this model, which runs in eager mode (%s)", reason
            )
        return False

    def compile(self, model: nn.Module) -> None:
        """Make `model` compile when it first runs; its class and parameter names do not change."""
        import torch._dynamo

        # Which variant would run eagerly depends on the ones that came before it.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch._dynamo.config.recompile_limit = MAX_VARIANTS
        torch._dynamo.config.accumulated_recompile_limit = 8 * MAX_VARIANTS
        model.compile(backend=self._compile_graph, dynamic=False)

    def _try(self, device: torch.device) -> str | None:
        """Compile a small function; return the reason if that fails."""
        try:
            compiled = torch.compile(lambda x: x + 1, backend=self._compile_graph, dynamic=False)
            compiled(torch.zeros(2, device=device))
        except Exception as error:
            return _reason(error)
        return None

    def _compile_graph(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._dynamo import lookup_backend

        with self._preparation.running():
            return lookup_backend("inductor")(graph, inputs)


@contextmanager
def compile_errors_explained() -> Iterator[None]:
    """Raise ConfigError for a model that cannot be compiled, or must be compiled too often."""
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        if name == "FailOnRecompileLimitHit":
            raise ConfigError(
                "COMPILE",
                f"--compile has compiled a forward {MAX_VARIANTS} times, "
                "once for each input shape and Python number: "
                "pad to a few lengths, read no number from a tensor in the forward, "
                "or leave out --compile",
            ) from error
        if name == "BackendCompilerFailed":
            raise ConfigError(
                "COMPILE", f"--compile cannot compile this model ({_reason(error)}): leave it out"
            ) from error
        raise


def _reason(error: Exception) -> str:
    """Return the first line of an error, or of the error that torch.compile has wrapped."""
    inner = getattr(error, "inner_exception", error)
    return f"{type(inner).__name__}: {inner}".splitlines()[0]
