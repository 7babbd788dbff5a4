"""The state dicts that a checkpoint holds, and their way back: everything is checked before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import CheckpointError
from ..core.tensor_memory import make_dense
from ..distributed.fsdp import gather_shards
from ..optim.evaluation_weights import evaluation_weights, has_evaluation_weights
from .sharded import StoredTensor, load_like, load_whole

_SAME_OPTIONS = "start with the options that it was made with"
_STATE = ("params", "lr")  # what a group of parameters has beside settings
_OURS = ("class", "initial_groups")  # what an optimizer's piece has beside its state dict
EXTRA_STATE = "_extra_state"  # the end of the key under which torch stores what `get_extra_state` returns

_TRAINED = "training_weights"  # of optimizers that evaluate others: those are in `model`, for all who read it

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
        self._initial_buffers = {
            name: {key: buffer.clone() for key, buffer in unlisted_buffers(module).items()}
            for name, module in self._modules().items()
        }

    def _modules(self) -> dict[str, nn.Module]:
        return {"model": self.model} if self.ema is None else {"model": self.model, "ema": self.ema}

    def pieces(self) -> dict[str, Any]:
        """Return the states, as references to live tensors. **Collective** if shards are gathered."""
        pieces = self.local_pieces()
        return {name: gather_shards(piece) for name, piece in pieces.items()} if self._gathers else pieces

    def local_pieces(self) -> dict[str, Any]:
        """Return the states, with the shards of this process, as references to live tensors."""
        settings = {"class": type(self.optimizer).__name__, "initial_groups": self._initial_groups}
        pieces: dict[str, Any] = {"model": dict(self.model.state_dict())}
        if has_evaluation_weights(self.optimizer):
            pieces[_TRAINED] = pieces["model"]
            with evaluation_weights(self.optimizer):
                pieces["model"] = copy.deepcopy(pieces["model"])
        pieces["optimizer"] = settings | self.optimizer.state_dict()
        if self.ema is not None:
            pieces["ema"] = dict(self.ema.state_dict())
        if self.scaler is not None:
            pieces["scaler"] = self.scaler.state_dict()
        if buffers := self._changed_buffers():
            pieces["buffers"] = buffers
        return pieces

    def _changed_buffers(self) -> dict[str, dict[str, Tensor]]:
        """Return the buffers that no state dict has and training has changed, such as a cache that grew."""
        changed = {}
        for name, module in self._modules().items():
            before = self._initial_buffers[name]
            buffers = unlisted_buffers(module)
            kept = {key: new for key, new in buffers.items() if not (key in before and equal_bits(new, before[key]))}
            if kept:
                changed[name] = kept
        return changed

    def restore(self, pieces: StateDicts) -> None:
        """Load `pieces`. Raises CheckpointError, before anything changes, if one is missing or does not fit."""
        mine, modules = self.pieces(), self._modules()
        if missing := [name for name in mine if name not in pieces and name not in ("buffers", _TRAINED)]:
            raise CheckpointError("CKPT_MISSING", f"the checkpoint has no {missing[0]}: {_SAME_OPTIONS}")
        stored = {"model": pieces.get(_TRAINED, pieces["model"]), "ema": pieces.get("ema")}
        weights = {name: rename_weights(self.model, stored[name]) for name in modules}
        for name, renamed in weights.items():
            check_weights(name, mine[name], renamed)
        optimizer_state = fitted_optimizer_state(self.optimizer, self.model, pieces["optimizer"])
        for name, module in modules.items():
            live = module.state_dict()
            weights[name] = {key: load_like(live[key], value) for key, value in weights[name].items()}
        for name, module in modules.items():
            module.load_state_dict(weights[name])
            _restore_buffers(module, pieces.get("buffers", {}).get(name, {}))
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
    make_dense(model)
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
        if key.endswith(EXTRA_STATE):
            continue  # the module's own business, which may grow
        if here.shape != there.shape or here.dtype != there.dtype:
            differences.append(f"{key} is {there.dtype} {list(there.shape)}, here {here.dtype} {list(here.shape)}")
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        fact = f"the checkpoint's {name} does not fit: {'; '.join(sorted(differences)[:5])}{more}"
        raise CheckpointError("CKPT_WEIGHTS", f"{fact}: use the --model it was made with")


def fitted_optimizer_state(optimizer: Optimizer, model: nn.Module, piece: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict to load, after checking that it is of the same optimizer over the same parameters.

    A setting that differs from what the saved run started with was changed on purpose: this run's value is kept. All
    other settings are the checkpoint's, since some optimizers change them as they train. What torch's own optimizers
    do not have is loaded as it was saved.
    """
    if piece.get("class") != type(optimizer).__name__:
        fact = f"the checkpoint's optimizer is {piece.get('class')}, this run's is {type(optimizer).__name__}"
        raise CheckpointError("CKPT_OPTIMIZER", f"{fact}: use the former, or start from its weights with --init-from")
    loaded = {name: load_all(value) for name, value in piece.items() if name not in (*_OURS, "state")}
    if "state" in piece:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        loaded["state"] = {key: _fitted_state(value, key, parameters) for key, value in piece["state"].items()}
    if "param_groups" in piece:
        loaded["param_groups"] = _fitted_groups(optimizer, model, piece)
    return loaded


