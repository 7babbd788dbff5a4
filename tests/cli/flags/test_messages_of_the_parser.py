"""What a config answers to a wrong command line or file: the whole line, for each."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import pytest

from accel_trainer import RecipeConfig, parse_config
from accel_trainer.cli.flags.parser import load_config
from accel_trainer.core.errors import ConfigError, ExitCode
from accel_trainer.vision import PhotoRecipeConfig

from .example_config import Config, parse

try:
    date(2020, 13, 1)
except ValueError as error:
    NO_MONTH = str(error)  # which differs between versions of Python

# The words of a command line, and the line.
FLAGS: list[tuple[list[str], str]] = [
    # names
    (["--lrr", "1"], "unknown flag --lrr: did you mean --lr?"),
    (["-lr", "1"], "unknown flag -lr: did you mean --lr?"),
    (["--sead=1"], "unknown flag --sead: did you mean --seed?"),
    (["--use-ema"], "unknown flag --use-ema: did you mean --ema 0.999?"),
    (["--no-lr"], "unknown flag --no-lr: see --help"),
    (
        ["--lrr", "1", "--sead=1"],
        "unknown flags: --lrr (did you mean --lr?); --sead (did you mean --seed?)",
    ),
    (["--trainer.no-ema"], "unknown flag --trainer.no-ema: did you mean --trainer.no-use-ema?"),
    (["--trainer.lr", "1"], "unknown flag --trainer.lr: see --help"),
    (["--confg", "x.yaml"], "unknown flag --confg: did you mean --config?"),
    (["--zzzzzzzz"], "unknown flag --zzzzzzzz: see --help"),
    (["--lr", "-inf"], "--lr: expected a number"),
    (["--tyro-print-completion", "bash"], "unknown flag --tyro-print-completion: see --help"),
    (
        ["digits", "--lr", "1"],
        "unexpected 'digits': put a flag in front of each value, such as --seed 1; see --help",
    ),
    (
        ["-5", "--lr", "1"],
        "unexpected '-5': put a flag in front of each value, such as --seed 1; see --help",
    ),
    (
        ["--", "--lr", "1"],
        "unexpected '--': put a flag in front of each value, such as --seed 1; see --help",
    ),
    (
        ["/", "--lr", "1"],
        "unexpected '/': put a flag in front of each value, such as --seed 1; see --help",
    ),
    # numbers
    (["--lr", "abc"], "--lr abc: expected a number"),
    (["--lr", "10%"], "--lr 10%: expected a number, such as 0.1"),
    (["--lr", "a\nb"], "--lr a b: expected a number"),
    (["--lr="], "--lr : expected a number"),
    (["--lr", "0.1", "0.2"], "--lr 0.1 0.2: expected a number"),
    (["--lr=0.1", "0.2"], "--lr 0.1 0.2: expected a number"),
    (["--seed", "1", "--epochs"], "--epochs: expected a whole number"),
    (["--seed", "--epochs", "1"], "--seed: expected a whole number"),
    (["--epochs", "1e3"], "--epochs 1e3: expected a whole number"),
    (["--trainer.num_epochs", "2.5"], "--trainer.num_epochs 2.5: expected a whole number"),
    (["--trainer.max-grad-norm", "x"], "--trainer.max-grad-norm x: expected a number or None"),
    (
        ["--trainer.max-grad-norm", "null"],
        "--trainer.max-grad-norm null: expected a number or None",
    ),
    (["--trainer.betas", "1"], "--trainer.betas 1: expected tuple[float, float]"),
    (["--trainer.betas", "1", "2", "3"], "--trainer.betas 1 2 3: expected tuple[float, float]"),
    # choices, switches and paths
    (
        ["--trainer.mixed-precision", "fp8"],
        "--trainer.mixed-precision fp8: expected no or bf16",
    ),
    (["--trainer.mixed_precision"], "--trainer.mixed_precision: expected no or bf16"),
    (["--ema=True"], "--ema True: expected no value, only --ema or --no-ema"),
    (["--no-ema", "1"], "--no-ema 1: expected no value, only --ema or --no-ema"),
    (
        ["--trainer.no_use_ema", "1"],
        "--trainer.no_use_ema 1: expected no value, only --ema or --no-ema",
    ),
    (
        ["--trainer.output-dir", ""],
        "--trainer.output-dir is empty: give a path, or leave it out",
    ),
    # files
    (["--config"], "--config: expected one file"),
    (["--config", "a", "b"], "--config a b: expected one file"),
    (["--config="], "--config : not a regular file"),
    (["--config", "missing.yaml"], "--config missing.yaml: No such file or directory"),
    (["--config", "."], "--config .: not a regular file"),
    (["--config", "pipe"], "--config pipe: not a regular file"),
    (["--config", "loop"], "--config loop: Too many levels of symbolic links"),
    (["--config", "/dev/zero"], "--config /dev/zero: not a regular file"),
    (["--config", "binary"], "--config binary: not a text file"),
    (["--config", "long"], "--config long: 1200000 bytes, more than 1048576"),
    (["--config", "wrong", "--lr", "abc"], "wrong: seed abc: expected a whole number"),
    (["--config", "wrong", "--seed", "3"], "wrong: seed abc: expected a whole number"),
    # what a config class refuses
    (["--epochs", "-1"], "num_epochs is -1: set it to 0 or more"),
    (["--lr", "1", "--seed", "13"], "seed is 13: set another"),
]

# The text of a file, and the line after the file's name.
FILES: list[tuple[str, str]] = [
    # names
    ("trainer: {numepochs: 3}", "unknown key trainer.numepochs: did you mean trainer.num_epochs?"),
    ("sead: 3", "unknown key sead: did you mean seed?"),
    ("num_epochs: 3", "unknown key num_epochs: did you mean trainer.num_epochs?"),
    ("seed: {a: 1}", "unknown key seed.a: did you mean seed?"),
    ("trainer: [1]", "unknown key trainer: see --help"),
    ("trainer: {a: {b: {c: {d: 1}}}}", "unknown key trainer.a.b.c.d: see --help"),
    ("num_classes: 3", "unknown key num_classes: their number comes from the data"),
    (
        "optimizer: {bias_learning_rate_scale: 64}",
        "unknown key optimizer.bias_learning_rate_scale: "
        "write learning_rate_scales: [bias=FACTOR] and weight_decays: [bias=DECAY/FACTOR]",
    ),
    ("'': 2", "unknown key : see --help"),
    ("- 1", "expected names with values, got a value of type list"),
    ("some text", "expected names with values, got a value of type str"),
    # numbers
    ("seed: abc", "seed abc: expected a whole number"),
    ("seed: true", "seed True: expected a whole number"),
    ("seed: null", "seed None: expected a whole number"),
    ("seed: '3x'", "seed 3x: expected a whole number"),
    ("seed: 1e3", "seed 1e3: expected a whole number"),
    ("seed: [[1]]", "seed [1]: expected a whole number"),
    ("trainer: {num_epochs: 2.0}", "trainer.num_epochs 2.0: expected a whole number"),
    ("trainer.num-epochs: 2.5", "trainer.num-epochs 2.5: expected a whole number"),
    ("trainer: {betas: []}", "trainer.betas: expected tuple[float, float]"),
    ("trainer: {betas: [1, null]}", "trainer.betas 1 None: expected tuple[float, float]"),
    ("trainer: {betas: [1, {a: 2}]}", "trainer.betas 1 {'a': 2}: expected tuple[float, float]"),
    # choices, switches, texts and paths
    ("trainer: {use_ema: 'yes'}", "trainer.use_ema yes: expected bool"),
    ("trainer: {use_ema: null}", "trainer.use_ema None: expected bool"),
    (
        "trainer: {mixed_precision: fp8}",
        "trainer.mixed_precision fp8: expected no or bf16",
    ),
    (
        "trainer: {mixed_precision: no}",
        "line 1: YAML reads no as False: put text in quotes, and write numbers as 1000 and "
        "switches as true or false",
    ),
    ("trainer: {run_name: 10}", "trainer.run_name: YAML reads 10, not text: quote it"),
    ("trainer: {tags: [a, true]}", "trainer.tags: YAML reads True, not text: quote it"),
    ("trainer: {tags: [[a]]}", "trainer.tags: YAML reads ['a'], not text: quote it"),
    ("trainer: {output_dir: ''}", "trainer.output_dir is empty: give a path, or leave it out"),
    ('trainer: {run_name: "a\\0b"}', "trainer.run_name contains a NUL character: remove it"),
    # what is not YAML, or more of it than a config needs
    ("seed: 1\nseed: 2", "line 2: seed appears twice"),
    (
        "trainer: {num-epochs: 3, num_epochs: 4}",
        "trainer.num_epochs is given twice: keep one of them",
    ),
    (
        "trainer.num_epochs: 3\ntrainer: {num_epochs: 4}",
        "trainer.num_epochs is given twice: keep one of them",
    ),
    (
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        "line 2: aliases (& and *) are not supported",
    ),
    (
        "seed: !!python/object/apply:os.system ['true']",
        "line 1: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.system'",
    ),
    (
        "seed: 1\nseed_2: !mine 3",
        "line 2: could not determine a constructor for the tag '!mine'",
    ),
    ("when: 2020-13-01", f"not YAML: {NO_MONTH}"),
    ("seed: 3\n  epochs: 4", "line 2: mapping values are not allowed here"),
    ("seed: [", "line 1: expected the node content, but found '<stream end>'"),
    (
        "\tseed: 1",
        "line 1: found character '\\t' that cannot start any token: indent with spaces",
    ),
    ("? [a]\n: 1", "line 1: found unhashable key"),
    ("--- 1\n--- 2", "line 2: but found another document"),
    (
        "a: \x00",
        "not YAML: unacceptable character #x0000: special characters are not allowed "
        '  in "<unicode string>", position 3',
    ),
]


@pytest.mark.parametrize(("argv", "line"), FLAGS, ids=[" ".join(argv) for argv, _ in FLAGS])
def test_a_bad_command_line_is_one_line(
    argv: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Fault (Data, config and users' code): an unknown flag or an invalid value -> one line with
    the flag, the value and the nearest name, exit 64; 0 epochs only evaluates
    """
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "long").write_text("# \n" * 400_000)
    (tmp_path / "wrong").write_text("seed: abc")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert str(caught.value) == f"error[CONFIG]: {line}"
    assert caught.value.exit_code == ExitCode.USAGE
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("text", "line"), FILES)
def test_a_bad_file_is_one_line(text: str, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, text, source="run.yaml")
    assert str(caught.value) == f"error[CONFIG]: run.yaml: {line}"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{" * 100_000,
        "seed: " + "9" * 5000,
        "seed: !!int ''",
        "seed: !!bool x",
        "seed: !!timestamp x",
    ],
)
def test_what_is_too_deep_too_long_or_not_of_its_tag_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, text, source="run.yaml")
    assert str(caught.value).startswith("error[CONFIG]: run.yaml: not YAML: ")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("words", [["--local-rank=1"], ["--local_rank", "1"], ["--local_rank=1"]])
def test_a_rank_that_repeats_the_launchers_variable_is_passed_over(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch.distributed.launch passes it."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert parse_config(RecipeConfig, [*words, "--seed", "3"], description="").seed == 3
    for rank in ("0", None):
        monkeypatch.delenv("LOCAL_RANK")
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(ConfigError, match="unknown flag --local.rank: torch.distributed"):
            parse_config(RecipeConfig, words, description="")


def test_a_folder_without_a_flag_is_the_dataset_of_recipes_that_have_one(tmp_path: Path) -> None:
    for config_class, flag in ((PhotoRecipeConfig, "--dataset"), (RecipeConfig, "put a flag")):
        with pytest.raises(ConfigError, match=flag):
            parse_config(config_class, [str(tmp_path)], description="")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--epochs", "a whole number or None"),
        ("--trainer.max-time-s", "a number or None"),
        ("--run.runs-dir", "a path"),
    ],
)
def test_a_wrong_value_is_told_what_is_expected_in_words(flag: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"expected {words}$"):
        parse_config(RecipeConfig, [flag, "a", "b"], description="")
