from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from accel_trainer.cli.flags.parser import load_config, parse_config, save_config
from accel_trainer.core.config import config_to_dict, diff_config
from accel_trainer.core.errors import ConfigError
from accel_trainer.run.config import RecipeConfig, RunConfig
from accel_trainer.training.config import TrainerConfig as RunLength

from .example_config import Config, TrainerConfig, parse


def parsed(**trainer: object) -> Config:
    return Config(trainer=replace(TrainerConfig(), **trainer))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], parsed()),
        (["--trainer.num-epochs", "20"], parsed(num_epochs=20)),
        (["--trainer.num_epochs", "20"], parsed(num_epochs=20)),
        (["--epochs=20"], parsed(num_epochs=20)),
        (["--lr", "1e-3"], parsed(learning_rate=0.001)),
        (["--lr", "-1"], parsed(learning_rate=-1.0)),
        (["--trainer.max-grad-norm", "2"], parsed(max_grad_norm=2.0)),
        (["--trainer.max-grad-norm", "2", "--trainer.max-grad-norm", "None"], parsed()),
        (["--epochs", "5", "--trainer.num_epochs", "6"], parsed(num_epochs=6)),
        (["--ema"], parsed(use_ema=True)),
        (["--ema", "--no-ema"], parsed()),
        (["--trainer.use-ema", "--trainer.no-use-ema"], parsed()),
        (
            ["--trainer.betas", "0.5", "0.6", "--seed", "1"],
            replace(parsed(betas=(0.5, 0.6)), seed=1),
        ),
        (["--trainer.tags", "a", "b"], parsed(tags=("a", "b"))),
        (["--trainer.run-name=a=b --lr c"], parsed(run_name="a=b --lr c")),
        (["--trainer.output-dir", "runs/x"], parsed(output_dir=Path("runs/x"))),
    ],
)
def test_flags_are_parsed(argv: list[str], expected: Config) -> None:
    assert parse(*argv) == expected


def test_an_error_of_a_config_class_keeps_its_code() -> None:
    with pytest.raises(ConfigError, match=r"^error\[LEARNING_RATE\]: learning_rate is 666$"):
        parse("--lr", "666")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", parsed()),
        ("trainer:\n", parsed()),
        (
            "trainer:\n  num_epochs: 4\n  learning_rate: 1e-3\nseed: 2",
            replace(parsed(num_epochs=4, learning_rate=0.001), seed=2),
        ),
        ("trainer.num_epochs: 4", parsed(num_epochs=4)),
        ("trainer: {num-epochs: 4}", parsed(num_epochs=4)),
        (
            "trainer: {use_ema: true, max_grad_norm: null, learning_rate: .inf}",
            parsed(use_ema=True, learning_rate=float("inf")),
        ),
        ("trainer: {use_ema: false, betas: [0, 1], tags: []}", parsed(betas=(0.0, 1.0))),
        ("seed: 2\nrun: {profile: false}", replace(parsed(), seed=2)),  # a setting that is gone
        ("trainer: {run_name: '--lr 3'}", parsed(run_name="--lr 3")),
        ("trainer: {tags: ['--seed', --, -h]}", parsed(tags=("--seed", "--", "-h"))),
    ],
)
def test_a_file_is_parsed(text: str, expected: Config, tmp_path: Path) -> None:
    assert load_config(Config, text) == expected
    (tmp_path / "run.yaml").write_text(text)
    assert parse("--config", str(tmp_path / "run.yaml")) == expected


def test_a_file_cannot_run_code(tmp_path: Path) -> None:
    """Fault (Malice): YAML that creates objects, or expands a short text -> an error: the safe
    loader, at most 1 MiB, no aliases
    """
    canary = tmp_path / "canary"
    with pytest.raises(ConfigError, match=r"run.yaml: line 1: could not determine"):
        load_config(Config, f"seed: !!python/object/apply:os.mkdir ['{canary}']", source="run.yaml")
    assert not canary.exists()


def test_flags_win_over_the_file_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {num_epochs: 4, learning_rate: 0.5}")
    assert parse("--epochs", "7", "--config", str(path)) == parsed(num_epochs=7, learning_rate=0.5)


@pytest.mark.parametrize(
    "text", ["", "--x", "-h", "null", "~", "a\nb", "é€", "=", "#", "yes", "1", "1e3", " a "]
)
def test_a_saved_config_parses_back_equal(text: str) -> None:
    config = parsed(
        learning_rate=0.1 + 0.2,
        betas=(1e-300, 1 / 3),
        tags=("a", "b c", ""),
        use_ema=True,
        output_dir=Path("x y/z"),
        run_name=text,
    )
    assert load_config(Config, save_config(config)) == config


@dataclass(frozen=True, kw_only=True)
class Containers:
    weights: Mapping[str, float] = field(default_factory=lambda: {"pixels": 1.0})
    names: dict[str, str] | None = None
    layers: frozenset[int] = frozenset()


