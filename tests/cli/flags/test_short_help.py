from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from accel_trainer import RecipeConfig, main
from accel_trainer.cli.flags.fields import config_fields
from accel_trainer.cli.flags.short_help import short_help
from accel_trainer.vision.models.zoo import MODEL_NAMES
from recipes import cifar, images
from tests.run.test_config import Demanding

CONFIGS = [RecipeConfig, cifar.Config, images.Config]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_terminal_of_any_width_shows_whole_texts(
    config: type[RecipeConfig], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = short_help(config, description="Train a net.").splitlines()
    assert [line for line in lines if len(line) > columns and "http" not in line] == []
    assert not any(line.endswith("...") for line in lines)
    titles = [line for line in lines[2:] if line[:1].isalpha()]
    assert titles[-3:] == ["Batches", "Training", "Machine and files"]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_short_flag_has_a_line_that_says_what_it_does(config: type[RecipeConfig]) -> None:
    lines = [
        line.split()
        for line in short_help(config, description="").splitlines()
        if line.startswith("  --")
    ]
    shown = {flag: words for flag, *words in lines}
    short = {field.flags[-1] for field in config_fields(config).values() if len(field.flags) > 1}
    assert short <= set(shown)
    assert all(len(words) >= 2 for words in shown.values())


def test_a_config_that_refuses_its_defaults_has_a_help() -> None:
    assert "--dataset" in short_help(Demanding, description="")


@pytest.mark.parametrize("columns", [80, 120])
def test_every_model_is_named(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = (
        " ".join(short_help(images.Config, description="").split())
        .partition("--model ")[2]
        .partition(" --")[0]
    )
    names = set()
    for kind, numbers in re.findall(r"`([a-z]+)(\d+`[/\d]*)", text):
        names |= {kind + number.strip("`") for number in numbers.split("/")}
    assert names == set(MODEL_NAMES)
    assert "timm/NAME" in text


def test_a_recipes_own_flags_come_first() -> None:
    flags = [
        line.split()[0]
        for line in short_help(images.Config, description="").splitlines()
        if line.startswith("  --")
    ]
    assert flags[0] == "--dataset"
    assert flags.index("--model") < flags.index("--seed")


def test_help_exits_with_0_and_names_the_longer_one(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, expected in (
        ("--help", "--help-all lists every setting"),
        ("--help-all", "--optimizer.weight-decay"),
    ):
        with pytest.raises(SystemExit) as end:
            main(cifar.train, cifar.Config, description="Train a net.", argv=[flag])
        assert end.value.code == 0
        assert expected in capsys.readouterr().out


@dataclass(frozen=True, kw_only=True)
class Undocumented(RecipeConfig):
    size: int = 7


def test_a_setting_without_a_text_is_listed_first_with_its_default() -> None:
    lines = short_help(Undocumented, description="Train a net.").splitlines()
    assert lines[0] == "Train a net."
    assert lines[2:5] == ["", "This recipe", "  --size                       (default: 7)"]
    assert "  --seed                       Determines the initial weights" in lines[7]
