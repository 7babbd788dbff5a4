"""Configs: nested frozen dataclasses, filled from a YAML file and then from flags.

Values of a file become flags, and tyro converts them all. Every field of a config class has a default; a short flag is
declared with its field as `Annotated[int, tyro.conf.arg(aliases=["--epochs"])]`.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
import yaml

from ..core import filesystem
from ..core.config import config_to_dict, flatten_config
from ..core.errors import ConfigError

C = TypeVar("C")
Origin = Literal["default", "file", "flag"]

MAX_YAML_BYTES = 1 << 20
FAMILIAR_FLAGS = Path(__file__).with_name("familiar_flags.yaml")
_NEAR = 0.75  # of the letters: `--step-size` and `--batch-size` share 0.63
_FLAG = re.compile(r"--?[a-zA-Z]")  # a negative number is a value


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A value of a config class, at any depth: its dotted name, type and flags."""

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
    """Return the config that `argv` (None: the command line) asks for; `--help` prints all flags and exits.

    Flags win over `--config FILE`, which wins over the defaults. The text `None` means None, in flags and files.
    Raises ConfigError if a name, a value or a file is wrong, in one line.
    """
    return parse_config_and_origins(config_class, argv, description=description)[0]


def parse_config_and_origins(
    config_class: type[C], argv: Sequence[str] | None = None, *, description: str
) -> tuple[C, dict[str, Origin]]:
    """Return the config and, by dotted name, where each of its values came from."""
    argv = sys.argv[1:] if argv is None else list(argv)
    help_asked = ["--help"] if {"-h", "--help", "--help-all"} & set(argv) else []
    if help_asked or argv[:1] == ["--tyro-write-completion"]:
        description = f"{description.strip()}\n\nFlags override --config FILE (YAML), which overrides the defaults."
        tyro.cli(config_class, args=help_asked or argv, description=description)
    given = {item.field.name: item for item in _read_command_line(config_class, argv)}
    config = _build(config_class, given.values())
    return config, {name: given[name].origin if name in given else "default" for name in config_fields(config_class)}


def load_config(config_class: type[C], text: str, *, source: str = "config") -> C:
    """Return the config that `save_config` wrote. Raises ConfigError, which names the text by `source`."""
    return _build(config_class, list(_parse_file(config_class, text, source=source)))


