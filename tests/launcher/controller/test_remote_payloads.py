"""
What goes over a connection and onto a command line, without a host: frames, payloads, bundles.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import ConfigError, RendezvousError, UsageError
from pdrun.launcher.adapters import mpirun_command as mpicommand
from pdrun.launcher.adapters import ssh_command as sshcommand
from pdrun.launcher.adapters.mpirun_command import MpirunProgram, identify_mpirun
from pdrun.launcher.common.signals import STOP_SIGNALS
from pdrun.launcher.config.spec import JobSpec, Program
from pdrun.launcher.controller import bundle, frames, payload
from pdrun.launcher.controller.external import ExternalJob
from pdrun.launcher.controller.frames import FrameReader, NonblockingWriter, encode_frame
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.plan import external as through
from pdrun.launcher.plan.hosts import select_forwarded
from pdrun.launcher.plan.model import ExternalLaunch

ANY_TEXT = st.text(
    st.characters(), max_size=40
)  # lone surrogates too: bytes of a file name that are no UTF-8


# Frames
# ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from([b"o", b"e", b"X"]), st.binary(max_size=300))),
    st.binary(max_size=50),
    st.integers(0),
)
def test_frames_survive_any_split_of_the_stream(
    sent: list[tuple[bytes, bytes]], noise: bytes, seed: int
) -> None:
    data = noise + frames.GREETING + b"".join(encode_frame(kind, body) for kind, body in sent)
    chance, found, cut = random.Random(seed), list[tuple[bytes, bytes]](), 0
    reader = FrameReader()
    while cut < len(data):
        size = chance.randint(1, 40)
        found += reader.feed(data[cut : cut + size])
        cut += size
    assert found == sent
    assert reader.is_greeted and reader.noise == noise


@given(st.binary(max_size=2000))
def test_noise_never_breaks_the_reader(data: bytes) -> None:
    try:
        list(FrameReader(is_greeted=True).feed(data))
    except RendezvousError:
        pass
    list(FrameReader().feed(data))


def test_other_programs_on_the_connection_are_refused() -> None:
    with pytest.raises(RendezvousError, match="something other than pdrun writes"):
        list(FrameReader(is_greeted=True).feed(b"Welcome to this machine!"))
    with pytest.raises(RendezvousError, match="without a greeting"):
        list(FrameReader().feed(b"x" * (frames.MAX_NOISE_BYTES + 1)))
    with pytest.raises(ValueError):
        encode_frame(b"O", bytes(frames.MAX_FRAME_BYTES + 1))


def test_the_writer_never_blocks() -> None:
    read, write = os.pipe()
    writer = NonblockingWriter(write)
    data = os.urandom(1 << 20)
    began = time.monotonic()
    writer.put(data)
    assert len(writer) > 0 and time.monotonic() - began < 5
    got = b""
    while len(got) < len(data):
        got += os.read(read, 1 << 16)
        writer.flush()
    assert got == data and len(writer) == 0
    os.close(read)
    writer.put(b"not read")
    assert len(writer) == 0
    os.close(write)


@given(st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=5))
def test_a_payload_survives(env: dict[str, str]) -> None:
    data = {"env": env, "spec": "{}"}
    assert payload.decode(payload.encode(data)) == data


@pytest.mark.parametrize("text", ["", "x", "eJw=", "!!!!", "bm90IHpsaWI="])
def test_text_that_is_not_a_payload_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a payload"):
        payload.decode(text)


def test_a_payload_that_is_too_long_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="must fit in 122880"):
        payload.encode({"env": {"X": os.urandom(200_000).hex()}})


# ssh
# ------------------------------------------------------------------------------------------------


def test_the_command_of_a_connection() -> None:
    argv = sshcommand.build_ssh_argv(
        "ssh",
        ("-i", "key"),
        Host("h1", user="alice", port=2222),
        sshcommand.build_remote_command("/a b/python"),
    )
    assert argv[:3] == ("ssh", "-i", "key")
    assert argv[-7:] == (
        "-p",
        "2222",
        "-l",
        "alice",
        "--",
        "h1",
        "exec '/a b/python' -P -m pdrun.launcher.launch.remote_main",
    )
    assert "BatchMode=yes" in argv and argv.index("-i") < argv.index("BatchMode=yes")


@pytest.mark.parametrize("host", [Host("-oProxyCommand=touch x"), Host("h", user="-lroot")])
def test_nothing_that_ssh_takes_for_an_option(host: Host) -> None:
    with pytest.raises(UsageError, match="must not start with '-'"):
        sshcommand.build_ssh_argv("ssh", (), host, "true")


@pytest.mark.parametrize(
    "python", ["-c", "a'b", "a\nb", "$(x)", "a;b", "a`b`", "a\\b", "a!b", '"', ""]
)
def test_an_interpreter_that_a_shell_could_read_otherwise_is_refused(python: str) -> None:
    with pytest.raises(UsageError):
        sshcommand.check_python(python, where="--python")


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "csh", "tcsh", "fish"])
def test_login_shells_read_the_command_alike(shell: str, tmp_path: Path) -> None:
    import shutil

    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    python = tmp_path / "a folder" / "py%+@=thon"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    sshcommand.check_python(str(python), where="--python")
    for words in (("-c", "print(1)"), sshcommand.BOOTSTRAP_ARGS):
        command = sshcommand.build_remote_command(str(python), words)
        done = subprocess.run(
            [shell, "-c", command], input=b"cHJpbnQoMSk=\n", capture_output=True, timeout=60
        )
        assert done.stdout == b"1\n", (command, done.stderr)


@pytest.mark.parametrize("text", ["host", "'open", "-p 22 --", "-- h"])
def test_options_of_ssh_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        sshcommand.split_ssh_options(text, "--ssh-opts")
    assert sshcommand.split_ssh_options("-p 22 -o 'User=a b'", "--ssh-opts") == (
        "-p",
        "22",
        "-o",
        "User=a b",
    )


@pytest.mark.parametrize(
    ("code", "said", "what"),
    [
        (
            255,
            "ssh: Could not resolve hostname x: Name or service not known",
            "its name cannot be resolved",
        ),
        (255, "ssh: connect to host x port 22: Connection refused", "its ssh port is closed"),
        (255, "ssh: connect to host x port 22: Connection timed out", "cannot be reached"),
        (255, "ssh: connect to host x port 22: No route to host", "cannot be reached"),
        (255, "alice@x: Permission denied (publickey).", "refuses the key"),
        (
            255,
            (
                "No ED25519 host key is known for x and you have requested strict checking.\nHost"
                " key verification failed."
            ),
            "is unknown on this machine",
        ),
        (
            255,
            (
                "@@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification"
                " failed."
            ),
            "has changed",
        ),
        (
            255,
            "kex_exchange_identification: Connection closed by remote host",
            "closed the connection",
        ),
        (255, "command-line: line 0: Bad configuration option: foo", "refuses the options"),
        (255, "", "no message"),
        (127, "bash: line 1: exec: /x/python: not found", "there is no /x/python on this host"),
        (126, "permission denied: /x/python", "/x/python cannot be executed on this host (perm"),
        (
            1,
            (
                "/x/python: Error while finding module specification for"
                " 'pdrun.launcher.launch.remote_main' (ModuleNotFoundError: No module named"
                " 'pdrun')"
            ),
            "has no pdrun there",
        ),
        (2, "Unknown option: -P\nusage: /x/python [option] ...", "older than Python 3.11"),
        (
            1,
            "remote side: pyzmq and psutil must be installed there (zmq is missing; ...)",
            "cannot be copied",
        ),
        (9, "strange", "ended with exit code 9 (strange)"),
        (None, "", "did not answer in time"),
    ],
)
def test_what_failures_mean(code: int | None, said: str, what: str) -> None:
    assert what in sshcommand.explain_failure(Host("x"), code, said, "/x/python")[0]


@pytest.mark.parametrize(
    ("code", "said", "hint"),
    [
        (255, "", "try: ssh -i k -p 2222 -o BatchMode=yes me@x true"),
        (255, "Host key verification failed.", "log in once with: ssh -i k -p 2222 me@x"),
        (255, "REMOTE HOST IDENTIFICATION HAS CHANGED", "ssh-keygen -R '[x]:2222'"),
        (None, "", "ssh -i k -p 2222 me@x true. If not, a start-up file there"),
    ],
)
def test_hints_have_the_command_that_reaches_the_host(
    code: int | None, said: str, hint: str
) -> None:
    host = Host("x", user="me", port=2222)
    assert hint in sshcommand.explain_failure(host, code, said, "python", ("ssh", "-i", "k"))[1]


THROUGH = "Connection closed by UNKNOWN port 65535"


@pytest.mark.parametrize(
    ("said", "what", "hint"),
    [
        (
            f"ssh: connect to host b port 22: Connection refused\r\n{THROUGH}",
            "its jump host, me@b: its ssh port is closed (ssh: connect to host b",
            "",
        ),
        (
            f"ssh: Could not resolve hostname b: Name or service not known\n{THROUGH}",
            "its jump host, me@b: its name cannot be resolved (ssh: Could not",
            "",
        ),
        (
            f"me@b: Permission denied (publickey).\n{THROUGH}",
            "its jump host, me@b: it refuses the key (me@b: Permission denied",
            "ssh -o BatchMode=yes me@b true",
        ),
        (
            "channel 0: open failed: connect failed: Connection refused\n"
            f"stdio forwarding failed\n{THROUGH}",
            "its ssh port is closed",
            "",
        ),
        ("x: Permission denied (publickey).", "it refuses the key (x: Per", "BatchMode=yes x true"),
    ],
)
def test_a_failure_on_the_way_is_that_of_the_jump_host(said: str, what: str, hint: str) -> None:
    found = sshcommand.explain_failure(Host("x"), 255, said, "python", jump="me@b")
    assert found[0].startswith(what) and hint in found[1]


def test_not_more_connections_at_once_than_the_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    A program in place of ssh notes when it begins and ends; 30 hosts go through a window of 4.
    All fail alike, which is one message.
    """
    from pdrun.launcher.config.spec import ClusterOptions, JobSpec, Program, RemoteOptions
    from pdrun.launcher.controller.host_connector import HostConnector
    from pdrun.launcher.plan.hosts import plan_hosts
    from pdrun.launcher.plan.model import Facts
    from pdrun.topology import CpuSet

    fake = tmp_path / "ssh"
    fake.write_text(
        f"#!/bin/sh\necho + >> {tmp_path}/log\nsleep 0.1\necho - >> {tmp_path}/log\necho no >&2;"
        " exit 255\n"
    )
    fake.chmod(0o755)
    hosts = tuple(Host(f"n{number}") for number in range(30))
    spec = JobSpec(
        Program("script", "x.py"),
        place=ClusterOptions(hosts=hosts),
        reach=RemoteOptions(ssh=str(fake)),
    )
    facts = Facts(
        "here", {}, str(tmp_path), sys.executable, "3.11", "", "0", CpuSet((0,)), (), (), 0
    )
    plan = plan_hosts(spec, facts, {}, "job", ())
    with pytest.raises(RendezvousError, match=r"30 of 30 host\(s\) cannot serve"):
        HostConnector(plan, max_parallel=4).connect_all()
    at_once = most = 0
    for mark in (tmp_path / "log").read_text().split():
        at_once += 1 if mark == "+" else -1
        most = max(most, at_once)
    assert most == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pdrun: n0 and 29 more hosts (n[1-29]): ssh failed (no); try: ")


