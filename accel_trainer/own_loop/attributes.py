"""What a loop changes in its parts beside tensors: modes, dropout rates, counters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..distributed.collectives import gather_texts

_PLAIN = (bool, int, float, str, type(None))

Change = tuple[str, str, Any]
"""The name of a part, and an attribute of it with its value."""


class Attributes:
    """The plain attributes of `parts` and of the modules in them that differ from the first ones.

    A part's own `state_dict` may leave them out: `training` and `requires_grad`, a rate that is
    raised with each epoch, how often a module was called. Those that a loop has not changed are as
    the program sets them, also after a resume.
    """

    def __init__(self, parts: Mapping[str, Any], accelerator: Accelerator) -> None:
        self._owners = dict(pair for each in parts.items() for pair in _owners(*each))
        self._accelerator = accelerator
        self._first = self._read()

    def changes(self) -> list[list[Change]]:
        """Return the changes on each process. **Collective. Host sync.**"""
        now = self._read()
        names = [name for name in now if self._first.get(name, self) != now[name]]
        text = json.dumps([(*name, now[name]) for name in names])
        return [json.loads(each) for each in gather_texts(text, self._accelerator)]

    def restore(self, changes: Sequence[Sequence[Change]]) -> None:
        """Make the changes of this process again."""
        for owner, name, value in changes[self._accelerator.process_index]:
            if owner in self._owners:  # states may go
                setattr(self._owners[owner], name, value)

    def _read(self) -> dict[tuple[str, str], Any]:
        return {
            (owner, name): value
            for owner, each in self._owners.items()
            for name in (*getattr(each, "__dict__", ()), "requires_grad")
            if type(value := getattr(each, name, None)) in _PLAIN
        }


def _owners(name: str, part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, nn.Module):
        for path, each in (*part.named_modules(), *part.named_parameters()):
            yield f"{name}.{path}", each
    # What torch's own optimizers, schedulers and scalers keep is in their state dicts.
    elif not type(part).__module__.startswith("torch."):
        yield name, part
