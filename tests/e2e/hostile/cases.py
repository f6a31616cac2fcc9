"""
Hostile inputs of the command line: options, variables, host files, rank tables, job files.

A case is a command, variables and files. It may be refused or run to its end; nothing else.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

PROGRAM = ("--no-python", "sh", "-c", "echo started >> started")
"""Every worker that starts leaves a line."""
LIMITS = ("--start-timeout", "1", "--grace", "1", "--no-warm")
NASTY = (
    *("", " ", "-1", "0", "1e9", "9" * 40, "nan", "inf", "-inf", "0x10", "1.5", "\u0663", "None"),
    *(
        "$(touch pwned)",
        "`touch pwned`",
        ";touch pwned",
        "|touch pwned",
        "a\nb",
        "a\tb",
        "\x1b[31mx",
    ),
    *(
        "\x9b31m",
        "\u202egnp",
        "\udc80\udcff",
        "x" * 5000,
        "../../../etc/passwd",
        "..",
        "/",
        ".",
        "~",
    ),
    *(
        "[::1",
        "fe80::1%",
        "[fe80::1%a b]:1",
        "1:2:3",
        "http://a:80",
        "host:99999",
        "a,,b",
        ",",
        "=",
        ":",
    ),
    *(
        "{rank}",
        "{rank.__class__}",
        "{0}",
        "%s%n",
        "true",
        "yes",
        "0-",
        "5-1",
        "0-999999999",
        "*",
        "-",
    ),
    *("--nodes", "a=b=c", "é", "null", "[]", "{}", "/dev/zero", "/proc/self/mem", "fifo", "A" * 64),
)
VARIABLES = (
    *(
        "PDRUN_NODES",
        "PDRUN_DEVICES",
        "PDRUN_SCHEDULER",
        "PDRUN_JOB",
        "PDRUN_NODE_RANK",
        "PDRUN_HOSTS",
    ),
    *(
        "PDRUN_TOKEN",
        "PDRUN_TOKEN_FILE",
        "PDRUN_LOG_DIR",
        "PDRUN_GRACE",
        "PDRUN_ENV",
        "PDRUN_BACKEND",
    ),
    *("PDRUN_NODE_NAME", "PDRUN_MAX_RESTARTS", "PDRUN_START", "PDRUN_PORT_RANGE", "PDRUN_UNKNOWN"),
    *("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_JOB_NODELIST"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "RANK_TABLE_FILE"),
    *("MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM", "MS_NODE_ID"),
    *(
        "JOB_COMPLETION_INDEX",
        "LSB_MCPU_HOSTS",
        "PBS_NODEFILE",
        "AZ_BATCH_NODE_LIST",
        "COBALT_NODEFILE",
    ),
    *(
        "CUDA_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "HOSTNAME",
        "XDG_CONFIG_HOME",
    ),
    *("PET_NNODES", "PET_NODE_RANK", "LWS_GROUP_SIZE", "TF_CONFIG", "SM_HOSTS", "VC_TASK_INDEX"),
)
HOSTFILES = (
    *(
        "",
        "\0",
        "\x1b[31m",
        "a slots=",
        "a slots=-1",
        "a slots=99999999999",
        "a slots=1.5",
        "a:b:c",
    ),
    *(
        "a slots=2 slots=3",
        "a\na\na",
        "[x]\n",
        "- a",
        "$(touch pwned)",
        "a #",
        "../a",
        "a/b",
        "fe80::1%",
    ),
    *(
        "a slots=2\x00b",
        "\ufeffa slots=1",
        "a\rb",
        "x" * 300,
        "a[0-99999999999]",
        "a[5-1]",
        "a[",
        "a]",
    ),
    *("a max_slots=1 slots=2", "@netgroup", "+", "a user=root;id", "-oProxyCommand=touch pwned"),
)
TABLE = {
    "version": "1.0",
    "server_count": "1",
    "server_list": [
        {
            "server_id": "127.0.0.1",
            "device": [{"device_id": "0", "device_ip": "192.168.0.1", "rank_id": "0"}],
        }
    ],
    "status": "completed",
}
JOB_FILES = (
    *(
        "",
        "\0",
        "[",
        "a: b: c",
        "- x",
        "nodes: {}",
        "nodes: []",
        "nodes: -1",
        "nodes: 1e99",
        "nodes: .nan",
    ),
    *(
        "!!python/object/apply:os.system ['touch pwned']",
        "a: &a [*a, *a]",
        "nodes: 2024-01-01",
        "? x",
    ),
    *(
        "nodes: 1\nnodes: 2",
        "env: {'A=B': c}",
        "env: {A: [1]}",
        "env: {1: 2}",
        "script: [a]",
        "\tnodes: 1",
    ),
    *(
        "a: " + "[" * 2000,
        "x: " + "9" * 5000,
        "job: '../../x'",
        'log_dir: "\\x1b[31m"',
        "\ufeffnodes: 0",
    ),
    *("&x !!set {a}", "nodes: !!binary AAAA", "%YAML 9.9\n---\nnodes: 1", "--- a\n--- b", "<<: *x"),
)


@dataclass(frozen=True)
class HostileCase:
    """One input."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Name -> text, with surrogates for bytes."""

    def to_json(self) -> str:
        """Return the case as a line for the process that plays it."""
        return json.dumps(asdict(self))