# Variables
# ------------------------------------------------------------------------------------------------


def test_nodes_have_names_of_their_own() -> None:
    from pdrun.launcher.plan.hosts import name_hosts

    hosts = [Host("n.a"), Host("n_a"), Host("fd00::1"), Host("fd00--1"), Host("n.a-1")]
    names = [name for _, name in name_hosts(hosts)]
    assert len(set(names)) == len(hosts)


def test_what_is_forwarded() -> None:
    environ = {
        "NCCL_A": "1",
        "NCCL_B": "2",
        "OTHER": "3",
        "PDRUN_TOKEN": "x",
        "OMPI_COMM_WORLD_RANK": "0",
        "RANK": "1",
    }
    assert select_forwarded(("NCCL_*", "OTHER"), environ, "--forward") == {
        "NCCL_A": "1",
        "NCCL_B": "2",
        "OTHER": "3",
    }
    assert set(select_forwarded(("*",), environ, "--forward")) == {"NCCL_A", "NCCL_B", "OTHER"}
    assert select_forwarded(("NONE_*",), environ, "--forward") == {}
    for name in ("MISSING", "PDRUN_TOKEN", "RANK"):
        with pytest.raises(UsageError):
            select_forwarded((name,), environ, "--forward")


# mpirun
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "family"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to ...", "openmpi4"),
        ("mpirun.openmpi (OpenRTE) 4.1.4\n", "openmpi4"),
        ("mpirun (Open MPI) 5.0.7\n", "openmpi5"),
        ("prterun (PRRTE) 3.0.8\n", "openmpi5"),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", "mpich"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307 (id: d82b3071db)\n",
            "intelmpi",
        ),
    ],
)
def test_which_mpirun_it_is(said: str, family: str) -> None:
    assert identify_mpirun("/usr/bin/mpirun", said).family == family


