"""The usual mistakes in a user's own code: what is printed last, for each; `mistakes.py` has the
code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from accel_trainer import (
    ClassificationTask,
    DatasetOptions,
    MeanLoss,
    RecipeConfig,
    TopKAccuracy,
    main,
)

from .. import processes
from . import mistakes as m

Recipe = Callable[[RecipeConfig], Any]


def having(**parts: Any) -> Recipe:
    return lambda config: m.train(config, **parts)


def with_model(make: Callable[[], nn.Module]) -> Recipe:
    return lambda config: m.train(config, model=make())


def on(make: Callable[[], Any]) -> Recipe:
    """Read the samples of both sets from what `make` makes."""
    return lambda config: m.train(config, train_set=make(), eval_sets=make())


# An error that is raised in the user's code: its type, what it says, and the function that raised
# it.
RAISED = [
    (m.misspells_a_name, "NameError: name 'num_clases' is not defined", "misspells_a_name"),
    (m.misspells_a_setting, "AttributeError: 'TrainerConfig' object has no", "misspells_a_setting"),
    (m.opens_a_missing_file, "FileNotFoundError: [Errno 2] No such file", "opens_a_missing_file"),
    (m.asserts, "AssertionError: this recipe needs seed 1", "asserts"),
    (m.wraps_an_error_of_its_own, "RuntimeError: the net cannot be", "wraps_an_error_of_its_own"),
    (having(task=m.MisspellsTargets()), "AttributeError: 'Batch' object has no attribute", "step"),
    (having(task=m.FailsInEvaluation()), "KeyError: 'logits'", "eval_step"),
    (having(task=m.FailsInFingerprint()), "AttributeError: 'FailsInFingerprint'", "fingerprint"),
    (having(task=m.AssignsToTheBatch()), "FrozenInstanceError: cannot assign to field", "step"),
    (with_model(m.MisspellsALayer), "AttributeError: 'MisspellsALayer' object has no", "forward"),
    (with_model(m.FeedsALayerTheWrongShape), "RuntimeError: ...mat1 and mat2 shapes", "forward"),
    (with_model(m.ForgetsSuper), "AttributeError: cannot assign module before", "__init__"),
    (
        with_model(lambda: m.HasABadBackward(6, 3)),
        "AttributeError: 'FailsInBackwardBackward'",
        "backward",
    ),
    (with_model(lambda: m.CallsItself(6, 3)), "RecursionError: maximum recursion depth", "forward"),
    (having(metrics=[m.FailsInUpdate()]), "metric FailsInUpdate failed (AttributeError:", "update"),
    (having(metrics=[m.FailsInCompute()]), "metric FailsInCompute failed", "compute"),
    (having(metrics=[m.FailsInEmpty()]), "AttributeError: 'FailsInEmpty' object has no", "empty"),
    (having(callbacks=[m.FailsAtStart()]), "callback FailsAtStart.on_fit_start", "on_fit_start"),
    (having(callbacks=[m.FailsAtStep()]), "callback FailsAtStep.on_step_end failed", "on_step_end"),
    (having(callbacks=[m.FailsInState()]), "AttributeError: 'FailsInState' object", "state_dict"),
    (having(optimizer=m.fails_to_build), "TypeError: SGD.__init__() got an", "fails_to_build"),
    (having(optimizer=m.fails_to_step), "KeyError: 'rate'", "step"),
    (having(schedule=m.fails_later), "ZeroDivisionError: ...division by zero", "fails_later"),
]
# An error that torch raises in the user's model, below no function of theirs.
IN_THE_MODEL = [
    (with_model(lambda: nn.Sequential(nn.Linear(5, 3))), "RuntimeError: ...mat1 and mat2 shapes"),
    (with_model(m.ChangesAnActivation), "RuntimeError: one of the variables needed for gradient"),
    (having(task=m.KeepsItsGraph()), "RuntimeError: Trying to backward through the graph a second"),
]
# What does not fit, and is found before it fails: the code of the error, and the fact.
FITS_NOT = [
    (having(task=m.ReturnsATensor()), "TASK", "the task returned float32 []"),
    (having(task=m.ReturnsALossDict()), "TASK", "the task returned an object of type dict with"),
    (having(task=m.ReturnsAMeanLoss()), "SHAPES", "the losses are float32 [] for 8 samples"),
    (having(task=m.DetachesItsLoss()), "TASK", "the task returned float32 [8]"),
    (having(task=m.EvaluatesToATensor()), "TASK", "the task returned float32 [24]"),
    (having(task=m.HasNoItems(), metrics=[MeanLoss()]), "NUM_ITEMS", "no sample of the training"),
    (having(task=ClassificationTask), "CONFIG", "task= is the class ClassificationTask"),
    (having(task=F.cross_entropy), "CONFIG", "task= is the function cross_entropy, which has no"),
    (having(task=None), "CONFIG", "task= is an object of type NoneType, which has no step"),
    (having(task=m.HasANumberAsStep()), "CONFIG", "task= is an object of type HasANumberAsStep,"),
    (having(task=m.OverridesTrainStep()), "CONFIG", "task= has train_step, which nothing calls"),
    (
        with_model(lambda: nn.Sequential(nn.DataParallel(m.make_net()))),
        "MODEL",
        "the model is or contains",
    ),
    (with_model(lambda: AveragedModel(m.make_net())), "MODEL", "the model is or contains a"),
    (
        with_model(lambda: torch.compile(m.make_net(), backend="eager")),
        "MODEL",
        "the model is or contains",
    ),
    (having(model=m.MisspellsALayer), "CONFIG", "model= is the class MisspellsALayer"),
    (having(model=None), "CONFIG", "model= is an object of type NoneType, which has no forward"),
    (having(task=nn.CrossEntropyLoss()), "CONFIG", "task= is an object of type CrossEntropyLoss,"),
    (having(metrics=[MeanLoss, TopKAccuracy]), "CONFIG", "metrics= is the class MeanLoss"),
    (having(metrics=MeanLoss()), "CONFIG", "metrics= is not a list"),
    (having(metrics="accuracy"), "CONFIG", "metrics= is not a list"),
    (having(metrics=["accuracy"]), "CONFIG", "metrics= is 'accuracy', which has no"),
    (having(metrics=[m.NotAMetric()]), "CONFIG", "metrics= is an object of type NotAMetric, which"),
    (having(metrics=[m.WithoutItsKey()]), "METRIC", "loss decides the best checkpoint, and the"),
    (having(metrics=[m.ReturnsANumber()]), "METRIC", "metric ReturnsANumber"),
    (having(callbacks=[m.FailsAtStep]), "CONFIG", "callbacks= is the class FailsAtStep"),
    (having(callbacks=[print]), "CONFIG", "callbacks= is the function print, which has no"),
    (having(callbacks=m.FailsAtStep()), "CONFIG", "callbacks= is not a list"),
    (having(callbacks=[m.OfAnotherToolkit()]), "CONFIG", "callbacks= is an object of type"),
    (having(callbacks=[m.AssignsToTheTrainer("log")]), "TRAINER", "trainer.log cannot be assigned"),
    (
        having(callbacks=[m.AssignsToTheTrainer("learning_rate_at")]),
        "TRAINER",
        "trainer.learning_rate_at",
    ),
    (having(trainer_class=m.ReturnsNoReport), "TRAINER", "train_step returned an object of type"),
    (m.forgets_with, "CONFIG", "run= is an object of type _GeneratorContextManager, which has no"),
    (
        lambda config: m.train(replace(config, batch={"per_device_batch_size": 8})),
        "CONFIG",
        "batch is {'per_device_batch_size':",
    ),  # type: ignore[arg-type]
    (
        lambda config: m.train(replace(config, batch=replace(config.batch, order="random"))),
        "CONFIG",
        "batch.order is 'random'",
    ),  # type: ignore[arg-type]
    (m.trains_after_the_run, "TRAINER", "the run has ended"),
    (having(export_config={"labels": {1, 2}}), "METADATA", "export_config is not JSON (Object of"),
    (
        having(task=ClassificationTask(class_weights=torch.ones(2))),
        "SHAPES",
        "class_weights are float32",
    ),
    (having(optimizer=torch.optim.SGD), "CONFIG", "optimizer= is the class SGD"),
    (having(schedule=0.1), "SCHEDULE", "the recipe's schedule fails at step 0 (TypeError: 'float'"),
    (having(schedule=m.forgets_a_step), "SCHEDULE", "the recipe's schedule fails at step 3"),
    (having(train_set=m.HasNoPlan()), "CONFIG", "train_set= is an object of type HasNoPlan, which"),
    (m.forgets_to_return, "RECIPE", "the recipe's function returned an object of type NoneType"),
    (having(train_set=m.NamesAreStrings()), "SHAPES", "the model returns"),
    (having(train_set=m.NamesAreStrings), "DATASET", "the training set is NamesAreStrings"),
    (having(callbacks=[m.NamesNoHook()]), "CONFIG", "callbacks= has NamesNoHook.on_step_ends,"),
    (
        having(callbacks=[m.ForgetsToReturnItsState()]),
        "CALLBACK",
        "state_dict of ForgetsToReturnItsState",
    ),
    (lambda config: m.train(config, task=ClassificationTask(3)), "CONFIG", "the task has config 3"),  # type: ignore[arg-type]
    (lambda config: m.train({"seed": 1}), "CONFIG", "start_run was given {'seed': 1}"),  # type: ignore[arg-type]
    (m.misspells_an_argument, "CONFIG", "build_trainer has no modle="),
    (lambda config: m.train(RecipeConfig), "CONFIG", "start_run was given <class"),  # type: ignore[arg-type]
    (having(train_set=m.HasNoLength()), "DATASET", "the training set is HasNoLength"),
    (having(train_set="photos/"), "DATASET", "the training set is str"),
    (having(eval_sets={}), "CONFIG", "eval_sets= has no set"),
    (having(eval_sets=None), "DATASET", "an evaluation set is NoneType"),
    (having(train_set=m.Streams()), "DATASET", "the training set is Streams"),
    (on(m.stream_of_rows), "DATASET", "the training set is IterableDataset"),
    (on(m.batches), "DATASET", "the training set is DataLoader"),
    (
        on(lambda: datasets.DatasetDict(train=m.table())),
        "DATASET",
        "the training set is DatasetDict",
    ),
    (on(m.table), "DATASET", "the samples are an object of type dict with features, label,"),
    (
        having(train_set=m.MisspellsAColumn()),
        "DATA_SAMPLE",
        "sample 0 cannot be read (AttributeError:",
    ),
    (
        having(train_set=m.IsNotThere()),
        "DATA_SAMPLE",
        "sample 0 cannot be read (FileNotFoundError:",
    ),
    (
        having(options=DatasetOptions(collate=m.collates_wrongly)),
        "DATA_SAMPLE",
        "samples ... (TypeError: list",
    ),
    (having(train_set=m.YieldsPhotos()), "DATA_SAMPLE", "samples ... cannot be collated into a"),
    (on(m.numbers), "DATASET", "the samples are int64 [24], without labels: name the columns"),
    (having(options=DatasetOptions(num_classes=2)), "DATA_SAMPLE", "sample 2 has label 2, the"),
    (
        having(train_set=m.NamesAreStrings(), options=DatasetOptions(num_classes=3)),
        "SHAPES",
        "... for targets an object",
    ),
    (with_model(lambda: nn.Linear(6, 2)), "DATA_LABEL", "sample ... has the target 2, but the"),
]
EXIT_CODES = {"DATA_SAMPLE": 65, "DATA_LABEL": 65, "NUM_ITEMS": 65}


def start(recipe: Recipe, folder: Path, *flags: str) -> None:
    arguments = [
        "--output-dir",
        str(folder),
        "--epochs",
        "2",
        "--batch-size",
        "8",
        "--runtime.num-threads",
        "1",
    ]
    main(recipe, RecipeConfig, description="", argv=[*arguments, *flags])


def end_of(
    recipe: Recipe, folder: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, list[str]]:
    """Return the exit code of a recipe and what it said, without the numbers of lines."""
    with pytest.raises(SystemExit) as end:
        start(recipe, folder / "run", *flags)
    assert isinstance(end.value.code, int)
    lines = capsys.readouterr().err.splitlines()
    return end.value.code, [
        re.sub(r"[^ (]*mistakes\.py:\d+", "mistakes.py", line) for line in lines
    ]


def is_said(line: str, expected: str) -> bool:
    """Whether a line is `expected`, where `...` stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, expected.split("..."))), line) is not None


