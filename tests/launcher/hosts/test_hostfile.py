from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdrun.templates
from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.launcher.hosts import hostfile
from pdrun.launcher.hosts.selection import Host
from tests.launcher.hosts.test_selection import said
from tests.lib.tiers import by_tier

GRAMMARS = {
    "open mpi": (
        "# comment  // comment  /* block */\nnode1 slots=8\nnode2 slots = 4 max_slots=8\nalice@node3 slots=2\nnode4\n"
        "node4\n",
        ["node1:8", "node2:4", "node3:2", "node4:2"],
    ),
    "open mpi, other words": ("a cpu=2\nb count=3\nc slots=1 slots-max=4\n", ["a:2", "b:3", "c:1"]),
    "bare names": ("node10\nnode2\n", ["node10", "node2"]),
    "mpich": (
        "node1:8\nnode2:4   # trailing\nnode3\nnode3\n[::1]:2\n",
        ["node1:8", "node2:4", "node3:2", "::1:2"],
    ),
    "deepspeed": ("worker-1 slots=4\n\nworker-2 slots=2\n", ["worker-1:4", "worker-2:2"]),
    "pbs": ("n1\nn2\nn1\n", ["n1:2", "n2:1"]),
    "lsf": ("hA 2 hB 4", ["hA:2", "hB:4"]),
    "sge": ("node1 4 all.q@node1 UNDEFINED\nnode2 4 all.q@node2 0,0:0,1\n", ["node1:4", "node2:4"]),
    "sge, two queues": (
        "c12 16 all.q@c12 UNDEFINED\nc13 16 all.q@c13 UNDEFINED\nc12 4 short.q@c12 UNDEFINED\n",
        ["c12:20", "c13:16"],
    ),
    "hydra, a host again": ("a:2\nb:2\na:1\n", ["a:3", "b:2"]),
    "hydra, binding": ("a:4 binding=user:0,1\nb binding=cores\n", ["a:4", "b"]),
    "hex digits": ("4c01db0b3391:2\n302x23:1\n1e5:1\n", ["4c01db0b3391:2", "302x23:1", "1e5:1"]),
    "addresses in a line": ("10.0.0.1 10.0.0.2", ["10.0.0.1", "10.0.0.2"]),
    "rankfile in turn": ("rank 0=a\nrank 1=b\nrank 2=a\nrank 3=b\n", ["a:2", "b:2"]),
    "slurm": (
        "rack[0-1]n[2-3]\ngpu-[01-02]-ib:4\na,b slots=2\n",
        ["rack0n2", "rack0n3", "rack1n2", "rack1n3", "gpu-01-ib:4", "gpu-02-ib:4", "a:2", "b:2"],
    ),
    "rankfile": ("rank 1=b slot=0\nrank 0=a slot=1-3\nrank 2=b slot=2\n", ["a:1", "b:2"]),
    "taken out": ("a\nb\nc\n^b\n", ["a", "c"]),
    "no slots": ("a slots=2\nb slots=0\n", ["a:2"]),
    "devices": ("a devices=0,2-3\nb devices=1 slots=1\n", ["a:3[0, 2, 3]", "b:1[1]"]),
    "windows": ("\ufeffa slots=2\r\nb slots=2\r\n", ["a:2", "b:2"]),
    "old mac, tabs, no end": ("a\tslots=2\rb slots=2", ["a:2", "b:2"]),
    "block comment over lines": ("a /* b\nc */ \nd\n", ["a", "d"]),
    "full names": ("n1.foo.net slots=1\nn1.bar.net slots=2\n", ["n1.foo.net:1", "n1.bar.net:2"]),
    "ipv6": ("fe80::1\n2001:db8::2 slots=3\n", ["fe80::1", "2001:db8::2:3"]),
}


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_every_grammar_is_read(grammar: str, tmp_path: Path) -> None:
    text, hosts = GRAMMARS[grammar]
    path = tmp_path / "hosts"
    path.write_bytes(text.encode())
    assert said(hostfile.read_hostfile(str(path))) == hosts


