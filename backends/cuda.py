"""
NVIDIA GPUs.

Files that are read (values from a machine with two H100)::

    /dev/nvidia0, /dev/nvidia1           one node per card; in a container only its cards
    /proc/driver/nvidia/version          NVRM version: NVIDIA UNIX Open Kernel Module ... 580.159.04
    /proc/driver/nvidia/gpus/0000:00:06.0/information
                                         GPU UUID: 	 GPU-055ee11a-11b6-d8c2-b506-544fd6091dc8
                                         Device Minor: 	 0
                                         GPU Excluded:	 No
    /proc/driver/nvidia/capabilities/gpu0/mig/gi1     exists if card 0 is divided into MIG instances
    /dev/dxg                             WSL 2: replaces all of the above; nvidia-smi -L is run

nvidia-smi -L is run only if MIG is on, because nothing else has the names of the instances::

    GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
      MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)

Limit: cards have CUDA's numbers. CUDA chooses the order (fastest first, or by bus).
"""

from __future__ import annotations

import re

from pdrun.backends.base import (
    Backend,
    DetectedDevice,
    ProbeEnvironment,
    SearchResult,
    VisibilityVariable,
)

_PROC = "proc/driver/nvidia"


def _find_devices(here: ProbeEnvironment) -> SearchResult:
    nodes = here.list_numbered("dev", r"nvidia([0-9]+)")
    driver = re.search(r"\b([0-9]{3,}\.[0-9.]+)\b", here.read_text(f"{_PROC}/version"))
    if not nodes:
        if here.has_path("dev/dxg"):
            return _ask_nvidia_smi(here, "WSL 2")
        if driver:
            return SearchResult(
                (),
                f"driver {driver[1]} is loaded, but there is no /dev/nvidiaN"
                " (container without GPUs?)",
            )
        return SearchResult((), "no /dev/nvidiaN and no NVIDIA driver in /proc")
    if not driver:
        return SearchResult(
            (),
            f"{len(nodes)} of /dev/nvidiaN, but no driver is loaded (/proc/driver/nvidia/version)",
        )
    usable = [number for number, path in nodes if here.is_accessible(path)]
    if not usable:
        return SearchResult((), f"{len(nodes)} of /dev/nvidiaN, but this process may open none")
    if any(
        here.list_numbered(f"{_PROC}/capabilities/gpu{number}/mig", r"gi([0-9]+)")
        for number in usable
    ):
        return _ask_nvidia_smi(here, "MIG is on")
    known = _read_card_info(here)
    cards = [known.get(number, "") for number in usable if known.get(number) != "excluded"]
    found = tuple(DetectedDevice(str(index), uuid) for index, uuid in enumerate(cards))
    return SearchResult(found, f"{len(found)} device(s) by /dev/nvidiaN, driver {driver[1]}")


def _read_card_info(here: ProbeEnvironment) -> dict[int, str]:
    """Return minor number -> UUID of the cards, or ``excluded`` for excluded cards."""
    known = {}
    folder = here.root / _PROC / "gpus"
    for path in sorted(folder.glob("*/information")) if folder.is_dir() else ():
        facts = dict(
            re.findall(
                r"^([^:\n]+):[ \t]*(.*?)[ \t]*$",
                here.read_text(str(path.relative_to(here.root))),
                re.M,
            )
        )
        if (minor := facts.get("Device Minor", "")).isdigit():
            uuid = facts.get("GPU UUID", "")
            if facts.get("GPU Excluded") == "Yes":
                uuid = "excluded"
            elif "?" in uuid:
                uuid = ""
            known[int(minor)] = uuid
    return known


def _ask_nvidia_smi(here: ProbeEnvironment, why: str) -> SearchResult:
    answer = here.run_tool(("nvidia-smi", "-L"))
    if answer.state != "ok":
        problems = {
            "missing": "is not installed",
            "hung": "does not answer",
            "failed": f"failed: {answer.text}",
        }
        return SearchResult(
            (),
            f"{why}, and nvidia-smi -L, which names the devices, {problems[answer.state]}",
            is_blind=True,
        )
    found = parse_nvidia_smi(answer.text)
    return SearchResult(found, f"{len(found)} device(s) by nvidia-smi -L ({why})")


def parse_nvidia_smi(text: str) -> tuple[DetectedDevice, ...]:
    """Parse the output of ``nvidia-smi -L``: cards, or the MIG instances of divided cards."""
    cards: dict[str, list[DetectedDevice]] = {}
    whole: dict[str, DetectedDevice] = {}
    card = ""
    for line in text.splitlines():
        if match := re.match(r"GPU ([0-9]+): .*\(UUID: (GPU-[0-9a-fA-F-]+)\)", line):
            card = match[1]
            whole[card], cards[card] = DetectedDevice(card, match[2]), []
        elif (match := re.match(r"\s+MIG .*\(UUID: (MIG-[0-9a-zA-Z/-]+)\)", line)) and card:
            cards[card].append(DetectedDevice(match[1], match[1], card))
    return tuple(item for card, slices in cards.items() for item in slices or (whole[card],))


BACKEND = Backend(
    name="cuda",
    title="NVIDIA GPU (CUDA)",
    variables=(VisibilityVariable("CUDA_VISIBLE_DEVICES", prefixes=("GPU-", "MIG-")),),
    torch_device="cuda",
    collective="nccl",
    search=_find_devices,
)
