"""The store: held before it is served, served by a process of its own, listening nowhere else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.launcher.agent.store import StorePair, StoreSocket
from pdrun.launcher.plan.model import StoreListener
from pdrun.launcher.supervisor.events import Exited, Spawned
from pdrun.rendezvous import tcpstore_main as storehost
from pdrun.rendezvous.transport.zmq_util import wait_readable
from tests.lib.supervisor_driver import supervisor_driver, wait_until

ENV = {"PATH": os.environ["PATH"]}


def listeners(pid: int) -> set[str]:
    """``ADDRESS:PORT``, hexadecimal, of the sockets on which a process listens."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [
        line
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in map(str.split, lines) if row[3] == "0A" and row[9] in inodes}


def client(port: int) -> subprocess.CompletedProcess[str]:
    """Use the store from another process, as a worker does."""
    code = (
        "import sys; from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False)\n"
        "store.set('a', 'b'); print(store.get('a').decode(), store.add('n', 2), store.num_keys() >= 2)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(port)], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def store() -> Iterator[StoreSocket]:
    made = StoreSocket("127.0.0.1")
    yield made
    made.close()


def test_the_port_is_held_and_early_clients_wait_in_the_backlog(store):
    host, _, port = store.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5):
        assert wait_readable(store.fileno(), wait=5)
        with pytest.raises(OSError), socket.socket() as other:
            other.bind((host, int(port)))


def test_a_generation_gets_the_socket_that_was_announced():
    stores = StorePair()
    first, again = stores.bind_current("127.0.0.1"), stores.bind_current("127.0.0.1")
    following = stores.bind_next("127.0.0.1")
    assert (first, first != following) == (again, True)
    assert stores.fileno() == -1  # not this node's to serve
    stores.advance(None)
    stores.is_wanted = True
    assert stores.bind_current("127.0.0.1") == following
    assert stores.fileno() >= 0
    stores.close()


def test_all_generations_listen_on_the_port_that_the_user_chose():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        chosen = StoreListener(Endpoint("127.0.0.1", port), "--master-port")
        stores = StorePair()
        with pytest.raises(ConfigError, match=f"--master-port: .* port {port} is in use"):
            stores.bind_current("127.0.0.1", chosen)
    assert stores.bind_current("127.0.0.1", chosen) == f"127.0.0.1:{port}"
    assert stores.bind_next("127.0.0.1", chosen) == f"127.0.0.1:{port}"
    stores.advance(None)
    stores.is_wanted = True
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        assert wait_readable(stores.fileno(), wait=5)
    stores.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_port_of_the_script_that_is_in_use_costs_a_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        chosen = StoreListener(Endpoint("127.0.0.1", port), "train.py:3", is_required=False)
        stores = StorePair()
        address = stores.bind_current("127.0.0.1", chosen)
    assert address != f"127.0.0.1:{port}"
    assert stores.fault.startswith(f"train.py:3: torch's store cannot listen on 127.0.0.1:{port}")
    stores.close()


def test_the_address_of_a_store_keeps_the_name_that_the_user_gave():
    stores = StorePair()
    address = stores.bind_current(
        "127.0.0.1", StoreListener(Endpoint("localhost", 0), "MASTER_ADDR")
    )
    assert address.startswith("localhost:")
    stores.close()


def test_a_store_that_ends_by_itself_says_why(store):
    with supervisor_driver() as driver:
        store.start_process(driver.supervisor, "/nowhere/python", ENV, "/")
        slot = store._slot
        events = wait_until(lambda: driver.supervisor.read_events(), 10)
        assert "/nowhere/python" in store.describe_exit(events[0])
        other = StoreSocket("127.0.0.1")
        other.start_process(driver.supervisor, sys.executable, {**ENV, "PYTHONPATH": ""}, "/")
        assert other._slot != slot
        spawned = driver.wait(Spawned, other._slot)
        os.kill(spawned.pid, signal.SIGKILL)
        assert other.describe_exit(driver.wait(Exited, other._slot)) == "signal 9"
        other.close()


@pytest.mark.torch
def test_the_store_serves_on_the_held_socket_only(store):
    pytest.importorskip("torch", reason="torch is not installed")
    port = int(store.address.rpartition(":")[2])
    with supervisor_driver() as driver:
        store.start_process(driver.supervisor, sys.executable, ENV, "/")
        pid = driver.wait(Spawned, store._slot).pid
        done = client(port)
        assert done.stdout.split() == ["b", "2", "True"], done.stderr
        assert listeners(pid) == {f"0100007F:{port:04X}"}
        for number in (
            signal.SIGTERM,
            signal.SIGUSR1,
            signal.SIGKILL,
        ):  # what a batch system sends to all ends it not
            driver.supervisor.send_signal(store._slot, number, group=False)
        assert driver.wait(Exited, store._slot).status == signal.SIGKILL


@pytest.mark.torch
def test_the_c_library_alone_is_enough():
    pytest.importorskip("torch", reason="torch is not installed")
    code = (
        "import sys; from pdrun.rendezvous import tcpstore_main as s\n"
        "print(s.light_store_class(s.find_torch_root()).__name__, 'torch.nn' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["TCPStore", "False"], done.stderr


@pytest.mark.torch
def test_the_whole_package_serves_as_well():
    pytest.importorskip("torch", reason="torch is not installed")
    with supervisor_driver() as driver, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        argv = (sys.executable, storehost.__file__, storehost.FULL_TORCH_FLAG)
        driver.start(0, argv, env=ENV, pass_fds=(listener.fileno(),))
        assert client(port).stdout.split() == ["b", "2", "True"]
        assert listeners(driver.wait(Spawned).pid) == {f"0100007F:{port:04X}"}
        driver.supervisor.send_signal(0, signal.SIGKILL, group=False)
        assert driver.wait(Exited).status == signal.SIGKILL


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("__version__ = '2.13.0+cpu'", True),
        ("__version__ = '2.11.0'", True),
        ("__version__ = '2.10.1'", False),
        ("__version__ = '2.15.0'", False),
        ("nothing", False),
    ],
)
def test_only_known_versions_are_loaded_in_part(tmp_path, text, known):
    assert not storehost.can_load_light(tmp_path)
    (tmp_path / "version.py").write_text(f"debug = False\n{text}\n")
    assert storehost.can_load_light(tmp_path) == known


def test_without_torch_one_line_says_so():
    done = subprocess.run(
        [sys.executable, "-S", storehost.__file__], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("has no torch, which MASTER_PORT's store needs")
