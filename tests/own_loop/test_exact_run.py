from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from accel_trainer import CheckpointError, ConfigError, Preempted, exact_run
from tests import processes, workload
from tests.own_loop.kills import left_by, train
from tests.own_loop.loops import LOOPS, Kill, Pictures

NUM_SAMPLES = 10


def parts(*, batch_size: int = 4, **loader: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    data = TensorDataset(torch.randn(NUM_SAMPLES, 3))
    loader = {"batch_size": batch_size, "shuffle": True} | loader
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(data, **loader),
    }


def step(given: dict[str, Any], batch: Any) -> None:
    given["model"](batch[0]).sum().backward()
    given["optimizer"].step()
    given["optimizer"].zero_grad()


def fit(folder: Path, num_epochs: int = 2, **more: Any) -> list[int]:
    """Train, and return the sizes of the batches that were seen."""
    given = more.pop("given", None) or parts()
    sizes = []
    with exact_run(Accelerator(cpu=True), folder, **given, **more) as run:
        for _ in run.epochs(num_epochs):
            for batch in run.batches():
                sizes.append(len(batch[0]))
                step(given, batch)
            run.row(size=1)
    return sizes


KILLS = [
    ("vision", 1, [Kill(5, signal.SIGKILL), Kill(7, signal.SIGTERM)]),
    ("accumulation", 2, [Kill(11, signal.SIGKILL, 1)]),
    ("changing", 1, [Kill(12, signal.SIGKILL)]),
    ("changing", 2, [Kill(6, signal.SIGTERM)]),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("gan", 1, [Kill(4, signal.SIGTERM), Kill(9, signal.SIGKILL)]),
            ("sampler", 1, [Kill(3, signal.SIGTERM), Kill(6, signal.SIGKILL)]),
            ("scaler", 1, [Kill(6, signal.SIGKILL)]),
            ("by_hand", 2, [Kill(11, signal.SIGKILL), Kill(5, signal.SIGTERM)]),
            ("vit", 1, [Kill(6, signal.SIGKILL)]),
            ("spawned", 1, [Kill(6, signal.SIGKILL)]),
            ("vision", 3, [Kill(3, signal.SIGTERM, 2)]),
        )
    ),
]


@pytest.mark.crash
@pytest.mark.parametrize(("name", "num_processes", "kills"), KILLS)
def test_a_killed_loop_ends_with_the_same_bytes(
    name: str, num_processes: int, kills: list[Kill], tmp_path: Path
) -> None:
    codes = train(name, tmp_path / "whole", [None], num_processes=num_processes)
    assert codes == [[0] * num_processes]
    codes = train(name, tmp_path / "killed", [*kills, None], num_processes=num_processes)
    expected = {signal.SIGKILL: -9, signal.SIGTERM: 75}
    assert [each[kill.process] for kill, each in zip(kills, codes, strict=False)] == [
        expected[kill.signal] for kill in kills
    ]
    assert codes[-1] == [0] * num_processes
    assert left_by(tmp_path / "killed") == left_by(tmp_path / "whole")


@pytest.mark.parametrize("is_folder_deleted", [False, True])
def test_a_loop_whose_checkpoints_are_gone_says_so(
    tmp_path: Path, is_folder_deleted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path)
    directory = tmp_path / "checkpoints"
    newest = max(directory.glob("step-*"))
    shutil.rmtree(directory)
    if not is_folder_deleted:
        directory.mkdir()
    assert len(fit(tmp_path)) == 6
    (line,) = [each for each in caplog.messages if "is gone" in each]
    assert str(newest) in line


