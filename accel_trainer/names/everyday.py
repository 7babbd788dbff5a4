"""The everyday settings, whose flag is one word: Python gives them to `start_run`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypedDict, get_type_hints


class Everyday(TypedDict, total=False):
    """A setting's name is that of its flag: `batch_size=32` is `--batch-size 32`."""

    accumulate: int
    allow_change: Sequence[str]
    batch_size: int
    cache_dir: str | Path
    check_every: int | None
    checkpoint_every_n_steps: int | None
    compile: bool | Literal["reduce-overhead"]
    debug: bool
    dry_run: bool
    ema: float | None
    epochs: int | None
    evaluate_every: str | None
    freeze: str | None
    global_batch_size: int | None
    hours: float | None
    init_from: str | Path | None
    init_skip: str | None
    leave_out: Path | None
    lr: float | None
    max_steps: int | None
    mixed_precision: Literal["no", "bf16", "fp16"] | None
    num_workers: int
    on_nonfinite: Literal["stop", "skip"]
    onnx: bool
    output_dir: str | Path | None
    quiet: bool
    reduce: Literal["float", "exact"]
    resume: str
    seed: int
    steps: int | None
    track: Sequence[str]


_VALUES = (
    r"(?<=allow-change )[\w.]+(?: [\w.]+)*",  # names, which take the rest
    r"\d[\w.]*\b",
    r"'[^']*'",
    r"[^\s,:;)]*/[^\s,:;)]*",  # a path
    r"(?:adamw|balanced|exact|float|gloo|linear|muon|nccl|never|skip|sqrt|strict|trunk|[bf]p?f?16)\b",
)
_FLAG = re.compile(
    r"(?P<flag>--(?P<group>[a-z]*\.)?(?P<name>[a-z][a-z0-9-]*))(?![\w.])"
    rf"(?: (?P<value>{'|'.join(_VALUES)}))?"
)
_GROUPS = ("batch", "trainer", "optimizer", "schedule", "checkpoint", "runtime", "run")


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


IN_START_RUN = {flag_of(name): f"{name}=" for name in Everyday.__annotations__}
"""How Python writes each everyday setting, by its flag."""


def in_python(text: str, spelt: Mapping[str, str] = IN_START_RUN) -> str:
    """Return a text in which flags of settings are written as a Python program gives them.

    That is what `spelt` says, and else a keyword of a config class: `RuntimeConfig(timeout_s=)`.
    """
    return _FLAG.sub(partial(_in_python, spelt), text)


def _in_python(spelt: Mapping[str, str], flag: re.Match[str]) -> str:
    group = (flag["group"] or "")[:-1]
    call = spelt.get(flag["flag"])
    if call is None and group in _GROUPS:
        call = f"{group.capitalize()}Config({flag['name'].replace('-', '_')}=)"
    value = flag["value"] or ""
    if flag["name"] == "allow-change":
        value = str(value.split())
    elif value and not value[0].isdecimal() and value[0] != "'":
        value = repr(value)
    return call.replace("=", f"={value}") if call else flag[0]


def config_fields(classes: Iterable[type]) -> Iterator[tuple[type, str, str, Sequence[str]]]:
    """Yield the class of each setting, its name there, its dotted name and its flags.

    The prefix of dotted names follows from the name of the config class.
    """
    for config_class in classes:
        prefix = config_class.__name__.replace("Config", ".").lower().replace("recipe.", "")
        for name, hint in get_type_hints(config_class, include_extras=True).items():
            notes = getattr(hint, "__metadata__", ())
            short = [flag for note in notes for flag in note.aliases]
            yield config_class, name, prefix + name, [flag_of(prefix + name), *short]


def spelt_fields(classes: Iterable[type], owner: object = None) -> dict[str, str]:
    """Return how Python writes each setting, by its flags; one of `owner` is only its name."""
    found = {}
    for config_class, name, _, flags in config_fields(classes):
        for flag in flags:
            found[flag] = f"{config_class.__name__}({name}=)"
            if flag in IN_START_RUN:
                found[flag] = f"start_run({IN_START_RUN[flag]}) or {found[flag]}"
            if isinstance(owner, type) and issubclass(owner, config_class):
                found[flag] = f"{name}="
    return found
