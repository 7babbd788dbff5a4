"""Which settings a run on photos chooses; a run that continues keeps its settings."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import (
    BatchConfig,
    ConfigError,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
    main,
)
from accel_trainer.cli.common.recipes import find_config_class
from accel_trainer.cli.flags.parser import parse_config
from accel_trainer.cli.runs.recorded_start import recorded_flags
from accel_trainer.cli.runs.run_reader import read_run
from accel_trainer.vision import ModelConfig, build_model, load_photos, rules, settings_for
from accel_trainer.vision.rules import PhotoFacts, choose_settings
from recipes import images
from tests import processes
from tests.training.test_exactness import final_files

from .make_photos import write_classes


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classes(tmp_path_factory.mktemp("photos"), ["ant", "bee"], per_class=24)


def choose(num_photos: int, *, config: images.Config | None = None, **facts: Any) -> images.Config:
    facts = {"num_photos": num_photos, "is_pretrained": False, **facts}
    return choose_settings(config or images.Config(), PhotoFacts(**facts))[0]


@pytest.mark.parametrize(
    ("num_photos", "is_pretrained", "batch_size", "epochs", "learning_rate", "warmup"),
    [
        (50, True, 8, 30, 0.0075, 3.0),
        (50, False, 8, 30, 0.025, 3.0),
        (500, True, 16, 30, 0.011, 3.0),
        (2_500, True, 128, 12, 0.03, 1.2),
        (50_000, True, 128, 5, 0.03, 0.5),
        (50_000, False, 128, 20, 0.1, 2.0),
    ],
)
def test_photos_and_weights_decide_the_settings(
    num_photos: int,
    is_pretrained: bool,
    batch_size: int,
    epochs: int,
    learning_rate: float,
    warmup: float,
) -> None:
    config = choose(num_photos, is_pretrained=is_pretrained)
    assert config.batch.per_device_batch_size == batch_size
    assert config.trainer.num_epochs == epochs
    assert config.optimizer.learning_rate == learning_rate
    assert config.schedule.warmup_epochs == warmup
    assert config.optimizer.weight_decay == 0.0005


@pytest.mark.parametrize("num_photos", [2, 3, 7, 100, 1_000_000])
def test_any_number_of_photos_makes_a_run(num_photos: int) -> None:
    config = choose(num_photos)
    plan = config.batch.plan(num_photos, num_processes=1)
    assert config.schedule.warmup_epochs * plan.steps_per_epoch < (
        config.trainer.num_epochs * plan.steps_per_epoch
    )


@pytest.mark.parametrize(
    ("num_photos", "is_dropped"), [(97, True), (50, False), (2_500, False), (96, False), (1, False)]
)
def test_a_last_step_of_very_few_photos_is_left_out(num_photos: int, is_dropped: bool) -> None:
    assert choose(num_photos).batch.drop_last == is_dropped  # 1 and 2 of 8, 68 of 128, none


def test_the_step_is_the_same_on_any_number_of_processes() -> None:
    for num_processes in (1, 2, 4, 8):
        config = choose(2_500, num_processes=num_processes)
        assert config.batch.resolved_global_batch_size(num_processes) == 128
        assert config.optimizer.learning_rate == 0.1


def test_adamw_has_learning_rates_of_its_own_and_rmsprop_torchs() -> None:
    adamw = choose(2_500, config=images.Config(optimizer=OptimizerConfig(name="adamw")))
    assert adamw.optimizer.learning_rate == 0.003
    other = choose(2_500, config=images.Config(optimizer=OptimizerConfig(name="RMSprop")))
    assert other.optimizer.learning_rate is None  # which a run fills in with torch's


def test_a_given_value_wins_even_if_it_is_the_default_of_its_class() -> None:
    given = images.Config(
        batch=BatchConfig(per_device_batch_size=5, drop_last=False),
        trainer=TrainerConfig(num_epochs=10),
        optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=5e-4),
        schedule=ScheduleConfig(warmup_epochs=0.0),
        photos=replace(images.Config().photos, image_size=224),
    )
    config, line = choose_settings(given, PhotoFacts(num_photos=50, is_pretrained=True))
    assert config == given
    assert line == "by rule: nothing, as all settings are given"
    is_open = replace(given, batch=replace(given.batch, drop_last=None))
    facts = PhotoFacts(num_photos=50, is_pretrained=True)
    assert choose_settings(is_open, facts) == (given, line), "what stays off is not worth a word"


def test_a_flag_wins_and_the_rest_follows_it() -> None:
    config = parse_config(images.Config, ["--epochs", "4", "--batch-size", "32"], description="")
    config = choose(50, config=config)
    assert config.trainer.num_epochs == 4
    assert config.schedule.warmup_epochs == 0.4
    assert config.optimizer.learning_rate == 0.05  # of batches of 32


def test_a_triangular_schedule_gets_no_warmup() -> None:
    config = images.Config(schedule=ScheduleConfig(shape="triangular", warmup_epochs=rules.BY_RULE))
    assert choose(50, config=config).schedule.warmup_epochs == 0


def test_a_warmup_in_steps_is_the_only_one() -> None:
    schedule = ScheduleConfig(warmup_epochs=rules.BY_RULE, warmup_steps=50)
    assert choose(50, config=images.Config(schedule=schedule)).schedule.warmup_epochs == 0


def test_the_warmup_of_a_trunk_does_not_depend_on_its_length() -> None:
    schedule = ScheduleConfig(shape="trunk", warmup_epochs=rules.BY_RULE)
    lengths = (20, 200)
    configs = [
        images.Config(schedule=schedule, trainer=TrainerConfig(num_epochs=each)) for each in lengths
    ]
    assert [choose(50, config=each).schedule.warmup_epochs for each in configs] == [1.0, 1.0]


def test_a_branch_in_steps_does_not_take_the_epochs_of_its_run() -> None:
    config = images.Config(trainer=TrainerConfig(num_steps=100))
    facts = PhotoFacts(num_photos=50, is_pretrained=False)
    stored = {"trainer.num_epochs": 30, "optimizer.learning_rate": 0.5}
    chosen, _ = choose_settings(config, facts, stored=stored)
    assert chosen.trainer.num_epochs is None
    assert chosen.optimizer.learning_rate == 0.5


@pytest.mark.parametrize(
    ("facts", "size"),
    [
        ({"short_side": 32}, 64),
        ({"short_side": 100}, 128),
        ({"short_side": 1000}, 224),
        ({"short_side": 100, "net_size": 384}, 384),
    ],
)
def test_the_net_or_the_photos_decide_the_size(facts: dict[str, int], size: int) -> None:
    assert choose(50, **facts).photos.image_size == size


def test_one_line_says_what_was_chosen_and_why(photos: Path) -> None:
    found = load_photos(str(photos), val_fraction=0.25)
    num_photos = len(found.train)
    _, line = settings_for(images.Config(), found, recipe="images")
    assert line == (
        "by rule: image size 64 (photos of about 30 pixels), "
        f"batch size 8 ({num_photos} photos), epochs 30 ({num_photos} photos from scratch), "
        "learning rate 0.025 (sgd from scratch, batch 8), weight decay 0.0005 (usual with sgd), "
        "warmup epochs 3 (a tenth of the epochs)"
    )


# --- runs ---


def run(photos: Path, *extra: str) -> None:
    flags = ["--dataset", str(photos), "--val-fraction", "0.25", "--model", "resnet8"]
    flags += ["--model.norm", "group", "--cache-dir", str(photos.parent / "cache")]
    flags += ["--runtime.num-threads", "1", "--checkpoint.every-n-steps", "2"]
    flags += ["--image-size", "16", "--epochs", "2"]
    with pytest.raises(SystemExit) as error:
        main(images.train, images.Config, description="", argv=[*flags, *extra])
    assert error.value.code == 0


KILL = """
import os, signal, time
from pathlib import Path
from accel_trainer import Callback