@pytest.mark.crash
def test_a_loop_killed_before_its_first_save_starts_without_a_word(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    loop = LOOPS["accumulation"]
    for number in range(2):
        killed = processes.start(
            loop, folder, Kill(1, signal.SIGKILL), folder=tmp_path / f"{number}.logs"
        )
        assert killed.wait() == [-signal.SIGKILL]
        assert (folder / "attempts.jsonl").exists()
        assert "is gone" not in killed.output()
    # What a first attempt saved is recorded nowhere, but it has made the folder.
    shutil.rmtree(folder / "checkpoints")
    restarted = processes.run(loop, folder, None, folder=tmp_path / "last.logs")
    assert f"{folder / 'checkpoints'}/, which an earlier start wrote" in restarted.output()


def test_a_finished_run_is_loaded_and_trains_no_more(tmp_path: Path) -> None:
    assert len(fit(tmp_path)) == 6
    rows = (tmp_path / "metrics.jsonl").read_bytes()
    given = parts()
    assert fit(tmp_path, given=given) == []
    assert (tmp_path / "metrics.jsonl").read_bytes() == rows
    other = parts()
    fit(tmp_path.with_name("other"), given=other)
    assert torch.equal(given["model"].weight, other["model"].weight)


def test_the_values_of_the_last_row_are_known_after_a_resume(tmp_path: Path) -> None:
    for num_epochs in (1, 3):
        given = parts()
        with exact_run(Accelerator(cpu=True), tmp_path, **given) as run:
            for epoch in run.epochs(num_epochs):
                for batch in run.batches():
                    step(given, batch)
                run.row(best=max(1 / (epoch + 1), run.metrics.get("eval/best", 0)))
    assert run.metrics == {"eval/best": 1}


def test_a_finished_run_goes_on_with_more_epochs(tmp_path: Path) -> None:
    fit(tmp_path / "two", 2)
    longer, whole = parts(), parts()
    assert len(fit(tmp_path / "two", 3, given=longer)) == 3
    fit(tmp_path / "three", 3, given=whole)
    assert torch.equal(longer["model"].weight, whole["model"].weight)


@pytest.mark.parametrize(
    ("first", "then", "named"),
    [
        ({"settings": {"lr": 0.1}}, {"settings": {"lr": 0.2}}, "lr: 0.1 -> 0.2"),
        ({"seed": 0}, {"seed": 1}, "seed: 0 -> 1"),
        ({}, {"given": parts(batch_size=5)}, "batches: 3 -> 2"),
    ],
)
def test_a_run_of_other_settings_is_not_continued(
    first: dict[str, Any], then: dict[str, Any], named: str, tmp_path: Path
) -> None:
    fit(tmp_path, **first)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="CONFIG_CHANGED") as refused:
        fit(tmp_path, 3, **then)
    assert named in str(refused.value)
    changed = {path.name for path, data in before.items() if path.read_bytes() != data}
    assert changed <= {"run.lock", "rank-00000.json"}


class Rotated(Sampler[int]):
    """Begins with a sample that neither the seed nor the epoch decides."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return iter([(self.first + each) % NUM_SAMPLES for each in range(NUM_SAMPLES)])

    def __len__(self) -> int:
        return NUM_SAMPLES


class Part:
    """A state that is loaded only if it has not changed its size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def state_dict(self) -> dict[str, int]:
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["size"] != self.size:
            raise ValueError(f"size {state['size']} is not {self.size}")


@pytest.mark.parametrize(("second", "code"), [((1, 0), "LOOP_ORDER"), ((0, 1), "CKPT_STATE")])
def test_a_refused_start_drops_no_rows(second: tuple[int, int], code: str, tmp_path: Path) -> None:
    """Those after the checkpoint stay until a start is accepted that goes on from there."""

    class Killed(Exception):
        pass

    def fit_with(first: int, size: int, killed_at: int | None = None) -> None:
        given = parts(shuffle=False, sampler=Rotated(first), batch_size=1)
        states = {"part": Part(size)}
        with exact_run(
            Accelerator(cpu=True), tmp_path, **given, states=states, save_every=4
        ) as run:
            for _ in run.epochs(1):
                for batch in run.batches():
                    step(given, batch)
                    run.row(size=1)
                    if run.step == killed_at:
                        raise Killed

    with pytest.raises(Killed):
        fit_with(0, 0, killed_at=6)
    rows = (tmp_path / "metrics.jsonl").read_bytes()
    assert rows.count(b"\n") == 7
    with pytest.raises((ConfigError, CheckpointError), match=code):
        fit_with(*second)
    assert (tmp_path / "metrics.jsonl").read_bytes() == rows
    fit_with(0, 0)
    rows = (tmp_path / "metrics.jsonl").read_bytes()
    steps = [json.loads(row)["optimizer_step"] for row in rows.splitlines()]
    assert steps == [*range(NUM_SAMPLES)]


