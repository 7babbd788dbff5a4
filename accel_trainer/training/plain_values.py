"""What metrics and evaluations compute, as plain values for rows and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..core.errors import ConfigError
from ..core.history import check_name
from ..core.types import Results
from ..core.wording import describe_tensor

_MAX_LISTED_NUMBERS = 2**16


def plain_values(values: Any, source: str = "compute") -> Results:
    """Return what `source` returned as plain numbers, texts, lists and dicts for JSON.

    Tensors are converted; one of more than 65,536 numbers stays a tensor, on the CPU.

    Raises:
        ConfigError: `values` is not a mapping, has a name that no row can have, or holds
            something that cannot be converted.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            "METRIC",
            f"{source} returned {describe_tensor(values)}: return a dict of names and numbers",
        )
    for name in values:
        check_name(str(name), "a metric")
    return {str(name): _plain(value, str(name)) for name, value in values.items()}


def is_detail(value: Any) -> bool:
    """Whether a value is more than a single number or text: no checkpoint stores it."""
    return isinstance(value, list | dict | Tensor)


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Tensor) and value.numel() > _MAX_LISTED_NUMBERS:
        return value.detach().cpu().contiguous()
    if hasattr(value, "tolist"):  # torch's and numpy's
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each, name) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, name) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        "METRIC", f"{name} holds {describe_tensor(value)}: return numbers, texts, lists and dicts"
    )
