"""What a checkpoint stores: the named parts of a run that have state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .errors import CheckpointError


class Part:
    """A part of a run with state, such as the model.

    Each is checked before any of them is restored.
    """

    is_optional = False
    """Whether a checkpoint may lack it: it then stays as it is."""
    starts_fresh = False
    """Whether it may begin at a checkpoint that lacks it, if settings were changed on purpose."""

    def fit(self, stored: Any) -> Any:
        """Return what `load_state_dict` takes.

        Raises CheckpointError if `stored` is not of such a part.
        """
        return stored

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a resumed run needs, as references to live tensors; nothing: it is not stored."""
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        """Restore what `fit` returned."""
        raise NotImplementedError

    def start_fresh(self) -> None:
        """Begin here, once the other parts are restored."""


class Registry:
    """The parts of a run by name, the same on every process. Create it before the first step."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name, with the shards of this process, as references to live tensors."""
        states = {name: part.state_dict() for name, part in self._parts.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, stored: Mapping[str, Any], *, changes: Collection[str] = ()) -> None:
        """Restore all parts; `changes` are the settings that were changed on purpose.

        Raises:
            CheckpointError: one is missing or does not fit; nothing is changed then.
        """
        missing = [
            name
            for name, part in self._parts.items()
            if name not in stored and not part.is_optional
        ]
        for name in missing:
            if not (changes and self._parts[name].starts_fresh):
                fix = "start with the options that it was made with"
                raise CheckpointError("CKPT_MISSING", f"the checkpoint has no {name}: {fix}")
        fitted = {
            name: part.fit(stored[name]) for name, part in self._parts.items() if name in stored
        }
        for name, state in fitted.items():
            self._parts[name].load_state_dict(state)
        for name in missing:
            self._parts[name].start_fresh()