def save_config(config: Any) -> str:
    """Return the config as YAML, which `load_config` turns back into an equal config."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


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
    """Yield the values of the files, and then those of the flags."""
    by_flag = {flag: field for field in config_fields(config_class).values() for flag in field.flags + field.negations}
    from_flags: list[_Given] = []
    starts = [position for position, word in enumerate(argv) if _FLAG.match(word)]
    if argv and 0 not in starts:
        raise ConfigError("CONFIG", f"unexpected {argv[0]!r}: values follow a flag, see --help")
    for start, stop in zip(starts, [*starts[1:], len(argv)], strict=False):
        flag, _, value = argv[start].partition("=")
        values = [value] * ("=" in argv[start]) + list(argv[start + 1 : stop])
        if flag == "--config":
            yield from _read_file(config_class, values)
        elif field := by_flag.get(flag.replace("_", "-")):
            _reject_empty_path(field, values, flag)
            from_flags.append(_Given(field, "flag", " ".join([flag, *values]), argv[start:stop]))
        else:
            raise ConfigError("CONFIG", f"unknown flag {flag}: {suggest(flag, [*by_flag, '--config'])}")
    yield from from_flags


def _reject_empty_path(field: ConfigField, values: Sequence[Any], where: str) -> None:
    """Refuse an empty path, such as from an unset variable: it would be the current folder."""
    if "" in values and Path in {field.type, *get_args(field.type)}:
        raise ConfigError("CONFIG", f"{where} is empty: give a path, or leave it out")


def _read_file(config_class: Any, paths: Sequence[str]) -> Iterator[_Given]:
    if len(paths) != 1:
        raise ConfigError("CONFIG", f"--config {' '.join(paths)}".strip() + ": expected one file")
    try:
        # Resolved: the user may name a link. `read_file` refuses what is no regular file.
        text = filesystem.read_file(Path(paths[0]).expanduser().resolve(), max_bytes=MAX_YAML_BYTES).decode()
    except OSError as error:
        raise ConfigError("CONFIG", f"--config {paths[0]}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("CONFIG", f"--config {paths[0]}: not a text file") from None
    yield from _parse_file(config_class, text, source=paths[0])


class _Loader(yaml.SafeLoader):
    """Plain values. No aliases, and no name twice, of which YAML would ignore the first.

    Not `CSafeLoader`, which ends the process by a segmentation fault for deeply nested text.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node. Raises ValueError."""
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]  # PyYAML is
            raise ValueError(f"line {line}: aliases (& and *) are not supported")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the dict of a node. Raises ValueError."""
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise ValueError(f"line {key.start_mark.line + 1}: {str(key.value)[:40]} appears twice")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Return the plain value of a YAML text. Raises ValueError."""
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"line {mark.line + 1}: {reason}" if mark else reason) from None
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def read_stored_yaml(path: Path) -> dict[str, Any]:
    """Return the config in a file that a run left. Raises OSError or ValueError."""
    stored = parse_yaml(filesystem.read_file(path, max_bytes=MAX_YAML_BYTES).decode())
    if not isinstance(stored, dict):
        raise ValueError(f"{path.name} is not a config")
    return stored


def _parse_file(config_class: Any, text: str, *, source: str) -> Iterator[_Given]:
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
            raise ConfigError("CONFIG", f"{source}: unknown key {key}: {suggest(key, known)}")


def as_arguments(field: ConfigField, value: Any, where: str) -> list[str]:
    """Return a value of a YAML file as command-line arguments."""
    items = value if isinstance(value, list) else [value]
    allowed = {field.type, *get_args(field.type)}
    _reject_empty_path(field, items, where)
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


def _build(config_class: type[C], given: Collection[_Given]) -> C:
    """Return the config. Raises ConfigError, which names the value that is wrong: tyro's report has several lines."""
    if not given:  # tyro would take a tenth of a second to find the same
        with contextlib.suppress(TypeError, ValueError):  # it says what is missing or refused
            return config_class()
    try:
        return _convert(config_class, [word for item in given for word in item.arguments])
    except _TyroError as error:
        for item in given:
            try:
                _convert(config_class, item.arguments)
            except ConfigError:
                continue
            except _TyroError:
                expected, flags = _describe(item.field.type), item.field.flags
                if item.field.type is bool and item.origin == "flag":
                    expected = f"no value, only {flags[-1]} or {item.field.negations[-1]}"
                raise ConfigError("CONFIG", f"{item.text}: expected {expected}") from None
        raise ConfigError("CONFIG", " ".join(re.findall(r"[!-~]+", str(error)))) from None


class _TyroError(Exception):
    """What tyro would print in a box."""


def _convert(config_class: type[C], arguments: Sequence[str]) -> C:
    """Return the config that tyro builds. Raises ConfigError for what a config class refused, else _TyroError."""
    with contextlib.redirect_stderr(io.StringIO()) as box:
        try:
            return tyro.cli(config_class, args=arguments)
        except SystemExit as exit_:
            error: BaseException | None = exit_
    while error := error and error.__context__:
        frames = traceback.walk_tb(error.__traceback__)
        if isinstance(error, ValueError) and any(f.f_code.co_name == "__post_init__" for f, _ in frames):
            raise error if isinstance(error, ConfigError) else ConfigError("CONFIG", str(error))
    raise _TyroError(box.getvalue())


def _describe(hint: Any) -> str:
    """Return a type as Python writes it, such as `float | None`."""
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else re.sub(r"\w+\.(?=\w)", "", str(hint))


def suggest(name: str, known: Collection[str]) -> str:
    """Return what to use instead of an unknown name: our name of another toolkit's flag, or the nearest name."""
    familiar = name.lstrip("-").replace("_", "-").lower()
    table = read_stored_yaml(FAMILIAR_FLAGS) if name.startswith("-") else {}
    plain = re.sub(r"^(trainer|model|data)\.", "", familiar)  # LightningCLI writes `--trainer.max_epochs`
    rows = [str(here) for here, names in table.items() if {familiar, plain} & set(names.split())]
    if rows:
        here = next((here for here in rows if not here.startswith("--") or here.split()[0] in known), "see --help")
        return f"did you mean {here}?" if here.startswith("--") else here
    # By the whole name and by its last part. A name that is further away is another thing: a guess would mislead.
    spelt = {each.lstrip("-"): each for each in known}
    spelt = {each.rpartition(".")[2]: full for each, full in spelt.items()} | spelt
    nearest = difflib.get_close_matches(familiar, spelt, n=1, cutoff=_NEAR)
    return f"did you mean {spelt[nearest[0]]}?" if nearest else "see --help"
