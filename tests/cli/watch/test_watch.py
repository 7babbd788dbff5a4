"""`accel-trainer watch` on runs that go on."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel_trainer import OutputError
from accel_trainer.cli.main import main as door
from accel_trainer.cli.runs.run_reader import MetricsReader, read_run
from accel_trainer.cli.watch.followed import Followed
from tests.browser import browser, needs_chromium
from tests.faults.signals import wait_for

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from accel_trainer.cli.watch.live_page import LivePage  # noqa: E402
from accel_trainer.cli.watch.server import PageServer, serving  # noqa: E402


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """A run that has not ended, as its files say, and was never evaluated."""
    copy = tmp_path / "runs" / "one"
    left_out = shutil.ignore_patterns("evaluation*", "export", "result.json", "mistakes.json")
    shutil.copytree(runs / "fast", copy, ignore=left_out)
    return copy


@pytest.fixture
def server(run: Path) -> Iterator[PageServer]:
    with serving(LivePage(Followed([run.parent])), "127.0.0.1", 0) as served:
        yield served


def add_row(run: Path, step: int) -> None:
    row = {"event": "train", "optimizer_step": step, "epoch": 9, "train/loss": 0.5}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def refusal(url: str) -> tuple[int, bytes]:
    """Return the status and the text of an answer that is an error."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(url, timeout=60)
    with raised.value as answer:  # collected unclosed, it warns on Python 3.14
        return answer.code, answer.read()


def test_added_rows_are_read_and_rows_that_a_resume_removes_are_gone(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:10])
    reader = MetricsReader(path)
    assert len(reader.read()) == 2, "a line that is half written is no row yet"
    path.write_text("".join(lines))
    assert reader.read() == list(read_run(run).rows)
    path.write_text(lines[0] + lines[-1] * 5)
    assert reader.read() == list(read_run(run).rows)
    path.unlink()
    assert reader.read() == []


def test_a_run_is_read_again_only_if_its_files_have_changed(run: Path) -> None:
    followed = Followed([run.parent])
    assert followed.look()
    (first,) = followed.read()
    assert not followed.look()
    assert followed.read()[0] is first
    add_row(run, 999)
    assert followed.look()
    assert followed.read()[0].rows[-1]["optimizer_step"] == 999
    shutil.copytree(run, run.parent / "two")
    assert followed.look()
    assert [each.name for each in followed.read()] == ["one", "two"]


def ask(server: PageServer) -> int:
    with urllib.request.urlopen(f"{server.url}version", timeout=60) as answer:
        return int(answer.read())


def test_readers_are_told_of_news_and_get_the_new_page(server: PageServer, run: Path) -> None:
    assert ask(server) == 0
    with urllib.request.urlopen(server.url, timeout=60) as page:
        assert b'data-version="0"' in page.read()
    add_row(run, 12_345)
    wait_for(lambda: ask(server))
    with urllib.request.urlopen(server.url, timeout=60) as page:
        assert b"<dd>12,345</dd>" in page.read()


def test_nothing_is_read_without_the_token(server: PageServer) -> None:
    host, port = server.server_address[:2]
    for path in ("", "/", "/version", "/%2e%2e/version", "/../../etc/passwd"):
        status, _ = refusal(f"http://{host!s}:{port}{path}")
        assert status == 404


