"""torch.compile as an exact run needs it; what it took is told apart, and what it cannot compile runs as it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

_logger = logging.getLogger(__name__)


class Stopwatch:
    """Counts `seconds` of work that is done once, before the steps that it makes faster."""

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


class Compiler:
    """Compiles a model in place with torch's inductor, for each shape of its inputs apart.

    By default torch makes of the second shape it meets kernels for any shape: which those are then depends
    on where a run was resumed, and so do its last bits (torch 2.13).

    `preparation` counts the time that it takes. Where it fails, such as without a C++ compiler, the model runs as
    it is, after one warning, given unless `is_quiet`.
    """

    def __init__(self, preparation: Stopwatch, *, is_quiet: bool = False) -> None:
        self._preparation, self._is_quiet = preparation, is_quiet

    def compile(self, model: nn.Module) -> None:
        """Let the forwards and backwards of `model` be compiled as they are met; names and class stay."""
        model.compile(backend=self._compile_graph, dynamic=False)

    def _compile_graph(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._dynamo import lookup_backend

        try:
            with self._preparation.running():
                return lookup_backend("inductor")(graph, inputs)
        except Exception as error:
            if not self._is_quiet:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                _logger.warning("--compile cannot compile this net, which runs as it is (%s)", reason)
            self._is_quiet = True
            return graph.forward
