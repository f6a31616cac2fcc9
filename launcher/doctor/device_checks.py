"""
Checks of accelerators: driver against torch's build, processes left over, errors, throttling.

Vendor's tools run only where their kind's driver or tool is found, each for at most 3 seconds. One
that hangs is a finding.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pdrun.backends.base import ProbeEnvironment, ToolAnswer
from pdrun.backends.detect import find_version_file, parse_torch_version, probe_all
from pdrun.launcher.doctor.finding import Finding

THROTTLE_REASONS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of nvidia-smi's clocks_event_reasons.active that mean trouble."""
ECC_QUERY = (
    "index,ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure,"
    "clocks_throttle_reasons.active,temperature.gpu"
)
PROCESS_QUERY = "pid,gpu_uuid,used_memory,process_name"
OTHER_TOOLS = {
    "npu": ("npu-smi", "info"),
    "rocm": ("rocm-smi", "--showid"),
    "xpu": ("xpu-smi", "discovery"),
}
"""Kind of device -> a command that answers quickly if the driver works."""
HUNG_HINT = "the driver hangs: look at dmesg (Xid) and for processes in state D; reboot the node"


def check_driver(here: ProbeEnvironment) -> Iterator[Finding]:
    """Check that the driver can run the installed torch."""
    file = find_version_file()
    if file is None:
        return  # `job_checks.check_versions` has said it
    text = file.read_text(encoding="utf-8", errors="replace")
    build = parse_torch_version(text)
    wanted = _find_version(text, "cuda")
    has_cards = bool(here.list_numbered("dev", r"nvidia([0-9]+)"))
    if has_cards and "cuda" not in build.kinds:
        what = f"torch {build.version} is a build without CUDA, but NVIDIA GPUs are here"
        hint = "install torch for CUDA: see https://pytorch.org/get-started/locally"
        yield Finding("driver", "warn", what, str(file.parent), hint)
    if not has_cards or "cuda" not in build.kinds:
        return
    answer = here.run_tool(("nvidia-smi",))
    if answer.state != "ok":
        yield from _explain_tool("driver", "nvidia-smi", answer)
        return
    found = re.search(r"CUDA Version: *([0-9]+)\.([0-9]+)", answer.text)
    if found is None:
        yield Finding("driver", "warn", "nvidia-smi names no CUDA version", hint=HUNG_HINT)
    elif wanted and int(found[1]) < wanted[0]:
        what = (
            f"the driver supports CUDA {found[1]}.{found[2]}, torch {build.version} needs"
            f" {wanted[0]}.{wanted[1]}"
        )
        hint = f"install a newer driver, or torch for CUDA {found[1]}"
        yield Finding("driver", "fail", what, hint=hint)
    else:
        needs = f", torch is built for {wanted[0]}.{wanted[1]}" if wanted else ""
        yield Finding("driver", "ok", f"the driver supports CUDA {found[1]}.{found[2]}{needs}")


def _find_version(text: str, key: str) -> tuple[int, int] | None:
    """Return the version that torch was built for, from its version file."""
    found = re.search(rf"^{key}(?::[^=\n]+)?\s*=\s*['\"]([0-9]+)\.([0-9]+)", text, re.M)
    return (int(found[1]), int(found[2])) if found else None


def check_visibility(here: ProbeEnvironment) -> Iterator[Finding]:
    """Check the variables that hide devices."""
    for probe in probe_all(here.environ, here.root, here.run_tool, platform=here.platform):
        if probe.name == "cpu":
            continue
        if probe.broken:
            hint = "unset the variable, or list devices that exist"
            yield Finding("visibility", "fail", probe.reason, probe.name, hint)
        elif probe.devices:
            yield Finding("visibility", "ok", probe.reason, probe.name)
        elif "may open none" in probe.reason or "no driver is loaded" in probe.reason:
            hint = "start the container with its devices (docker --gpus all), or load the driver"
            yield Finding("visibility", "fail", probe.reason, probe.name, hint)


