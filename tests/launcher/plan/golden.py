"""
Golden cases: a command line, an environment and the facts of a machine, and the plan that they lead
to, as text.

A case is one YAML file: ``argv``, ``environ``, ``facts`` and, last, ``expect``. A new quirk is a
new file, no code. ``PDRUN_GOLDEN=write pytest tests/launcher/plan`` writes what comes out into the files,
for reading in a diff.

``facts``, each with a default: hostname, cpus ("0-7"), cores and numa (lists of CPU lists), quota,
torch, cuda and npu (number of cards), uuids (cards have GPU-00000000-..), mig (text of nvidia-smi
-L), addresses ([name, address]), route, local_endpoint, program_error [text, code], log_error,
script_digest, hosts_here, starter (how, program, says: what mpirun's --version prints, kill_wait,
binds, fault). ``around`` has the answers of the probes, as in tests/launcher/adapters; ``files`` are written
into an empty working folder.
"""

from __future__ import annotations

from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

import yaml

from pdrun.backends import detect
from pdrun.backends.affinity import parse_cpu_list
from pdrun.backends.base import ToolAnswer, TorchBuild
from pdrun.errors import PdrunError
from pdrun.launcher.adapters.mpirun_command import identify_mpirun
from pdrun.launcher.cli.run import parse_request, run_command
from pdrun.launcher.plan import render
from pdrun.launcher.plan.model import BackendFacts, ExternalLauncher, Facts
from pdrun.launcher.plan.plan import make_plan, plan_simulated_nodes
from pdrun.topology import CpuSet
from tests.launcher.adapters.golden import probes

MARK = "expect: |\n"


def load_case(path: Path) -> dict[str, Any]:
    """Read a case."""
    case: dict[str, Any] = yaml.safe_load(path.read_text())
    return case


def format_outcome(case: dict[str, Any], root: Path) -> str:
    """Return the plan of a case as text, or the error that it ends with."""
    environ = {
        "PATH": "/usr/bin:/bin",
        **{name: str(value) for name, value in case.get("environ", {}).items()},
    }
    try:
        context = run_command().make_context("run", [str(word) for word in case["argv"]])
        words = context.params.pop("words")
        for name, text in case.get("files", {}).items():
            _write_file(root / "files" / name, text)
        around = probes(
            {"host": case.get("facts", {}).get("hostname", "host1"), **case.get("around", {})}
        )
        with chdir(root / "files") if "files" in case else nullcontext():
            asked = parse_request(context.params, words, environ, around).resolved
        facts = make_facts(case.get("facts", {}), environ, root)
        made = make_plan(asked.spec, facts, asked.sources, asked.notes)
        nodes = plan_simulated_nodes(made, facts) if made.mode == "local" else ()
    except PdrunError as error:
        return f"exit {error.exit_code}\npdrun: error: {error}\n"
    why = [f"  {note}" for note in (*made.notes, f"backend: {made.backend_reason}")]
    lines = [render.format_plan(made, nodes), "why:", *why, ""]
    said = [f"  {path} by {source}" for path, source in made.sources.items() if source != "default"]
    compared = " ".join(f"{key}={value}" for key, value in made.compared.items())
    return "\n".join([*lines, "sources:", *said, "", f"compared: {compared}"]) + "\n"


def make_facts(data: dict[str, Any], environ: dict[str, str], root: Path) -> Facts:
    """
    Return the facts of a machine that exists only in a case; devices are found by the real probes
    in ``root``.
    """
    error, code = data.get("program_error", ("", 0))
    return Facts(
        hostname=data.get("hostname", "host1"),
        environ=environ,
        cwd="/work",
        python="/usr/bin/python3",
        python_version="3.11.7",
        torch_version=data.get("torch", "2.13.0"),
        pdrun_version="0.1.0",
        cpus=_cpus(data),
        backends=_backends(data, environ, root),
        addresses=tuple(
            (name, address) for name, address in data.get("addresses", [["lo", "127.0.0.1"]])
        ),
        uid=1000,
        script_digest=data.get("script_digest", ""),
        is_scheduler_local=data.get("local_endpoint"),
        route_address=data.get("route", "127.0.0.1"),
        program_error=error,
        program_error_code=code,
        log_error=data.get("log_error", ""),
        local_hosts=tuple(data.get("hosts_here", ())),
        same_machine=data.get("same_machine", ""),
        external_launcher=_external_launcher(data["starter"]) if "starter" in data else None,
    )


def _external_launcher(data: dict[str, Any]) -> ExternalLauncher:
    mpi = identify_mpirun(data["program"], data["says"]) if "says" in data else None
    more = data.get("kill_wait"), data.get("binds", True), data.get("fault", "")
    return ExternalLauncher(data["how"], data["program"], mpi, *more)


def _cpus(data: dict[str, Any]) -> CpuSet:
    return CpuSet(
        parse_cpu_list(str(data.get("cpus", "0-7"))),
        data.get("quota"),
        tuple(parse_cpu_list(str(core)) for core in data.get("cores", ())),
        tuple(parse_cpu_list(str(node)) for node in data.get("numa", ())),
    )


def _backends(
    data: dict[str, Any], environ: dict[str, str], root: Path
) -> tuple[BackendFacts, ...]:
    for number in range(data.get("cuda", 0)):
        _write_file(root / f"dev/nvidia{number}", "")
        _write_file(
            root / "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64  580.159.04  Release\n",
        )
        uuid = (
            f"GPU-0000000{number}-aaaa-bbbb-cccc-dddddddddddd"
            if data.get("uuids")
            else "GPU-????????"
        )
        text = f"GPU UUID: \t {uuid}\nDevice Minor: \t {number}\n"
        _write_file(root / f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information", text)
        if data.get("mig"):
            _write_file(root / f"proc/driver/nvidia/capabilities/gpu{number}/mig/gi1/access", "")
    for number in range(data.get("npu", 0)):
        _write_file(root / f"dev/davinci{number}", "")
        _write_file(root / "dev/davinci_manager", "")
    kinds = frozenset({"cpu", "cuda", "npu"})
    probes = detect.probe_all(
        environ,
        root,
        lambda command: ToolAnswer("ok", data["mig"]) if data.get("mig") else ToolAnswer("missing"),
        build=lambda: TorchBuild("2.13.0", kinds),
        platform="linux",
        machine="x86_64",
    )
    return tuple(BackendFacts(p.name, p.present, p.reason, p.devices, p.broken) for p in probes)


def _write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def rewrite_case(path: Path, text: str) -> None:
    """Put what came out into a case."""
    head = path.read_text().partition(MARK)[0]
    body = "".join(f"  {line}\n" if line else "\n" for line in text.splitlines())
    path.write_text(head + MARK + body)
