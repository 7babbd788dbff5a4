"""Configs: the types and ranges of their values, plain dicts, and differences between two."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import wraps
from numbers import Integral, Real
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

from .errors import ConfigError, told_in_python

if TYPE_CHECKING:
    from typing_extensions import Self

Change = tuple[str, Any, Any]
"""The dotted name of a setting, its value before, and its value now."""

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Range:
    """A range of allowed numbers; `words` follow "set it" in the error message."""

    words: str
    has: Callable[[Any], bool]

    def check(self, config: object, group: str, *names: str) -> None:
        """Raise ConfigError if a named value of `config`, or an item of a tuple, is out of range.

        None is allowed.
        """
        for name in names:
            value = getattr(config, name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(
                number is None or (isinstance(number, Real) and self.has(number))
                for number in numbers
            ):
                raise ConfigError("CONFIG", f"{group}.{name} is {value!r}: set it {self.words}")


AT_LEAST_ONE = Range("to 1 or more", lambda number: number >= 1)
ABOVE_ZERO = Range("above 0", lambda number: number > 0)
POSITIVE = Range("above 0, and finite", lambda number: 0 < number < math.inf)
NOT_NEGATIVE = Range("to at least 0, and finite", lambda number: 0 <= number < math.inf)
FRACTION = Range("between 0 and 1", lambda number: 0 <= number <= 1)
BELOW_ONE = Range("to at least 0 and below 1", lambda number: 0 <= number < 1)
INSIDE_ONE = Range("above 0 and below 1", lambda number: 0 < number < 1)


def short_flag(name: str) -> Any:
    """Return the annotation of a field that has a short flag, such as `--epochs`."""
    return tyro.conf.arg(aliases=[name])


def check_pattern(config: object, group: str, name: str) -> None:
    """Raise ConfigError if a value of `config` is not a regular expression. None is allowed."""
    value = getattr(config, name)
    try:
        re.compile(value or "")
    except (re.error, TypeError) as error:
        raise ConfigError(
            "CONFIG",
            f"{group}.{name} is {value!r}, which is not a regular expression ({error}): correct it",
        ) from error


def check_types(config: object, config_class: Any, prefix: str = "") -> None:
    """Raise ConfigError if a value of `config`, which a program has made, has a wrong type."""
    for name, kind in get_type_hints(config_class).items():
        value = getattr(config, name, None)
        if not _fits(value, kind):
            raise ConfigError("CONFIG", f"{prefix}{name} is {value!r}: give {type_name(kind)}")
        if is_dataclass(kind):
            check_types(value, kind, f"{prefix}{name}.")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of the type of a field: one of its choices, or a number of its kind."""
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if origin is tuple:
        return not isinstance(value, str)  # whose items are letters
    kind = {int: Integral, float: Real}.get(kind, kind)
    # In Python 3.10, `tuple[str, ...]` is a type, of which nothing can be an instance.
    return origin is not None or not isinstance(kind, type) or isinstance(value, kind)


def type_name(kind: Any) -> str:
    """Return what a field accepts in words, such as `no, bf16 or None`."""
    *others, last = _alternatives(kind)
    return f"{', '.join(others)} or {last}" if others else last


def _alternatives(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [*map(str, get_args(kind))]
    if get_origin(kind) in (Union, UnionType):
        return [name for each in get_args(kind) for name in _alternatives(each)]
    if kind is type(None):
        return ["None"]
    return [re.sub(r"\w+\.(?=\w)", "", inspect.formatannotation(kind))]


class Config:
    """The base of config classes: a keyword that none has is answered as an unknown flag is."""

    def __init_subclass__(cls) -> None:
        """Let what the class refuses be told to a Python program."""
        if check := vars(cls).get("__post_init__"):
            setattr(cls, "__post_init__", told_in_python()(check))  # noqa: B010  # mypy

    def __new__(cls, *args: object, **given: object) -> Self:
        """Raise ConfigError for an unknown keyword."""
        _refuse_unknown(cls, args, given)
        return super().__new__(cls)


def answers_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Let a call of `function` with an unknown keyword say what it is called, here or elsewhere."""

    @wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        _refuse_unknown(function, args, given)
        return function(*args, **given)

    return call


def _refuse_unknown(called: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    signature = inspect.signature(called)
    try:
        signature.bind_partial(*args, **given)
    except TypeError as error:
        from ..names import everyday, unknown  # which few programs need

        elsewhere = everyday.spelt_fields(Config.__subclasses__(), called)
        owner = called.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        said = unknown.describe_unknown(owner, given, signature.parameters, elsewhere)
        if args and said is None:
            said = f"{owner} was given {args[-1]!r:.40} without its name: see help({owner})"
        if said is not None:
            raise ConfigError("CONFIG", said) from error


def unchecked_defaults(config_class: type[C]) -> C:
    """Return a config with the default of each field, although its class may refuse them."""
    config = object.__new__(config_class)
    for field in fields(config_class):  # type: ignore[arg-type]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        object.__setattr__(config, field.name, default)
    return config


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return the config as nested dicts of plain YAML and JSON values."""
    # A path becomes a text, and a set a list: the order of a set differs between processes.
    dumped = json.dumps(
        asdict(config),
        default=lambda value: sorted(value) if isinstance(value, Set) else str(value),
    )
    return dict(json.loads(dumped))


def config_values(config: Any) -> dict[str, Any]:
    """Return the plain value of each setting, by its dotted name."""
    return dict(flatten_config(config_to_dict(config)))


def diff_config(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Return a change for each value that differs; a missing value is None."""
    before = dict(flatten_config(old))
    after = dict(flatten_config(new))
    rows = [(name, before.get(name), after.get(name)) for name in before | after]
    return [row for row in rows if row[1] != row[2]]


def flatten_config(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(dotted name, value)` for each value of nested dicts."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from flatten_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
