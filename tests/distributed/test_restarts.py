"""A scheduler restarts a preempted run until it is done, and no bit tells of it.

The schedulers are stand-ins that read the file in `recipes/` and follow that system's rules.
Replaced are only what a test machine lacks: eight GPUs by two processes on CPUs, the data, and the
place of the run.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from PIL import Image

from ..digits import ON_DIGITS
from ..faults.signals import go_on, wait_for

ROOT = Path(__file__).parents[2]
SMALL = [
    "--image-size",
    "32",
    "--val-fraction",
    "0.25",
    "--model",
    "resnet8",
    "--epochs",
    "3",
    "--batch-size",
    "2",
]
SMALL += [
    "--global-batch-size",
    "4",
    "--checkpoint-every-n-steps",
    "1",
    "--runtime.num-threads",
    "1",
]
DIGITS = [
    *ON_DIGITS,
    "--epochs",
    "1",
    "--max-steps",
    "40",
    "--checkpoint-every-n-steps",
    "1",
    "--runtime.num-threads",
    "1",
]

Disturbance = Callable[[subprocess.Popen[Any]], None]


@dataclass
class Cluster:
    """Starts commands in sessions like containers; `disturbances[N]` disturbs attempt N."""

    folder: Path
    disturbances: Sequence[Disturbance] = ()
    codes: list[int] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self, command: Sequence[str], **variables: str) -> int:
        """Run one attempt to its end; negative for a signal, as `Popen` does it."""
        attempt = len(self.codes)
        path = os.pathsep.join(
            [str(self.folder), str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        environment = {
            **os.environ,
            "PATH": path,
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            **variables,
        }
        environment["PYTHONPATH"] = str(ROOT)
        control = self.folder / f"attempt-{attempt}"
        if attempt < len(self.disturbances):
            control.mkdir()
            environment["PAUSED_IN"] = str(control)
            environment["ACCEL_TRAINER_CALLBACKS"] = str(Path(__file__).with_name("pausing.py"))
        with (self.folder / f"attempt-{attempt}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if attempt < len(self.disturbances):
                wait_for(lambda: process.poll() is not None or (control / "ready-0").exists())
                assert process.poll() is None, self.output(attempt)
                self.disturbances[attempt](process)
                if self.disturbances[attempt] is not lose_machine:
                    go_on(control)
            self.codes.append(process.wait(300))
        return self.codes[-1]

    def output(self, attempt: int = -1) -> str:
        return (self.folder / f"attempt-{attempt % len(self.codes)}.log").read_text()

    def export(self) -> bytes:
        return (self.run / "export" / "model.safetensors").read_bytes()


def terminate(process: subprocess.Popen[Any]) -> None:
    """What a container's first process gets before its node is taken away."""
    process.send_signal(signal.SIGTERM)


