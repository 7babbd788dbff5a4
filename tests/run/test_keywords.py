"""Settings and parts as keywords in Python: what they set, and what unknown ones are called."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer import (
    BatchConfig,
    CheckpointConfig,
    ClassificationTask,
    ConfigError,
    DatasetOptions,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    Trainer,
    TrainerConfig,
    build_trainer,
    launch,
    start_run,
)
from accel_trainer.core.config import Config
from accel_trainer.core.user_code import describe_error
from accel_trainer.core.yaml_files import read_yaml

from .mistakes import DATA, INPUTS, LABELS, make_net


def started(*given: Any, **settings: Any) -> RecipeConfig:
    with start_run(*given, recipe="keywords", **settings) as run:
        return run.config


def built(**parts: Any) -> Trainer:
    with start_run(recipe="keywords", quiet=True) as run:
        return build_trainer(run, model=make_net(), **parts)


def trained(**parts: Any) -> None:
    parts = {"task": ClassificationTask(), "train_set": DATA, "eval_sets": DATA} | parts
    with start_run(recipe="keywords", quiet=True) as run:
        build_trainer(run, model=make_net(), **parts).fit()


def fitted(*given: Any, **settings: Any) -> None:
    with start_run(recipe="keywords", quiet=True) as run:
        parts = {"task": ClassificationTask(), "train_set": DATA, "eval_sets": DATA}
        build_trainer(run, model=make_net(), **parts).fit(*given, **settings)


class Indexes:
    """A task that reads a batch as the loaders of torch give it."""

    def __init__(self, read: Callable[[Any], object]) -> None:
        self.step = lambda model, batch: read(batch)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_everyday_settings_are_keywords_of_start_run() -> None:
    config = started(epochs=3, lr=0.1, batch_size=8, accumulate=2, num_workers=1, seed=5, ema=0.9)
    assert (config.trainer.num_epochs, config.trainer.ema_decay, config.seed) == (3, 0.9, 5)
    assert config.optimizer.learning_rate == 0.1
    assert config.batch == BatchConfig(
        per_device_batch_size=8, global_batch_size=16, accumulation_steps=2, num_workers=1
    )


def test_keywords_train_what_a_config_trains(tmp_path: Path) -> None:
    def weights(**start: Any) -> list[float]:
        with start_run(recipe="same", **start) as run:
            trainer = build_trainer(
                run, model=make_net(), task=ClassificationTask(), train_set=DATA, eval_sets=DATA
            )
            trainer.fit()
            return [float(each.detach().sum()) for each in trainer.model.parameters()]

    flat = weights(steps=3, lr=0.05, batch_size=6, output_dir=tmp_path / "flat", quiet=True)
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=6),
        trainer=TrainerConfig(num_steps=3),
        optimizer=OptimizerConfig(learning_rate=0.05),
        run=RunConfig(output_dir=tmp_path / "config", quiet=True),
    )
    assert flat == weights(config=config)


@pytest.mark.parametrize(
    ("guess", "facts"),
    [
        (lambda: RecipeConfig(epochs=3), ("RecipeConfig has no epochs=", "start_run(epochs=)")),
        (lambda: RecipeConfig(lr=0.1), ("OptimizerConfig(learning_rate=)",)),
        (lambda: RecipeConfig(batch_size=32), ("BatchConfig(per_device_batch_size=)",)),
        (lambda: OptimizerConfig(lr=0.1), ("did you mean learning_rate=",)),
        (lambda: TrainerConfig(epochs=3), ("did you mean num_epochs=",)),
        (lambda: TrainerConfig(max_epochs=3), ("did you mean num_epochs=",)),
        (lambda: TrainerConfig(wd=0.1), ("OptimizerConfig(weight_decay=)",)),
        (lambda: BatchConfig(batch_size=32), ("did you mean per_device_batch_size=",)),
        (lambda: RuntimeConfig(amp=True), ("mixed_precision='bf16'",)),
        (lambda: CheckpointConfig(save_steps=9), ("did you mean every_n_steps=",)),
        (lambda: ScheduleConfig(milestone=3), ("did you mean milestones=",)),
        (lambda: DatasetOptions(sampler=3), ("DatasetOptions(order=f)",)),
        (lambda: built(batch_sampler=3), ("DatasetOptions(order=f)",)),
        (lambda: DatasetOptions(batch_size=3), ("start_run(batch_size=)",)),
        (lambda: started(max_epochs=3), ("start_run has no max_epochs=", "mean epochs=")),
        (lambda: started(weight_decay=0.1), ("OptimizerConfig(weight_decay=)",)),
        (lambda: started(sead=1), ("did you mean seed=",)),
        (lambda: started(lr="fast"), ("lr= is 'fast'",)),
        (lambda: started(epochs=-1), ("epochs= is -1",)),
        (lambda: started(epochs=3, steps=9), ("epochs=3 and steps=9",)),
        (lambda: started(config=RecipeConfig(), lr=1), ("a config and lr=",)),
        (lambda: built(train_dataset=DATA), ("did you mean train_set=",)),
        (lambda: built(val_set=DATA), ("did you mean eval_sets=",)),
        (lambda: built(loss=len), ("did you mean task=",)),
        (lambda: built(batch_size=4), ("start_run(batch_size=)",)),
        (lambda: built(whatever=4), ("help(build_trainer)",)),
        (lambda: trained(train_set=(INPUTS, LABELS)), ("tuple", "TensorDataset(X, Y)")),
        (lambda: trained(train_set=[INPUTS.numpy(), LABELS.numpy()]), ("TensorDataset(X, Y)",)),
        (lambda: trained(eval_sets=(INPUTS, LABELS)), ("an evaluation set", "TensorDataset(X, Y)")),
        (lambda: trained(callbacks=[print]), ("the function print", "Callback")),
        (lambda: trained(metrics=["accuracy"]), ("'accuracy'", "TopKAccuracy()")),
        (lambda: trained(task=len), ("the function len", "ClassificationTask()")),
        (lambda: trained(optimizer=torch.optim.Adam), ("the class Adam", "lambda model:")),
        (lambda: trained(optimizer="adam"), ("'adam'", "OptimizerConfig(name=)")),
        (lambda: trained(task=Indexes(lambda batch: batch[0])), ("batch.inputs",)),
        (lambda: trained(task=Indexes(lambda batch: batch["x"])), ("batch.targets",)),
        (lambda: trained(task=Indexes(lambda batch: [*batch])), ("batch.inputs",)),
        (lambda: RecipeConfig(3), ("RecipeConfig was given 3 without its name",)),  # type: ignore[call-arg]
        (lambda: BatchConfig("32"), ("BatchConfig was given '32' without its name",)),  # type: ignore[call-arg]
        (lambda: started("digits", 20), ("start_run was given 20 without its name",)),
        (lambda: OptimizerConfig(name="adam"), ("OptimizerConfig(name=) is adam", "mean Adam?")),
        (lambda: RunConfig(init_skip="x"), ("init_skip= has no effect without init_from=",)),
        (lambda: started(freeze=["body"]), ("freeze= is ['body']", "regular expression")),
        (lambda: started(track="wandb"), ("track is 'wandb'",)),
        (lambda: DatasetOptions(order=[1, 2]), ("order= is an object of type list", "function")),  # type: ignore[arg-type]
        (lambda: DatasetOptions(order=[]), ("order= is an object of type list", "function")),  # type: ignore[arg-type]
        (
            lambda: ClassificationTask(label_smoothing=0.1),
            ("ClassificationConfig(label_smoothing=",),
        ),  # type: ignore[call-arg]
        (lambda: fitted(epochs=3), ("fit has no epochs=", "start_run(epochs=)")),
        (lambda: fitted(DATA), ("fit was given",)),
        (lambda: launch(len, "a", nprocs=2), ("launch has no nprocs=", "num_processes=")),
        (lambda: launch(len, "a", gpus=2), ("did you mean num_processes=",)),
        (lambda: Trainer(max_epochs=3), ("max_epochs=", "start_run(epochs=...)")),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_or_wrong_keyword_says_what_it_is_called(
    guess: Callable[[], object], facts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        guess()
    assert [fact for fact in facts if fact not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train", "trainer.fit()"),
        ("predict", "accel-trainer predict RUN"),
        ("save_model", "RUN/export"),
        ("whatever", "no attribute 'whatever'"),
    ],
)
def test_an_attribute_of_other_trainers_says_what_it_is_here(name: str, said: str) -> None:
    trainer = built(task=ClassificationTask(), train_set=DATA, eval_sets=DATA)
    with pytest.raises(AttributeError) as caught:
        getattr(trainer, name)()
    assert said in describe_error(caught.value)


def test_the_dotted_name_of_a_setting_follows_from_its_class() -> None:
    """As config_fields assumes, which knows no recipe's config."""
    config = RecipeConfig()
    for name in RecipeConfig.__dataclass_fields__:
        if isinstance(group := getattr(config, name), Config):
            assert type(group).__name__ == f"{name.capitalize()}Config"