class Kill(Callback):
    def on_step_end(self, trainer, report):
        if report.optimizer_step == 3:
            while not list(Path({folder!r}).glob("**/checkpoints/step-*2-*")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def run_until_killed(photos: Path, callbacks: Path, place: tuple[str, str]) -> None:
    os.environ["ACCEL_TRAINER_CALLBACKS"] = str(callbacks)
    run(photos, *place)


@pytest.mark.parametrize("flag", ["--output-dir", "--run.runs-dir"])
def test_a_killed_run_keeps_its_settings_though_the_rules_change(
    photos: Path,
    tmp_path: Path,
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run(photos, "--output-dir", str(tmp_path / "whole"))
    place = (flag, str(tmp_path / "killed"))
    callbacks = tmp_path / "kill.py"
    callbacks.write_text(KILL.format(folder=place[1]))
    processes.run(
        run_until_killed,
        photos,
        callbacks,
        place,
        folder=tmp_path / "logs",
        codes=[-signal.SIGKILL],
    )
    monkeypatch.setattr(rules, "_PEAKS", {"sgd": (0.7, 0.7)})  # as after an update
    monkeypatch.setattr(rules, "_WARMUP", 0.5)
    capfd.readouterr()
    run(photos, *place)
    assert "as the run began: batch size 8, learning rate 0.025" in capfd.readouterr().out
    (folder,) = {path.parent for path in (tmp_path / "killed").glob("**/config.yaml")}
    assert final_files(folder) == final_files(tmp_path / "whole")


def test_what_trains_a_run_again_leaves_nothing_to_the_rules(photos: Path, tmp_path: Path) -> None:
    run(photos, "--output-dir", str(tmp_path / "run"), "--max-steps", "1", "--lr", "0.3")
    flags = recorded_flags(read_run(tmp_path / "run"))
    config = parse_config(find_config_class(Path(images.__file__)), flags, description="")
    assert isinstance(config, images.Config | rules.PhotoRecipeConfig)
    assert choose(10**6, config=config) == config
    assert config.optimizer.learning_rate == 0.3
    assert config.schedule.warmup_epochs == 0.2


# --- pretrained weights ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "resnet8"},
            "resnet8 has no pretrained weights: set --model to resnet18, resnet34, resnet50, "
            "resnet101 or timm/NAME",
        ),
        (
            {"name": "resnet18", "width": 16},
            "pretrained weights do not fit a different width, stem or norm: leave out "
            "--model.width, --model.stem and --model.norm",
        ),
    ],
)
def test_a_net_without_pretrained_weights_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig(**settings, pretrained=True)
    assert str(error.value) == f"error[MODEL_PRETRAINED]: {message}"


@pytest.mark.parametrize(
    ("pretrained", "init_from", "message"),
    [
        (True, "mine", "--pretrained and --init-from mine both set the initial weights"),
        (False, "imagenet", "imagenet is not a file: --pretrained loads timm's ImageNet"),
        (False, "IMAGENET1K_V1", "is not a file: --pretrained loads timm's ImageNet weights"),
    ],
)
def test_where_weights_come_from_is_said_once_and_rightly(
    photos: Path, pretrained: bool, init_from: str, message: str
) -> None:
    model = ModelConfig(name="resnet18", pretrained=pretrained)
    config = images.Config(model=model, run=RunConfig(init_from=Path(init_from)))
    with pytest.raises(ConfigError, match=message):
        settings_for(config, load_photos(str(photos), val_fraction=0.25), recipe="images")


def test_without_timm_the_error_says_which_file_to_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError) as error:
        build_model(ModelConfig(name="resnet50", pretrained=True), in_channels=3, num_classes=2)
    assert str(error.value).endswith(
        "pip install timm, with the torchvision for this torch; or download "
        "https://huggingface.co/timm/resnet50.a1_in1k/resolve/main/model.safetensors elsewhere, "
        "and start with --model resnet50 --init-from model.safetensors"
    )
