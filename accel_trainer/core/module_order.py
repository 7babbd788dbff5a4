"""The order of a model's modules and tensors, which may come from a set of names."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def take_order(model: nn.Module, names: Iterable[str]) -> None:
    """Put the modules and tensors of `model` into the order of `names`, a state dict's keys.

    A ModuleDict is read, norms are summed and gradients are averaged in this order, and the order
    of a set differs between processes. Layers of a Sequential stay as they are: their order is
    that of the forward. Nothing changes if the names are those of a different model.
    """
    mine = [*model.state_dict()]
    names = [*names]
    if mine == names or {*mine} != {*names}:
        return
    # The first place of a tensor, and of each module around it.
    places: dict[str, int] = {}
    for place, name in enumerate(names):
        while name:
            places.setdefault(name, place)
            name = name.rpartition(".")[0]
    for path, module in [*model.named_modules()]:
        if isinstance(module, nn.Sequential):
            continue
        kinds = [module._modules, module._parameters, module._buffers]
        if isinstance(module, nn.ParameterDict):
            kinds.append(module._keys)
        for kind in kinds:
            for key in sorted(kind, key=lambda key: places.get(f"{path}.{key}".lstrip("."), -1)):
                kind[key] = kind.pop(key)
