"""Whether a user's own loop takes batches before it trains on those that it has."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..core.logger import logger

_NUM_ROUNDS = 3


class ReadAhead:
    """Looks for gradients of the `parameters` and for steps in the first rounds of a start.

    After these, nothing is left on the parameters.
    """

    def __init__(self, parameters: Iterable[Tensor], resources: ExitStack) -> None:
        """Look for them until `resources` are closed."""
        self._rounds: list[bool] = []
        self._has_gradient = False
        self._hooks = resources.enter_context(ExitStack())
        for parameter in parameters:
            if parameter.requires_grad:
                # Unlike a hook of the parameter, one of its node is gone with the node.
                node = get_gradient_edge(parameter).node
                self._hooks.callback(_remove, node, node.register_hook(self._note_gradient))

    def _note_gradient(self, *_: object) -> None:
        self._has_gradient = True

    def end_round(self, has_stepped: bool) -> None:
        """Warn after the last one, if only the first has trained nothing.

        A loop that sums losses over several rounds does not train in each of those that follow.
        """
        if len(self._rounds) == _NUM_ROUNDS:
            return
        self._rounds.append(self._has_gradient or has_stepped)
        self._has_gradient = False
        if len(self._rounds) < _NUM_ROUNDS:
            return
        self._hooks.close()
        if self._rounds == [False, True, True]:
            logger.warning(
                "[LOOP_AHEAD] the loop took its second batch before it trained on the first: if "
                "batches are read ahead, such as by a prefetcher, a resume loses one; let the "
                "workers of the DataLoader read ahead"
            )


def _remove(_: Node, hook: RemovableHandle) -> None:
    hook.remove()
