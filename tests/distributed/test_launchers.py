"""Every launcher and every preset gives the same weights and metrics as `python`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.variants import slow_but

from . import launchers
from .launchers import LAUNCHERS, ONE, ROOT, StepResult

# Others have tests of their own: torchrun in test_elastic, `launch` in test_launch, srun in
# test_launch_env.
SHOWN = ("multi_cpu.yaml", "accel-trainer launch", "notebook_launcher")


@pytest.fixture(scope="module")
def one_process(one_that_forks: Path, tmp_path_factory: pytest.TempPathFactory) -> StepResult:
    pytest.importorskip("sklearn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(one_that_forks))
        return launchers.run([ONE], tmp_path_factory.mktemp("one"))


@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.parametrize("name", slow_but(SHOWN, LAUNCHERS))
def test_every_launcher_and_preset_trains_the_same_model(
    tmp_path: Path, name: str, one_process: StepResult
) -> None:
    outcome = launchers.run(LAUNCHERS[name], tmp_path)
    assert outcome.num_processes == (
        1 if name in ("cpu.yaml", "single_gpu.yaml", "mps.yaml") else 2
    )
    assert outcome.output.count("done:") == 1, "one process speaks for all"
    assert outcome.largest_difference(one_process) <= 1e-6
    assert outcome.has_metrics_of(one_process)
    assert sum(map(sum, outcome.metrics["eval/confusion_matrix"])) == 359


def test_every_preset_is_launched() -> None:
    assert {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")} < LAUNCHERS.keys()
