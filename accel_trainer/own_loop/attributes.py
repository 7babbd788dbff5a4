"""What a loop changes in its parts beside tensors: modes, dropout rates, counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..checkpoint.serialization import decode, encode, is_numpy_number
from ..distributed.collectives import gather_texts

_MAX_ITEMS = 1000

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
        self._first = {(owner, name): repr(value) for owner, name, value in self._read()}

    def changes(self) -> list[str]:
        """Return the changes on each process, encoded. **Collective. Host sync.**"""
        changed = [each for each in self._read() if self._first.get(each[:2]) != repr(each[2])]
        skeleton = encode(changed, name="attributes").skeleton or b""
        return gather_texts(str(skeleton, "utf-8"), self._accelerator)

    def restore(self, changes: Sequence[str]) -> None:
        """Make the changes of this process again."""
        mine = changes[self._accelerator.process_index]
        for owner, name, value in decode(mine.encode(), {}):
            if owner in self._owners:  # states may go
                setattr(self._owners[owner], name, value)

    def _read(self) -> Iterator[Change]:
        for owner, each in self._owners.items():
            for name in (*getattr(each, "__dict__", ()), "requires_grad"):
                if _is_plain(value := getattr(each, name, None)):
                    yield owner, name, value


def _is_plain(value: object) -> bool:
    """Whether a value, or each one in a short list, tuple or dict, is a number or a text."""
    if type(value) is dict:
        return _is_plain([*value, *value.values()])
    if type(value) is list or type(value) is tuple:
        return len(value) <= _MAX_ITEMS and all(_is_plain(each) for each in value)
    return type(value) in (bool, int, float, str, type(None)) or is_numpy_number(value)


def _owners(name: str, part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, nn.Module):
        for path, each in (*part.named_modules(), *part.named_parameters()):
            yield f"{name}.{path}", each
    # What torch's own optimizers, schedulers and scalers keep is in their state dicts.
    elif not type(part).__module__.startswith("torch."):
        yield name, part
