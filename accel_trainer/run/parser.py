"""Configs: nested frozen dataclasses, filled from YAML files and then from flags.

Every field of a config class has a default. A short flag is declared with its field as
`Annotated[int, short_flag("--epochs")]`, which means tyro's `arg(aliases=["--epochs"])`.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import re
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
import yaml

from ..core.config import config_to_dict, flatten_config, unchecked_defaults
from ..core.errors import ConfigError
from ..core.filesystem import read_file
from ..core.run_dir import expand_home
from . import plain_yaml

C = TypeVar("C")

FAMILIAR_FLAGS = Path(__file__).with_name("familiar_flags.yaml")
_MIN_SIMILARITY = 0.75  # `--step-size` and `--batch-size` have 0.63
_FLAG = re.compile(r"--?[a-zA-Z]")  # a negative number is a value


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A field of a config class, at any depth: its dotted name, type, class and flags."""

    name: str
    type: Any
    owner: type
    flags: Sequence[str]

    @property
    def negations(self) -> list[str]:
        """The flags that turn a switch off, as in tyro's help: `--no-ema`, `--trainer.no-ema`."""
        flags = self.flags if self.type is bool else ()
        return [re.sub(r"([^.-][^.]*)$", r"no-\1", flag) for flag in flags]

    def convert(self, words: Sequence[str], where: str) -> Any:
        """Return the value that the words mean. Raises ConfigError, which begins with `where`."""
        is_path = Path in {self.type, *get_args(self.type)}
        if is_path and "" in words:  # an empty path is the current folder
            raise ConfigError("CONFIG", f"{where} is empty: give a path, or leave it out")
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # tyro's report has several lines
                return tyro.cli(self.type, args=["--", *words])
        except SystemExit:
            given = " ".join([where, *words])
            expected = _type_name(self.type)
            raise ConfigError("CONFIG", f"{given}: expected {expected}") from None


def check_types(config: object, config_class: Any, prefix: str = "") -> None:
    """Raise ConfigError if a value of `config`, which a program has made, has a wrong type."""
    for name, kind in get_type_hints(config_class).items():
        value = getattr(config, name, None)
        if not _fits(value, kind):
            raise ConfigError("CONFIG", f"{prefix}{name} is {value!r}: give {_type_name(kind)}")
        if is_dataclass(kind):
            check_types(value, kind, f"{prefix}{name}.")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of the type of a field: one of its choices, or a number of its kind."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    kind = {int: Integral, float: Real}.get(kind, kind)
    return not isinstance(kind, type) or isinstance(value, kind)


def _type_name(kind: Any) -> str:
    return re.sub(r"\w+\.(?=\w)", "", inspect.formatannotation(kind))


def parse_config(
    config_class: type[C], argv: Sequence[str] | None = None, *, description: str
) -> C:
    """Return the config that `argv` (None: the command line) asks for.

    Flags win over `--config FILE`, which wins over the defaults. The text `None` means None, in
    flags and files. `--help` prints all flags and exits. Raises ConfigError, with one line, if a
    name, a value or a file is wrong.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help", "--help-all"} & set(argv):
        argv = ["--help"]
    if argv[:1] in (["--help"], ["--tyro-write-completion"]):
        order = "Flags override --config FILE (YAML), which overrides the defaults."
        with warnings.catch_warnings():  # tyro's, of a default of another type: it is left open
            warnings.simplefilter("ignore")
            tyro.cli(config_class, args=argv, description=f"{description.strip()}\n\n{order}")
    return parse_config_and_origins(config_class, argv)[0]


def parse_config_and_origins(
    config_class: type[C], argv: Sequence[str]
) -> tuple[C, dict[str, str]]:
    """Return the config and, by dotted name, the origin of each value: default, file or flag."""
    known = config_fields(config_class)
    by_flag = {flag: field for field in known.values() for flag in [*field.flags, *field.negations]}
    from_files: dict[str, Any] = {}
    from_flags: dict[str, Any] = {}
    for flag, *words in _split_at_flags(argv):
        if flag == "--config":
            from_files |= _read_file(config_class, words)
        elif field := by_flag.get(flag.replace("_", "-")):
            from_flags[field.name] = _read_flag(field, flag, words)
        else:
            hint = suggest(flag, [*by_flag, "--config"])
            raise ConfigError("CONFIG", f"unknown flag {flag}: {hint}")
    origins = dict.fromkeys(known, "default")
    origins |= dict.fromkeys(from_files, "file") | dict.fromkeys(from_flags, "flag")
    return _build(config_class, from_files | from_flags), origins


def load_config(config_class: type[C], text: str, *, source: str = "config") -> C:
    """Return the config that `save_config` wrote; errors name the text by `source`."""
    return _build(config_class, _parse_file(config_class, text, source=source))


def save_config(config: Any) -> str:
    """Return the config as YAML, which `load_config` turns back into an equal config."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


