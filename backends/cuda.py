"""
NVIDIA GPUs.

What is looked at (values seen on a machine with two H100)::

    /dev/nvidia0, /dev/nvidia1           one node a card; a container has nodes only for the cards it was given
    /proc/driver/nvidia/version          NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release
    /proc/driver/nvidia/gpus/0000:00:06.0/information
                                         GPU UUID: 	 GPU-055ee11a-11b6-d8c2-b506-544fd6091dc8
                                         Device Minor: 	 0
                                         GPU Excluded:	 No
    /proc/driver/nvidia/capabilities/gpu0/mig/gi1     there when card 0 is cut into MIG instances
    /dev/dxg                             WSL 2 has this instead of all the above; nvidia-smi -L is asked

nvidia-smi -L is asked only where MIG is on, since nothing else has the instances' names::

    GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
      MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)

Limit: cards are numbered as CUDA numbers them; which card that is (fastest first, or by bus) is
CUDA's choice.
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
                f"driver {driver[1]} is loaded, but there is no /dev/nvidiaN (a container without GPUs?)",
            )
        return SearchResult((), "no /dev/nvidiaN and no NVIDIA driver in /proc")
    if not driver:
        return SearchResult(
            (),
            f"{len(nodes)} node(s) /dev/nvidiaN, but no driver is loaded (/proc/driver/nvidia/version)",
        )
    usable = [number for number, path in nodes if here.is_accessible(path)]
    if not usable:
        return SearchResult(
            (), f"{len(nodes)} node(s) /dev/nvidiaN, none of which this process may open"
        )
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
    """
    Return minor number -> UUID of the cards, or the word ``excluded`` for one that the driver
    leaves alone.
    """
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
            known[int(minor)] = (
                "excluded"
                if facts.get("GPU Excluded") == "Yes"
                else uuid
                if "?" not in uuid
                else ""
            )
    return known


def _ask_nvidia_smi(here: ProbeEnvironment, why: str) -> SearchResult:
    answer = here.run_tool(("nvidia-smi", "-L"))
    if answer.state != "ok":
        said = {
            "missing": "is not installed",
            "hung": "does not answer",
            "failed": f"failed: {answer.text}",
        }
        return SearchResult(
            (),
            f"{why}, and nvidia-smi -L, which names the devices, {said[answer.state]}",
            is_blind=True,
        )
    found = parse_nvidia_smi(answer.text)
    return SearchResult(found, f"{len(found)} device(s) by nvidia-smi -L ({why})")


def parse_nvidia_smi(text: str) -> tuple[DetectedDevice, ...]:
    """Read ``nvidia-smi -L``: a card, or in its place the MIG instances that it is cut into."""
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
