"""The everyday settings have one name: as flags, as keywords, and in what errors say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from accel_trainer import (
    ClassificationTask,
    ConfigError,
    RecipeConfig,
    RunConfig,
    RunResult,
    TrainerConfig,
    build_trainer,
    main,
    start_run,
)
from accel_trainer.cli.flags.fields import config_fields
from accel_trainer.names.everyday import Everyday, flag_of, in_python


def everyday_fields() -> dict[str, Any]:
    """Return the type of each setting with a flag of one word, by that flag."""
    return {
        field.flags[-1]: field.type
        for name, field in config_fields(RecipeConfig).items()
        if len(field.flags) > 1 or "." not in name
    }


def kinds(hint: Any) -> set[Any]:
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {get_args(each) or get_origin(each) or each for each in alternatives}


def test_every_setting_with_a_flag_of_one_word_is_a_keyword_of_its_type() -> None:
    keywords = get_type_hints(Everyday)
    fields = everyday_fields()
    assert {flag_of(name) for name in keywords} == fields.keys()
    for name, hint in keywords.items():
        kind = fields[flag_of(name)]
        if kind == tuple[str, ...]:
            assert get_args(hint) == (str,), name
        else:
            assert kinds(hint) - {str} == kinds(kind) - {str}, name
            assert str not in kinds(kind) or str in kinds(hint), name


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("set --batch-size to at most 2", "set batch_size= to at most 2"),
        ("--epochs 3 and --ema 0.9 clash", "epochs=3 and ema=0.9 clash"),
        ("--reduce exact needs --batch-size 8: x", "reduce='exact' needs batch_size=8: x"),
        ("--resume runs/a: no", "resume='runs/a': no"),
        ("--init-skip 'fc' matches", "init_skip='fc' matches"),
        (
            "on purpose with --allow-change seed data, if",
            "on purpose with allow_change=['seed', 'data'], if",
        ),
        ("raise --runtime.timeout-s", "raise RuntimeConfig(timeout_s=)"),
        ("set --schedule.warmup-steps 5", "set ScheduleConfig(warmup_steps=5)"),
        ("needs --schedule.shape trunk: add it", "needs ScheduleConfig(shape='trunk'): add it"),
        ("or use --runtime.backend gloo", "or use RuntimeConfig(backend='gloo')"),
        # of a recipe, of a launcher and of a command
        ("--augment.mixup is 2", "--augment.mixup is 2"),
        ("launch --multi_gpu --num_processes 2", "launch --multi_gpu --num_processes 2"),
        ("accel-trainer export RUN --to FOLDER", "accel-trainer export RUN --to FOLDER"),
    ],
)
def test_a_flag_is_written_as_python_gives_it(said: str, told: str) -> None:
    assert in_python(said) == told


def test_an_error_names_flags_to_commands_and_keywords_to_python(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught, start_run(recipe="named", output_dir=tmp_path):
        raise ConfigError("SIZE", "too large: lower --batch-size")
    assert caught.value.line == "error[SIZE]: too large: lower --batch-size"
    assert str(caught.value) == "error[SIZE]: too large: lower batch_size="


def train(config: RecipeConfig) -> RunResult:
    samples = TensorDataset(torch.ones(24, 2), torch.tensor([0, 1] * 12))
    with start_run(config, recipe="said") as run:
        parts = {"train_set": samples, "eval_sets": samples}
        trainer = build_trainer(run, model=nn.Linear(2, 2), task=ClassificationTask(), **parts)
        return trainer.fit()


@pytest.mark.parametrize(
    ("length", "flags", "keywords"),
    [
        ({"num_epochs": 0}, {"--epochs", "--init-from"}, {"epochs=", "init_from="}),  # a warning
        ({"max_steps": 1}, {"--max-steps", "--steps"}, {"max_steps=", "steps="}),  # printed
    ],
)
def test_what_a_run_says_names_keywords_in_python_and_flags_in_a_command(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    length: dict[str, int],
    flags: set[str],
    keywords: set[str],
) -> None:
    def said() -> set[str]:
        text = f"{caplog.text} {capsys.readouterr().out}"
        caplog.clear()
        # `main` adds what comes next, such as a command with --open.
        return {*re.findall(r"--[a-z][a-z-]+|\b[a-z_]+=", text)} - {"eval_sets=", "--open"}

    run = RunConfig(output_dir=tmp_path / "python")
    train(RecipeConfig(trainer=TrainerConfig(**length), run=run))  # type: ignore[arg-type]
    assert said() == keywords
    argv = [f"--trainer.{name.replace('_', '-')}={value}" for name, value in length.items()]
    argv += ["--output-dir", str(tmp_path / "command")]
    with pytest.raises(SystemExit):
        main(train, RecipeConfig, description="", argv=argv)
    assert said() == flags


@pytest.mark.slow  # it reads the whole package
def test_a_type_checker_knows_the_keywords_and_the_parts(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "from accel_trainer import ClassificationTask, TrainerConfig, build_trainer, start_run\n"
        "start_run(recipe='a', epochs=3, lr=0.1, output_dir='runs/a')\n"
        "start_run(recipe='a', epoch=3)\n"
        "start_run(recipe='a', lr='high')\n"
        "TrainerConfig(epochs=3)\n"
        "def build(run, model, data: TensorDataset, loader: DataLoader[int]) -> None:\n"
        "    t = ClassificationTask()\n"
        "    build_trainer(run, model=model, task=t, train_set=data, eval_sets=data)\n"
        "    build_trainer(run, model=model, task=t, train_set=data, eval_sets={'a': data})\n"
        "    build_trainer(run, model=model, task=t, train_set=loader, eval_sets=data)\n"
        "    build_trainer(run, model=model, task=t, train_set=data, eval_sets=loader)\n"
        "    build_trainer(run, model=model, task=t, train_dataset=data, eval_sets=data)\n"
    )
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent"]
    command += ["--cache-dir", str(tmp_path), "--config-file", str(tmp_path / "none"), str(program)]
    (tmp_path / "none").write_text("[mypy]\nignore_missing_imports = true\n")
    checked = subprocess.run(command, capture_output=True, text=True)
    errors = [line.split(":")[1] for line in checked.stdout.splitlines() if ": error:" in line]
    assert errors == ["4", "5", "6", "11", "12", "13"]
