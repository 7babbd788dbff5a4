"""Configs: nested frozen dataclasses, filled from a YAML file and then from flags.

A file is read as flags that come first, so that both obey one set of names, types and messages; tyro
does the conversion. Every field of a config class has a default; a short flag is declared at its owner
as `Annotated[int, tyro.conf.arg(aliases=["--epochs"])]`.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import json
import re
import sys
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
import yaml

from . import storage
from .errors import ConfigError
from .familiar_flags import find_familiar

C = TypeVar("C")
Origin = Literal["default", "file", "flag"]

MAX_YAML_BYTES = 1 << 20
_MAX_YAML_DEPTH, _MAX_YAML_VALUE = 16, 4096
_FLAG = re.compile(r"--?[a-zA-Z]")  # so that a negative number is a value


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A value that a config class holds, at any depth: its dotted name, type and flags."""

    name: str
    type: Any
    flags: list[str]

    @property
    def negations(self) -> list[str]:
        """The flags that turn a switch off, as tyro spells them: `--no-ema`, `--trainer.no-ema`."""
        return [re.sub(r"[^.-][^.]*$", r"no-\g<0>", flag) for flag in self.flags if self.type is bool]


@dataclass(frozen=True, slots=True)
class _Given:
    """A value from a file or the command line: its text as written, and as arguments for tyro."""

    field: ConfigField
    origin: Origin
    text: str
    arguments: Sequence[str]


def parse_config(config_class: type[C], argv: Sequence[str] | None = None, *, description: str) -> C:
    """Return the config that `argv` (None: the command line) asks for; `--help` prints and exits.

    Values come from the defaults, then from `--config FILE`, then from flags; the later wins. The
    text `None` stands for None, in flags as in files.

    Raises:
        ConfigError: a name, a value or a file is wrong, in one line.
    """
    return parse_config_and_origins(config_class, argv, description=description)[0]


def parse_config_and_origins(
    config_class: type[C], argv: Sequence[str] | None = None, *, description: str
) -> tuple[C, dict[str, Origin]]:
    """Return the config and, by dotted name, where each of its values came from."""
    argv = sys.argv[1:] if argv is None else list(argv)
    help_asked = ["--help"] if {"-h", "--help"} & set(argv) else []
    if help_asked or argv[:1] == ["--tyro-write-completion"]:
        description = f"{description.strip()}\n\nValues: defaults, then --config FILE (YAML), then flags."
        tyro.cli(config_class, args=help_asked or argv, description=description)
    given = {item.field.name: item for item in _read_command_line(config_class, argv)}
    config = _build(config_class, given.values())
    return config, {name: given[name].origin if name in given else "default" for name in config_fields(config_class)}


def load_config(config_class: type[C], text: str, *, source: str = "config") -> C:
    """Return the config that `save_config` wrote; `source` names the text in errors.

    Raises:
        ConfigError: a name or a value is wrong, or the text is no YAML.
    """
    return _build(config_class, list(_read_yaml(config_class, text, source=source)))