def check_devices(here: ProbeEnvironment) -> Iterator[Finding]:
    """Check the state of the devices, and which processes use them."""
    if here.list_numbered("dev", r"nvidia([0-9]+)"):
        yield from _check_nvidia(here)
    for kind, command in OTHER_TOOLS.items():
        answer = here.run_tool(command)
        if answer.state != "missing":
            yield from _explain_tool("devices", command[0], answer)
            if answer.state == "ok":
                yield Finding("devices", "ok", f"{command[0]} answers", kind)


def _check_nvidia(here: ProbeEnvironment) -> Iterator[Finding]:
    answer = here.run_tool(
        ("nvidia-smi", f"--query-gpu={ECC_QUERY}", "--format=csv,noheader,nounits")
    )
    yield from _explain_tool("devices", "nvidia-smi", answer)
    if answer.state != "ok":
        return
    for row in _parse_rows(answer.text, 6):
        yield from _judge_card(row)
    answer = here.run_tool(
        ("nvidia-smi", f"--query-compute-apps={PROCESS_QUERY}", "--format=csv,noheader,nounits")
    )
    yield from _explain_tool("devices", "nvidia-smi", answer)
    for pid, uuid, memory, name in _parse_rows(answer.text, 4) if answer.state == "ok" else ():
        owner, is_orphan = _describe_process(here.root, pid)
        what = f"process {pid} ({name[-60:]}){owner} uses {memory} MiB"
        hint = f"wait for it, or end it: kill {pid}"
        if is_orphan:
            what += "; its parent has ended"
        yield Finding("devices", "warn", what, uuid, hint)


def _judge_card(row: Sequence[str]) -> Iterator[Finding]:
    index, uncorrected, pending, failure, reasons, temperature = row
    where = f"GPU {index}"
    is_well = True
    if failure.lower() in ("yes", "1"):
        is_well = False
        hint = "replace the GPU: its spare memory is used up"
        yield Finding("devices", "fail", "remapping of memory rows has failed", where, hint)
    if uncorrected.isdecimal() and int(uncorrected):
        is_well = False
        what = f"{uncorrected} uncorrected memory errors since the driver was loaded"
        hint = "end all jobs of the GPU and reset it (nvidia-smi -r); watch it"
        yield Finding("devices", "warn", what, where, hint)
    if pending.lower() in ("yes", "1"):
        is_well = False
        hint = "reset the GPU (nvidia-smi -r) or reboot"
        yield Finding("devices", "warn", "memory rows wait for a reset", where, hint)
    try:
        bits = int(reasons, 0)
    except ValueError:
        bits = 0
    names = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    if names:
        is_well = False
        what = f"its clock is reduced: {', '.join(names)}, {temperature} C"
        hint = "check cooling and power of the node: this GPU slows down all ranks"
        yield Finding("devices", "warn", what, where, hint)
    if is_well:
        yield Finding("devices", "ok", f"no memory errors, full clock, {temperature} C", where)


def _explain_tool(check: str, tool: str, answer: ToolAnswer) -> Iterator[Finding]:
    """Yield a finding if a vendor's tool does not work."""
    if answer.state == "hung":
        yield Finding(check, "fail", f"{tool} did not answer in 3 s", tool, HUNG_HINT)
    elif answer.state == "missing":
        hint = "mount the driver's tools into the container"
        yield Finding(check, "warn", f"{tool} is not on PATH", tool, hint)
    elif answer.state == "failed":
        hint = "reload the driver or reboot the node"
        if "mismatch" in answer.text:
            hint = "the driver was updated while it was loaded: reboot the node"
        yield Finding(check, "fail", f"{tool} fails: {answer.text}", tool, hint)


def _parse_rows(text: str, columns: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == columns]


def _describe_process(root: Path, pid: str) -> tuple[str, bool]:
    """Return the owner of a process as text, and whether its parent has ended."""
    folder = root / "proc" / pid
    try:
        uid = folder.stat().st_uid
        after_name = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return (" of this user" if uid == os.geteuid() else f" of uid {uid}"), after_name[1] == "1"
    except (OSError, IndexError):
        return " of another container", False