@pytest.mark.parametrize("first", ["own", "trainer"])
def test_a_folder_is_continued_by_the_kind_of_loop_that_it_has(first: str, tmp_path: Path) -> None:
    def fit_trainer() -> None:
        workload.train(workload.make_config(tmp_path))

    starts = [partial(fit, tmp_path), fit_trainer]
    begin, refused = starts if first == "own" else reversed(starts)
    begin()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="LOOP"):
        refused()
    changed = {path.name for path, data in before.items() if path.read_bytes() != data}
    assert changed <= {"run.lock", "rank-00000.json"}


def test_a_list_of_batches_is_an_order(tmp_path: Path) -> None:
    given = parts()
    given["loader"] = DataLoader(given["loader"].dataset, batch_sampler=[[0, 1, 2], [5]])
    assert fit(tmp_path, given=given) == [3, 1, 3, 1]


def test_settings_may_be_changed_on_purpose(tmp_path: Path) -> None:
    fit(tmp_path, settings={"lr": 0.1})
    assert len(fit(tmp_path, 3, settings={"lr": 0.2}, allow_change=["lr"])) == 3


def test_other_data_is_not_trained_on(tmp_path: Path) -> None:
    fit(tmp_path)
    given = parts()
    given["loader"].dataset.tensors[0].add_(1)
    with pytest.raises(CheckpointError, match="DATA_CHANGED"):
        fit(tmp_path, 3, given=given)