def lose_machine(process: subprocess.Popen[Any]) -> None:
    for each in [process, *psutil.Process(process.pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            each.kill()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    pixels = np.random.default_rng(0)
    for label in ("dark", "light"):
        (folder / label).mkdir()
        for number in range(20):
            image = pixels.integers(0, 100, (40, 40, 3), np.uint8) + (
                100 if label == "light" else 0
            )
            Image.fromarray(image.astype(np.uint8)).save(folder / label / f"{number}.png")
    return folder


def undisturbed(start: Callable[[Cluster], None], folder: Path) -> bytes:
    """Return the export of the same run in a cluster where nothing happens."""
    folder.mkdir()
    cluster = Cluster(folder)
    start(cluster)
    assert cluster.codes == [0], cluster.output()
    return cluster.export()


def run_on_kubernetes(cluster: Cluster, photos: Path) -> None:
    """A Job: pods are started until one succeeds, or more fail than `backoffLimit` allows."""
    spec = yaml.safe_load((ROOT / "recipes" / "job.yaml").read_text())["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    places = {"/data": str(photos), "/runs/first": str(cluster.run), "8": "2"}
    command = [places.get(word, word) for word in [*container["command"], *container["args"]]]
    at = command.index("--checkpoint-every-n-steps")
    del command[at : at + 2]
    failures = 0
    while failures <= spec["backoffLimit"]:
        code = cluster.start([*command, *SMALL])
        if code == 0:
            return
        rules = [
            rule["action"] for rule in spec["podFailurePolicy"]["rules"] if matches(rule, code)
        ]
        failures += rules[:1] != ["Ignore"]
    pytest.fail(f"the job has failed: {cluster.output()}")


def matches(rule: dict[str, Any], code: int) -> bool:
    """Return whether a rule applies to a pod lost with its node (negative) or ended with `code`."""
    if "onPodConditions" in rule:
        is_lost = code < 0
        return is_lost and {"type": "DisruptionTarget", "status": "True"} in rule["onPodConditions"]
    codes = rule["onExitCodes"]
    return (code in codes["values"]) == (codes["operator"] == "In")


def run_on_skypilot(cluster: Cluster, photos: Path) -> None:
    """Run a managed job, restarted if the machine was lost or its exit code asks for recovery."""
    task = yaml.safe_load((ROOT / "recipes" / "sky.yaml").read_text())
    recovery = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    script = task["run"].replace("/runs/$SKYPILOT_TASK_ID", "$SKYPILOT_TASK_ID")
    script = re.sub(r"--checkpoint-every-n-steps \d+", shlex.join(SMALL), script)
    variables = {
        "SKYPILOT_TASK_ID": str(cluster.run),
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "DATASET": str(photos),
    }
    while (code := cluster.start(["bash", "-c", script], **variables)) != 0:
        assert code < 0 or code in recovery, cluster.output()


SRUN = """#!{python}
import os, signal, subprocess, sys
sys.path.insert(0, {root!r})
from tests.distributed.test_launch_env import like_srun
command = [word for word in sys.argv[1:] if not word.startswith("--kill-on-bad-exit")]
tasks = [subprocess.Popen(command, env={{**os.environ, **like_srun(rank, 2)}}) for rank in range(2)]
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""


def run_on_slurm(cluster: Cluster, photos: Path) -> None:
    """Run a batch script that requeues its job: it is restarted until it ends without a requeue."""
    requeued = cluster.folder / "requeued"
    programs = {
        "srun": SRUN.format(python=sys.executable, root=str(ROOT)),
        "scontrol": f'#!/bin/sh\ntest "$1 $2" = "requeue 7" && touch {requeued}\n',
    }
    for name, text in programs.items():
        (cluster.folder / name).write_text(text)
        (cluster.folder / name).chmod(0o755)
    command = ["bash", "recipes/slurm.sbatch", *DIGITS, "--output-dir", str(cluster.run)]
    while (code := cluster.start(command, SLURM_JOB_ID="7")) == 75 and requeued.exists():
        requeued.unlink()
    assert code == 0, cluster.output()


def reach_time_limit(process: subprocess.Popen[Any]) -> None:
    """Send the tasks, not the script, the signal that the script asks for before the time limit."""
    asked = re.search(
        r"#SBATCH --signal=(\w+)@\d+", (ROOT / "recipes" / "slurm.sbatch").read_text()
    )
    assert asked
    (srun,) = psutil.Process(process.pid).children()
    srun.send_signal(getattr(signal, f"SIG{asked[1]}"))


def preempt_job(process: subprocess.Popen[Any]) -> None:
    """Everything in the job gets TERM, the script as well."""
    (srun,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTERM)
    srun.send_signal(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "disturbances", "codes"),
    [
        (run_on_kubernetes, (terminate, lose_machine, terminate), [75, -9, 75, 0]),
        (run_on_skypilot, (terminate, lose_machine), [75, -9, 0]),
        (run_on_slurm, (reach_time_limit, preempt_job), [75, 75, 0]),
    ],
)
def test_a_preempted_run_is_restarted_until_it_is_done(
    tmp_path: Path,
    photos: Path,
    scheduler: Callable[..., None],
    disturbances: Sequence[Disturbance],
    codes: list[int],
) -> None:
    (tmp_path / "disturbed").mkdir()
    cluster = Cluster(tmp_path / "disturbed", disturbances)
    scheduler(cluster, photos)
    assert cluster.codes == codes
    assert "continuing after step" in cluster.output()
    assert cluster.export() == undisturbed(
        lambda other: scheduler(other, photos), tmp_path / "whole"
    )
