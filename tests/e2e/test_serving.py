"""``pdrun serve`` with real HTTP servers: probes, restarts of the whole group, groups, and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.conftest import Job, Shell, free_port, gone_within, until

SERVER = """
import http.server, json, os, sys, time
folder, rank, port, *words = sys.argv[1:]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {"data": [{"id": "m"}]})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if os.path.exists(folder + "/hangs"):
            time.sleep(60)
        if os.path.exists(folder + "/sick"):
            self.answer(500, {"error": "the engine is dead"})
        else:
            self.answer(200, {"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}})
    def answer(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *words):
        pass
with open(folder + "/pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
print("words", words, flush=True)
if os.path.exists(folder + "/leaves"):
    sys.exit(int(open(folder + "/leaves").read()))
if port == "0":
    while True:
        time.sleep(60)
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""
COMMAND = (sys.executable, "-S", "server.py", ".", "{rank}")
"""Then a port, and any words."""
HEALTH = "http://127.0.0.1:{port}/v1/completions"
QUICK = ("--health", HEALTH, "--health-interval", "0.2", "--health-timeout", "0.5")


@pytest.fixture
def servers(shell: Shell) -> Shell:
    shell.script(SERVER, "server.py")
    return shell


def start(shell: Shell, *options: str, words: tuple[str, ...] = ("{port}",)) -> Job:
    port = free_port()
    more = ("--backend", "cpu", "--grace", "5", "--port", str(port), "--init-port", "9001")
    return shell.start("serve", *more, *options, *COMMAND, *words)


def test_a_server_of_two_nodes(servers: Shell) -> None:
    """Each node has one server, with its placeholders; all are gone after a signal."""
    words = ("{port}", "{tp}-{nodes}-{node_rank}-{devices}-{head}-{init_port}-{host}", "{{tp}}{x}")
    job = start(servers, "--nodes", "2", "--devices", "4", "--local", *QUICK, words=words)
    job.expect(r"rank 0: ready after [\d.]+ s: http://127.0.0.1:\d+/v1/completions")
    text = job.expect(r"words \[", count=2)
    found = sorted(re.findall(r"words \['(\S+)', '(\S+)'\]", text))
    assert found == [
        ("8-2-0-4-127.0.0.1-9001-127.0.0.1", "{tp}{x}"),
        ("8-2-1-4-127.0.0.1-9001-127.0.0.1", "{tp}{x}"),
    ]
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    gone_within(servers.pids("pids"), 5)
    assert "rank 1: ready" not in job.out + job.err  # only the head is probed


def test_a_sick_group_restarts_whole(servers: Shell) -> None:
    """A health probe that generates nothing restarts every rank, and the new group is ready."""
    job = start(servers, "--devices", "2", "--per", "device", "--max-restarts", "1", *QUICK)
    job.expect("ready after", count=2)
    (servers.folder / "sick").touch()
    text = job.expect("restart 1 of 1: rank [01] on .* failed: health probe failed 3 times")
    assert "(1 of 3)" in text
    assert "the engine is dead" in text
    first = servers.pids("pids")[:2]
    (servers.folder / "sick").unlink()
    job.expect("ready after", count=4)
    gone_within(first, 5)
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert len(servers.pids("pids")) == 4
    gone_within(servers.pids("pids"), 5)


def test_a_server_that_hangs(servers: Shell) -> None:
    """An engine that accepts and never answers is ended; without restarts the job ends."""
    (servers.folder / "hangs").touch()
    ready = ("--ready", "http://127.0.0.1:{port}/v1/models")
    job = start(servers, *QUICK, *ready, "--health-failures", "2")
    assert job.wait() == 69
    assert "no answer within 0.5 s" in job.err
    assert "health probe failed 2 times in a row" in job.err
    gone_within(servers.pids("pids"), 5)


@pytest.mark.parametrize(
    ("options", "words", "code", "message"),
    [
        (
            ("--ready", "http://127.0.0.1:{port}/", "--ready-timeout", "1s"),
            ("0",),
            69,
            r"not ready within 1 s: http://127.0.0.1:\d+/: Connection refused",
        ),
        ((), ("x",), 1, "ValueError"),
    ],
    ids=("never_ready", "its_own_code"),
)
def test_ends(
    servers: Shell, options: tuple[str, ...], words: tuple[str, ...], code: int, message: str
) -> None:
    job = start(servers, *options, words=words)
    assert job.wait() == code
    assert re.search(message, job.err)
    gone_within(servers.pids("pids"), 5)


def test_a_server_that_leaves(servers: Shell) -> None:
    """A server that ends by itself is a failure, even with code 0."""
    (servers.folder / "leaves").write_text("0")
    job = start(servers)
    assert job.wait() == 1
    assert "the server ended by itself, with exit code 0" in job.err


def test_a_killed_rank_ends_the_group(servers: Shell) -> None:
    job = start(servers, "--devices", "2", "--per", "device", *QUICK)
    job.expect("ready after", count=2)
    os.kill(servers.pids("pids")[1], signal.SIGKILL)
    assert job.wait() == 137
    assert "SIGKILL" in job.err
    gone_within(servers.pids("pids"), 5)


def groups(shell: Shell) -> Job:
    ports = (free_port(), free_port())
    lines = []
    for name, port in zip(("prefill", "decode"), ports, strict=True):
        options = ("--group", name, "--backend", "cpu", "--port", str(port), *QUICK)
        lines += [":", *options, *COMMAND, "{port}", "{group}"]
    return shell.start("serve", *lines[1:])


def test_two_groups(servers: Shell) -> None:
    """They start together, and one that ends for good ends the other one."""
    job = groups(servers)
    text = job.expect("ready after", count=2)
    assert "prefill| words ['prefill']" in text
    assert "decode| words ['decode']" in text
    os.kill(servers.pids("pids")[0], signal.SIGKILL)
    assert job.wait() == 137
    assert re.search(
        "pdrun: group (prefill|decode) has ended with exit code 137: stopping the others", job.err
    )
    gone_within(servers.pids("pids"), 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_groups_end_with_their_command(servers: Shell, number: int) -> None:
    job = groups(servers)
    job.expect("ready after", count=2)
    job.signal(number)
    assert job.wait() == {signal.SIGINT: 130, signal.SIGKILL: -9}[signal.Signals(number)]
    gone_within(servers.pids("pids"), 10)


def test_the_example(shell: Shell) -> None:
    """The page's command serves; the probe asks for a token."""
    port = free_port()
    example = Path(__file__).parents[2] / "examples/completions_server.py"
    server = (sys.executable, str(example), "--port", "{port}", "--rank", "{rank}")
    job = shell.start("serve", "--backend", "cpu", "--port", str(port), "--health", HEALTH, *server)
    job.expect("ready after")
    body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", body, 10) as answer:
        assert json.load(answer)["choices"][0]["text"] == "bcd"
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    until(lambda: not is_open(port), "the server ends")


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
