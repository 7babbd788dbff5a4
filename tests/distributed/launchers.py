"""Every way to launch the CIFAR recipe.

`python -m tests.distributed.launchers` tries them all and prints a table.

Commands of one entry are started together, as on several machines. RECIPE stands for the recipe,
PORT for a free port.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.test_launch_env import like_srun
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
ONE = "python RECIPE"  # what all others are compared with
# One step in float32 with group norm: sums in another order are all that may differ, and rounding
# does not grow.
FLAGS = "--dataset digits --model resnet8 --model.norm group --augment.crop-padding 1"
FLAGS += " --mixed-precision no --global-batch-size 32 --max-steps 1 --lr 0.01"
FLAGS += " --runtime.num-threads 1"


def preset(name: str, options: str = "", *, launcher: str = "accelerate") -> str:
    file = f"accelerate_configs/{name}.yaml"
    return f"env ACCELERATE_USE_CPU=true {launcher} launch --config_file {file} {options} RECIPE"


def node(name: str, rank: int) -> str:
    address = "--main_process_ip 127.0.0.1 --main_process_port PORT"
    return preset(name, f"--num_processes 2 {address} --machine_rank {rank}")


def task(rank: int) -> str:
    variables = {**like_srun(rank, 2), "MASTER_PORT": "PORT"}
    return f"env {' '.join(f'{name}={value}' for name, value in variables.items())} {ONE}"


FROM_PYTHON = "env ACCELERATE_USE_CPU=true python -m tests.distributed.from_python"
LAUNCHERS = {
    "cpu.yaml": [preset("cpu")],
    "single_gpu.yaml": [preset("single_gpu")],
    "mps.yaml": [preset("mps")],
    "multi_cpu.yaml": [preset("multi_cpu")],
    "multi_gpu.yaml": [preset("multi_gpu", "--num_processes 2")],
    "multi_node.yaml": [node("multi_node", rank) for rank in (0, 1)],
    "multi_node_cpu.yaml": [node("multi_node_cpu", rank) for rank in (0, 1)],
    "fsdp.yaml": [preset("fsdp", "--num_processes 2")],
    "fsdp_sharded.yaml": [preset("fsdp_sharded", "--num_processes 2")],
    "accel-trainer launch": [preset("multi_cpu", launcher="accel-trainer")],
    "torchrun": ["torchrun --standalone --nproc_per_node 2 RECIPE"],
    "srun": [task(rank) for rank in (0, 1)],
    "launch": [f"{FROM_PYTHON} launch"],
    "notebook_launcher": [f"{FROM_PYTHON} notebook_launcher"],
}


@dataclass(frozen=True)
class StepResult:
    """What a launch left, and what it said."""

    weights: Mapping[str, Tensor]
    metrics: Mapping[str, Any]
    num_processes: int
    output: str

    def largest_difference(self, other: StepResult) -> float:
        assert self.weights.keys() == other.weights.keys()
        return max(
            float((self.weights[name] - other.weights[name]).abs().max()) for name in self.weights
        )

    def has_metrics_of(self, other: StepResult) -> bool:
        """Return whether counts are equal, and up to rounding also loss and probabilities."""
        mine, theirs = ({**outcome.metrics} for outcome in (self, other))
        has_same_loss = abs(mine.pop("eval/loss") - theirs.pop("eval/loss")) <= 1e-6
        has_same_samples = all(
            abs(one.pop("probability") - two.pop("probability")) <= 1e-6 and one == two
            for name in ("eval/worst_mistakes", "eval/predictions")
            for one, two in (
                ({**one}, {**two})
                for one, two in zip(mine.pop(name), theirs.pop(name), strict=True)
            )
        )
        return has_same_loss and has_same_samples and mine == theirs


def start(command: str, flags: str, log: Path) -> subprocess.Popen[bytes]:
    words = [
        "recipes/cifar.py" if word == "RECIPE" else word
        for word in shlex.split(f"{command} {flags}")
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    with log.open("wb") as output:
        return subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def run(commands: list[str], folder: Path) -> StepResult:
    """Run the recipe for a step of 32 images by commands that are started together."""
    port = str(free_port())
    flags = f"{FLAGS} --output-dir {folder / 'run'} --cache-dir {folder / 'cache'}"
    folder.mkdir(exist_ok=True)
    logs = [folder / f"{number}.log" for number in range(len(commands))]
    jobs = [
        start(text.replace("PORT", port), flags, log)
        for text, log in zip(commands, logs, strict=True)
    ]
    codes = [job.wait(600) for job in jobs]
    output = "".join(log.read_text() for log in logs)
    assert codes == [0] * len(jobs), output
    [manifest] = (folder / "run" / "checkpoints").glob("*/manifest.json")
    return StepResult(
        weights=load_file(folder / "run" / "export" / "model.safetensors"),
        metrics=json.loads((folder / "run" / "result.json").read_text())["metrics"],
        num_processes=json.loads(manifest.read_text())["num_processes"],
        output=output,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        one = run([ONE], Path(folder) / "one")
        print(f"{'launcher':22}  processes  largest weight difference  metrics of one process")
        for name, commands in LAUNCHERS.items():
            outcome = run(commands, Path(folder) / name.replace(" ", "-"))
            difference = outcome.largest_difference(one)
            is_equal = "yes" if outcome.has_metrics_of(one) else "NO"
            print(
                f"{name:22}  {outcome.num_processes:9}  {difference:25.1e}  {is_equal}", flush=True
            )


if __name__ == "__main__":
    main()
