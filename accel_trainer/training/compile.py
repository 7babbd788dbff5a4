"""torch.compile for exact runs; its time is counted apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core.timing import Stopwatch

# Of one forward. torch's default of 8 is too few for batches that are cut to their longest sample.
MAX_VARIANTS = 128


def compile_model(model: nn.Module, preparation: Stopwatch, mode: str | None = None) -> None:
    """Make `model` compile with torch's inductor, separately for each shape of its inputs.

    By default, torch generates kernels for any shape when it meets a second one, and runs eagerly
    after the eighth. The kernels, and thus the last bits, would then depend on where a run was
    resumed (torch 2.13).

    It compiles when it first runs; its class and parameter names do not change. `preparation`
    counts the time spent compiling for training. `mode` is one of torch's.
    """
    import torch._dynamo

    # Which variant would run eagerly depends on the ones that came before it.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.recompile_limit = MAX_VARIANTS
    torch._dynamo.config.accumulated_recompile_limit = 8 * MAX_VARIANTS
    model.compile(backend=partial(compile_graph, preparation), mode=mode, dynamic=False)


def compile_graph(
    preparation: Stopwatch, graph: fx.GraphModule, inputs: list[Tensor], mode: str = "default"
) -> Callable[..., Any]:
    """Return `graph` as a compiled function, as torch.compile asks for it."""
    from torch._dynamo import lookup_backend
    from torch._inductor import list_mode_options

    # An evaluation, which has no gradients, is counted as a whole.
    with preparation.running() if torch.is_grad_enabled() else nullcontext():
        compiler: Callable[..., Callable[..., Any]] = lookup_backend("inductor")
        return compiler(graph, inputs, config_patches=list_mode_options(mode))