def valued_options(command: click.Command) -> list[str]:
    """Return one spelling of each option of a command that has a value."""
    return sorted(
        {
            param.opts[0].replace("_", "-") if param.opts[0].startswith("--") else param.opts[0]
            for param in command.params
            if isinstance(param, click.Option) and not param.is_flag
        }
    )


def option_cases(options: list[str], chance: random.Random, each: int) -> Iterator[HostileCase]:
    """Yield some nasty values of each option."""
    for option in options:
        for value in chance.sample(NASTY, each):
            limits = () if option in LIMITS else LIMITS
            yield HostileCase(f"{option} {value!r:.30}", (*limits, option, value, *PROGRAM))


def variable_cases(chance: random.Random, each: int) -> Iterator[HostileCase]:
    """Yield some nasty values of each variable."""
    for name in VARIABLES:
        for value in chance.sample(NASTY, each):
            text = value.replace("\0", "")
            yield HostileCase(f"{name}={text!r:.30}", (*LIMITS, *PROGRAM), {name: text})


def mutate(value: Any, chance: random.Random) -> Any:
    """Return a JSON value with one place changed."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        if chance.random() < 0.15:
            return {other: one for other, one in value.items() if other != key}
        return {**value, key: mutate(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        if chance.random() < 0.15:
            return value + [value[place]]
        return [mutate(one, chance) if at == place else one for at, one in enumerate(value)]
    return chance.choice(
        [
            None,
            [],
            {},
            "",
            -1,
            1 << 70,
            1.5,
            "x" * 300,
            "\x1b[31m",
            "$(touch pwned)",
            True,
            "1e9",
            "../x",
        ]
    )


def file_cases(chance: random.Random, tables: int) -> Iterator[HostileCase]:
    """Yield host files, rank tables and job files."""
    for text in HOSTFILES:
        argv = (*LIMITS, "--hostfile", "input", *PROGRAM)
        yield HostileCase(f"hostfile {text!r:.30}", argv, files={"input": text})
    for text in JOB_FILES:
        yield HostileCase(f"job file {text!r:.30}", ("job.yaml",), files={"job.yaml": text})
        yield HostileCase(
            f"job file run {text!r:.30}", (*LIMITS, "run", "job.yaml"), files={"job.yaml": text}
        )
    for number in range(tables):
        text = json.dumps(mutate(TABLE, chance))
        if number % 10 == 9:
            text = text[: chance.randrange(len(text))]
        for argv in (
            ("rank-table", "check", "input"),
            (*LIMITS, "--rank-table", "input", *PROGRAM),
        ):
            yield HostileCase(f"{argv[0]} {text:.60}", argv, files={"input": text})


def status_cases(chance: random.Random, count: int) -> Iterator[HostileCase]:
    """Yield damaged event logs, registry entries and logs, shown by the commands."""
    events = [
        {"kind": "created", "time": 1.0, "job": "demo", "run": "demo-1", "nodes": 1},
        {"kind": "joined", "time": 1.0, "node": "n0", "workers": 2},
        {"kind": "assigned", "time": 1.0, "generation": 0, "nodes": [["n0", 0, 2]]},
        {"kind": "exited", "time": 1.0, "generation": 0, "rank": 1, "node": "n0", "code": 3},
        {"kind": "verdict", "time": 2.0, "code": 3, "reason": "x"},
    ]
    record = {
        "run": "demo-1",
        "job": "demo",
        "pid": 1 << 30,
        "ticks": 1,
        "host": "HOST",
        "events": "events.jsonl",
        "log_dir": "logs",
        "made": 1.0,
    }
    for number in range(count):
        lines = [
            json.dumps(mutate(one, chance) if chance.random() < 0.5 else one) for one in events
        ]
        if number % 5 == 4:
            lines = [line[: chance.randrange(len(line))] for line in lines]
        entry = json.dumps(mutate(record, chance) if number % 3 == 2 else record)
        files = {"events.jsonl": "\n".join(lines), "state/pdrun/jobs/demo-1.json": entry}
        for argv in (("status",), ("status", "demo", "--json"), ("logs", "demo")):
            yield HostileCase(f"{argv} {number}", argv, files=files)
    for argv in (("status", "demo"), ("logs", "demo"), ("stop", "demo")):
        files = {"events.jsonl": "FIFO", "state/pdrun/jobs/demo-1.json": json.dumps(record)}
        yield HostileCase(f"{argv} of a pipe", argv, files=files)


def all_cases(command: click.Command, seed: int) -> list[HostileCase]:
    """Return the cases of a seed."""
    chance = random.Random(seed)
    return [
        *option_cases(valued_options(command), chance, 5),
        *variable_cases(chance, 3),
        *file_cases(chance, 25),
        *status_cases(chance, 15),
    ]


def write_files(case: HostileCase, folder: Path) -> None:
    """Write the files of a case into a folder; the text FIFO makes a pipe."""
    import os

    for name, text in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text == "FIFO":
            os.mkfifo(path)
        else:
            path.write_bytes(
                text.replace("HOST", os.uname().nodename).encode("utf-8", "surrogatepass")
            )
    os.mkfifo(folder / "fifo")
