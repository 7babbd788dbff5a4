"""What a checkpoint holds of a run, by name, and how it is put back: everything is checked before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import CheckpointError
from .sharding import gather_shards, shard_like

Pieces = Mapping[str, Any]
"""Piece name (`model`, `ema`, `optimizer`, `scaler`, `trainer`) to its state."""


class TrainingState:
    """The live objects whose state makes a checkpoint. All are the same on every process.

    Make it before the first step: it notes the settings that the optimizer starts with.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        ema: nn.Module | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.model, self.optimizer, self.ema, self.scaler = model, optimizer, ema, scaler
        self._initial_groups = [_settings(group) for group in optimizer.param_groups]

    def pieces(self) -> dict[str, Any]:
        """Return the states, as references to live tensors; shards are gathered on main. **Collective** then."""
        pieces: dict[str, Any] = {
            "model": dict(self.model.state_dict()),
            "optimizer": {
                "class": type(self.optimizer).__name__,
                "initial_groups": self._initial_groups,
                **self.optimizer.state_dict(),
            },
        }
        if self.ema is not None:
            pieces["ema"] = dict(self.ema.state_dict())
        if self.scaler is not None:
            pieces["scaler"] = self.scaler.state_dict()
        return {name: gather_shards(piece) for name, piece in pieces.items()}

    def restore(self, pieces: Pieces) -> None:
        """Load `pieces` into the live objects, or raise and leave all of them as they were.

        Raises:
            CheckpointError: a piece is missing, or does not fit its object.
        """
        mine = self.pieces()
        for name in mine:
            if name not in pieces:
                raise CheckpointError(
                    "CKPT_MISSING",
                    f"the checkpoint has no {name} and this run has: start it with the options it was made with",
                )
        check_weights("model", mine["model"], pieces["model"])
        if self.ema is not None:
            check_weights("ema", mine["ema"], pieces["ema"])
        if self.scaler is not None and pieces["scaler"].keys() != mine["scaler"].keys():
            raise CheckpointError(
                "CKPT_SCALER",
                "the checkpoint's scaler has other fields than this torch's: use the torch it was made with",
            )
        optimizer_state = _fitted_optimizer_state(self.optimizer, pieces["optimizer"])
        live = self.model.state_dict()
        self.model.load_state_dict({key: shard_like(live[key], whole) for key, whole in pieces["model"].items()})
        self.optimizer.load_state_dict(optimizer_state)
        if self.ema is not None:
            self.ema.load_state_dict(pieces["ema"])
        if self.scaler is not None:
            learnt = {name: pieces["scaler"][name] for name in ("scale", "_growth_tracker")}
            self.scaler.load_state_dict({**mine["scaler"], **learnt})  # how it grows is a setting


def check_weights(name: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raise a CheckpointError that lists the first differences of names, shapes and dtypes, if there are any."""
    differences = [f"{key} is missing" for key in mine.keys() - theirs.keys()]
    differences += [f"{key} is unknown here" for key in theirs.keys() - mine.keys()]
    for key in mine.keys() & theirs.keys():
        here, there = mine[key], theirs[key]
        if here.shape != there.shape or here.dtype != there.dtype:
            differences.append(f"{key} is {there.dtype} {list(there.shape)}, here {here.dtype} {list(here.shape)}")
    if differences:
        shown = "; ".join(sorted(differences)[:5])
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(
            "CKPT_WEIGHTS",
            f"the checkpoint's {name} does not fit: {shown}{more}: use the --model it was made with",
        )


def _fitted_optimizer_state(optimizer: Optimizer, piece: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict to load, after checking that it is of the same optimizer over the same parameters.

    A setting of a group that differs from what the saved run began with was changed on purpose, and is this run's.
    All others are as the checkpoint has them: some optimizers change them as they train.
    """
    if piece.get("class") != type(optimizer).__name__:
        raise CheckpointError(
            "CKPT_OPTIMIZER",
            f"the checkpoint's optimizer is {piece.get('class')}, this run's is {type(optimizer).__name__}: "
            "use the one it was made with, or start from its weights with --init-from",
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    identities = [_group_identity(group) for group in optimizer.state_dict()["param_groups"]]
    are_same_groups = identities == [_group_identity(group) for group in piece["param_groups"]]
    if not are_same_groups or any(index >= len(parameters) for index in piece["state"]):
        raise CheckpointError(
            "CKPT_OPTIMIZER",
            "the checkpoint's optimizer has other parameters or groups: use the options it was made with",
        )
    state = {
        index: {name: _fitted(value, parameters[index], f"{name}[{index}]") for name, value in values.items()}
        for index, values in piece["state"].items()
    }
    initial = piece.get("initial_groups") or [_settings(group) for group in piece["param_groups"]]
    groups = []
    for mine, theirs, before in zip(optimizer.param_groups, piece["param_groups"], initial, strict=True):
        if wrong := [name for name in mine if name != "params" and not _is_like(theirs[name], mine[name])]:
            raise CheckpointError(
                "CKPT_OPTIMIZER", f"the checkpoint's optimizer has {wrong[0]} {str(theirs[wrong[0]])[:40]}: use another"
            )
        changed = {name: value for name, value in _settings(mine).items() if value != before.get(name)}
        groups.append({**theirs, **changed})
    return {"state": state, "param_groups": groups}


def _is_like(theirs: Any, mine: Any) -> bool:
    """Whether a setting is of a kind that the optimizer takes; None stands for some default."""
    are_numbers = all(isinstance(value, int | float | Tensor) for value in (theirs, mine))
    return theirs is None or mine is None or are_numbers or type(theirs) is type(mine)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group of parameters is set to, such as its weight decay."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names", "lr")}


def _group_identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return sorted(group), group.get("param_names"), len(group["params"])


def _fitted(value: Any, parameter: Tensor, name: str) -> Any:
    """Return per-parameter state in the parameter's memory layout: fused kernels walk both side by side."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if value.shape != parameter.shape:
        raise CheckpointError("CKPT_OPTIMIZER", f"the checkpoint's {name} has another shape than its parameter")
    return torch.empty_like(parameter, dtype=value.dtype).copy_(shard_like(parameter, value))