def test_what_ssh_needs_stands_in_the_file() -> None:
    (host,) = hostfile.parse_hostfile("node4 user=bob port=2222 addr=10.0.0.4", "hosts")
    assert host == Host("node4", None, None, "hosts:1", "bob", 2222, "10.0.0.4")
    assert host.peer_address == "10.0.0.4"


def test_the_example_is_one() -> None:
    path = Path(pdrun.templates.__path__[0]) / "hostfile"
    hosts = hostfile.read_hostfile(str(path))
    assert said(hosts)[:2] == ["node01:8", "node02:8"]
    assert len(hosts) >= 4


BROKEN = {
    "": "hosts: names no host",
    "# only\n// comments\n": "hosts: names no host",
    "a slots=0": "hosts: leaves no host",
    "a\n^a": "hosts: leaves no host",
    "a slots=-1": "hosts:1: '-1' is below 0",
    "a slots=abc": "hosts:1: 'abc' is not a whole number",
    "a slots=1e9": "hosts:1: '1e9' is not a whole number",
    "a slots=4junk": "hosts:1: '4junk' is not a whole number",
    "a slots=99999": "hosts:1: '99999' is above 4096",
    "a slots=": "hosts:1: '' is not a whole number",
    "a slots=2\n\na slots=4": "hosts:3: a has a line already (hosts:1)",
    "a\na slots=2": "hosts:2: a has a line already (hosts:1)",
    "a slots=2\na": "hosts:2: a has a line already (hosts:1)",
    "a:2 slots=2": "hosts:1: a:2 and slots= both count",
    "a slots=2 cpu=2": "hosts:1: slots is given twice",
    "a slots=8 max_slots=4": "hosts:1: slots=8 is more than max_slots=4",
    "a slots=2 devices=1": "hosts:1: slots=2 and devices=1 differ in number",
    "a slot=2": "hosts:1: unknown key 'slot'; did you mean 'slots'?",
    "a foo=bar": "hosts:1: unknown key 'foo'; known: slots",
    "slots=4": "hosts:1: 'slots=4' names no host",
    "a:0": "hosts:1: '0' is below 1",
    "a:abc": "hosts:1: 'abc' is not a whole number",
    "-oProxyCommand=x": "hosts:1: '-oProxyCommand=x' is neither a host name",
    "--": "hosts:1: '--' is neither a host name",
    "h1;reboot": "hosts:1: 'h1;reboot' is neither a host name",
    "$(x)": "hosts:1: '$(x)' is neither a host name",
    "`x`": "hosts:1: '`x`' is neither a host name",
    "'a'": "is neither a host name",
    "user@host@x": "hosts:1: 'user@host@x': 'user@host' is not a valid user name",
    "a user=x;y": "hosts:1: 'x;y' is not a valid user name",
    "a port=0": "hosts:1: '0' is not a port",
    "h[1-": "hosts:1: 'h[1-': the bracket is not closed",
    "h[3-1]": "runs backwards",
    "h[1-99999999]": "more than 65536 hosts",
    "n[1-40000]\nm[1-40000]": "hosts:2: more than 65536 hosts",
    "a" * 256: "is neither a host name",
    "h\u00f6st": "is neither a host name",
    "a 2 b": "hosts:1: 'b' is not followed by a number",
    "a slots=2 b": "hosts:1: 'b' must be before key=value",
    "a 2 slots=2": "exclude each other",
    "+n0": "hosts:1: '+n0': relative names are not supported",
    "^b\na": "hosts:1: ^b removes a host that is not listed",
    "/* a": "hosts:1: a comment /* is not closed",
    "rank 0=a\nrank 2=b": "hosts:2: rank 1 is missing",
    "rank 0=a\nrank 0=b": "hosts:2: rank 0 is listed twice (first in hosts:1)",
    "a:2\na slots=2": "hosts:2: a has a line already (hosts:1)",
    "a 2 q@a x\na 2": "hosts:2: a has a line already (hosts:1)",
    "a:4000\na:4000": "hosts:2: a has 8000 devices in total",
    "127.0.0.1 localhost": "hosts:1: '127.0.0.1 localhost' looks like a line of /etc/hosts",
    "a\n10.0.0.1\tn1 n1.net": "hosts:2: '10.0.0.1\\tn1 n1.net' looks like a line of /etc/hosts",
    "::1 localhost": "looks like a line of /etc/hosts; write localhost, or localhost addr=::1",
    "a addr=127.0.0.1\nb": "hosts:1: addr=127.0.0.1 is a loopback address",
    "a addr=10.0.0.1\nb addr=10.0.0.1": "hosts:2: 10.0.0.1 is the address of a, too (hosts:1)",
    "a addr=b\nb": "hosts:2: b is the address of a, too (hosts:1)",
    '{"hosts": ["a"]}': "hosts:1: looks like JSON; write one host per line",
    '\n["a", "b"]': "hosts:2: looks like JSON",
    "---\n- a": "hosts:1: looks like YAML",
    "- a\n- b": "hosts:1: looks like YAML",
    "[workers]\na\nb": "hosts:1: [workers] is a heading of an inventory (Ansible)",
    "a\nssh://root@b:2222 slots=2": "hosts:2: is a URL; write b port=2222 user=root",
    "http://b/": "hosts:1: is a URL; write b",
    "rank 0=a\nb": "hosts:2: a host without a rank among lines with ranks",
}


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:20])
def test_a_line_that_is_wrong_is_named(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hostfile.parse_hostfile(text, "hosts")
    assert BROKEN[text] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_all_wrong_lines_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^hosts:1: .*; also wrong: hosts:2, hosts:4$"):
        hostfile.parse_hostfile("a:x\nb slot=1\nc\nd foo=1", "hosts")


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "utf16").write_bytes("a slots=2\n".encode("utf-16"))
    (tmp_path / "nul").write_bytes(b"a\0b\n")
    (tmp_path / "latin").write_bytes(b"a\nh\xf6st\n")
    cases = {
        "pipe": "is a pipe, not a regular file",
        "loop": "cannot be read",
        "utf16": "contains NUL bytes or is UTF-16",
        "nul": "contains NUL bytes",
        "latin": "latin:2: is not UTF-8",
        ".": "is not a regular file",
        "nope": "no such file",
    }
    for name, words in cases.items():
        with pytest.raises((UsageError, ConfigError)) as caught:
            hostfile.read_hostfile(str(tmp_path / name))
        assert words in str(caught.value)
    for device in ("/dev/zero", "/dev/null", "/dev/stdin"):
        with pytest.raises(PdrunError):
            hostfile.read_hostfile(device)


