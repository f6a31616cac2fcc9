"""
Bad input: one clear line that names the place, the right exit code, at once, and nothing started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.cli.conftest import Outcome

Call = Callable[..., Outcome]


def refused(outcome: Outcome, code: int, *words: str) -> None:
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("pdrun: error: ")
    assert outcome.out == ""
    for word in words:
        assert word in lines[0]
    assert outcome.code == code, lines[0]


def typed(item: object) -> str:
    """Name a case by what was typed."""
    return ascii(" ".join(item)[:40]) if isinstance(item, (list, dict)) else ""


WORDS = [
    # numbers: ASCII digits only, in range
    (["--nnodes", "0"], "--nnodes: '0' is below 1"),
    (["--nnodes", "-1"], "'-1' is below 1"),
    (["--nnodes", "3:2"], "larger number first"),
    (["--nnodes", "1:"], "'1:' lacks a number; write MIN:MAX, as 2:4"),
    (["--nodes", ":"], "':' lacks a number"),
    (["--nnodes", "1:2:3"], "'2:3' is not a whole number"),
    (["--nodes", "4:1"], "write 1:4"),
    (["--nodes", "2", "--grow", "5"], "applies to elastic jobs only"),
    (["--restart-on", "0"], "not an exit code of a failure"),
    (["--restart-on", "3"], "applies to restarts only, and the job has none; add --max-restarts N"),
    (["--no-restart-on", "3"], "applies to restarts only"),
    (["--restart-window", "1h"], "applies to restarts only"),
    (["--backoff", "1s"], "applies to restarts only"),
    (
        ["--launcher", "ssh"],
        "ssh needs a list of hosts; add --hosts a,b or --hostfile FILE",
    ),
    (["--hostfile", "nope"], "--hostfile: no such file 'nope'"),
    (["--hostfile", "."], "--hostfile .: is not a regular file"),
    (["--no-restart-on", "SIGKIL"], "not an exit code of a failure"),
    (["--on-scheduler-loss", "restart"], "not one of wait"),
    (["--hang-timeout", "0"], "not between 0 and a year"),
    (["--nodes", "\uff11\uff12"], "is not a whole number"),
    (["--nodes", "1_0"], "'1_0' is not a whole number"),
    (["--nodes", " 5 "], "' 5 ' is not a whole number"),
    (["--nodes", "0x10"], "'0x10'"),
    (["--nodes", "1e3"], "'1e3'"),
    (["--nodes", "1" + "0" * 20], "is above"),
    (["--nodes", "nan"], "'nan'"),
    (["--nodes", ""], "--nodes: is empty; a variable of the shell in it may not be set"),
    (
        ["-rdzv_backend=c10d"],
        "-r: must be LOCAL_RANK:0-3, got 'dzv_backend=c10d'; did you mean '--rdzv_backend'?",
    ),
    (["--devices", "gpuu"], "neither a number nor 'auto'"),
    (["--nproc-per-node", "gpuu"], "did you mean 'gpu'?"),
    (["--nproc-per-node", "0"], "'0' is below 1"),
    (
        ["--node-rank", "5", "--nnodes", "2"],
        "must be 0 to 1 (--nnodes 2), got 5",
    ),
    (["--node-rank", "-1"], "'-1' is below 0"),
    # addresses
    (
        ["--nnodes", "2", "--master-addr", "h", "--master-port", "0"],
        "--master-port: 0 is a different port on every node",
    ),
    (["--master-addr", "h", "--master-port", "65536"], "'65536' is not a port"),
    (["--master-addr", "h", "--master-port", "-1"], "'-1' is not a port"),
    (["--master-addr", "h", "--master-port", "abc"], "'abc' is not a port"),
    (["--master-addr", ""], "--master-addr: is empty; a variable of the shell"),
    (["--nnodes", "2", "--master-port", "29500"], "--master-port: needs a host"),
    (["--scheduler", "host:1:2"], "several colons"),
    (["--scheduler", "[::1"], "no closing bracket"),
    (["--scheduler", "host"], "has no port"),
    (["--scheduler", "127.1:99"], "'127.1' is neither"),
    (["--scheduler", "0177.0.0.1:99"], "'0177.0.0.1' is neither"),
    (["--scheduler", "tcp://host:99"], "is a URL"),
    (["--master-addr", "http://host"], "is a URL"),
    (["--scheduler", "-oProxyCommand=x:99"], "is neither a host name"),
    (["--interface", "0.0.0.0"], "means all interfaces"),
    (["--interface", "eth0;reboot"], "neither an interface nor an address"),
    # torchrun's and msrun's own grammars
    (["--rdzv-conf", "a,b="], "must be KEY=VALUE, got 'a'"),
    (["--rdzv-conf", "=,=="], "must be KEY=VALUE, got '='"),
    (["--rdzv-conf", "timeout=3,timeout=4"], "'timeout' is given twice"),
    (["--rdzv-conf", "join_timeot=3"], "did you mean 'join_timeout'?"),
    (["--rdzv-conf", "join_timeout=nan"], "--rdzv-conf join_timeout: 'nan' is not a duration"),
    (["--rdzv-backend", "etcd"], "pdrun has its own rendezvous"),
    (["--tee", "4"], "must be LOCAL_RANK:0-3, got '4'"),
    (["--tee", "0:3,0:1"], "local rank 0 is given twice"),
    (["--redirects", "1:3"], "set --nproc-per-node to a number"),
    (["--run-path"], "is not supported: a script always runs"),
    (["--logs-specs", "x"], "is not supported"),
    (["--log-line-prefix-template", "${rank}: "], "use --prefix auto, rank or none"),
    (["--print-completion", "zsh"], "use pdrun completion install"),
    (["--standalone", "--nnodes", "2"], "--standalone contradicts"),
    (["--standalone", "--scheduler", "h:1"], "--standalone contradicts --scheduler h:1"),
    (["--standalone", "--serve"], "--standalone contradicts --serve"),
    (["--numa-binding", "exclusive"], "must be node, got 'exclusive'"),
    (["--worker_num", "4"], "4 workers cannot be divided into nodes of 8"),
    (["--join", "False"], "pdrun waits for its workers"),
    (["--join", "maybe"], "must be True or False"),
    (["--cluster_time_out", "-1"], "an unlimited wait is not supported"),
    (["--bind_core", '{"device1":["0-9"]}'], "must name device0, device1 ... in this order"),
    (["--bind_core", '{"device0":"0-9"}'], "must have a list of texts for each device"),
    (["--bind_core", "{}"], "must name device0"),
    (["--bind_core", "{0"], "--bind_core: is not JSON"),
    (["--bind_core", '{"device0":["0"]}', "--bind", "cores"], "contradicts --bind"),
    (["--bind_numa", "map.json"], "pdrun does not bind memory"),
    (["--bind", "0-3/3"], "CPU 3 is given to two workers"),
    (["--bind", "3-1"], "a range of CPUs that ends below its start"),
    (["--bind", "0/"], "or lists of CPUs, got '0/'"),
    (["--devices", "2", "--backend", "cpu", "--bind", "0"], "1 list of CPUs for 2 workers"),
    (["--devices", "1", "--backend", "cpu", "--bind", "99999"], "CPU 99999 is not one that"),
    (["--nodes", "2", "--devices", "1", "--local", "--bind", "0"], "simulated nodes share"),
    (
        ["--bind_core", "True", "--bind_numa", "True"],
        "--bind_numa True contradicts --bind_core True",
    ),
    (["--rank_table_file", "x.json"], "--rank_table_file: no such file 'x.json'"),
    (["--tail_worker_log", "a"], "'a' is not a rank"),
    (["--worker_log_name", "../x"], "is not a file name"),
    # names and values
    (["--job", "../../x"], "is not a name"),
    (["--job", "a/b"], "is not a name"),
    (["--job", "."], "is not a name"),
    (["--job", "x" * 300], "is not a name"),
    (["--job", "a\nb"], r"'a\nb' is not a name"),
    (["--job", "\U0001f600"], "is not a name"),
    (["--job", "-rf"], "is not a name"),
    (["--rdzv-id", "a b"], "is not a name"),
    (["--node-name", "a/b"], "is not a name"),
    (["--env", "FOO"], "has no '='"),
    (["--env", "=x"], "is not a variable's name"),
    (["--env", "A-B=x"], "is not a variable's name"),
    (["--env", "A=1", "--env", "A=2"], "given twice"),
    (["--env", "RANK=3"], "--env: RANK is set by pdrun for each worker"),
    (["--env", "MASTER_PORT=1"], "MASTER_PORT is set by pdrun"),
    (["--env", "TORCHELASTIC_X=1"], "TORCHELASTIC_X is set by pdrun"),
    (["--backend", "gpu"], "'gpu' is not one of auto, cpu"),
    (["--bind", "core"], "did you mean 'cores'?"),
    (["--show-ranks", "3-1"], "write the lower rank first"),
    (["--show-ranks", "0,,1"], "'' is not a rank"),
    (["--log-name", "{rnak}"], "{rnak} is not a field"),
    (["--log-name", "worker"], "is the same for every worker"),
    (["--log-name", "a/{rank}"], "is not a file name"),
    # times
    (["--start-timeout", "nan"], "'nan' is not a duration"),
    (["--start-timeout", "inf"], "'inf' is not a duration"),
    (["--grace", "-1"], "'-1' is not a duration"),
    (["--grace", "5 apples"], "'5 apples' is not a duration"),
    (["--time-limit", "0"], "is not between 0 and a year"),
    (["--time-limit", "1e9"], "is not a duration"),
    (["--max-restarts", "-1"], "'-1' is below 0"),
    # contradictions name both places
    (["--nodes", "2", "--nnodes", "3"], "--nnodes 3 contradicts --nodes 2"),
    (["--nodes", "2", "--nodes", "3"], "--nodes: given twice, as 2 and 3"),
    (["--serve", "--no-serve"], "--no-serve contradicts --serve"),
    (["--local", "--scheduler", "h:1", "--nodes", "2"], "--scheduler h:1 contradicts --local"),
    (["--nodes", "2", "--node-rank", "1", "--serve"], "--serve contradicts --node-rank 1"),
    (["--scheduler", "h:1", "--master-addr", "g"], "--master-addr g contradicts --scheduler h:1"),
    (["-m", "--no-python"], "contradicts"),
    (["--json"], "add --dry-run"),
    # options
    (["--nodez", "2"], "no such option --nodez; did you mean '--nodes'?"),
    (["--nproc"], "no such option --nproc"),
    (["--local=yes"], "does not take a value"),
    # logs
    (["--log-dir", "/proc/x"], "file system of the kernel"),
    (["--log-dir", ""], "--log-dir: is empty"),
    (["--log-dir", "a\x1bb"], "contains a control character"),
    (["--log-dir", "x" * 5000], "too long"),
    (["--chdir", "nowhere"], "'nowhere' is not a directory"),
    (["--python", "/no/python"], "--python: no such file '/no/python'"),
]
OTHER_CODES = {
    "--devices 1 --backend cpu --bind 99999": 78,
    "--log-dir /proc/x": 78,
    "--python /no/python": 127,
}


@pytest.mark.parametrize(("words", "message"), WORDS, ids=typed)
def test_bad_options_are_refused_in_one_line(pdrun: Call, words: list[str], message: str) -> None:
    fastest = float("inf")
    for _ in range(3):  # the best of three is what the mistake itself costs on a loaded machine
        start = time.monotonic()
        outcome = pdrun(*words, "train.py")
        fastest = min(fastest, time.monotonic() - start)
        refused(outcome, OTHER_CODES.get(" ".join(words), 2), message)
        if fastest < 1:
            break
    assert fastest < 1


PROGRAMS = [
    (["trian.py"], 2, "no such file 'trian.py'; did you mean 'train.py'?"),
    (["."], 2, "is a directory without a __main__.py"),
    (["\u2013devices", "2", "x.py"], 2, "is a longer dash than '-'; write --devices"),
    (["-"], 2, "standard input is not supported"),
    ([""], 2, "the script's name is empty"),
    (["fifo"], 2, "is not a regular file"),
    (["/dev/zero"], 2, "is not a regular file"),
    (["dangling"], 2, "is a broken link"),
    (["loop"], 2, "Too many levels"),
    (["x" * 300], 2, "File name too long"),
    (["train.py/x"], 2, "Not a directory"),
    (["shell.sh"], 2, "add --no-python"),
    (["/bin/true"], 2, "compiled program"),
    (["true"], 2, "for the command true add --no-python"),
    (
        ["--hostfile", "fifo", "train.py"],
        2,
        "is a pipe, not a regular file; give it on standard input: --hostfile -",
    ),
    (["--rank-table", "fifo", "train.py"], 2, "is a pipe, not a regular file; write it to a file"),
    (["help"], 2, "for help use pdrun --help"),
    (["stauts"], 2, "did you mean 'status'?"),
    (["-m"], 2, "no program to run"),
    (["-m", "no_such_module_here"], 2, "no module named 'no_such_module_here'"),
    (["-m", "json.nope"], 2, "no module named 'json.nope'"),
    (["-m", "email"], 2, "without a __main__ module"),
    (["-m", "a/b"], 2, "is not a module name"),
    (["--no-python", "no-such-command"], 127, "command not found: 'no-such-command'"),
    (["--no-python", "train.py"], 127, "did you mean './train.py'?"),
    (
        ["--no-python", "echo hi there"],
        127,
        "write arguments separately, in a job file as args:",
    ),
    (["--no-python", "./train.py"], 126, "is not executable"),
    (["--no-python", "./"], 126, "is a directory"),
    (["--no-python", "./nope"], 127, "no such file"),
    (["nope.yaml"], 2, "no such file 'nope.yaml'"),
    (["--nodes", "2"], 2, "no program to run"),
    (["--nodes"], 2, "option '--nodes' requires an argument"),
    (["join"], 2, "missing argument 'HOST:PORT'"),
    (["join", "host"], 2, "has no port"),
    (["join", "host:0"], 2, "the port must not be 0"),
    (["join", "host:1", "--nodes", "2"], 2, "no such option --nodes"),
    (["scheduler"], 2, "--nodes: is required"),
    (["scheduler", "--nodes", "2", "--listen", "0.0.0.0:1"], 2, "means all interfaces"),
    (["scheduler", "--nodes", "x"], 2, "'x' is not a whole number"),
    (["token", "craete"], 2, "no such command 'craete'"),
    (["logs", "--ranks", "x"], 2, "'x' is not a rank"),
    (["logs", "--generation", "x"], 2, "--generation: 'x' is not a whole number"),
    (["status", "--all", "demo"], 2, "--all: lists every job and takes no JOB or --scheduler"),
    (["stop", "--timeout", "soon"], 2, "'soon' is not a duration"),
    (["status", "--insecure"], 2, "--insecure: requires --scheduler"),
    (["completion", "csh"], 2, "'csh' is not one of bash, zsh, fish"),
]


@pytest.mark.parametrize(("words", "code", "message"), PROGRAMS, ids=typed)
def test_bad_programs_and_commands_are_refused_in_one_line(
    pdrun: Call, folder: Path, words: list[str], code: int, message: str
) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "shell.sh").write_text("#!/bin/sh\necho hello\n")
    refused(pdrun(*words), code, message)


VARIABLES = [
    ({"PET_NNODES": "x"}, "PET_NNODES: 'x' is not a whole number"),
    ({"PDRUN_NODES": ""}, "PDRUN_NODES: must not be empty"),
    ({"PDRUN_NODES": "\u0663"}, "PDRUN_NODES: "),
    ({"PDRUN_LOCAL": "maybe"}, "PDRUN_LOCAL: 'maybe' is neither true nor false"),
    ({"PDRUN_NODES": "2", "PET_NNODES": "3"}, "PET_NNODES=3 contradicts PDRUN_NODES=2"),
    (
        {"PET_NNODES": "2", "PET_NODE_RANK": "2"},
        "PET_NODE_RANK: must be 0 to 1 (PET_NNODES=2), got 2",
    ),
    ({"PET_RDZV_CONF": "=="}, "PET_RDZV_CONF"),
    ({"PDRUN_GRACE": "1 h"}, "PDRUN_GRACE: '1 h' is not a duration"),
    ({"PDRUN_HOSTFILE": "nope"}, "PDRUN_HOSTFILE: no such file 'nope'"),
    ({"RANK_TABLE_FILE": "/no/table.json"}, "RANK_TABLE_FILE: no such file '/no/table.json'"),
    ({"PDRUN_JOB": "../x"}, "PDRUN_JOB: '../x' is not a name"),
    ({"CUDA_VISIBLE_DEVICES": "0", "PDRUN_BACKEND": "cuda"}, "cuda cannot be used"),
]


@pytest.mark.parametrize(("environ", "message"), VARIABLES, ids=typed)
def test_bad_variables_are_a_matter_of_set_up(
    pdrun: Call, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], message: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    refused(pdrun("train.py"), 78, message)


def test_a_log_folder_that_is_a_file(pdrun: Call, folder: Path) -> None:
    refused(pdrun("--log-dir", "train.py", "train.py"), 78, "train.py is not a directory")
    (folder / "gone").symlink_to("nowhere")
    refused(pdrun("--log-dir", "gone", "train.py"), 78, "is a broken link")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_log_folder_of_somebody_else(pdrun: Call, folder: Path) -> None:
    (folder / "closed").mkdir(mode=0o500)
    refused(pdrun("--log-dir", "closed/logs", "train.py"), 78, "cannot be written")


def test_a_log_folder_that_is_no_text(pdrun: Call) -> None:
    refused(pdrun("--log-dir", os.fsdecode(b"logs-\xff"), "train.py"), 2, "is not valid UTF-8")


def test_a_working_directory_that_is_gone(
    pdrun: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder / "inner")
    (folder / "inner").rmdir()
    refused(pdrun("train.py"), 78, "the working directory does not exist")


def test_an_argument_of_two_megabytes_reaches_the_plan(pdrun: Call) -> None:
    outcome = pdrun("--dry-run", "--json", "train.py", "x" * 2_000_000)
    assert outcome.code == 0
    assert len(outcome.out) > 2_000_000


def test_nothing_is_written_by_a_refusal_or_a_dry_run(pdrun: Call, folder: Path) -> None:
    pdrun("--nodes", "0", "train.py")
    pdrun("--dry-run", "train.py")
    pdrun("--dry-run", "--nodes", "2", "--local", "train.py")
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]


@pytest.mark.parametrize(
    ("line", "is_written"),
    [
        ("--nodes 0 train.py", True),
        ("run --nodes 0 train.py", True),
        ("join nowhere:x", True),
        ("scheduler --nodes 0", True),
        ("status typo", False),
        ("stop typo", False),
        ("translate -- torchrun", False),
        ("statsu typo", False),
    ],
)
def test_only_a_command_with_a_job_says_why_its_container_ended(
    pdrun: Call, folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, is_written: bool
) -> None:
    log = folder / "termination-log"
    log.write_text("the cause of the job")
    monkeypatch.setenv("PDRUN_TERMINATION_LOG", str(log))
    outcome = pdrun(*line.split())
    assert outcome.code and outcome.err.startswith("pdrun: error: ")
    right = outcome.err.rstrip("\n") if is_written else "the cause of the job"
    assert log.read_text() == right
