"""`accel-trainer runs` on real runs, and how two of them differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from accel_trainer.cli.report.facts import facts_of
from accel_trainer.cli.runs.changes import compare_runs
from accel_trainer.cli.runs.run_reader import read_run
from tests.cli.conftest import run_command


def test_runs_are_a_table_with_the_best_marked(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_command(capsys, ["runs", runs])
    header, fast, slow = out.splitlines()
    assert code == 0
    assert header.split() == [
        "name",
        "data",
        "state",
        "step",
        "epoch",
        "metric",
        "best",
        "last",
        "samples/s",
        "wall",
    ]
    assert fast.split()[:6] == ["*", "fast", "digits", "done", "46", "2"]
    assert slow.split()[:3] == ["slow", "digits", "done"]
    best = json.loads((runs / "fast" / "result.json").read_text())["best"]
    assert f"{best['metric']}  {best['value']:.2%}" in fast


def test_runs_on_different_data_are_not_compared(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the data is called: without a name, or folders of the same name."""
    for dataset in (None, "elsewhere/photos"):
        folder = tmp_path / str(dataset).replace("/", "-")
        for name, fingerprint in {"a": "one", "b": "one", "c": "two", "d": "three"}.items():
            shutil.copytree(runs / ("slow" if name in "ab" else "fast"), folder / name)
            config = yaml.safe_load((folder / name / "config.yaml").read_text())
            config["dataset"] = dataset and f"{fingerprint}/{dataset}"
            (folder / name / "config.yaml").write_text(yaml.safe_dump(config))
            for path in (folder / name).glob("checkpoints/*/manifest.json"):
                manifest = json.loads(path.read_text()) | {"data_fingerprint": fingerprint}
                path.write_text(json.dumps(manifest))
        _, out, _ = run_command(capsys, ["runs", folder])
        starred = [line.split()[1] for line in out.splitlines() if line.startswith("*")]
        assert starred == ["a"], dataset


