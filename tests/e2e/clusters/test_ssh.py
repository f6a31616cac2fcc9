"""
`--hosts` over real ssh between hosts in namespaces: what arrives, what comes back, and what is
left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import venv
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.clusters.conftest import Cluster, until
from tests.lib.netns_hosts import Hosts, run
from tests.lib.tiers import thorough

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.xdist_group("hosts")]

ALL = ("pdrun", "--hosts", "h1,h2,h3")
SLEEP = (
    "import os, time\nopen(f'{os.environ[\"RANK\"]}.up', 'w').close()\nwhile True:"
    " time.sleep(0.05)\n"
)
NASTY = [
    "",
    " ",
    "a b",
    "  lead and trail  ",
    "'",
    '"',
    "\"'\"'",
    "$HOME",
    "${PATH}",
    "$(touch ran)",
    "`touch ran`",
    "\\",
    "\\n",
    "a\nb\n",
    "\t",
    "*",
    "?",
    "[a-z]",
    "{a,b}",
    "~",
    "~root",
    "!",
    "!!",
    "a!b",
    "#",
    ";touch ran",
    "&",
    "|",
    "<",
    ">",
    "%s",
    "=",
    "-",
    "--",
    "-x",
    "--help",
    '{"a": [1, "two", null], "b": "\\u00e9"}',
    "é",
    "日本語",
    "🙂",
    "\x01\x7f\x1b[31m",
    "\u2028",
    b"\xff\xfe not utf-8".decode("utf-8", "surrogateescape"),
    "x" * 20000,
]


def up(cluster: Cluster, ranks: int) -> None:
    until(
        lambda: all((cluster.folder / f"{rank}.up").exists() for rank in range(ranks)),
        "all workers run",
    )


def test_arguments_variables_and_folder_arrive_byte_for_byte(cluster: Cluster) -> None:
    script = cluster.script(
        "import json, os, sys\ndata = {'argv': [os.fsencode(a).hex() for a in sys.argv[1:]], 'cwd':"
        " os.getcwd(),\n        'host': os.uname().nodename, 'exe': sys.executable, 'pwd':"
        " os.environ['PWD'],\n        'env': {k: os.fsencode(v).hex() for k, v in"
        " os.environ.items() if k.startswith('FUZZ')}}\njson.dump(data,"
        " open(f\"{os.environ['RANK']}.json\", 'w'))\n"
    )
    fuzz = {f"FUZZ_{index}": text for index, text in enumerate(NASTY)}
    other = {"SECRET_THING": "stays here"}
    code, _, err = cluster.run(*ALL, "--forward", "FUZZ_*", script, *NASTY, env={**fuzz, **other})
    assert code == 0, err
    for rank, host in enumerate(("h1", "h2", "h3")):
        data = json.loads((cluster.folder / f"{rank}.json").read_text())
        assert data["argv"] == [os.fsencode(text).hex() for text in NASTY]
        assert data["env"] == {name: os.fsencode(text).hex() for name, text in fuzz.items()}
        assert (data["host"], data["cwd"], data["pwd"]) == (
            host,
            str(cluster.folder),
            str(cluster.folder),
        )
        assert data["exe"] == sys.executable
    assert not (cluster.folder / "ran").exists() and not Path("/root/ran").exists()


def test_only_what_is_forwarded_goes_along(cluster: Cluster) -> None:
    script = cluster.script(
        "import os\nprint(os.uname().nodename, os.environ.get('MINE'),"
        " os.environ.get('PDRUN_TOKEN'))\n"
    )
    code, out, err = cluster.run("pdrun", "--hosts", "h2", script, env={"MINE": "here"})
    assert (code, out) == (0, "h2 None None\n"), err
    code, out, _ = cluster.run(
        "pdrun", "--hosts", "h2", "--forward", "MINE", script, env={"MINE": "here"}
    )
    assert (code, out) == (0, "h2 here None\n")
    code, _, err = cluster.run("pdrun", "--hosts", "h2", "--forward", "MNIE", script)
    assert (code, err) == (
        2,
        "pdrun: error: --forward: MNIE is not set; set it, or use --env NAME=VALUE\n",
    )


def test_ranks_follow_the_list_and_counts_the_hosts(cluster: Cluster) -> None:
    script = cluster.script(
        "import os\nprint('at', os.environ['RANK'], os.uname().nodename, os.environ['LOCAL_RANK'],"
        " os.environ['WORLD_SIZE'])\n"
    )
    code, out, err = cluster.run("pdrun", "--hosts", "h3:1,h1:2,h2:3", script)
    assert code == 0, err
    found = re.findall(r"at (\d) (h\d) (\d) (\d)", out)
    assert sorted(found) == [
        ("0", "h3", "0", "6"),
        ("1", "h1", "0", "6"),
        ("2", "h1", "1", "6"),
        ("3", "h2", "0", "6"),
        ("4", "h2", "1", "6"),
        ("5", "h2", "2", "6"),
    ]
    assert f"6 workers on 3 nodes, cpu, logs in pdrun-logs/{script.removesuffix('.py')}" in err


def test_lines_stay_whole_and_none_is_lost(cluster: Cluster) -> None:
    script = cluster.script(
        "import os, sys\nfor i in range(4000): print(f\"<{os.environ['RANK']}:{i}:\" + 'x' * 60 +"
        " '>')\nprint('to stderr', os.environ['RANK'], file=sys.stderr)\n"
    )
    code, out, err = cluster.run(*ALL, "--devices", "2", script)
    assert code == 0, err
    found = Counter(
        int(match[1]) for match in re.finditer(r"^h\d:\d\| <(\d):\d+:x{60}>$", out, re.MULTILINE)
    )
    assert found == dict.fromkeys(range(6), 4000)
    assert len(out.splitlines()) == 24000
    assert len(re.findall(r"^h\d:\d\| to stderr \d$", err, re.MULTILINE)) == 6


@pytest.mark.parametrize(
    ("death", "code"),
    [("sys.exit(42)", 42), thorough("os.kill(os.getpid(), signal.SIGSEGV)", 139)],
)
def test_a_workers_end_on_another_host_is_the_jobs(cluster: Cluster, death: str, code: int) -> None:
    script = cluster.script(
        "import os, signal, sys, time\nif os.environ['RANK'] == '2':\n    time.sleep(0.2); "
        + death
        + "\ntime.sleep(60)\n"
    )
    found, _, err = cluster.run(*ALL, script)
    assert found == code, err
    assert "rank 2 on h3" in err
    cluster.nothing_left()


def test_a_killed_front_leaves_nothing_anywhere(cluster: Cluster) -> None:
    job = cluster.start(*ALL, cluster.script(SLEEP))
    up(cluster, 3)
    assert {name for name, _, _ in cluster.hosts.of_pdrun()} == {"h1", "h2", "h3"}
    os.kill(cluster.inside(job), signal.SIGKILL)
    job.wait()
    cluster.nothing_left(10.0)


@pytest.mark.parametrize(
    "victim", [thorough("pdrun.launcher.launch.agent_main"), "pdrun.launcher.launch.remote_main"]
)
def test_a_killed_agent_ends_the_job_everywhere(cluster: Cluster, victim: str) -> None:
    job = cluster.start(*ALL, "--grace", "2", cluster.script(SLEEP))
    up(cluster, 3)
    pid = next(
        pid
        for _, pid, command in cluster.hosts.of_pdrun()
        if victim in command and _on(cluster, pid, "h3")
    )
    os.kill(pid, signal.SIGKILL)
    code = job.wait(40)
    assert code != 0
    what = (
        "the agent of h3 was killed by SIGKILL"
        if "agent" in victim
        else "the connection to h3 was lost"
    )
    assert what in job.err
    assert "h3" in job.err and "Traceback" not in job.err
    cluster.nothing_left(10.0)


def _on(cluster: Cluster, pid: int, name: str) -> bool:
    return any(pid == one for one, _ in cluster.hosts.processes(name))


@pytest.mark.parametrize(("number", "code"), [thorough(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_the_workers_and_give_the_code(
    cluster: Cluster, number: int, code: int
) -> None:
    script = cluster.script(
        "import os, signal, sys, time\n"
        "def saved(n, f):\n    open(f\"{os.environ['RANK']}.saved\", 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, saved); signal.signal(signal.SIGINT, saved)\n" + SLEEP
    )
    job = cluster.start(*ALL, script)
    up(cluster, 3)
    os.kill(cluster.inside(job), number)
    assert job.wait(30) == code, job.err
    assert all((cluster.folder / f"{rank}.saved").exists() for rank in range(3))
    cluster.nothing_left()


def test_a_host_that_loses_power_ends_the_job(tmp_path: Path, three: Hosts) -> None:
    from tests.lib import netns_hosts as made

    folder = tmp_path / "own"
    folder.mkdir()
    with made.hosts(folder, 3) as own:
        cluster = Cluster(own, tmp_path)
        job = cluster.start(*ALL, "--grace", "1", cluster.script(SLEEP))
        up(cluster, 3)
        own.power_off("h2")
        assert job.wait(60) != 0
        assert "h2" in job.err
        cluster.nothing_left()


# What is wrong is told before anything starts
# -------------------------------------------------------------------------


def config(three: Hosts) -> None:
    """Names that lead to failures of every kind; h2 and h3 stay as they are."""
    ssh = three.folder / "ssh"
    if not (ssh / "wrong").exists():
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / "wrong"))
        (ssh / "changed").write_text(f"altered {(ssh / 'wrong.pub').read_text()}")
    (ssh / "config").write_text(
        f"Host refused\n  HostName {three.address('h2')}\n  Port 2222\n"
        f"Host silent\n  HostName {three.net}.77\n  ConnectTimeout 2\n"
        "Host nokey\n  HostName h2\n  IdentityFile ~/.ssh/wrong\n  IdentitiesOnly yes\n"
        "Host stranger\n  HostName h2\n  HostKeyAlias stranger\n"
        "Host altered\n  HostName h2\n  UserKnownHostsFile ~/.ssh/changed\n  HostKeyAlias altered\n"
    )


def test_every_host_that_fails_is_named_with_its_reason_and_nothing_starts(
    cluster: Cluster,
) -> None:
    config(cluster.hosts)
    names = "h2,refused,nowhere.invalid,nokey,stranger,altered,h3,silent"
    code, out, err = cluster.run("pdrun", "--hosts", names, cluster.script("open('ran', 'w')\n"))
    assert (code, out) == (69, "")
    for name, text in {
        "refused": "its ssh port is closed (ssh: connect to host",
        "nowhere.invalid": "its name cannot be resolved",
        "nokey": "it refuses the key",
        "stranger": "its host key is unknown on this machine",
        "altered": "its host key has changed",
        "silent": "it cannot be reached",
    }.items():
        assert re.search(rf"^pdrun: {re.escape(name)}: {re.escape(text)}", err, re.MULTILINE), err
    assert "pdrun: h2:" not in err and "pdrun: h3:" not in err
    assert (
        "6 of 8 host(s) cannot serve (refused, nowhere.invalid, nokey, stranger, altered, silent);"
        " nothing was started" in err
    )
    assert not (cluster.folder / "ran").exists() and not (cluster.folder / "pdrun-logs").exists()
    cluster.nothing_left(5.0)


def test_an_interpreter_that_is_not_there(cluster: Cluster) -> None:
    script = cluster.script("open('ran', 'w')\n")
    code, _, err = cluster.run("pdrun", "--hosts", "h2,h3", "--python", "/no/such/python", script)
    assert code == 69
    assert (
        err.count("there is no /no/such/python on this host; set the interpreter with --python")
        == 2
    )
    code, _, err = cluster.run(
        "pdrun", "--hosts", "h2,h3", "--python", "/bin/python$(touch ran)", script
    )
    assert code == 2 and "cannot be passed to the shell of another host" in err
    assert not (cluster.folder / "ran").exists()


def test_a_folder_that_is_not_there(cluster: Cluster) -> None:
    code, _, err = cluster.run("pdrun", "--hosts", "h2,h3", "--chdir", "/no/such/folder", "x.py")
    assert code == 69
    assert (
        err.count("cannot change to the folder /no/such/folder there: No such file or directory")
        == 2
    )


@pytest.mark.parametrize(
    "listed",
    [
        "-oProxyCommand=touch${IFS}ran",
        "h2,-oProxyCommand=touch ran",
        "$(touch ran)",
        "h2;touch ran",
        "`touch ran`",
        "h2 -oProxyCommand=x",
        "h2\n-oProxyCommand=touch ran",
    ],
)
@pytest.mark.parametrize("how", ["--hosts", "--hostfile"])
def test_names_that_are_no_names_are_refused_and_nothing_is_run(
    cluster: Cluster, how: str, listed: str
) -> None:
    (cluster.folder / "hosts").write_text(listed.replace(",", "\n") + "\n")
    traced = cluster.script("#!/bin/sh\ntouch called\n", "myssh")
    (cluster.folder / traced).chmod(0o755)
    given = listed if how == "--hosts" else "hosts"
    code, _, err = cluster.run(
        "pdrun", f"{how}={given}", "--ssh", str(cluster.folder / traced), cluster.script("", "x.py")
    )
    assert code in (2, 78), err
    assert len(err.splitlines()) == 1 and err.startswith("pdrun: error: ")
    assert not (cluster.folder / "ran").exists() and not (cluster.folder / "called").exists()


def test_this_machine_needs_no_ssh(cluster: Cluster) -> None:
    script = cluster.script(
        "import os\nprint(os.uname().nodename, 'SSH_CONNECTION' in os.environ,"
        " os.environ['WORLD_SIZE'])\n"
    )
    refuse = cluster.script("#!/bin/sh\nexit 99\n", "myssh")
    (cluster.folder / refuse).chmod(0o755)
    code, out, err = cluster.run(
        "pdrun", "--hosts", "h1", "--ssh", str(cluster.folder / refuse), script
    )
    assert (code, out) == (0, "h1 False 1\n"), err


def test_from_a_machine_that_is_no_host_of_the_job(cluster: Cluster) -> None:
    script = cluster.script("import os\nprint(os.environ['RANK'], os.uname().nodename)\n")
    code, out, err = cluster.run("pdrun", "--hosts", "h3,h2", "--prefix", "none", script, at="h1")
    assert (code, sorted(out.splitlines())) == (0, ["0 h3", "1 h2"]), err


def test_the_job_is_in_the_registry_of_the_machine_that_started_it(cluster: Cluster) -> None:
    job = cluster.start("pdrun", "--hosts", "h2,h3", "--grace", "2", cluster.script(SLEEP))
    up(cluster, 2)
    code, out, err = cluster.run("pdrun", "status", "--json")
    assert code == 0, err
    assert json.loads(out)["state"] == "running"
    assert cluster.run("pdrun", "stop")[0] == 0
    assert job.wait(30) == 143


def test_a_dry_run_shows_every_command_and_reaches_nobody(cluster: Cluster) -> None:
    code, out, _ = cluster.run(
        "pdrun",
        "--hosts",
        "h1,alice@h9:4",
        "--forward",
        "A_*",
        "--ssh-opts",
        "-p 2222",
        "--dry-run",
        "x.py",
        "a b",
        env={"A_NAME": "v", "A_TOKEN": "hide"},
    )
    assert code == 0
    assert "variables  A_NAME=v A_TOKEN=(hidden)" in out
    assert f"this machine, no ssh: {sys.executable} -P -m pdrun.launcher.launch.remote_main" in out
    assert re.search(
        r"  ssh -p 2222 -o BatchMode=yes .* -T -l alice -- h9 'exec \S+ -P -m"
        r" pdrun.launcher.launch.remote_main'\n",
        out,
    )
    assert "h9: node rank 1, 4 worker(s)" in out


# --ship -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without pdrun, pyzmq or psutil."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def test_pdrun_goes_along_where_it_is_lacking(cluster: Cluster, bare: Path) -> None:
    script = cluster.script(
        "import os, sys, pdrun\nprint(os.environ['RANK'], pdrun.init(group=False).world_size,"
        " sys.executable, pdrun.__file__)\n"
    )
    code, _, err = cluster.run("pdrun", "--hosts", "h2,h3", "--python", str(bare), script)
    assert code == 69
    assert err.count(f"{bare} has no pdrun there; install pdrun on this host, or add --ship") == 2
    cache = {"XDG_CACHE_HOME": str(cluster.folder / "cache")}
    for _ in range(2):  # the second time it is there already
        code, out, err = cluster.run(
            "pdrun",
            "--hosts",
            "h2,h3",
            "--python",
            str(bare),
            "--ship",
            "--prefix",
            "none",
            script,
            env=cache,
        )
        assert code == 0, err
        lines = sorted(out.splitlines())
        assert [line.split()[:3] for line in lines] == [
            ["0", "2", str(bare)],
            ["1", "2", str(bare)],
        ]
        assert "/.cache/pdrun/ship/" in lines[0].split()[3]
    home = Path(lines[0].split()[3]).parents[3]
    assert home.stat().st_mode & 0o077 == 0 and home.name == "ship"
    assert not list(home.glob(".draft*"))
    shutil.rmtree(home)