def save_config(config: Any) -> str:
    """Return the config as YAML, which `load_config` turns back into an equal config."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return the config as nested dicts of plain YAML and JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))  # a Path becomes text
    return plain


def config_sha256(config: Any) -> str:
    """Return a hash of all values, the same in every process and on every machine."""
    return hashlib.sha256(json.dumps(config_to_dict(config), sort_keys=True).encode()).hexdigest()


def diff_config(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return `(dotted name, old, new)` of the values that differ; an absent one is None."""
    before, after = dict(flatten_config(old)), dict(flatten_config(new))
    pairs = {name: (before.get(name), after.get(name)) for name in before | after}
    return [(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]


def flatten_config(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(dotted name, value)` of nested dicts."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from flatten_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def config_fields(config_class: Any, prefix: str = "") -> dict[str, ConfigField]:
    """Return the fields of a config class and of the config classes in it, by dotted name."""
    found: dict[str, ConfigField] = {}
    hints = get_type_hints(config_class, include_extras=True)
    for field in fields(config_class):
        name, hint = prefix + field.name, hints[field.name]
        hint, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if is_dataclass(hint):
            found |= config_fields(hint, f"{name}.")
        else:
            aliases = [alias for note in notes for alias in getattr(note, "aliases", None) or ()]
            found[name] = ConfigField(name, hint, ["--" + name.replace("_", "-"), *aliases])
    return found


def _read_command_line(config_class: Any, argv: Sequence[str]) -> Iterator[_Given]:
    """Yield what the files and then what the flags give."""
    by_flag = {flag: field for field in config_fields(config_class).values() for flag in field.flags + field.negations}
    from_flags: list[_Given] = []
    starts = [position for position, word in enumerate(argv) if _FLAG.match(word)]
    if argv and 0 not in starts:
        raise ConfigError("CONFIG", f"unexpected {argv[0]!r}: a value follows its flag, see --help")
    for start, stop in zip(starts, [*starts[1:], len(argv)], strict=False):
        flag, _, value = argv[start].partition("=")
        values = [value] * ("=" in argv[start]) + list(argv[start + 1 : stop])
        if flag == "--config":
            yield from _read_file(config_class, values)
        elif field := by_flag.get(flag.replace("_", "-")):
            _refuse_empty_path(field, values, flag)
            from_flags.append(_Given(field, "flag", " ".join([flag, *values]), argv[start:stop]))
        else:
            raise ConfigError("CONFIG", f"unknown flag {flag}: {_suggest(flag, [*by_flag, '--config'])}")
    yield from from_flags


def _refuse_empty_path(field: ConfigField, values: Sequence[Any], where: str) -> None:
    """An empty path, such as of a variable that is not set, would be the current folder."""
    if "" in values and Path in {field.type, *get_args(field.type)}:
        raise ConfigError("CONFIG", f"{where} is empty: give a path, or leave it out")


def _suggest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    if familiar := find_familiar(name, known):
        return familiar
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]}?" if nearest else "see --help"


def _read_file(config_class: Any, paths: Sequence[str]) -> Iterator[_Given]:
    if len(paths) != 1:
        raise ConfigError("CONFIG", f"--config {' '.join(paths)}".strip() + ": expected one file")
    try:
        # What a user names may be a link; what it leads to is a file, and no device that never ends.
        data = storage.read_file(Path(paths[0]).expanduser().resolve(), max_bytes=MAX_YAML_BYTES)
    except OSError as error:
        raise ConfigError("CONFIG", f"--config {paths[0]}: {error.strerror}") from None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError("CONFIG", f"--config {paths[0]}: not a text file") from None
    yield from _read_yaml(config_class, text, source=paths[0])


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Plain values, and each name once: of two the first would be ignored in silence."""

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        """Return the dict of a node. Raises ValueError."""
        names: set[str] = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in names:
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value[:40]} is there twice")
            names.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def parse_yaml(text: str) -> Any:
    """Return the plain value of a YAML text of at most a MiB, whoever wrote it.

    Raises:
        ValueError: it is none, or has what no config needs: aliases, which make little text much, names that are there
            twice, deep nesting, or a value of thousands of characters.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            line = event.start_mark.line + 1 if event.start_mark else 0
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise ValueError(f"line {line}: aliases (& and *) are not read")
            if depth > _MAX_YAML_DEPTH or len(getattr(event, "value", None) or "") > _MAX_YAML_VALUE:
                raise ValueError(f"line {line}: nested too deeply, or too long")
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"line {mark.line + 1}: {reason}" if mark else reason) from None
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def read_stored_yaml(path: Path) -> dict[str, Any]:
    """Return the config in a file that a run left. Raises OSError or ValueError."""
    stored = parse_yaml(storage.read_file(path, max_bytes=MAX_YAML_BYTES).decode())
    if not isinstance(stored, dict):
        raise ValueError(f"{path.name} is not a config")
    return stored


def _read_yaml(config_class: Any, text: str, *, source: str) -> Iterator[_Given]:
    try:
        content = parse_yaml(text) or {}
    except ValueError as error:
        raise ConfigError("CONFIG", f"{source}: cannot be read as YAML: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError("CONFIG", f"{source}: expected names with values, got a {type(content).__name__}")
    values = list(flatten_config(content))
    known = config_fields(config_class)
    for key, value in values:
        field = known.get(key.replace("-", "_"))
        if field:
            yield _Given(field, "file", f"{source}: {key} {value}", as_arguments(field, value, f"{source}: {key}"))
        elif value is not None or not any(name.startswith(f"{key}.") for name in known):  # an empty group is fine
            raise ConfigError("CONFIG", f"{source}: unknown key {key}: {_suggest(key, known)}")


def as_arguments(field: ConfigField, value: Any, where: str) -> list[str]:
    """Return the arguments that say the same as a value in a YAML file."""
    items = value if isinstance(value, list) else [value]
    allowed = {field.type, *get_args(field.type)}
    _refuse_empty_path(field, items, where)
    for item in items:
        if isinstance(item, list | Mapping):
            raise ConfigError("CONFIG", f"{where}: expected {_describe(field.type)}, got a nested list")
        if allowed & {str, Path} and not allowed & {int, float, bool} and not isinstance(item, str | None):
            raise ConfigError("CONFIG", f"{where}: YAML reads {item!r}, not text: put it in quotes")
        if isinstance(value, list) and _FLAG.match(str(item)):
            raise ConfigError("CONFIG", f"{where}: {item} looks like a flag")
    if isinstance(value, list):
        return [field.flags[0], *map(str, items)]
    if field.type is bool and isinstance(value, bool):
        return [(field.flags if value else field.negations)[0]]
    return [f"{field.flags[0]}={value}"]


def _build(config_class: type[C], given: Iterable[_Given]) -> C:
    try:
        return _convert(config_class, [word for item in given for word in item.arguments])
    except SystemExit as error:
        raise _explain(config_class, given, error) from None


def _convert(config_class: type[C], arguments: Sequence[str]) -> C:
    """Let tyro build the config; instead of its box of text, `SystemExit` carries the text."""
    with contextlib.redirect_stderr(io.StringIO()) as box:
        try:
            return tyro.cli(config_class, args=arguments)
        except SystemExit as error:
            error.args = (box.getvalue(),)
            raise


def _explain(config_class: Any, given: Iterable[_Given], error: SystemExit) -> ConfigError:
    """Return what is wrong in one line: tyro's own report is a box of several."""
    if refusal := _refusal(error):
        return refusal
    for item in given:
        try:
            _convert(config_class, item.arguments)
        except SystemExit as alone:
            if not _refusal(alone):
                expected = _describe(item.field.type)
                if item.field.type is bool and item.origin == "flag":
                    expected = f"no value, as {item.field.flags[-1]} or {item.field.negations[-1]}"
                return ConfigError("CONFIG", f"{item.text}: expected {expected}")
    return ConfigError("CONFIG", " ".join(re.findall(r"[!-~]+", str(error))))


def _refusal(error: BaseException | None) -> ConfigError | None:
    """Return the error with which a config class refused its values, found behind tyro's exit."""
    while error is not None:
        frames = traceback.walk_tb(error.__traceback__)
        if isinstance(error, ValueError) and any(f.f_code.co_name == "__post_init__" for f, _ in frames):
            return error if isinstance(error, ConfigError) else ConfigError("CONFIG", str(error))
        error = error.__context__
    return None


def _describe(hint: Any) -> str:
    """Return what a type accepts, in words."""
    if hint is types.NoneType:
        return "None"
    if hint is bool:
        return "true or false"
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_describe, get_args(hint)))
    if get_args(hint):
        return " and ".join(_describe(arg) if arg is not ... else "more" for arg in get_args(hint))
    return f"{'an' if hint.__name__[0] in 'aeiou' else 'a'} {hint.__name__}"
