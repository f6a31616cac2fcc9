"""Nodes behind a slow network, and a port that others fill with idle connections."""

from __future__ import annotations

import re
import socket
import sys
from contextlib import ExitStack

import pytest

from pdrun.endpoint import Endpoint
from tests.e2e.conftest import Shell, free_port
from tests.lib.delay_proxy import DelayProxy


@pytest.mark.thorough
def test_two_nodes_with_round_trips_of_a_second(shell: Shell) -> None:
    port = free_port()
    common = ("--nodes", "2", "--start-timeout", "60", "--no-python", "sleep", "3")
    first = shell.start("--node-name", "a", "--scheduler", f"127.0.0.1:{port}", *common)
    first.expect("1 of 2 nodes", timeout=30)
    with DelayProxy(Endpoint("127.0.0.1", port), 0.5) as proxy:
        second = shell.start(
            "--node-name", "b", "--scheduler", str(proxy.endpoint), "--no-serve", *common
        )
        assert (second.wait(60), first.wait(30)) == (0, 0), first.err + second.err


@pytest.mark.thorough
def test_a_thousand_idle_connections_do_not_starve_the_port(shell: Shell) -> None:
    """Even with 256 descriptors for the scheduler's process."""
    port = free_port()
    limits = (
        "import os, resource, sys; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    limit = (sys.executable, "-c", limits)
    common = ("--nodes", "2", "--scheduler", f"127.0.0.1:{port}", "--no-python", "true")
    first = shell.start("--node-name", "a", *common, prefix=limit)
    first.expect("1 of 2 nodes", timeout=30)
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        second = shell.start("--node-name", "b", "--no-serve", *common)
        assert (second.wait(30), first.wait(30)) == (0, 0), first.err + second.err
    assert not re.search("Traceback", first.err + second.err)