def config_fields(config_class: Any, prefix: str = "") -> dict[str, ConfigField]:
    """Return the fields of a config class, with those of nested config classes, by dotted name."""
    found: dict[str, ConfigField] = {}
    types = get_type_hints(config_class)
    hints = get_type_hints(config_class, include_extras=True)
    for field in fields(config_class):
        name = prefix + field.name
        kind = types[field.name]
        if field.default is field.default_factory:  # MISSING
            raise ConfigError("CONFIG", f"{name} has no default: give it one")
        if is_dataclass(kind):
            found |= config_fields(kind, f"{name}.")
        else:
            notes = getattr(hints[field.name], "__metadata__", ())
            aliases = [alias for note in notes for alias in getattr(note, "aliases", None) or ()]
            flags = ["--" + name.replace("_", "-"), *aliases]
            found[name] = ConfigField(name, kind, config_class, flags)
    return found


def _split_at_flags(argv: Sequence[str]) -> list[list[str]]:
    """Return for each flag a list of the flag and its words."""
    groups: list[list[str]] = []
    for word in argv:
        if _FLAG.match(word):
            groups.append(word.split("=", 1))
        elif groups:
            groups[-1].append(word)
        else:
            raise ConfigError("CONFIG", f"unexpected {word!r}: values follow a flag, see --help")
    return groups


def _read_flag(field: ConfigField, flag: str, words: Sequence[str]) -> Any:
    if field.type is not bool:
        return field.convert(words, flag)
    if words:
        given = " ".join([flag, *words])
        switches = f"{field.flags[-1]} or {field.negations[-1]}"
        raise ConfigError("CONFIG", f"{given}: expected no value, only {switches}")
    return flag.replace("_", "-") in field.flags


def _read_file(config_class: Any, paths: Sequence[str]) -> dict[str, Any]:
    given = " ".join(["--config", *paths])
    if len(paths) != 1:
        raise ConfigError("CONFIG", f"{given}: expected one file")
    path = expand_home(Path(paths[0])).resolve()  # the user may name a link
    try:
        text = read_file(path, max_bytes=plain_yaml.MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not a text file")
        raise ConfigError("CONFIG", f"{given}: {reason}") from None
    return _parse_file(config_class, text, source=paths[0])


def _parse_file(config_class: Any, text: str, *, source: str) -> dict[str, Any]:
    """Return the values in a file, by dotted name."""
    try:
        content = plain_yaml.parse_plain_yaml(text)
    except ValueError as error:
        raise ConfigError("CONFIG", f"{source}: {error}") from None
    known = config_fields(config_class)
    values = {}
    for key, value in flatten_config(content):
        where = f"{source}: {key}"
        if field := known.get(key.replace("-", "_")):
            values[field.name] = field.convert(words_of(field, value, where), where)
        elif value is not None or not any(name.startswith(f"{key}.") for name in known):
            raise ConfigError("CONFIG", f"{source}: unknown key {key}: {suggest(key, known)}")
    return values


def words_of(field: ConfigField, value: Any, where: str) -> list[str]:
    """Return a value of YAML as the words of a flag. Raises ConfigError for a text to be quoted."""
    items = value if isinstance(value, list) else [value]
    types = {field.type, *get_args(field.type)}
    for item in items:
        if types & {str, Path} and type(item) not in {str, type(None), *types}:
            raise ConfigError("CONFIG", f"{where}: YAML reads {item!r}, not text: quote it")
    return [str(item) for item in items]


def _build(config_class: type[C], values: Mapping[str, Any]) -> C:
    try:
        config: C = _with_values(unchecked_defaults(config_class), values)
        return config
    except ConfigError:
        raise
    except ValueError as error:  # of a config class
        raise ConfigError("CONFIG", str(error)) from None


def _with_values(config: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Return the config with the values, which have dotted names."""
    changes = {}
    for field in fields(config):
        name = prefix + field.name
        default = getattr(config, field.name)
        if is_dataclass(default):
            changes[field.name] = _with_values(default, values, f"{name}.")
        elif name in values:
            changes[field.name] = values[name]
    return replace(config, **changes)


def suggest(name: str, known: Collection[str]) -> str:
    """Return a hint: advice or the name of this flag in our package, else the most similar name."""
    plain = name.lstrip("-").replace("_", "-").lower()
    table = plain_yaml.read_plain_yaml(FAMILIAR_FLAGS)
    if not name.startswith("-"):  # a key of a file, for which no flag stands in
        table = {ours: names for ours, names in table.items() if not ours.startswith("--")}
    theirs = {plain, re.sub(r"^(trainer|model|data)\.", "", plain)}  # as LightningCLI writes them
    rows = [ours for ours, names in table.items() if theirs & set(names.split())]
    if rows:
        usable = [row for row in rows if not row.startswith("--") or row.split()[0] in known]
        ours = [*usable, "see --help"][0]
        return f"did you mean {ours}?" if ours.startswith("--") else ours
    # Compared by the whole name or its last part. A name that is less similar would mislead.
    spelt = {each.rpartition(".")[2].lstrip("-"): each for each in known}
    spelt |= {each.lstrip("-"): each for each in known}
    nearest = difflib.get_close_matches(plain, spelt, n=1, cutoff=_MIN_SIMILARITY)
    return f"did you mean {spelt[nearest[0]]}?" if nearest else "see --help"