def test_dicts_and_sets_come_from_flags_and_files_and_are_saved() -> None:
    flags = ["--weights", "cat", "2", "dog", "0.5", "--names", "a", "b", "--layers", "3", "1"]
    config = parse_config(Containers, flags, description="")
    assert (config.weights, config.names) == ({"cat": 2.0, "dog": 0.5}, {"a": "b"})
    assert load_config(Containers, save_config(config)) == config
    text = "weights: {cat: 2, dog: 0.5}\nnames: {a: b}\nlayers: [1, 3]"
    assert load_config(Containers, text) == config
    with pytest.raises(ConfigError, match="weights cat x: expected Mapping"):
        load_config(Containers, "weights: {cat: x}")


def test_a_diff_names_each_value_that_differs() -> None:
    old, new = config_to_dict(parsed()), config_to_dict(parsed(num_epochs=5, tags=("a",)))
    del old["seed"]
    assert diff_config(old, new) == [
        ("trainer.num_epochs", 3, 5),
        ("trainer.tags", [], ["a"]),
        ("seed", None, 0),
    ]
    assert diff_config(new, new) == []


def test_help_is_printed_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--config", "missing.yaml", "--help")
    assert caught.value.code == 0
    help_text = capsys.readouterr().out
    for words in (
        "Train.",
        "--config FILE",
        "--epochs INT, --trainer.num-epochs INT",
        "Passes over the data.",
    ):
        assert words in help_text


def test_a_field_without_a_default_is_named() -> None:
    with pytest.raises(ConfigError, match="size has no default: give it one"):
        parse_config(NeedsSize, [], description="")


@dataclass(frozen=True, kw_only=True)
class NeedsSize:
    size: int


def test_a_path_may_be_given_as_text_in_python() -> None:
    as_text = RunConfig(output_dir="runs/x", cache_dir="cache")  # type: ignore[arg-type]
    assert as_text == RunConfig(output_dir=Path("runs/x"), cache_dir=Path("cache"))


def test_a_link_that_the_user_names_is_followed(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("seed: 3")
    (tmp_path / "link.yaml").symlink_to("good.yaml")
    assert parse("--config", str(tmp_path / "link.yaml")).seed == 3


def test_an_empty_path_is_refused_and_a_tilde_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in (["--output-dir", ""], ["--output-dir="]):
        with pytest.raises(ConfigError, match="--output-dir is empty: give a path, or leave it"):
            parse_config(RecipeConfig, flags, description="")
    (tmp_path / "run.yaml").write_text('run: {output_dir: ""}')
    with pytest.raises(ConfigError, match="run.output_dir is empty"):
        parse_config(RecipeConfig, ["--config", str(tmp_path / "run.yaml")], description="")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        parse_config(RecipeConfig, ["--output-dir=~/run"], description="").run.output_dir
        == tmp_path / "run"
    )
    with pytest.raises(ConfigError, match="~nobody-of-that-name/run needs a home folder"):
        parse_config(RecipeConfig, ["--output-dir=~nobody-of-that-name/run"], description="")


@dataclass(frozen=True, kw_only=True)
class Derived:
    """Has a value that follows from another, and no defaults that fit."""

    size: int = 0
    half: float | None = None
    trainer: TrainerConfig = TrainerConfig(num_epochs=5, use_ema=True)

    def __post_init__(self) -> None:
        if self.size == 0:
            raise ValueError("--size is 0: set it above 0")
        if self.half is None:
            object.__setattr__(self, "half", self.size / 2)


def test_only_the_given_values_reach_a_config_class() -> None:
    config = parse_config(Derived, ["--size", "3", "--trainer.tags", "a"], description="")
    assert (config.size, config.half) == (3, 1.5)
    assert config.trainer == TrainerConfig(num_epochs=5, use_ema=True, tags=("a",))
    with pytest.raises(ConfigError, match="--size is 0"):
        parse_config(Derived, [], description="")


def test_steps_take_the_place_of_epochs_that_were_given_before(tmp_path: Path) -> None:
    """Flags over a file, and both over the recipe's defaults, also the other way round."""

    @dataclass(frozen=True, kw_only=True)
    class ByEpochs(RecipeConfig):
        trainer: RunLength = RunLength(num_epochs=30)

    def length(*argv: str) -> tuple[int | None, int | None]:
        trainer = parse_config(ByEpochs, argv, description="").trainer
        return trainer.num_epochs, trainer.num_steps

    file = tmp_path / "steps.yaml"
    file.write_text("trainer:\n  num_steps: 70\n")
    assert length() == (30, None)
    assert length("--steps", "9") == (None, 9)
    assert length("--config", str(file)) == (None, 70)
    assert length("--config", str(file), "--epochs", "2") == (2, None)
    assert length("--config", str(file), "--lr", "1") == (None, 70)
    stored = tmp_path / "stored.yaml"
    stored.write_text("trainer:\n  num_epochs: 10\n  num_steps: null\n")
    assert length("--config", str(stored)) == (10, None)
    with pytest.raises(ConfigError) as caught:
        length("--epochs", "2", "--steps", "9")
    assert "--epochs 2 and --steps 9 both set the length" in caught.value.line
