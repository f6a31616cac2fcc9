"""What counts as an answer of a healthy server, and the values of placeholders."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pdrun.launcher.stdlib_only.serving import server_prober
from pdrun.launcher.stdlib_only.serving.server_prober import ProbeError


class Server(http.server.ThreadingHTTPServer):
    """Answers every POST with ``answer``, and remembers what was asked."""

    answer: tuple[int, bytes] = (200, b"")
    models: tuple[int, bytes] = (200, b'{"data": [{"id": "m"}]}')
    asked: dict[str, Any]
    headers: dict[str, str]
    drips = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.reply(*self.server.models)

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.headers = dict(self.headers)
        if self.server.drips:
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b" ")
                threading.Event().wait(0.02)
        self.reply(*self.server.answer)

    def reply(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


GENERATED = b'{"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}}'


def test_asks_for_a_token(server: Server) -> None:
    server.answer = (200, GENERATED)
    server_prober.check_health(f"{server.url}/v1/completions", None, 5, "secret")
    assert server.asked == {"max_tokens": 1, "temperature": 0, "model": "m", "prompt": "1"}
    assert server.headers["Authorization"] == "Bearer secret"
    server_prober.check_health(f"{server.url}/v1/chat/completions?a=b", None, 5, "")
    assert server.asked["messages"] == [{"role": "user", "content": "1"}]
    assert "Authorization" not in server.headers
    server.models = (404, b"{}")  # the model's name is optional in some servers
    server_prober.check_health(f"{server.url}/v1/completions", None, 5, "")
    assert "model" not in server.asked
    server_prober.check_health(f"{server.url}/generate", {"text": "1"}, 5, "")
    assert server.asked == {"text": "1"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((500, b"engine dead"), "HTTP 500: 'engine dead'"),
        ((301, b""), "HTTP 301"),
        ((200, b"ok"), "not JSON"),
        ((200, b"[]"), "empty"),
        ((200, b"7"), "without generating"),
        ((200, b'{"choices": []}'), "without generating"),
        ((200, b'{"choices": [{}], "usage": {"completion_tokens": 0}}'), "without generating"),
        ((200, b'{"error": {"message": "no"}}'), "is an error: .*no"),
    ],
)
def test_what_is_no_token(server: Server, answer: tuple[int, bytes], reason: str) -> None:
    server.answer = answer
    with pytest.raises(ProbeError, match=reason):
        server_prober.check_health(f"{server.url}/v1/completions", None, 5, "")


def test_a_server_that_never_completes_its_answer(server: Server) -> None:
    server.drips = True
    with pytest.raises(ProbeError, match=r"no answer within 0\.2 s"):
        server_prober.check_health(f"{server.url}/generate", {"a": 1}, 0.2, "")


def test_no_server() -> None:
    with socket.socket() as listener:  # accepts nothing: the queue of a hanging process
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with pytest.raises(ProbeError, match="Connection refused"):
            server_prober.check_ready(url, 0.2, "")
        listener.listen(1)
        with pytest.raises(ProbeError, match="no answer within"):
            server_prober.check_ready(url, 0.2, "")


def test_placeholders() -> None:
    environ = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    settings = {"devices": 4, "port": 8000, "init_port": 9000, "group": "decode"}
    values = server_prober.placeholder_values(settings, environ)
    assert values["tp"] == "8"
    assert values["port"] == "8003"
    assert values["host"] == "127.0.0.1"
    fill = server_prober.fill_placeholders
    assert fill('{"a": {rank}} {{rank}} {x} {port}{group}', values) == (
        '{"a": 3} {rank} {x} 8003decode'
    )
    assert fill("{{{rank}}}", values) == "{{rank}}"
    with pytest.raises(ProbeError, match="65536"):
        server_prober.placeholder_values({**settings, "port": 65533}, environ)
