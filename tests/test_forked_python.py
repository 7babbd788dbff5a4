"""Python that is forked does what Python does that is started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from . import terminal
from .forked_python import _serve

LOOK = (
    "import os, sys; print(sys.argv, os.getcwd(), os.environ['COLOUR'], sys.stdin.read());"
    " sys.exit(3)"
)
FIND = "import importlib.util; print(importlib.util.find_spec('script'))"
WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def look(python: str, *command: str, folder: Path) -> tuple[int, str]:
    environment = {**os.environ, "COLOUR": "red"}
    done = subprocess.run(
        [python, *command],
        cwd=folder,
        env=environment,
        input="typed",
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_forked_python_has_the_arguments_streams_and_exit_code_of_python(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "script.py").write_text(LOOK)
    commands = [
        ("-c", LOOK, "a", "b c"),
        ("script.py", "a"),
        ("-u", "-m", "script"),
        ("-W", "error", "-c", LOOK),
        ("-I", "-c", FIND),
    ]
    started = [look(sys.executable, *command, folder=tmp_path) for command in commands]
    request.getfixturevalue("python_is_forked")
    forked = [look(sys.executable, *command, folder=tmp_path) for command in commands]
    assert [
        (code, said.replace(str(tmp_path / "script.py"), "script.py")) for code, said in forked
    ] == [(code, said.replace(str(tmp_path / "script.py"), "script.py")) for code, said in started]


STREAMS = (
    "import sys; print([(stream.encoding, stream.errors, stream.line_buffering,"
    " stream.write_through) for stream in (sys.stdout, sys.stderr)])"
)


def test_forked_python_buffers_and_encodes_as_python_does(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)

    def shown() -> list[str]:
        command = [sys.executable, "-c", STREAMS]
        encoded = {"PYTHONIOENCODING": "ascii:replace"}
        unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "cp1252"}
        return [
            terminal.run(command, columns=80),
            terminal.run(command, columns=80, environment=encoded),
            subprocess.check_output(command, text=True),
            subprocess.check_output(command, text=True, env=unbuffered),
            subprocess.check_output([command[0], "-u", *command[1:]], text=True),
        ]

    started = shown()
    request.getfixturevalue("python_is_forked")
    assert shown() == started
    assert len({*started}) == 5, "they differ, so there is something to compare"


def test_a_client_killed_before_it_knows_its_process_takes_it_along() -> None:
    """Under load, it may be killed while the server is still starting the process."""
    server, client = socket.socketpair(socket.AF_UNIX)
    reader, writer = os.pipe()
    request = {
        "words": ["-c", WAIT],
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "cores": None,
        "python": sys.executable,
        "parent": os.getpid(),
        "is_isolated": False,
    }
    encoded = json.dumps(request).encode()
    with client:
        socket.send_fds(client, [len(encoded).to_bytes(8, "big")], [0, writer, 2])
        client.sendall(encoded)
    os.close(writer)
    _serve(server)
    with open(reader) as output:
        output.read()  # until no process can write


@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_process_that_was_forked(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAIT], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        process = psutil.Process(int(client.stdout.readline()))
        client.send_signal(number)
        assert client.wait() == -number
        psutil.wait_procs([process])
