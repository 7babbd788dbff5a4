"""The state dicts that a checkpoint holds, and their way back: everything is checked before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import CheckpointError
from ..core.registry import Part, Registry
from ..core.shards import is_shard
from ..core.tensor_memory import make_dense
from ..optim.evaluation_weights import evaluation_weights, has_evaluation_weights
from .sharded import StoredTensor, load_like, load_whole

_SAME_OPTIONS = "start with the options that it was made with"
_STATE = ("params", "lr")  # what a group of parameters has beside settings
_OURS = ("class", "initial_groups")  # what an optimizer's piece has beside its state dict
# the end of the key under which torch stores what `get_extra_state` returns
EXTRA_STATE = "_extra_state"


class ModelWeights(Part):
    """The tensors of a model's state dict; `name` is that of the piece."""

    def __init__(self, model: nn.Module, *, name: str) -> None:
        self.model = model
        self._name = name

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict."""
        return dict(self.model.state_dict())

    def fit(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the tensors by their names of today.

        Raises CheckpointError if they are those of another model.
        """
        renamed = rename_weights(self.model, stored)
        check_weights(self._name, self.model.state_dict(), renamed)
        return renamed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the tensors, of stored ones what this process needs."""
        live = self.model.state_dict()
        self.model.load_state_dict(
            {key: load_like(live[key], value) for key, value in state.items()}
        )


class EvaluatedWeights(ModelWeights):
    """The weights that an optimizer evaluates, for all who read a checkpoint; see `TrainedWeights`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, name: str) -> None:
        super().__init__(model, name=name)
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the model's state dict as it is in an evaluation."""
        with evaluation_weights(self._optimizer):
            return copy.deepcopy(super().state_dict())


class TrainedWeights(ModelWeights):
    """The weights that an optimizer trains, if it evaluates others."""

    is_optional = True


class AverageWeights(ModelWeights):
    """The averaged weights, which a branch of a run without an average begins with its weights."""

    starts_fresh = True

    def __init__(self, average: nn.Module, source: nn.Module) -> None:
        super().__init__(average, name="ema")
        self._source = source

    def start_fresh(self) -> None:
        """Begin with the weights of the source."""
        self.model.load_state_dict(self._source.state_dict())