def _fitted_groups(optimizer: Optimizer, model: nn.Module, piece: Mapping[str, Any]) -> list[dict[str, Any]]:
    identities = [_group_identity(model, group) for group in optimizer.state_dict()["param_groups"]]
    if identities != [_group_identity(model, group) for group in piece["param_groups"]]:
        fix = f"{_SAME_OPTIONS}, or from its weights with --init-from"
        raise CheckpointError("CKPT_OPTIMIZER", f"the checkpoint's optimizer has other parameters: {fix}")
    initial = piece.get("initial_groups") or [_settings(group) for group in piece["param_groups"]]
    groups = []
    for mine, theirs, before in zip(optimizer.param_groups, piece["param_groups"], initial, strict=True):
        # Also the names of the parameters, which may have been others.
        changed = {name: value for name, value in mine.items() if name not in _STATE and value != before.get(name)}
        groups.append({**theirs, **changed})
    return groups


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group of parameters, such as its weight decay."""
    return {name: value for name, value in group.items() if name not in (*_STATE, "param_names")}


def _group_identity(model: nn.Module, group: Mapping[str, Any]) -> tuple[Any, ...]:
    return sorted(group), _current_names(model, group.get("param_names", ())), len(group["params"])


def _fitted_state(values: Any, key: Any, parameters: Sequence[Tensor]) -> Any:
    """Return the state under `key` of an optimizer's state dict, fitted if it is that of a parameter."""
    if not isinstance(values, Mapping) or not isinstance(key, int) or key not in range(len(parameters)):
        return load_all(values)
    return {name: _fitted(value, parameters[key]) for name, value in values.items()}


def _fitted(value: Any, parameter: Tensor) -> Any:
    """Return per-parameter state; what has the parameter's shape in its memory layout, which fused kernels need."""
    if not isinstance(value, Tensor | StoredTensor) or not value.shape or value.shape != parameter.shape:
        return load_all(value)  # a step, or Adafactor's row_var
    return torch.empty_like(parameter, dtype=value.dtype).copy_(load_like(parameter, value))


def load_all(value: Any) -> Any:
    """Return `value` with every stored tensor in it read."""
    if isinstance(value, Mapping):
        return {key: load_all(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(load_all, value))
    return load_whole(value)


# --- buffers that no state dict has ---


def unlisted_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the module's state dict leaves out, such as those with `persistent=False`, by name."""
    listed = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name not in listed}


def _restore_buffers(module: nn.Module, stored: Mapping[str, Any]) -> None:
    """Set buffers as they were; a checkpoint has none that training had not changed."""
    live = unlisted_buffers(module)
    device = next((tensor.device for tensor in module.parameters()), None)
    for key, value in stored.items():
        path, _, name = key.rpartition(".")
        whole = load_whole(value)
        if key in live and live[key].shape == whole.shape:
            live[key].copy_(whole)
        else:
            module.get_submodule(path).register_buffer(name, whole.to(device), persistent=False)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same bits, also those of a NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