class Counting(Sampler[int]):
    """Gives a different order each time that it is asked."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        self.number += 1
        return iter([(each + self.number) % NUM_SAMPLES for each in range(NUM_SAMPLES)])

    def __len__(self) -> int:
        return NUM_SAMPLES


def test_a_sampler_that_counts_is_refused(tmp_path: Path) -> None:
    given = parts(shuffle=False, sampler=Counting())
    with pytest.raises(ConfigError, match="Counting gives a different order"):
        fit(tmp_path / "run", given=given)
    assert not (tmp_path / "run").exists()


def fit_while_replaced(run: Path, folder: Path) -> None:
    """Train, while somebody puts another folder in place of `folder`, before the first save."""
    given = parts()
    with exact_run(Accelerator(cpu=True), run, **given, save_every=2) as loop:
        for batch in loop.steps(6):
            step(given, batch)
            if loop.step == 1:
                folder.rename(run.with_name("moved"))
                (folder / "checkpoints").mkdir(parents=True)
                (folder / "best.json").write_text("of others")


@pytest.mark.parametrize("what", [".", "checkpoints"])
def test_a_folder_in_place_of_the_runs_ends_the_loop_and_stays_as_it_is(
    tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "run" / what
    with pytest.raises(CheckpointError, match="RUN_FOLDER"):
        fit_while_replaced(tmp_path / "run", folder)
    assert sorted(folder.rglob("*")) == [folder / "best.json", folder / "checkpoints"]
    assert (folder / "best.json").read_text() == "of others"


def test_the_loader_is_given_back_as_it_was(tmp_path: Path) -> None:
    given = parts()
    loader = given["loader"]
    before = (loader.dataset, loader.batch_sampler)
    fit(tmp_path, given=given)
    assert (loader.dataset, loader.batch_sampler) == before
    assert len([*loader]) == 3


def test_the_loader_is_not_iterated_outside_of_the_run(tmp_path: Path) -> None:
    given = parts()
    with (
        pytest.raises(ConfigError, match="LOOP_LOADER"),
        exact_run(Accelerator(cpu=True), tmp_path, **given),
    ):
        next(iter(given["loader"]))


def test_the_loader_is_not_iterated_inside_of_the_loop(tmp_path: Path) -> None:
    given = parts()

    def evaluate_in_a_round() -> None:
        with exact_run(Accelerator(cpu=True), tmp_path, **given) as run:
            for batch in run.steps(2):
                step(given, batch)
                list(given["loader"])

    with pytest.raises(ConfigError, match="LOOP_LOADER"):
        evaluate_in_a_round()


def read_again(folder: Path, where: str) -> None:
    given = parts()
    with exact_run(Accelerator(cpu=True), folder, **given) as run:
        for _ in run.epochs(1):
            for batch in run.batches():
                if where == "in a round":
                    next(run.batches())
                step(given, batch)
                if where == "after a step":
                    next(run.batches())
            if where == "in the epoch":
                next(run.batches())


@pytest.mark.parametrize("where", ["in a round", "after a step", "in the epoch"])
def test_the_batches_of_an_epoch_are_read_once(where: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gives the batches of an epoch once"):
        read_again(tmp_path, where)


@pytest.mark.parametrize(
    "value", [None, "good", [1, 2], {"a": 1}, torch.zeros(3), np.zeros(2), {1}], ids=repr
)
def test_what_is_not_one_number_is_refused_by_its_name(value: Any, tmp_path: Path) -> None:
    numbers = (1, True, np.float32(1), np.array(1), torch.ones(()), torch.ones(1))
    with exact_run(Accelerator(cpu=True), tmp_path, **parts()) as run:
        for write in (lambda: run.row(mine=value), lambda: run.log("mine", value)):
            with pytest.raises(ConfigError, match=r"mine is .*: give one number"):
                write()
        for number in numbers:
            run.row(mine=number)
            run.log("mine", number)


def test_a_row_after_the_end_of_a_run_is_refused(tmp_path: Path) -> None:
    with exact_run(Accelerator(cpu=True), tmp_path, **parts()) as run:
        pass
    with pytest.raises(ConfigError, match="the run has ended"):
        run.row(size=1)


def accumulate(batches: Iterator[Any], first: int, given: dict[str, Any]) -> None:
    """Step on three batches at a time, and on what is left at the end of an epoch."""
    for number, batch in enumerate(batches, first + 1):
        given["model"](batch[0]).square().sum().backward()
        if number % 3 == 0:
            given["optimizer"].step()
            given["optimizer"].zero_grad()
    given["optimizer"].step()
    given["optimizer"].zero_grad()


def test_a_step_after_the_last_batch_is_one_of_its_epoch(tmp_path: Path) -> None:
    plain, given = (parts(batch_size=2, shuffle=False) for _ in range(2))
    for _ in range(3):
        accumulate(iter(plain["loader"]), 0, plain)
    with exact_run(Accelerator(cpu=True), tmp_path, **given) as run:
        for _ in run.epochs(3):
            accumulate(run.batches(), run.batch_in_epoch, given)
    assert run.step == 6
    assert given["model"].weight.equal(plain["model"].weight)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-0000000004-epoch-00002", "step-0000000006-epoch-00003"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"save_every": "10"}, "save_every= is '10'"),
        ({"keep_last": 0}, "keep_last= is 0"),
        ({"seed": "0"}, "seed is '0'"),
    ],
    ids=str,
)
def test_a_setting_that_means_nothing_is_refused_by_name(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        fit(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_an_epoch_that_leaves_gradients_is_saved_in_the_next(tmp_path: Path) -> None:
    given = parts(batch_size=2)
    with exact_run(Accelerator(cpu=True), tmp_path, **given) as run:
        for _ in run.epochs(3):
            for number, batch in enumerate(run.batches(), run.batch_in_epoch + 1):
                given["model"](batch[0]).sum().backward()
                if number % 3 == 0:
                    given["optimizer"].step()
                    given["optimizer"].zero_grad()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-0000000003-epoch-00002", "step-0000000003-epoch-00003"]


def fit_with_a_tail(folder: Path, killed_in: int = 0) -> None:
    """Train with what follows an epoch's batches and has their names; a round may be the last."""
    given = parts()
    with exact_run(Accelerator(cpu=True), folder, **given, save_every=1) as run:
        for _ in run.epochs(3):
            for batch in run.batches():
                if run.step + 1 == killed_in:
                    signal.raise_signal(signal.SIGTERM)
                loss = given["model"](batch[0]).square().mean()
                loss.backward()
                given["optimizer"].step()
                given["optimizer"].zero_grad()
            if run.step == -killed_in:
                raise KeyboardInterrupt
            run.row(last=loss.item())


