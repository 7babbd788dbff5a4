"""What a release says of itself is the same in all of its files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from accel_trainer.cli.doctor.machine import TRIED_PYTHON

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_changelog_and_the_citation_have_the_version() -> None:
    version = PROJECT["version"]
    heading = rf"^## {re.escape(version)} - (unreleased|20\d\d-\d\d-\d\d)$"
    assert re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version


def test_the_readme_names_the_oldest_python_and_none_is_too_new() -> None:
    allowed = SpecifierSet(PROJECT["requires-python"])
    minors = [minor for minor in range(100) if allowed.contains(f"3.{minor}.0")]
    assert minors == [*range(minors[0], 100)], "a later Python says that it was not tried"
    assert f"Python 3.{minors[0]} or later" in (ROOT / "README.md").read_text()


def test_the_workflow_runs_the_pythons_that_count_as_tried() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == [*TRIED_PYTHON]


def test_no_pin_is_for_a_python_that_was_not_tried() -> None:
    major, minor = map(int, TRIED_PYTHON[-1].split("."))
    for python, is_pinned in ((f"{major}.{minor}", True), (f"{major}.{minor + 1}", False)):
        now = {"python_version": python, "python_full_version": f"{python}.0"}
        pins = [Requirement(line) for line in CONSTRAINTS if not line.startswith("#")]
        held = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(now)]
        assert bool(held) == is_pinned, held


def test_every_dependency_is_pinned_at_a_version_that_it_allows() -> None:
    pinned: dict[str, list[str]] = {}
    for line in CONSTRAINTS:
        if not line.startswith("#"):
            pin = Requirement(line)
            pinned.setdefault(canonicalize_name(pin.name), []).append(
                str(pin.specifier).removeprefix("==")
            )
    declared = sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
    for wanted in map(Requirement, declared):
        if canonicalize_name(wanted.name) != PROJECT["name"]:  # an extra that has others
            versions = pinned[canonicalize_name(wanted.name)]
            assert any(map(wanted.specifier.contains, versions)), (str(wanted), versions)


def test_the_workflow_runs_what_the_table_of_platforms_says() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    commands = {
        name: " ".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()
    }
    assert jobs["macos"]["runs-on"].startswith("macos")
    assert "make test" in commands["macos"]
    assert jobs["windows"]["runs-on"].startswith("windows")
    assert "tests/core tests/data tests/optim" in commands["windows"]
    assert "make test-torch" in commands["torch"]
    floor, newest = jobs["torch"]["strategy"]["matrix"]["torch"]
    allowed = next(
        Requirement(line).specifier for line in PROJECT["dependencies"] if line.startswith("torch")
    )
    assert f">={floor.removesuffix('.0')}" in map(str, allowed)
    assert newest == "2.*"


def test_what_the_workflows_call_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = PROJECT["optional-dependencies"]
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for command in (step["run"] for step in job["steps"] if "run" in step):
                if command.startswith("make "):
                    called = re.findall(r"(?<= )[a-z-]+(?= |$)", command)
                    assert set(called) <= {*targets}, command
                for folder in re.findall(r"tests/\S+", command):
                    assert (ROOT / folder).is_dir(), command
                for extra in re.findall(r"\[(\w+)\]", command):
                    assert extra in extras, command
