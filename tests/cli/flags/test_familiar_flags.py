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


TO_THE_LAUNCHER = (
    "give it to the launcher, before the recipe: torchrun --FLAG ... RECIPE, or accelerate "
    "launch --FLAG ... RECIPE"
)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--learning-rate", "did you mean --lr?"),
        ("--weight_decay", "did you mean --optimizer.weight-decay?"),
        ("--num_train_epochs", "did you mean --epochs?"),
        ("--per_device_train_batch_size", "did you mean --batch-size?"),
        ("--warmup", "did you mean --schedule.warmup-epochs?"),
        ("--warmup_steps", "did you mean --schedule.warmup-steps?"),
        ("--use-amp", "did you mean --mixed-precision bf16?"),
        (
            "--world-size",
            "the launcher starts the processes: accelerate launch --multi_gpu --num_processes N "
            "RECIPE",
        ),
        (
            "--num_gpus",
            "the launcher starts the processes: accelerate launch --multi_gpu --num_processes N "
            "RECIPE",
        ),
        (
            "--device",
            "GPUs are detected: CUDA_VISIBLE_DEVICES selects one, ACCELERATE_USE_CPU=true uses "
            "the CPU",
        ),
        ("--img-size", "images keep their size: resize the files first"),
        ("-j", "did you mean --num-workers?"),
        ("--epoch", "did you mean --epochs?"),  # the nearest, as no toolkit calls it so
        ("--experiment-name", "did you mean --output-dir?"),
        ("--master_port", TO_THE_LAUNCHER),
        ("--master_addr", TO_THE_LAUNCHER),
        ("--node_rank", TO_THE_LAUNCHER),
        ("--num-machines", TO_THE_LAUNCHER),
        ("--step-size", "did you mean --schedule.milestones (as fractions of the run)?"),
        ("--step-lr", "did you mean --schedule.shape step?"),
        ("--eta-min", "did you mean --schedule.min-fraction (of the peak)?"),
        ("--init-timeout", "did you mean --runtime.timeout-s?"),
        (
            "--save-last",
            "the last checkpoints are always kept: --checkpoint.keep-last-n says how many",
        ),
        (
            "--metadata",
            "a run stores its settings in config.yaml and its versions in environment.json",
        ),
        (
            "--include-optimizer",
            "every checkpoint has the optimizer's state, and the export only weights",
        ),
        ("--shuffle", "training samples are in a new order in each epoch, which --seed decides"),
        (
            "--sampler",
            "a recipe gives build_trainer an order: options=DatasetOptions(order=f), in "
            "docs/data.md",
        ),
        ("--quantize", "there is no quantization: --onnx exports a file for other tools"),
        (
            "--model-parallel",
            "the launcher chooses it: accelerate launch --config_file "
            "accelerate_configs/fsdp.yaml RECIPE",
        ),
        (
            "--use-dynamic-scaling",
            "the loss is scaled dynamically with --mixed-precision fp16, from "
            "--runtime.loss-scale on",
        ),
        ("--map-location", "weights are read into memory of the CPU, and then moved to the device"),
        ("--criterion", "the recipe chooses its task, such as MultiLabelTask"),
    ],
)
def test_a_flag_of_another_toolkit_is_answered_by_ours(flag: str, said: str) -> None:
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
        ("--save-images", "see --help"),
        ("--tensor-parallel", "see --help"),
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