def test_an_evaluation_of_nan_is_never_the_best(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, values in {"a": ["nan", "nan"], "b": ["nan", 0.5], "c": [0.7, 0.6]}.items():
        shutil.copytree(runs / "slow", tmp_path / name)
        config = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        config["trainer"]["monitor"] = "eval/loss"
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
        (tmp_path / name / "result.json").unlink()
        rows = [
            {"event": "eval", "optimizer_step": step, "epoch": step, "eval/loss": value}
            for step, value in enumerate(values, 1)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    _, out, _ = run_command(capsys, ["runs", tmp_path, "--sort", "best"])
    order = [line.split()[:2] for line in out.splitlines()[1:]]
    assert order == [["*", "b"], ["c", "digits"], ["a", "digits"]]


def test_runs_are_sorted_by_the_column_asked_for(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def order(column: str) -> list[str]:
        lines = run_command(capsys, ["runs", runs, "--sort", column])[1].splitlines()[1:]
        return ["fast" if "fast" in line else "slow" for line in lines]

    assert order("best") == ["fast", "slow"], "the better one first"
    walls = {
        name: json.loads((runs / name / "result.json").read_text())["wall_s"]
        for name in ("fast", "slow")
    }
    assert order("wall") == sorted(walls, key=lambda name: walls[name]), "the shorter one first"


def test_a_text_in_a_status_is_one_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(runs / "fast", tmp_path / "failed")
    status = json.loads((folder / "status.json").read_text())
    status |= {"state": "failed", "error": "mine\nstate: done"}
    (folder / "status.json").write_text(json.dumps(status))
    _, out, _ = run_command(capsys, ["status", folder])
    assert "mine state: done" in out
    assert [line for line in out.splitlines() if line.startswith("state")] == ["state: failed"]


def test_the_status_of_a_killed_run_has_the_step_that_it_reached(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(runs / "fast", tmp_path / "killed")
    status = json.loads((folder / "status.json").read_text())
    status |= {"state": "running", "optimizer_step": 0, "last_commit": None}
    (folder / "status.json").write_text(json.dumps(status))
    _, out, _ = run_command(capsys, ["status", folder])
    newest = max(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert out.splitlines()[:4] == [
        "exit_code: 70",
        "state: killed",
        "optimizer_step: 46",
        f"last_commit: {newest}",
    ]


def test_a_run_that_was_killed_before_its_first_row_is_in_the_table(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "fast", tmp_path / "killed")
    for name in ("result.json", "metrics.jsonl"):
        (tmp_path / "killed" / name).unlink()
    status = json.loads((tmp_path / "killed" / "status.json").read_text()) | {"state": "running"}
    (tmp_path / "killed" / "status.json").write_text(json.dumps(status))
    (tmp_path / "not-a-run").mkdir()
    _, out, err = run_command(capsys, ["runs", tmp_path])
    assert out.splitlines()[1].split() == ["killed", "digits", "killed"]
    assert "not-a-run" not in out + err, "and is no damaged run"


def test_the_table_has_the_step_of_a_run_that_was_killed_after_a_resume(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(runs / "fast", tmp_path / "killed")
    result = json.loads((folder / "result.json").read_text())
    first = {"state": "preempted", "optimizer_step": 5, "epoch": 0}
    (folder / "result.json").write_text(json.dumps(result | first))
    attempts = (folder / "attempts.jsonl").read_text()
    start = attempts.splitlines()[0]
    (folder / "attempts.jsonl").write_text(f"{attempts}{start}\n")
    status = json.loads((folder / "status.json").read_text()) | {"state": "running"}
    (folder / "status.json").write_text(json.dumps(status))
    out = run_command(capsys, ["runs", tmp_path])[1]
    assert out.splitlines()[1].split()[:5] == ["killed", "digits", "killed", "46", "2"]


def test_the_table_and_the_report_agree_on_the_time_of_all_attempts(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(runs / "fast", tmp_path / "resumed")
    attempts = (folder / "attempts.jsonl").read_text()
    (folder / "attempts.jsonl").write_text(attempts + attempts)
    run = read_run(folder)
    assert run.wall_s == pytest.approx(2 * sum(read_run(runs / "fast").phase_s.values()))
    out = run_command(capsys, ["runs", tmp_path])[1]
    time = next(fact["value"] for fact in facts_of(run) if fact["name"] == "time")
    assert out.splitlines()[1].endswith(time)


def test_a_run_of_no_known_length_has_no_number_of_epochs(runs: Path, tmp_path: Path) -> None:
    """Such as one of `--hours` that a signal has stopped before it decided."""
    shutil.copytree(runs / "fast", tmp_path / "run")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    config["trainer"]["num_epochs"] = None
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    notes = {fact["name"]: fact["note"] for fact in facts_of(read_run(tmp_path / "run"))}
    assert notes["steps"] == "2 epochs"


def test_a_half_written_row_is_left_out(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "fast", tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "tra')
    before, after = (
        run_command(capsys, ["runs", folder])[1] for folder in (runs / "fast", tmp_path / "run")
    )
    assert before.split()[-8:] == after.split()[-8:]


def test_a_sweep_is_one_row_of_its_best_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs, tmp_path / "sweep-cifar")
    shutil.copytree(runs / "slow", tmp_path / "alone")
    _, alone, sweep = run_command(capsys, ["runs", tmp_path])[1].splitlines()
    assert alone.split()[:2] == ["alone", "digits"]
    assert sweep.split()[:7] == ["*", "sweep-cifar/fast", "digits", "2", "of", "2", "done"]


def test_a_new_project_is_not_a_run_but_has_runs(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    assert run_command(capsys, ["new", project])[0] == 0
    code, _, err = run_command(capsys, ["runs", project])
    assert (code, "no runs in" in err) == (73, True)
    code, _, err = run_command(capsys, ["report", project, "--to", tmp_path / "report.html"])
    assert code == 73
    assert "is not a run (there is only a config.yaml)" in err
    shutil.copytree(runs, project / "runs")
    out = run_command(capsys, ["runs", project])[1]
    assert out.splitlines()[1].split()[:2] == ["runs/fast", "digits"]


def test_a_folder_without_runs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_command(capsys, ["runs", tmp_path])
    assert code == 73
    assert (
        err == f"accel_trainer: error[NO_RUNS]: no runs in {tmp_path}: give the folder that holds "
        "them\n"
    )


def test_two_runs_that_differ_in_one_flag_differ_only_in_that_flag(runs: Path) -> None:
    found = compare_runs(read_run(runs / "fast"), read_run(runs / "slow"))
    assert (found["config"], found["data"], found["environment"]) == (
        [("optimizer.learning_rate", 0.1, 0.01)],
        [],
        [],
    )
    assert "eval_ema/accuracy" in {name for name, _, _ in found["results"]}


def test_a_changed_environment_differs(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fast", tmp_path / "other")
    path = tmp_path / "other" / "environment.json"
    changed = json.loads(path.read_text())
    changed["command"] = "another, which is in the config already"
    changed["packages"]["torch"], changed["code"]["git_commit"] = "1.0", "0" * 40
    path.write_text(json.dumps(changed))
    found = compare_runs(read_run(runs / "fast"), read_run(tmp_path / "other"))
    assert not any(found[group] for group in ("config", "data", "results"))
    names = [name for name, _, _ in found["environment"]]
    assert names == ["packages.torch", "code.git_commit"]


def test_a_setting_that_an_older_run_lacks_differs_only_from_its_default(
    runs: Path, tmp_path: Path
) -> None:
    older = shutil.copytree(runs / "fast", tmp_path / "older")
    config = yaml.safe_load((older / "config.yaml").read_text())
    for name, setting in (("optimizer", "learning_rate"), ("trainer", "on_nonfinite")):
        del config[name][setting]
    (older / "config.yaml").write_text(yaml.safe_dump(config))
    found = compare_runs(read_run(older), read_run(runs / "slow"))
    assert found["config"] == [("optimizer.learning_rate", "not recorded", 0.01)]


def test_what_is_not_a_run_is_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_command(capsys, ["why", runs / "fast", tmp_path])
    assert code == 73
    assert "is not a run (there is no config.yaml): check the path" in err
    code, _, err = run_command(capsys, ["why", runs / "fast", runs])
    assert code == 73
    assert f"is not a run (there is no config.yaml): give one of its runs, such as {runs}/" in err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.yaml", "a: [1", "config.yaml: line 1: "),
        ("config.yaml", "# all removed", "(config.yaml is empty)"),
        ("environment.json", "{", "environment.json: Expecting"),
        ("metrics.jsonl", "{\n", "line 1 of metrics.jsonl is not a row"),
    ],
)
def test_a_damaged_run_is_named_with_its_file(
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str,
    said: str,
) -> None:
    shutil.copytree(runs / "fast", tmp_path / "whole")
    damaged = shutil.copytree(runs / "slow", tmp_path / "damaged")
    (damaged / name).write_text(content)
    code, out, err = run_command(capsys, ["runs", tmp_path])
    assert code == 0
    assert len(out.splitlines()) == 2, "the header and the whole one"
    assert err.startswith(f"left out: {damaged} cannot be read (")
    assert said in err
    assert err.endswith("): restore or repair the file\n")
    assert run_command(capsys, ["runs", damaged])[0] == 73