@pytest.mark.parametrize(
    ("recipe", "said", "place"), RAISED, ids=[said[:40] for _, said, _ in RAISED]
)
def test_an_error_in_the_users_code_is_shown_as_theirs(
    recipe: Recipe, said: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault (Data, config and users' code): a model, a task, an optimizer, a schedule or the recipe
    raises -> exit 80 on all processes, with the traceback of that code alone and a line with the
    error and its location. `--debug` shows all frames. Exit code 70 with a full traceback is
    reserved for bugs in this package
    """
    code, lines = end_of(recipe, tmp_path, capsys)
    assert code == 80
    line = re.sub("rank 0, step [0-9]+, [a-z]+: ", "", lines[-1])
    start = "accel_trainer: error[USER_CODE]: "
    assert is_said(line, f"{start}{said}..., at mistakes.py in {place}"), line
    files = {line.split('"')[1] for line in lines if line.startswith('  File "')}
    assert {Path(file).name for file in files} <= {"mistakes.py", "test_mistakes.py"}, (
        "frames of others"
    )


def test_zero_epochs_evaluate_with_the_schedule_of_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_of(m.train, tmp_path, capsys, "--epochs", "0")[0] == 0


def test_callbacks_and_metrics_may_be_generators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"callbacks": (each for each in [m.FailsAtStep()])}
    assert end_of(having(**parts), tmp_path, capsys)[0] == 80, "the callback was not called"
    parts = {"metrics": (each for each in [m.FailsInUpdate()])}
    assert end_of(having(**parts), tmp_path, capsys)[0] == 80, "the metric was not used"


@pytest.mark.parametrize(
    ("recipe", "said"), IN_THE_MODEL, ids=[said[:40] for _, said in IN_THE_MODEL]
)
def test_an_error_in_a_layer_or_a_backward_is_the_users_model(
    recipe: Recipe, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = end_of(recipe, tmp_path, capsys)
    assert code == 80
    assert is_said(
        lines[-1], f"accel_trainer: error[USER_CODE]: rank 0, step ..., training: {said}..."
    ), lines[-1]


@pytest.mark.parametrize(
    ("recipe", "name", "said"), FITS_NOT, ids=[said[:50] for _, _, said in FITS_NOT]
)
def test_a_part_that_does_not_fit_is_one_line_with_the_fix(
    recipe: Recipe, name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault (Data, config and users' code): an argument is of the wrong kind: a class instead of an
    instance, a step that returns a plain tensor or None, a float among its sums, a torch
    `DataLoader`, a stream without `[index]` -> one line with the argument and the fix

    Fault (Data, config and users' code): model, labels and metrics do not match -> exit 64 at
    the first batch, with both shapes and the fix
    """
    code, lines = end_of(recipe, tmp_path, capsys)
    assert is_said(lines[-1], f"accel_trainer: error[{name}]: {said}..."), lines[-1]
    assert code == EXIT_CODES.get(name, 64)
    assert not any(line.startswith("Traceback") for line in lines)


@pytest.mark.parametrize("flag", ["--debug", "--run.debug"])
def test_debug_shows_all_frames_of_an_error_in_the_users_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    code, lines = end_of(with_model(m.MisspellsALayer), tmp_path, capsys, flag)
    assert code == 80
    assert any("accel_trainer/training/trainer.py" in line for line in lines)


def fail_on_the_last_process(folder: Path) -> None:
    start(having(callbacks=[m.FailsOnTheLastProcess()]), folder)


def test_an_error_in_the_code_of_one_process_has_its_exit_code_on_all(tmp_path: Path) -> None:
    job = processes.run(
        fail_on_the_last_process, tmp_path / "run", folder=tmp_path / "logs", codes=[80, 80]
    )
    said = (
        "step 1, training: callback FailsOnTheLastProcess.on_step_end failed (ZeroDivisionError: "
        "division by zero), at "
    )
    assert f"error[PROCESS]: rank 1, {said}" in job.output().splitlines()[-1]
    assert "Traceback" not in job.output()
    frames = [line for line in job.output(1).splitlines() if line.startswith('  File "')]
    assert [Path(line.split('"')[1]).name for line in frames] == ["mistakes.py"]
