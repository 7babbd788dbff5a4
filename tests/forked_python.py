"""A `python` that forks a process with torch imported, for commands that start Python themselves.

The test run listens at a socket. What is started in place of Python sends there its arguments,
variables, folder, cores and standard streams, hands on signals, and ends as the process does that
is forked for it, or takes that along.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import runpy
import socket
import sys
import threading
from collections.abc import Iterator
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .processes import context

_CLIENT = """#!{python} -ISs
import json, os, signal, socket, sys
words = [*{words}, *sys.argv[1:]]
is_isolated = words[:1] == ["-I"]
if "-u" in words[:2]:
    os.environ["PYTHONUNBUFFERED"] = "1"
while words[:1] in (["-I"], ["-u"], ["-W"]):
    del words[: 1 + (words[0] == "-W")]
if not words or words[0].startswith("-") and words[0] not in ("-c", "-m"):
    os.execv("{python}", ["{python}", *words])
request = {{
    "words": words, "variables": dict(os.environ), "folder": os.getcwd(),
    "cores": list(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None, "python": "{folder}/python",
    "parent": os.getppid(), "is_isolated": is_isolated,
}}
numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until they can be handed on
with socket.socket(socket.AF_UNIX) as server:
    server.connect("{address}")
    encoded = json.dumps(request).encode()
    socket.send_fds(server, [len(encoded).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(encoded)
    said = server.makefile()
    process = int(said.readline())
    for number in numbers:
        signal.signal(number, lambda number, frame: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    code = int(said.readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""  # noqa: E501
LAUNCHER = "ACCEL_TRAINER_LAUNCHER"
_COMMANDS = {
    "python": [],
    "accel-trainer": [
        "-c",
        "import sys; from accel_trainer.cli.main import main; sys.exit(main())",
    ],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
    "torchrun": ["-m", "torch.distributed.run"],
}


class Descriptor:
    """An open file that arrives in another process as one of its own: a number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (reduction.DupFd(self._number),)


def _detach(duplicate: Any) -> int:
    return int(duplicate.detach())


@contextlib.contextmanager
def forked_python(folder: Path) -> Iterator[Path]:
    """Fill `folder` with `python` and the commands that start with it; yield that `python`."""
    address = folder / "socket"
    for name, words in _COMMANDS.items():
        client = folder / name
        client.write_text(
            _CLIENT.format(python=sys.executable, words=words, address=address, folder=folder)
        )
        client.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen(64)
        threading.Thread(target=_listen, args=(server,), daemon=True).start()
        yield folder / "python"
        server.shutdown(socket.SHUT_RDWR)


def _listen(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the end
        while True:
            client, _ = server.accept()
            threading.Thread(target=_serve, args=(client,), daemon=True).start()


def _serve(client: socket.socket) -> None:
    with client:
        length, descriptors, _, _ = socket.recv_fds(client, 8, 3)
        with client.makefile("rb") as received:
            request = json.loads(received.read(int.from_bytes(length, "big")))
        streams = [Descriptor(number) for number in descriptors]
        process = context.Process(target=_be_python, args=(request, streams))
        process.start()
        # Before anything is sent: the client may be killed at any time.
        threading.Thread(target=_end_with, args=(client, process), daemon=True).start()
        for number in descriptors:
            os.close(number)
        with contextlib.suppress(OSError):  # it was killed
            client.sendall(f"{process.pid}\n".encode())
            process.join()
            client.sendall(f"{process.exitcode}\n".encode())
        process.join()


def _end_with(client: socket.socket, process: BaseProcess) -> None:
    with contextlib.suppress(OSError):
        client.recv(1)
    process.kill()


def _be_python(request: dict[str, Any], streams: list[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)  # type: ignore[arg-type]
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["variables"])
    _open_streams()
    if os.environ.get(LAUNCHER) == str(request["parent"]):
        os.environ[LAUNCHER] = str(os.getppid())  # whose end would be the launcher's
    os.chdir(request["folder"])
    if request["cores"] is not None:  # macOS has no such limit
        os.sched_setaffinity(0, request["cores"])
    sys.executable = request["python"]
    kind, *arguments = request["words"]
    if not request["is_isolated"]:
        first = {"-m": os.getcwd(), "-c": ""}.get(kind, str(Path(kind).resolve().parent))
        sys.path[:0] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    try:
        _run(kind, arguments)
    finally:
        atexit._run_exitfuncs()


def _open_streams() -> None:
    """Open the standard streams as a Python does that is started with these files."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing has put /dev/null there
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    strict = "strict" if encoding else sys.stdout.errors
    is_buffered = not os.environ.get("PYTHONUNBUFFERED")
    for name, number in (("stdout", 1), ("stderr", 2)):
        binary = open(number, "wb", -1 if is_buffered else 0, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            binary,
            encoding=encoding or getattr(sys, name).encoding,
            errors="backslashreplace" if name == "stderr" else errors or strict,
            line_buffering=is_buffered and (name == "stderr" or binary.isatty()),
            write_through=not is_buffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(kind: str, arguments: list[str]) -> None:
    if kind == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(arguments[0], {"__name__": "__main__"})
    else:
        sys.argv = [kind, *arguments]
        runpy.run_path(kind, run_name="__main__")
