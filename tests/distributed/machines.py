"""Two "machines": network namespaces with an address and a disk each, or launchers on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).parents[2]


@dataclass
class Machines:
    """Machine 0 is where the processes meet.

    `disks` are what each has at the place of the run folder.
    """

    folder: Path
    address: str = "127.0.0.1"
    namespaces: tuple[str, ...] = ()
    wires: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)

    @property
    def run(self) -> Path:
        """The run folder, of which each machine has its own in namespaces."""
        return self.folder / "run"

    def disk(self, machine: int) -> Path:
        """What a machine has in the place of the run folder, seen from outside."""
        return self.folder / f"disk-{machine}" if self.namespaces else self.run

    def start(
        self, machine: int, launcher: str, *arguments: str, processes_each: int = 1
    ) -> Launch:
        """Start a machine's share of a run with the command that its user would type there."""
        options = {
            "accelerate": (
                "accelerate.commands.launch --config_file accelerate_configs/multi_node_cpu.yaml"
                f" --num_processes {2 * processes_each} --machine_rank {machine}"
                f" --main_process_ip {self.address} --main_process_port {self.port}"
            ),
            "torchrun": (
                f"torch.distributed.run --nnodes 2 --nproc_per_node {processes_each}"
                f" --node_rank {machine} --master_addr {self.address} --master_port {self.port}"
            ),
        }[launcher].split()
        recipe = ["-m", "tests.distributed.elastic", str(self.run), *arguments]
        command = [*self._inside(machine), sys.executable, "-m", *options, *recipe]
        log = self.folder / f"machine-{machine}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        return Launch(process, log)

    def cut_link(self) -> None:
        """Take machine 1's end of the wire down, as if the cable were pulled out."""
        ip("-n", self.namespaces[1], "link", "set", self.wires[1], "down")

    def join_link(self) -> None:
        """Put the cable back."""
        ip("-n", self.namespaces[1], "link", "set", self.wires[1], "up")

    def _inside(self, machine: int) -> list[str]:
        if not self.namespaces:
            return []
        for place in (self.run, self.disk(machine)):
            place.mkdir(exist_ok=True)
        mount = f'mount --bind {self.disk(machine)} {self.run} && exec "$@"'
        return ["ip", "netns", "exec", self.namespaces[machine], "sh", "-c", mount, "sh"]


@dataclass
class Launch:
    """A machine's launcher."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> int:
        """Return the exit code, once all of its processes have ended."""
        try:
            return self.process.wait(600)
        finally:
            self.process.kill()

    @property
    def output(self) -> str:
        return self.log.read_text()


@contextmanager
def in_namespaces(folder: Path) -> Iterator[Machines]:
    """Yield two machines with a wire between them.

    Raises PermissionError where the system allows none.
    """
    names = tuple(f"trainer-{os.getpid()}-{machine}" for machine in (0, 1))
    wires = tuple(f"wire{os.getpid() % 10**6}{machine}" for machine in "ab")
    try:
        for name in names:
            ip("netns", "add", name)
        wire = [
            "link",
            "add",
            wires[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            wires[1],
            "netns",
            names[1],
        ]
        ip(*wire)
        for number, (name, wire) in enumerate(zip(names, wires, strict=True), start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", wire)
            for device in ("lo", wire):
                ip("-n", name, "link", "set", device, "up")
        yield Machines(folder, "10.77.0.1", names, wires)
    finally:
        for name in names:
            with suppress(PermissionError):
                ip("netns", "del", name)


def ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PermissionError(
            f"no network namespaces here: {getattr(error, 'stderr', error)}"
        ) from error