def test_what_is_no_mpirun() -> None:
    assert identify_mpirun("/opt/ibm/jsrun", "").family == "jsrun"
    with pytest.raises(ConfigError, match="is not a known mpirun"):
        identify_mpirun("/bin/true", "true (GNU coreutils) 9.1")


HOSTS = (Host("a.x.net"), Host("b"))
TASK = ("python", "-m", "t")


@pytest.mark.parametrize(
    ("family", "words"),
    [
        (
            "openmpi4",
            (
                "-np 2 --host a.x.net:1,b:1 --map-by ppr:1:node --bind-to none --mca"
                " orte_keep_fqdn_hostnames 1 --allow-run-as-root -x A -x B --more python -m t"
            ),
        ),
        (
            "openmpi5",
            (
                "-np 2 --host a.x.net:1,b:1 --map-by ppr:1:node --bind-to none --prtemca"
                " prte_keep_fqdn_hostnames 1 --allow-run-as-root -x A -x B --more python -m t"
            ),
        ),
        ("mpich", "-n 2 -hosts a.x.net,b -ppn 1 -disable-auto-cleanup --more python -m t"),
        ("intelmpi", "-n 2 -hosts a.x.net,b -ppn 1 --more python -m t"),
        ("jsrun", "-n 2 -r 1 -a 1 -c ALL_CPUS -g ALL_GPUS -b none -E A -E B --more python -m t"),
    ],
)
def test_the_words_of_each_mpirun(family: mpicommand.MpiFamily, words: str) -> None:
    found = mpicommand.build_mpirun_command(
        MpirunProgram("mpirun", family), HOSTS, 2, ("A", "B"), ("--more",), TASK, root=True
    )
    assert " ".join(found) == f"mpirun {words}"
    assert "--allow-run-as-root" not in mpicommand.build_mpirun_command(
        MpirunProgram("m", family), HOSTS, 2, (), (), TASK, root=False
    )
    assert mpicommand.mpirun_environment(MpirunProgram("m", family)) == (
        {"I_MPI_PIN": "0"} if family == "intelmpi" else {}
    )


