"""torch.compile for exact runs: its time is counted separately, and a model that it cannot compile runs eagerly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

_logger = logging.getLogger(__name__)


class Compiler:
    """Compiles a model in place with torch's inductor, separately for each shape of its inputs.

    By default torch generates kernels for any shape when it meets a second one. The kernels, and so the last bits,
    would then depend on where a run was resumed (torch 2.13).

    `preparation` counts the time of compilation. If it fails, such as without a C++ compiler, the model runs eagerly,
    after one warning unless `is_quiet`.
    """

    def __init__(self, preparation: Stopwatch, *, is_quiet: bool = False) -> None:
        self._preparation, self._is_quiet = preparation, is_quiet

    def compile(self, model: nn.Module) -> None:
        """Compile the forwards and backwards of `model` when they first run; names and class stay."""
        model.compile(backend=self._compile_graph, dynamic=False)

    def _compile_graph(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._dynamo import lookup_backend

        try:
            with self._preparation.running():
                return lookup_backend("inductor")(graph, inputs)
        except Exception as error:
            if not self._is_quiet:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                _logger.warning("--compile cannot compile this model, which runs in eager mode (%s)", reason)
            self._is_quiet = True
            return graph.forward


class Stopwatch:
    """Counts `seconds` of one-time work, which the throughput leaves out."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start_s