def test_a_malformed_run_is_one_line_of_text_and_the_server_goes_on(
    server: PageServer, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = run / "environment.json"
    environment = path.read_text()
    path.write_text('{"recipe_defaults": 3}')
    server.page._followed.look()
    status, text = refusal(server.url)
    assert status == 500
    assert text.startswith(f"error[NOT_A_RUN]: {run}: malformed".encode())
    path.write_text(environment)
    server.page._followed.look()
    with urllib.request.urlopen(server.url, timeout=60) as page:
        assert page.status == 200
    assert capfd.readouterr().err == ""


def test_a_reader_that_leaves_is_not_an_error(
    server: PageServer, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host, port = server.server_address[:2]
    for _ in range(3):
        with socket.create_connection((str(host), int(port))) as reader:
            reader.sendall(f"GET /{server.token}/version HTTP/1.0\r\n\r\n".encode())
            assert reader.recv(1)
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    add_row(run, 12_345)
    wait_for(lambda: ask(server))
    seen = ask(server)
    add_row(run, 12_346)
    wait_for(lambda: ask(server) > seen)
    assert capfd.readouterr().err == ""


def test_a_folder_that_is_missing_or_a_port_in_use_is_one_line(
    server: PageServer, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert door(["watch", str(run / "none")]) == 64
    assert door(["watch", str(run), "--port", str(server.server_address[1])]) == 73
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("is not a folder: check the path")
    assert lines[1].endswith("(Address already in use): choose a different --port or --host")


@pytest.mark.usefixtures("python_is_forked")
def test_ctrl_c_ends_it_and_is_no_error(run: Path) -> None:
    code = "import sys; from accel_trainer.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@needs_chromium
def test_a_browser_shows_new_numbers_and_keeps_what_was_chosen(
    server: PageServer, run: Path, tmp_path: Path
) -> None:
    with browser(tmp_path / "profile") as page:
        page.open(server.url)
        page.wait_for("document.getElementById('live').textContent.startsWith('live, updated')")
        page.value("document.querySelector('h3 button').click()")  # a logarithmic axis
        page.value("document.querySelector('#details details').open = true")
        page.value("window.isTheSame = true")
        add_row(run, 12_345)
        page.wait_for("document.querySelector('#top').textContent.includes('12,345')")
        assert page.value("window.isTheSame"), "the page was not loaded again"
        assert page.value("document.querySelector('#details details').open")
        assert page.value("document.querySelector('h3 button').ariaPressed") == "true"
        assert page.value("document.querySelector('svg.live').textContent").count("12,") == 1
        page.value("smoothing.value = 0.5, smoothing.oninput()")
        shutil.copytree(run, run.with_name("two"))
        page.wait_for("!window.isTheSame && document.querySelectorAll('#legend button').length > 1")
        assert page.value("document.querySelector('h3 button').ariaPressed") == "true"
        assert page.value("smoothing.value") == "0.5"


def test_an_unreadable_run_is_one_line_and_a_mistake_of_ours_is_shown(
    server: PageServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(error: Exception) -> Callable[[], bytes]:
        def html() -> bytes:
            raise error

        return html

    monkeypatch.setattr(server.page, "html", fail(PermissionError(13, "Permission denied")))
    assert refusal(server.url) == (500, b"[Errno 13] Permission denied\n")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(server.page, "html", fail(ZeroDivisionError()))
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(server.url, timeout=60)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_port_that_does_not_exist_is_one_line(runs: Path) -> None:
    page = LivePage(Followed([runs]))
    with (
        pytest.raises(
            OutputError, match=r":99999 cannot be used \(.+\): choose a different --port"
        ),
        serving(page, "127.0.0.1", 99999),
    ):
        raise AssertionError("nothing is served")


# What may be in the files of a run that only show up when it is drawn.
MALFORMED: dict[str, dict[str, object]] = {
    "environment.json": {"recipe_defaults": 3},
    "config.yaml": {"model": {"name": {"a": 1}}, "trainer": {"num_epochs": "x", "monitor": []}},
    "result.json": {"metrics": {"eval/per_class_accuracy": 5, "eval/confusion_matrix": {"a": 1}}},
    "metrics.jsonl": {"event": 5},
    "attempts.jsonl": {"event": "end", "phase_s": {"training": None}},
}


@pytest.mark.parametrize("shown", ["watch", "report"])
def test_a_malformed_run_is_named_and_the_others_are_shown(
    run: Path, capsys: pytest.CaptureFixture[str], shown: str
) -> None:
    folder = run.parent
    for name in MALFORMED:
        bad = shutil.copytree(run, folder / f"bad-{name.partition('.')[0]}")
        (bad / name).write_text(json.dumps(MALFORMED[name]) + "\n")
    named = {"bad-environment", "bad-metrics", "bad-attempts"}
    if shown == "watch":
        page = LivePage(Followed([folder])).html().decode()
    else:
        words = [str(folder / name) for name in sorted(named)]
        path = folder.parent / "page.html"
        assert door(["report", str(run), *words, "--to", str(path)]) == 0
        err = capsys.readouterr().err
        assert [name for name in named if name not in err] == []
        page = path.read_text()
    for name in named:
        assert re.search(rf"<h3>{name}</h3><p class=.note.>cannot be shown: .*{name}", page), name
    assert "<h3>one</h3>" not in page
    assert f'"name":"{run.name}"' in page


def test_readers_that_say_nothing_are_few_and_not_for_long(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from accel_trainer.cli.watch import server as module

    def let_readers_be_silent_for(seconds: float) -> None:
        monkeypatch.setattr(module, "_TIMEOUT_S", seconds)
        monkeypatch.setattr(module._Answer, "timeout", seconds)

    def connect(said: bytes = b"") -> socket.socket:
        reader = socket.create_connection((str(address[0]), int(address[1])), timeout=60)
        with contextlib.suppress(ConnectionError):  # it was closed at once
            reader.sendall(said)
        return reader

    def wait_until_closed(reader: socket.socket) -> None:
        with reader, contextlib.suppress(ConnectionError):
            while reader.recv(4096):  # an answer to half a request
                pass

    def is_let_in() -> bool:
        try:
            with urllib.request.urlopen(served.url, timeout=60) as page:
                return bool(page.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    monkeypatch.setattr(module, "_MAX_CONNECTIONS", 4)
    with serving(LivePage(Followed([run.parent])), "127.0.0.1", 0) as served:
        address = served.server_address
        let_readers_be_silent_for(600)
        silent = [connect() for _ in range(4)]
        wait_until_closed(connect())
        for each in silent:
            each.close()
        wait_for(is_let_in)
        let_readers_be_silent_for(0.2)
        for said in (b"", b"GET /"):
            wait_until_closed(connect(said))
    assert capfd.readouterr().err == ""