@pytest.mark.parametrize("killed_in", range(-6, 9))
def test_what_follows_an_epoch_has_the_names_of_its_batches(killed_in: int, tmp_path: Path) -> None:
    fit_with_a_tail(tmp_path / "whole")
    if killed_in:
        with suppress(Preempted, KeyboardInterrupt):
            fit_with_a_tail(tmp_path / "killed", killed_in)
    fit_with_a_tail(tmp_path / "killed")
    assert left_by(tmp_path / "killed") == left_by(tmp_path / "whole")


def test_a_step_before_the_first_batch_is_refused(tmp_path: Path) -> None:
    given = parts()

    def step_too_early() -> None:
        with exact_run(Accelerator(cpu=True), tmp_path, **given) as run:
            for _ in run.epochs(1):
                step(given, [torch.ones(1, 3)])
                for batch in run.batches():
                    step(given, batch)

    with pytest.raises(ConfigError, match="stepped before the first batch"):
        step_too_early()


def test_a_loop_that_would_leave_an_epoch_is_refused_at_once(tmp_path: Path) -> None:
    given = parts()
    seen = []

    def fit_and_break() -> None:
        with exact_run(Accelerator(cpu=True), tmp_path, **given) as run:
            for _ in run.epochs(2):
                for batch in run.batches():
                    seen.append(batch)
                    if len(seen) == 2:
                        break

    def fit_and_return() -> None:
        with exact_run(Accelerator(cpu=True), tmp_path, **given) as run:
            for _ in run.epochs(2):
                for batch in run.batches():
                    seen.append(batch)
                    for _ in batch:
                        break  # leaves this loop alone
                    match len(seen):
                        case 2:
                            return

    with pytest.raises(ConfigError, match=r"break in line \d+"):
        fit_and_break()
    with pytest.raises(ConfigError, match=r"return in line \d+"):
        fit_and_return()
    assert seen == []


def test_stop_ends_the_loops_for_good(tmp_path: Path) -> None:
    def fit_until(number: int) -> list[tuple[int, int]]:
        given = parts()
        places = []
        with exact_run(Accelerator(cpu=True), tmp_path, **given) as run:
            for epoch in run.epochs(4):
                for batch in run.batches():
                    step(given, batch)
                    places.append((epoch, run.step))
                    if run.step == number:
                        run.stop()
        return places

    assert fit_until(4) == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)]
    assert fit_until(4) == []
    assert json.loads((tmp_path / "result.json").read_text())["stop_reason"] == "run.stop()"


def test_what_changes_only_with_each_step_is_named_with_accumulation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    given = {name: accelerator.prepare(each) for name, each in parts(batch_size=1).items()}
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given["optimizer"].optimizer, 0.9)
    with exact_run(accelerator, tmp_path, **given) as run:
        for _ in run.epochs(2):
            for batch in run.batches():
                with accelerator.accumulate(given["model"]):
                    step(given, batch)
                    if accelerator.sync_gradients:
                        scheduler.step()
    assert "[LOOP_STATE] the loop changes scheduler" in caplog.text