def test_hostile_files_take_little_time_and_memory(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    texts = (
        "a" * (7 << 20),
        "a slots=1\n" * by_tier(5_000, 100_000),
        "n[1-65536]\n",
        "/*" * (3 << 20),
        "\n".join(f"n{number}" for number in range(by_tier(3_000, 66_000))),
        "x" * (9 << 20),
        "rank 0=a\n" * by_tier(5_000, 20_000),
    )
    tracemalloc.start()
    begin = time.process_time()
    for text in texts:
        path.write_text(text)
        try:
            assert len(hostfile.read_hostfile(str(path))) <= 65_536
        except ConfigError as error:
            assert len(str(error)) < 500
    taken, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 60  # seconds of CPU, while memory is traced
    assert peak < 400 << 20


def test_standard_input_is_read_with_a_limit() -> None:
    hosts = hostfile.read_hostfile("-", lambda limit: b"a slots=2\nb slots=2\n")
    assert said(hosts) == ["a:2", "b:2"]
    with pytest.raises(ConfigError, match="standard input: is larger"):
        hostfile.read_hostfile("-", lambda limit: b"a" * limit)


LINES = st.lists(st.text(alphabet="ab1[]-,:@= slotrank^#/*\t\"'$;", max_size=20), max_size=8)


@given(LINES)
def test_anything_is_read_or_refused(lines: list[str]) -> None:
    try:
        found = hostfile.parse_hostfile("\n".join(lines), "hosts")
    except ConfigError as error:
        assert error.where.startswith("hosts")
        return
    assert found
    assert len({host.name for host in found}) == len(found)
