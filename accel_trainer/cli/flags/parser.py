"""Configs: nested frozen dataclasses, filled from YAML files and then from flags."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from ...core.config import config_to_dict
from ...core.errors import ConfigError
from ...core.filesystem import read_file
from ...core.run_dir import expand_home
from ...core.yaml_files import MAX_BYTES, dump_yaml, parse_yaml
from ...names.unknown import suggest
from ...run.keywords import Settings, build_config
from .fields import ConfigField, config_fields, fields_by_flag, words_of
from .typed_words import refuse_misread_words

C = TypeVar("C")

FLAG = re.compile(r"--?[a-zA-Z]")  # a negative number is a value
_GONE = (("run.profile", False),)
"""Settings without effect that the files of earlier runs have, and that are gone."""


def parse_config(
    config_class: type[C], argv: Sequence[str] | None = None, *, description: str
) -> C:
    """Return the config that `argv` (None: the command line) asks for.

    Flags win over `--config FILE`, which wins over the defaults. The text `None` means None, in
    flags and files. `--help` prints all flags and exits. Raises ConfigError, with one line, if a
    name, a value or a file is wrong.
    """
    if not isinstance(config_class, type):
        name = type(config_class).__name__
        raise ConfigError("CONFIG", f"main was given an object of type {name}: give the class")
    argv = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help", "--help-all"} & set(argv):
        argv = ["--help"]
    if argv[:1] in (["--help"], ["--tyro-write-completion"]):
        order = "Flags override --config FILE (YAML), which overrides the defaults."
        with warnings.catch_warnings():  # tyro warns of settings left open: None is of no such type
            warnings.simplefilter("ignore")
            tyro.cli(config_class, args=argv, description=f"{description.strip()}\n\n{order}")
    by_flag = fields_by_flag(config_class)
    from_files: Settings = {}
    from_flags: Settings = {}
    unknown: dict[str, str] = {}
    typed: dict[str, str] = {}
    for first, *rest in split_at_flags(argv, by_flag):
        flag, *words = [*first.split("=", 1), *rest]
        if flag == "--config":
            from_files |= _read_file(config_class, words)
        elif field := by_flag.get(flag.replace("_", "-")):
            from_flags[field.name] = _read_flag(field, flag, words)
            typed[field.name] = flag
        elif [flag.replace("_", "-"), *words] != ["--local-rank", os.environ.get("LOCAL_RANK")]:
            # torch.distributed.launch passes the rank, and sets the variable as well.
            unknown[flag] = suggest(flag, [*by_flag, "--config"])
    if unknown:
        if len(unknown) == 1:
            raise ConfigError("CONFIG", "unknown flag {}: {}".format(*unknown.popitem()))
        hints = "; ".join(f"{flag} ({hint})" for flag, hint in unknown.items())
        raise ConfigError("CONFIG", f"unknown flags: {hints}")
    known = config_fields(config_class)
    values = _with_length(from_files, known) | _with_length(from_flags, known)
    return build_config(config_class, values, typed)


def load_config(config_class: type[C], text: str, *, source: str = "config") -> C:
    """Return the config that `save_config` wrote; errors name the text by `source`."""
    return build_config(config_class, _parse_file(config_class, text, source=source))


def save_config(config: Any) -> str:
    """Return the config as YAML, which `load_config` turns back into an equal config."""
    return dump_yaml(config_to_dict(config))


def _with_length(given: Settings, known: Collection[str]) -> Settings:
    """Return the values; if they have a length of the run, the lengths of other kinds are None.

    So `--steps` replaces a number of epochs in a file or a default, as if they were one setting.
    """
    kinds = ("trainer.num_epochs", "trainer.num_steps", "trainer.hours")
    lengths = [name for name in kinds if name in known]
    if all(given.get(name) is None for name in lengths):
        return given
    return dict.fromkeys(lengths) | given


def split_at_flags(argv: Sequence[str], known: Collection[str] = ()) -> list[list[str]]:
    """Return for each flag a list of the flag and the words behind it.

    Raises ConfigError for a word without a flag; it suggests one of the `known` flags.
    """
    groups: list[list[str]] = []
    for word in argv:
        if FLAG.match(word):
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        else:
            fix = "put a flag in front of each value, such as --seed 1; see --help"
            if "--dataset" in known and Path(word).is_dir():
                fix = f"did you mean --dataset {word}?"
            raise ConfigError("CONFIG", f"unexpected {word!r}: {fix}")
    return groups


def _read_flag(field: ConfigField, flag: str, words: Sequence[str]) -> Any:
    is_off = flag.replace("_", "-") in field.negations
    if field.type is not bool and not is_off and (words or not field.is_switch):
        return field.convert(words, flag)
    if words:
        given = " ".join([flag, *words])
        switches = f"{field.flags[-1]} or {field.negations[-1]}"
        raise ConfigError("CONFIG", f"{given}: expected no value, only {switches}")
    return not is_off


def _read_file(config_class: Any, paths: Sequence[str]) -> Settings:
    given = " ".join(["--config", *paths])
    if len(paths) != 1:
        raise ConfigError("CONFIG", f"{given}: expected one file")
    path = Path(os.path.realpath(expand_home(Path(paths[0]))))  # the user may name a link
    try:
        text = read_file(path, max_bytes=MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not a text file")
        raise ConfigError("CONFIG", f"{given}: {reason}") from None
    return _parse_file(config_class, text, source=paths[0])


def _parse_file(config_class: Any, text: str, *, source: str) -> Settings:
    """Return the values in a file, by dotted name."""
    try:
        content = parse_yaml(text)
    except ValueError as error:
        fix = ": indent with spaces" if "'\\t'" in str(error) else ""
        raise ConfigError("CONFIG", f"{source}: {error}{fix}") from None
    refuse_misread_words(text, source=source)
    known = config_fields(config_class)
    values: Settings = {}
    dicts = {name for name, field in known.items() if field.holds_dict}
    for key, value in _values_by_name(content, dicts):
        where = f"{source}: {key}"
        if field := known.get(key.replace("-", "_")):
            if field.name in values:  # as `num-epochs` beside `num_epochs`
                raise ConfigError("CONFIG", f"{where} is given twice: keep one of them")
            values[field.name] = field.convert(words_of(field, value, where), where)
        elif (key, value) in _GONE:
            continue
        elif value is not None or not any(name.startswith(f"{key}.") for name in known):
            raise ConfigError("CONFIG", f"{source}: unknown key {key}: {suggest(key, known)}")
    return values


def _values_by_name(
    content: Mapping[Any, Any], dicts: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting, of which those in `dicts` are dicts."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name.replace("-", "_") not in dicts:
            yield from _values_by_name(value, dicts, f"{name}.")
        else:
            yield name, value