def test_what_changes_only_with_each_update_is_named_after_overflows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    given = parts(batch_size=1)
    given["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(given["optimizer"], 0.9)
    given = {name: accelerator.prepare(each) for name, each in given.items()}
    scheduler = given.pop("scheduler")
    skipped = []
    with exact_run(accelerator, tmp_path, **given) as run:
        for batch in run.steps(20):
            accelerator.backward(1024 * given["model"](batch[0]).sum())
            given["optimizer"].step()
            scheduler.step()
            given["optimizer"].zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
    assert skipped[:3] == [True] * 3
    assert "[LOOP_STATE] the loop changes scheduler" in caplog.text


def test_a_forgotten_scheduler_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = parts(batch_size=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given["optimizer"], 0.9)
    total = 0.0
    since_last = 0
    with exact_run(Accelerator(cpu=True), tmp_path, **given) as run:
        for _ in run.epochs(1):
            for batch in run.batches():
                step(given, batch)
                scheduler.step()
                total += float(batch[0].sum())
                since_last += 1
                if since_last == 3:
                    given["model"].zero_grad()
                    since_last = 0
    (record,) = [each for each in caplog.records if "LOOP_STATE" in each.message]
    assert "scheduler" in record.message
    assert "since_last" in record.message
    assert "total" not in record.message


def test_an_honest_loop_gets_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("vision", "accumulation", "by_hand", "gan"):
        LOOPS[name](tmp_path / name, None)
    assert caplog.records == []


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("loader", "prepare", "named"),
    [
        (lambda data: DataLoader(data, 4), {"dispatch_batches": True}, "dispatch_batches"),
        (lambda data: DataLoader(Stream(), 4), {}, "is a stream"),
        (lambda data: DataLoader(data, batch_size=None), {}, "batch_size"),
        (lambda data: DataLoader(data, 4, num_workers=2, in_order=False), {}, "in_order"),
        (lambda data: [data[0]], None, "is a list"),
    ],
)
def test_a_loader_that_cannot_go_on_in_the_middle_is_refused(
    loader: Any, prepare: dict[str, Any] | None, named: str, tmp_path: Path
) -> None:
    given = parts()
    given["loader"] = loader(given["loader"].dataset)
    config = DataLoaderConfiguration(**prepare or {})
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    if prepare is not None:
        given["loader"] = accelerator.prepare(given["loader"])
    with (
        pytest.raises(ConfigError, match="LOOP_LOADER") as refused,
        exact_run(accelerator, tmp_path, **given),
    ):
        pass
    assert named in str(refused.value)


def test_samples_are_read_with_their_own_random_numbers(tmp_path: Path) -> None:
    """A sample does not depend on which others were read before it, nor on the workers."""
    read = []
    for num_workers in (0, 2):
        given = parts()
        given["loader"] = DataLoader(Pictures(), batch_size=8, num_workers=num_workers)
        given["model"] = nn.Sequential(nn.Flatten(), nn.Linear(192, 1))
        given["optimizer"] = torch.optim.SGD(given["model"].parameters(), lr=0.1)
        with exact_run(Accelerator(cpu=True), tmp_path / str(num_workers), **given) as run:
            for _ in run.epochs(1):
                for batch in run.batches():
                    read.append(batch[0])
                    step(given, batch)
    assert torch.equal(torch.cat(read[:6]), torch.cat(read[6:]))


class Half(Part):
    """Returns what no checkpoint can hold as a state."""

    def state_dict(self) -> Any:
        return [1, 2]


@pytest.mark.parametrize(
    "state",
    [0.5, None, [], {"w": torch.zeros(2)}, torch.zeros(2), torch.Generator(), iter([1]), Half(1)],
    ids=lambda each: type(each).__name__,
)
def test_a_state_that_cannot_be_stored_is_named(state: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="states= has mine, which cannot be saved"),
        exact_run(Accelerator(cpu=True), tmp_path / "run", **parts(), states={"mine": state}),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_loader_is_no_state(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    given = parts() | {"loader": accelerator.prepare(parts()["loader"])}
    with (
        pytest.raises(ConfigError, match="states= has mine, .* loaders are read again"),
        exact_run(accelerator, tmp_path, **given, states={"mine": given["loader"]}),
    ):
        pass


def test_a_state_has_a_name_of_its_own(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="states= has the name 'loop'"),
        exact_run(Accelerator(cpu=True), tmp_path, **parts(), states={"loop": Part(1)}),
    ):
        pass