def test_configs_are_copied_changed_and_pickled_as_other_dataclasses() -> None:
    config = RecipeConfig(trainer=TrainerConfig(num_epochs=3))
    assert pickle.loads(pickle.dumps(config)) == deepcopy(config) == replace(config) == config
    assert replace(config, seed=1).trainer.num_epochs == 3


def test_a_config_with_its_own_init_takes_what_that_takes() -> None:
    class Named(RecipeConfig):
        def __init__(self, name: str, **others: Any) -> None:
            super().__init__(**others)
            object.__setattr__(self, "name", name)

    assert Named("x", seed=3).seed == 3


def test_the_signature_of_a_config_class_lists_its_fields() -> None:
    assert "num_epochs" in inspect.signature(TrainerConfig).parameters
    assert "function" not in str(inspect.signature(build_trainer))


def test_a_default_batch_is_lowered_to_small_data_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with start_run(recipe="small", epochs=2) as run:
        trainer = build_trainer(
            run, model=make_net(), task=ClassificationTask(), train_set=DATA, eval_sets=DATA
        )
        assert trainer.fit().position.optimizer_step == 2
    assert "default batch of 128 is larger than the data: 24 samples" in capsys.readouterr().out
    stored = read_yaml(run.folder / "config.yaml")["batch"]
    assert stored["global_batch_size"] == 24, "so that any number of processes continues it"


