from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from accel_trainer.core.config import config_to_dict, diff_config
from accel_trainer.core.errors import ConfigError, ExitCode
from accel_trainer.run.config import RecipeConfig, RunConfig
from accel_trainer.run.parser import (
    load_config,
    parse_config,
    parse_config_and_origins,
    save_config,
)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long and how."""

    num_epochs: Annotated[int, tyro.conf.arg(aliases=["--epochs"])] = 3
    """Passes over the data."""
    learning_rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 0.1
    max_grad_norm: float | None = None
    betas: tuple[float, float] = (0.9, 0.99)
    tags: tuple[str, ...] = ()
    use_ema: Annotated[bool, tyro.conf.arg(aliases=["--ema"])] = False
    mixed_precision: Literal["no", "bf16"] = "no"
    output_dir: Path | None = None
    run_name: str | None = None

    def __post_init__(self) -> None:
        if self.num_epochs < 0:
            raise ValueError(f"num_epochs is {self.num_epochs}: set it to 0 or more")
        if self.learning_rate == 666:
            raise ConfigError("LEARNING_RATE", "learning_rate is 666")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed == 13:
            raise ValueError("seed is 13: set another")


def parse(*argv: str) -> Config:
    return parse_config(Config, argv, description="Train.")


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
        (["--trainer.betas", "0.5", "0.6", "--seed", "1"], replace(parsed(betas=(0.5, 0.6)), seed=1)),
        (["--trainer.tags", "a", "b"], parsed(tags=("a", "b"))),
        (["--trainer.run-name=a=b --lr c"], parsed(run_name="a=b --lr c")),
        (["--trainer.output-dir", "runs/x"], parsed(output_dir=Path("runs/x"))),
    ],
)
def test_flags_are_parsed(argv: list[str], expected: Config) -> None:
    assert parse(*argv) == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lrr", "1"], "unknown flag --lrr: did you mean --lr?"),
        (["-lr", "1"], "unknown flag -lr: did you mean --lr?"),
        (["--confg", "x.yaml"], "unknown flag --confg: did you mean --config?"),
        (["--zzzzzzzz"], "unknown flag --zzzzzzzz: see --help"),
        (["--lr", "abc"], "--lr abc: expected float"),
        (["--lr", "0.1", "0.2"], "--lr 0.1 0.2: expected float"),
        (["--seed", "1", "--epochs"], "--epochs: expected int"),
        (["--trainer.num_epochs", "2.5"], "--trainer.num_epochs 2.5: expected int"),
        (["--trainer.max-grad-norm", "x"], "--trainer.max-grad-norm x: expected float | None"),
        (["--trainer.mixed-precision", "fp8"], "--trainer.mixed-precision fp8: expected Literal['no', 'bf16']"),
        (["--trainer.betas", "1"], "--trainer.betas 1: expected tuple[float, float]"),
        (["--ema", "True"], "--ema True: expected no value, only --ema or --no-ema"),
        (["digits", "--lr", "1"], "unexpected 'digits': values follow a flag, see --help"),
        (["--epochs", "-1"], "num_epochs is -1: set it to 0 or more"),
        (["--lr", "1", "--seed", "13"], "seed is 13: set another"),
        (["--config"], "--config: expected one file"),
        (["--config", "a", "b"], "--config a b: expected one file"),
        (["--config", "missing.yaml"], "--config missing.yaml: No such file or directory"),
    ],
)
def test_a_bad_command_line_is_one_line(argv: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert str(caught.value) == f"error[CONFIG]: {message}"
    assert caught.value.exit_code == ExitCode.USAGE
    assert capfd.readouterr() == ("", "")


def test_an_error_of_a_config_class_keeps_its_code() -> None:
    with pytest.raises(ConfigError, match=r"^error\[LEARNING_RATE\]: learning_rate is 666$"):
        parse("--lr", "666")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", parsed()),
        ("trainer:\n", parsed()),
        ("trainer:\n  num_epochs: 4\n  learning_rate: 1e-3\nseed: 2", replace(
            parsed(num_epochs=4, learning_rate=0.001), seed=2)),
        ("trainer.num_epochs: 4", parsed(num_epochs=4)),
        ("trainer: {num-epochs: 4}", parsed(num_epochs=4)),
        ("trainer: {use_ema: true, max_grad_norm: null, learning_rate: .inf}",
         parsed(use_ema=True, learning_rate=float("inf"))),
        ("trainer: {use_ema: no, betas: [0, 1], tags: []}", parsed(betas=(0.0, 1.0))),
        ("trainer: {run_name: '--lr 3'}", parsed(run_name="--lr 3")),
    ],
)  # fmt: skip
def test_a_file_is_parsed(text: str, expected: Config, tmp_path: Path) -> None:
    assert load_config(Config, text) == expected
    (tmp_path / "run.yaml").write_text(text)
    assert parse("--config", str(tmp_path / "run.yaml")) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {numepochs: 3}", "unknown key trainer.numepochs: did you mean trainer.num_epochs?"),
        ("sead: 3", "unknown key sead: did you mean seed?"),
        ("seed: {a: 1}", "unknown key seed.a: did you mean seed?"),
        ("1: 2", "unknown key 1: see --help"),
        ("seed: abc", "seed abc: expected int"),
        ("seed: true", "seed True: expected int"),
        ("seed: null", "seed None: expected int"),
        ("trainer: {num_epochs: 2.0}", "trainer.num_epochs 2.0: expected int"),
        ("trainer: {use_ema: 'yes'}", "trainer.use_ema yes: expected bool"),
        ("trainer: {mixed_precision: fp8}", "trainer.mixed_precision fp8: expected Literal['no', 'bf16']"),
        ("trainer: {betas: [1, [2]]}", "trainer.betas: expected tuple[float, float], got a nested list"),
        ("trainer: {run_name: 010}", "trainer.run_name: YAML reads 8, not text: put it in quotes"),
        ("trainer: {tags: [yes]}", "trainer.tags: YAML reads True, not text: put it in quotes"),
        ("trainer: {tags: ['--seed', '3']}", "trainer.tags: --seed looks like a flag"),
        ("- 1", "expected names with values, got a list"),
        ("when: 2020-13-01", "cannot be read as YAML: month must be in 1..12"),
    ],
)
def test_a_bad_file_is_one_line(text: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, text, source="run.yaml")
    assert str(caught.value) == f"error[CONFIG]: run.yaml: {message}"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "text",
    ["seed: [", "a: \x00", "[" * 5000, "? [a]\n: 1", "&a [*a]", "trainer: &a {b: *a}", "seed: " + "9" * 5000],
)
def test_what_is_not_yaml_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, text, source="run.yaml")
    assert str(caught.value).startswith("error[CONFIG]: run.yaml")
    assert "\n" not in str(caught.value)


def test_a_file_cannot_run_code(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    with pytest.raises(ConfigError, match=r"run.yaml: cannot be read as YAML: line 1: could not determine"):
        load_config(Config, f"seed: !!python/object/apply:os.mkdir ['{canary}']", source="run.yaml")
    assert not canary.exists()


def test_a_file_that_is_not_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"not a text file$"):
        parse("--config", str(tmp_path / "x"))
    with pytest.raises(ConfigError, match=r"not a regular file$"):
        parse("--config", str(tmp_path))


def test_flags_win_over_the_file_wherever_they_stand_and_origins_say_so(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {num_epochs: 4, learning_rate: 0.5}")
    config, origins = parse_config_and_origins(Config, ["--epochs", "7", "--config", str(path)], description="Train.")
    assert config == parsed(num_epochs=7, learning_rate=0.5)
    assert origins["trainer.num_epochs"] == "flag"
    assert origins["trainer.learning_rate"] == "file"
    assert origins["seed"] == "default"
    assert len(origins) == 10


@pytest.mark.parametrize("text", ["", "--x", "-h", "null", "~", "a\nb", "é€", "=", "#", "yes", "1", "1e3", " a "])
def test_a_saved_config_parses_back_equal(text: str) -> None:
    config = parsed(
        learning_rate=0.1 + 0.2, betas=(1e-300, 1 / 3), tags=("a", "b c", ""), use_ema=True,
        output_dir=Path("x y/z"), run_name=text,
    )  # fmt: skip
    assert load_config(Config, save_config(config)) == config


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


def test_a_broken_config_class_is_reported_with_the_words_of_tyro() -> None:
    with pytest.raises(ConfigError, match=r"Missing from .*--size INT"):
        parse_config(NeedsSize, [], description="")


@dataclass(frozen=True, kw_only=True)
class NeedsSize:
    size: int


def test_a_path_may_be_given_as_text_in_python() -> None:
    as_text = RunConfig(output_dir="runs/x", cache_dir="cache")  # type: ignore[arg-type]
    assert as_text == RunConfig(output_dir=Path("runs/x"), cache_dir=Path("cache"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seed: 1\nseed: 2", "line 2: seed appears twice"),
        ("trainer: {num_epochs: 1, num_epochs: 2}", "line 1: num_epochs appears twice"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "line 2: aliases"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
    ],
)
def test_a_file_with_yaml_that_no_config_needs_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"cannot be read as YAML: {reason}"):
        parse("--config", str(path))


def test_a_file_is_read_up_to_a_mebibyte_and_a_device_or_a_pipe_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text("# \n" * 400_000)
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "good.yaml").write_text("seed: 3")
    (tmp_path / "link.yaml").symlink_to("good.yaml")
    for name, reason in (("long.yaml", "more than 1048576"), ("pipe.yaml", "not a regular"), ("/dev/zero", "not a")):
        with pytest.raises(ConfigError, match=reason):
            parse("--config", str(tmp_path / name))
    assert parse("--config", str(tmp_path / "link.yaml")).seed == 3, "a link that the user names"


def test_an_empty_path_is_refused_and_a_tilde_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in (["--output-dir", ""], ["--output-dir="]):
        with pytest.raises(ConfigError, match="--output-dir is empty: give a path, or leave it out"):
            parse_config(RecipeConfig, flags, description="")
    (tmp_path / "run.yaml").write_text('run: {output_dir: ""}')
    with pytest.raises(ConfigError, match="run.output_dir is empty"):
        parse_config(RecipeConfig, ["--config", str(tmp_path / "run.yaml")], description="")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_config(RecipeConfig, ["--output-dir=~/run"], description="").run.output_dir == tmp_path / "run"
    with pytest.raises(ConfigError, match="the home folder in ~nobody-of-that-name/run is unknown"):
        parse_config(RecipeConfig, ["--output-dir=~nobody-of-that-name/run"], description="")
