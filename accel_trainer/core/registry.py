"""What a checkpoint stores: the named parts of a run that have state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError

StateDict = dict[str, Any]
"""What `state_dict` of an object returns: its plain values and tensors by name."""

Pieces = dict[str, Any]
"""The state dicts of the parts of a run by name, as a checkpoint holds them."""

WEIGHTS = ("model", "training_weights", "ema")
"""The pieces whose tensors have the model's names. In others, equal names mean nothing."""


class Stateful:
    """A part of a run with state, such as the model.

    All parts are checked with `validated` before the first one is restored.
    """

    is_optional = False
    """Whether a checkpoint may lack this part, which then stays as it is."""
    starts_fresh = False
    """Whether this part may start anew from a checkpoint that lacks it.

    That is allowed only if settings were changed on purpose."""

    def validated(self, stored: Any) -> Any:
        """Return `stored` in the form that `load_state_dict` takes.

        Raises CheckpointError if it does not fit this part.
        """
        return stored

    def state_dict(self) -> StateDict:
        """Return what a resumed run needs, as references to live tensors.

        An empty state of an optional part is not stored.
        """
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        """Restore what `validated` returned."""
        raise NotImplementedError

    def start_fresh(self) -> None:
        """Start anew; called after the other parts were restored."""


@dataclass(eq=False)
class Registry:
    """The parts of a run by name, the same on every process. Create it before the first step."""

    parts: Mapping[str, Stateful]

    def state_dict(self) -> Pieces:
        """Return the states by name, as references to live tensors and to this process's shards."""
        return {
            name: state
            for name, part in self.parts.items()
            if (state := part.state_dict()) or not part.is_optional
        }

    def load_state_dict(self, stored: Pieces, *, changes: Collection[str] = ()) -> None:
        """Restore all parts; `changes` are the settings that were changed on purpose.

        States whose part is gone are ignored.

        Raises:
            CheckpointError: a part is missing or does not fit; no part was changed.
        """
        parts = self.parts
        missing = [name for name in parts if name not in stored and not parts[name].is_optional]
        for name in missing:
            if not (changes and parts[name].starts_fresh):
                raise CheckpointError(
                    "CKPT_MISSING",
                    f"the checkpoint has no {name}: start with the options that it was made with",
                )
        fitted = {
            name: part.validated(stored[name]) for name, part in parts.items() if name in stored
        }
        for name, state in fitted.items():
            parts[name].load_state_dict(state)
        for name in missing:
            parts[name].start_fresh()