@pytest.mark.parametrize(
    ("first", "again", "is_said"),
    [
        ({"batch_size": 12}, {"batch_size": 16}, True),
        ({"batch_size": 12}, {"batch_size": 12}, False),
        ({"batch_size": 12}, {"batch_size": 6}, False),
        ({"batch_size": 12}, {}, False),
        ({}, {}, False),
    ],
)
def test_a_batch_size_that_a_run_cannot_take_later_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    first: dict[str, int],
    again: dict[str, int],
    is_said: bool,
) -> None:
    """It keeps its samples per step, of which a smaller batch size makes several parts."""
    parts = {"task": ClassificationTask(), "train_set": DATA, "eval_sets": DATA}
    for sizes, max_steps in ((first, 1), (again, 2)):
        capsys.readouterr()
        with start_run(
            recipe="kept", output_dir=tmp_path / "run", max_steps=max_steps, epochs=9, **sizes
        ) as run:
            build_trainer(run, model=make_net(), **parts).fit()
    shown = capsys.readouterr().out
    assert ("batch_size=16 is larger than a step of the run: 12 samples" in shown) == is_said
    assert is_said or "is larger than" not in shown


@pytest.mark.parametrize(
    "sizes", [{"batch_size": 100}, {"global_batch_size": 128, "batch_size": 64}]
)
def test_a_batch_that_was_asked_for_is_not_lowered(sizes: dict[str, int]) -> None:
    parts = {"task": ClassificationTask(), "train_set": DATA, "eval_sets": DATA}
    refused = pytest.raises(ConfigError, match="BATCH_SIZE.*24 training samples.*batch_size= to")
    with refused, start_run(recipe="asked", quiet=True, **sizes) as run:  # type: ignore[misc]
        build_trainer(run, model=make_net(), **parts)


def test_the_help_of_build_trainer_has_each_argument_and_an_example() -> None:
    text = inspect.getdoc(build_trainer) or ""  # Python 3.13 stores it without its indentation
    assert "with start_run(" in text
    arguments = text.partition("Args:")[2].partition("Raises:")[0]
    for name in inspect.signature(build_trainer).parameters:
        assert f"\n    {name}: " in arguments, name