def test_hosts_that_an_mpirun_does_not_support() -> None:
    with pytest.raises(UsageError, match="has a port"):
        mpicommand.build_mpirun_command(
            MpirunProgram("m", "openmpi4"), (Host("a", port=22),), 1, (), (), TASK, root=False
        )
    with pytest.raises(UsageError, match="has a user"):
        mpicommand.build_mpirun_command(
            MpirunProgram("m", "mpich"), (Host("a", user="u"),), 1, (), (), TASK, root=False
        )
    found = mpicommand.build_mpirun_command(
        MpirunProgram("m", "openmpi4"), (Host("a", user="u"),), 1, (), (), TASK, root=False
    )
    assert "u@a:1" in found


def test_a_tasks_place_is_its_hosts() -> None:
    assert through.find_node_rank(HOSTS, ("b",), 0) == 1
    assert through.find_node_rank(HOSTS, (), 1) == 1
    assert through.find_node_rank(HOSTS, ("a.x.net", "b"), 1) == 1


# --ship -----------------------------------------------------------------------------------------


def test_the_bundle_is_this_installation_and_reproducible() -> None:
    load = bundle.build_bundle()
    assert load == bundle.build_bundle()
    names = set(zipfile.ZipFile(BytesIO(load.archive)).namelist())
    assert {
        "pure/pdrun/__init__.py",
        "pure/pdrun/launcher/launch/remote_main.py",
        "pure/pdrun/rendezvous/membership/machine.py",
    } <= names
    assert any(name.startswith("compiled/zmq/") for name in names) and not any(
        "__pycache__" in name for name in names
    )
    assert not any(name.startswith("/") or ".." in name.split("/") for name in names)


def test_templates_are_shell_that_parses() -> None:
    folder = Path(__file__).parents[3] / "templates"
    for name in ("job.sbatch", "job.pbs", "job.lsf"):
        text = (folder / name).read_text()
        done = subprocess.run(
            ["bash", "-n", str(folder / name)], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        head = [line for line in text.splitlines() if line.startswith("#")]
        mark = {"job.sbatch": "#SBATCH -", "job.pbs": "#PBS -", "job.lsf": "#BSUB -"}[name]
        assert sum(line.startswith(mark) for line in head) >= 4
        first = next(
            number
            for number, line in enumerate(text.splitlines())
            if line and not line.startswith("#")
        )
        assert not any(line.startswith(mark) for line in text.splitlines()[first:]), (
            "directives end at the first command"
        )
        assert text.rstrip().endswith("exec pdrun --devices auto train.py")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("/no/such/mpirun",), r"/no/such/mpirun: cannot be started: No such file"),
        (
            ("/bin/true", "x" * (1 << 18)),
            r"/bin/true: cannot be started: Argument list too long; put long",
        ),
    ],
)
def test_a_launcher_that_cannot_be_started_is_named_and_signals_are_as_before(
    argv: tuple[str, ...], message: str
) -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    plan = SimpleNamespace(
        external_launch=ExternalLaunch("mpirun", "", "", argv, {}, {}),
        spec=JobSpec(Program("script", "x.py")),
    )
    job = ExternalJob(plan, SimpleNamespace(exit_code=None), {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        job.run()
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
