"""Flags of other toolkits are answered with the name of ours."""

from __future__ import annotations

import functools
import inspect

import pytest

from accel_trainer import ConfigError, RecipeConfig, build_trainer, launch, parse_config
from accel_trainer.cli.flags.fields import config_fields
from accel_trainer.names import unknown
from accel_trainer.names.everyday import flag_of
from recipes import cifar, images


def said_of(flag: str, config_class: type[RecipeConfig] = cifar.Config) -> str:
    """Return what follows `unknown flag`."""
    with pytest.raises(ConfigError, match=f"unknown flag {flag}: ") as caught:
        parse_config(config_class, [flag, "1"], description="")
    return str(caught.value).partition(f"{flag}: ")[2]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--learning-rate", "did you mean --lr?"),
        ("--weight_decay", "did you mean --optimizer.weight-decay?"),
        ("--use-amp", "did you mean --mixed-precision bf16?"),
        ("-j", "did you mean --num-workers?"),
        ("--epoch", "did you mean --epochs?"),  # the nearest, as no toolkit calls it so
        ("--criterion", "the recipe chooses its task, such as MultiLabelTask"),
    ],
)
def test_a_flag_of_another_toolkit_is_answered_by_ours(flag: str, said: str) -> None:
    """A sample of each kind; the next test has every row."""
    assert said_of(flag) == said


@pytest.mark.parametrize("config", [cifar.Config, images.Config])
def test_a_familiar_flag_is_answered_by_its_first_row_that_the_recipe_has(
    monkeypatch: pytest.MonkeyPatch, config: type[RecipeConfig]
) -> None:
    # The table is read once here, and not for each of hundreds of names.
    monkeypatch.setattr(unknown, "familiar_names", functools.cache(unknown.familiar_names))
    known = {flag for field in config_fields(config).values() for flag in field.flags}
    table = unknown.familiar_names()
    answers: dict[str, list[str]] = {}
    for here, names in table.items():
        for name in names.split():
            answers.setdefault(name, []).append(here)
    assert len(answers) > 200
    for name, rows in answers.items():
        assert len(rows) == len(set(rows)), f"{name} appears twice"
        usable = [here for here in rows if not here.startswith("--") or here.split()[0] in known]
        expected = "see --help" if not usable else usable[0]
        if expected.startswith("--"):
            expected = f"did you mean {expected}?"
        if f"--{name}" not in known:
            assert unknown.suggest(f"--{name}", known) == expected
            assert unknown.suggest(f"--trainer.{name}", known) == expected, (
                "as LightningCLI writes it"
            )


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--sead", "did you mean --seed?"),
        ("--optimiser.name", "did you mean --optimizer.name?"),
        ("--label-smothing", "did you mean --task.label-smoothing?"),
        ("--nesterov", "did you mean --optimizer.nesterov?"),
        ("--hidden-layers", "see --help"),
        ("--queue-size", "see --help"),
    ],
)
def test_only_a_near_name_is_suggested(flag: str, said: str) -> None:
    assert said_of(flag) == said


def test_every_name_in_the_table_is_of_a_recipe_or_a_function() -> None:
    known = {
        flag
        for config in (cifar.Config, images.Config)
        for field in config_fields(config).values()
        for flag in field.flags
    }
    functions = (build_trainer, launch)
    known |= {flag_of(name) for each in functions for name in inspect.signature(each).parameters}
    rows = [here for here in unknown.familiar_names() if here.startswith("--")]
    assert [here for here in rows if here.split()[0] not in known] == []


def test_a_recipe_without_images_is_not_told_to_augment_them() -> None:
    assert said_of("--hflip", RecipeConfig) == "see --help"