class OptimizerState(Part):
    """The state of an optimizer.

    Create it before the first step: it records the settings that the run starts with.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model
        self._initial_groups = [_settings(group) for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict, its class, and its settings before the first step."""
        settings = {"class": type(self._optimizer).__name__, "initial_groups": self._initial_groups}
        return settings | self._optimizer.state_dict()

    def fit(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dict to load.

        Raises CheckpointError for another optimizer, or other parameters.
        """
        return fitted_optimizer_state(self._optimizer, self._model, stored)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it."""
        self._optimizer.load_state_dict(state)


class LossScale(Part):
    """The loss scale of fp16."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state dict."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scale; how it grows is a setting of this run."""
        current = {name: state[name] for name in ("scale", "_growth_tracker")}
        self._scaler.load_state_dict({**self._scaler.state_dict(), **current})


class UnlistedBuffers(Part):
    """The buffers that no state dict has and training has changed, such as a cache that grew, by the model's name."""

    is_optional = True

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models
        self._initial = {
            name: {key: buffer.clone() for key, buffer in unlisted_buffers(model).items()}
            for name, model in models.items()
        }

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return those that are not as they were at the start."""
        changed = {}
        for name, model in self._models.items():
            before = self._initial[name]
            buffers = unlisted_buffers(model)
            kept = {
                key: new
                for key, new in buffers.items()
                if not (key in before and equal_bits(new, before[key]))
            }
            if kept:
                changed[name] = kept
        return changed

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Set them as they were."""
        for name, stored in state.items():
            if name in self._models:
                _restore_buffers(self._models[name], stored)


def training_state(
    model: nn.Module,
    optimizer: Optimizer,
    average: nn.Module | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Registry:
    """Return the state of a training. Call it before the first step."""
    models = {"model": model}
    parts: dict[str, Part] = {}
    if has_evaluation_weights(optimizer):
        parts["model"] = EvaluatedWeights(model, optimizer, name="model")
        parts["training_weights"] = TrainedWeights(model, name="training_weights")
    else:
        parts["model"] = ModelWeights(model, name="model")
    parts["optimizer"] = OptimizerState(optimizer, model)
    if average is not None:
        models["ema"] = average
        parts["ema"] = AverageWeights(average, model)
    if scaler is not None:
        parts["scaler"] = LossScale(scaler)
    parts["buffers"] = UnlistedBuffers(models)
    return Registry(parts)


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
    return [
        next((new + n[len(old) :] for old, new in former if n.startswith(f"{old}.")), n)
        for n in names
    ]


def check_weights(name: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError with the first differences of names, shapes and dtypes, if there are any."""
    differences = [f"{key} is missing" for key in mine.keys() - theirs.keys()]
    differences += [f"{key} is unknown here" for key in theirs.keys() - mine.keys()]
    for key in mine.keys() & theirs.keys():
        here, there = mine[key], theirs[key]
        if key.endswith(EXTRA_STATE):
            continue  # the module's own business, which may grow
        if here.shape != there.shape or here.dtype != there.dtype:
            differences.append(
                f"{key} is {there.dtype} {list(there.shape)}, here {here.dtype} {list(here.shape)}"
            )
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        fact = f"the checkpoint's {name} does not fit: {'; '.join(sorted(differences)[:5])}{more}"
        raise CheckpointError("CKPT_WEIGHTS", f"{fact}: use the --model it was made with")


def fitted_optimizer_state(
    optimizer: Optimizer, model: nn.Module, piece: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state dict to load, after checking that it is of the same optimizer over the same parameters.

    A setting that differs from what the saved run started with was changed on purpose: this run's
    value is kept. All other settings are the checkpoint's, since some optimizers change them as
    they train. What torch's own optimizers do not have is loaded as it was saved.
    """
    if piece.get("class") != type(optimizer).__name__:
        fact = f"the checkpoint's optimizer is {piece.get('class')}, this run's is {type(optimizer).__name__}"
        raise CheckpointError(
            "CKPT_OPTIMIZER", f"{fact}: use the former, or start from its weights with --init-from"
        )
    loaded = {
        name: load_all(value) for name, value in piece.items() if name not in (*_OURS, "state")
    }
    if "state" in piece:
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        state = piece["state"].items()
        loaded["state"] = {key: _fitted_state(value, key, parameters) for key, value in state}
    if "param_groups" in piece:
        loaded["param_groups"] = _fitted_groups(optimizer, model, piece)
    return loaded


def _fitted_groups(
    optimizer: Optimizer, model: nn.Module, piece: Mapping[str, Any]
) -> list[dict[str, Any]]:
    own, stored = optimizer.state_dict()["param_groups"], piece["param_groups"]
    if len(own) != len(stored) or not all(
        _fits_group(model, *pair) for pair in zip(own, stored, strict=True)
    ):
        fix = f"{_SAME_OPTIONS}, or from its weights with --init-from"
        raise CheckpointError(
            "CKPT_OPTIMIZER", f"the checkpoint's optimizer has other parameters: {fix}"
        )
    initial = piece.get("initial_groups") or [_settings(group) for group in piece["param_groups"]]
    groups = []
    for mine, theirs, before in zip(
        optimizer.param_groups, piece["param_groups"], initial, strict=True
    ):
        # Also the names of the parameters, which may have been others.
        changed = {
            name: value
            for name, value in mine.items()
            if name not in _STATE and value != before.get(name)
        }
        groups.append({**theirs, **changed})
    return groups


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group of parameters, such as its weight decay."""
    return {name: value for name, value in group.items() if name not in (*_STATE, "param_names")}


def _fits_group(model: nn.Module, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether a group has the parameters and settings of this run's, perhaps with settings that training added."""
    mine_names, names = (
        _current_names(model, group.get("param_names", ())) for group in (mine, theirs)
    )
    return (
        mine.keys() <= theirs.keys()
        and names == mine_names
        and len(mine["params"]) == len(theirs["params"])
    )


def _fitted_state(values: Any, key: Any, parameters: Sequence[Tensor]) -> Any:
    """Return the state under `key` of an optimizer's state dict, fitted if it is that of a parameter."""
    if (
        not isinstance(values, Mapping)
        or not isinstance(key, int)
        or key not in range(len(parameters))
    ):
        return load_all(values)
    return {name: _fitted(value, parameters[key]) for name, value in values.items()}


def _fitted(value: Any, parameter: Tensor) -> Any:
    """Return per-parameter state; what has the parameter's shape in its memory layout, which fused kernels need."""
    if (
        not isinstance(value, Tensor | StoredTensor)
        or not value.shape
        or value.shape != parameter.shape
    ):
        return load_all(value)  # a step, or Adafactor's row_var
    return torch.empty_like(parameter, dtype=value.dtype).copy_(load_like(parameter, value))


def load_all(value: Any) -> Any:
    """Return `value` with every stored tensor in it read, and every shard whole.

    **Collective** with shards.
    """
    if isinstance(value, Mapping):
        return {key: load_all(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(load_all, value))
    return value.full_tensor() if is_shard(value) else load_whole(value)


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
