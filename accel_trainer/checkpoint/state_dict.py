"""The state dicts that a checkpoint holds, and their way back: everything is checked before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import CheckpointError
from ..distributed.fsdp import gather_shards
from .sharded import StoredTensor, load_like, load_whole

_SAME_OPTIONS = "start with the options that it was made with"
_STATE = ("params", "lr")  # what a group of parameters has beside settings

StateDicts = Mapping[str, Any]
"""Piece name (`model`, `ema`, `optimizer`, `scaler`, `trainer`) to its state."""


class TrainingState:
    """The live objects whose state makes a checkpoint, the same on every process.

    Create it before the first step: it records the settings that the optimizer starts with. `gathers`: whether shards
    are gathered on main, or each process stores its own.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, ema: nn.Module | None, scaler: torch.amp.GradScaler | None,
        *, gathers: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.ema, self.scaler = model, optimizer, ema, scaler
        self._gathers = gathers
        self._initial_groups = [_settings(group) for group in optimizer.param_groups]

    def pieces(self) -> dict[str, Any]:
        """Return the states, as references to live tensors. **Collective** if shards are gathered."""
        settings = {"class": type(self.optimizer).__name__, "initial_groups": self._initial_groups}
        pieces: dict[str, Any] = {"model": dict(self.model.state_dict())}
        pieces["optimizer"] = settings | self.optimizer.state_dict()
        if self.ema is not None:
            pieces["ema"] = dict(self.ema.state_dict())
        if self.scaler is not None:
            pieces["scaler"] = self.scaler.state_dict()
        return {name: gather_shards(piece) for name, piece in pieces.items()} if self._gathers else pieces

    def restore(self, pieces: StateDicts) -> None:
        """Load `pieces`. Raises CheckpointError, before anything changes, if one is missing or does not fit."""
        mine, modules = self.pieces(), {"model": self.model} | ({} if self.ema is None else {"ema": self.ema})
        if missing := [name for name in mine if name not in pieces]:
            raise CheckpointError("CKPT_MISSING", f"the checkpoint has no {missing[0]}: {_SAME_OPTIONS}")
        weights = {name: rename_weights(self.model, pieces[name]) for name in modules}
        for name, renamed in weights.items():
            check_weights(name, mine[name], renamed)
        optimizer_state = _fitted_optimizer_state(self.optimizer, self.model, pieces["optimizer"])
        for name, module in modules.items():
            live = module.state_dict()
            weights[name] = {key: load_like(live[key], stored) for key, stored in weights[name].items()}
        for name, module in modules.items():
            module.load_state_dict(weights[name])
        self.optimizer.load_state_dict(optimizer_state)
        if self.scaler is not None:
            current = {name: pieces["scaler"][name] for name in ("scale", "_growth_tracker")}
            self.scaler.load_state_dict({**mine["scaler"], **current})  # how the scale grows is a setting of this run


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load `weights`, by their names of today or of an older version, into a model on one device.

    Raises CheckpointError, before anything changes, if they do not fit.
    """
    weights = rename_weights(model, weights)
    check_weights("model", model.state_dict(), weights)
    model.load_state_dict(weights)


def rename_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `weights` by the names of today."""
    return dict(zip(_current_names(model, weights), weights.values(), strict=True))


def _current_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of today: a model's `former_names` maps modules of older versions to these."""
    former = getattr(model, "former_names", {}).items()
    return [next((new + n[len(old) :] for old, new in former if n.startswith(f"{old}.")), n) for n in names]


def check_weights(name: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError with the first differences of names, shapes and dtypes, if there are any."""
    differences = [f"{key} is missing" for key in mine.keys() - theirs.keys()]
    differences += [f"{key} is unknown here" for key in theirs.keys() - mine.keys()]
    for key in mine.keys() & theirs.keys():
        here, there = mine[key], theirs[key]
        if here.shape != there.shape or here.dtype != there.dtype:
            differences.append(f"{key} is {there.dtype} {list(there.shape)}, here {here.dtype} {list(here.shape)}")
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        fact = f"the checkpoint's {name} does not fit: {'; '.join(sorted(differences)[:5])}{more}"
        raise CheckpointError("CKPT_WEIGHTS", f"{fact}: use the --model it was made with")


def _fitted_optimizer_state(optimizer: Optimizer, model: nn.Module, piece: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict to load, after checking that it is of the same optimizer over the same parameters.

    A setting that differs from what the saved run started with was changed on purpose: this run's value is kept. All
    other settings are the checkpoint's, since some optimizers change them as they train.
    """
    if piece.get("class") != type(optimizer).__name__:
        fact = f"the checkpoint's optimizer is {piece.get('class')}, this run's is {type(optimizer).__name__}"
        raise CheckpointError("CKPT_OPTIMIZER", f"{fact}: use the former, or start from its weights with --init-from")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    identities = [_group_identity(model, group) for group in optimizer.state_dict()["param_groups"]]
    if identities != [_group_identity(model, group) for group in piece["param_groups"]]:
        fix = f"{_SAME_OPTIONS}, or from its weights with --init-from"
        raise CheckpointError("CKPT_OPTIMIZER", f"the checkpoint's optimizer has other parameters: {fix}")
    state = {
        index: {name: _fitted(value, parameters[index]) for name, value in values.items()}
        for index, values in piece["state"].items()
    }
    initial = piece.get("initial_groups") or [_settings(group) for group in piece["param_groups"]]
    groups = []
    for mine, theirs, before in zip(optimizer.param_groups, piece["param_groups"], initial, strict=True):
        # Also the names of the parameters, which may have been others.
        changed = {name: value for name, value in mine.items() if name not in _STATE and value != before.get(name)}
        groups.append({**theirs, **changed})
    return {"state": state, "param_groups": groups}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group of parameters, such as its weight decay."""
    return {name: value for name, value in group.items() if name not in (*_STATE, "param_names")}


def _group_identity(model: nn.Module, group: Mapping[str, Any]) -> tuple[Any, ...]:
    return sorted(group), _current_names(model, group.get("param_names", ())), len(group["params"])


def _fitted(value: Any, parameter: Tensor) -> Any:
    """Return per-parameter state; what has the parameter's shape in its memory layout, which fused kernels need."""
    if not isinstance(value, Tensor | StoredTensor) or not value.shape or value.shape != parameter.shape:
        return load_whole(value)  # a step, or Adafactor's row_var
    return torch.empty_like(parameter, dtype=value.dtype).copy_(load_like(parameter, value))
