"""Fake machines: file trees and vendor tools that say what a test wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pdrun.backends.base import BackendProbe, ToolAnswer, TorchBuild
from pdrun.backends.detect import probe_all

EVERYTHING = TorchBuild("9.9", frozenset({"cpu", "cuda", "rocm", "npu", "xpu", "mps"}))


def tree(root: Path, files: Mapping[str, str]) -> Path:
    """Lay files under ``root``; parents are made."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class Tool:
    """A fake tool runner that remembers what was asked."""

    def __init__(self, answer: ToolAnswer | None = None) -> None:
        self.answer = answer or ToolAnswer("missing")
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, command: Sequence[str]) -> ToolAnswer:
        self.asked.append(tuple(command))
        return self.answer


def probe(
    name: str,
    root: Path,
    environ: Mapping[str, str] | None = None,
    tool: Tool | None = None,
    build: TorchBuild | None = EVERYTHING,
    **more: str,
) -> BackendProbe:
    """Return one kind's result on a fake machine."""
    probes = probe_all(
        environ or {}, root, tool or Tool(), build=lambda: build, **{"platform": "linux", **more}
    )
    return next(found for found in probes if found.name == name)


def names(found: BackendProbe) -> list[str]:
    """Return what the visibility variable would call the devices."""
    return [device.name for device in found.devices]


UUIDS = ("GPU-055ee11a-11b6-d8c2-b506-544fd6091dc8", "GPU-b792ced0-3d3b-f6c0-d031-bbef20bfd83d")


def nvidia(root: Path, cards: int = 2, *, driver: bool = True, nodes: bool = True) -> Path:
    """A machine with NVIDIA cards, as /dev and /proc show it on a real one."""
    files = {}
    for card in range(cards):
        uuid = UUIDS[card] if card < len(UUIDS) else f"GPU-{card:08x}-0000-0000-0000-000000000000"
        if nodes:
            files[f"dev/nvidia{card}"] = ""
        files[f"proc/driver/nvidia/gpus/0000:00:{card:02x}.0/information"] = (
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 41\nGPU UUID: \t {uuid}\nBus Type: \t"
            f" PCIe\nBus Location: \t 0000:00:{card:02x}.0\nDevice Minor: \t {card}\nGPU"
            " Excluded:\t No\n"
        )
    if nodes:
        files |= {"dev/nvidiactl": "", "dev/nvidia-uvm": ""}
    if driver:
        files["proc/driver/nvidia/version"] = (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build "
            " (nixbld@)\nGCC version:  gcc version 15.3.0 (GCC)\n"
        )
    return tree(root, files)


def amd(root: Path, cards: int = 2, nodes: Sequence[int] | None = None) -> Path:
    """A machine with one CPU and AMD cards; ``nodes`` are the cards whose render node is there."""
    files = {
        "dev/kfd": "",
        "sys/class/kfd/kfd/topology/nodes/0/gpu_id": "0",
        "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 64\nsimd_count 0\n",
    }
    for card in range(cards):
        place = f"sys/class/kfd/kfd/topology/nodes/{card + 1}"
        files[f"{place}/gpu_id"] = "50432"
        files[f"{place}/properties"] = (
            f"simd_count 440\nvendor_id 4098\ndrm_render_minor {128 + card}\nunique_id"
            f" {5508303925133741523 + card}\n"
        )
        if nodes is None or card in nodes:
            files[f"dev/dri/renderD{128 + card}"] = ""
    return tree(root, files)


def intel(root: Path, cards: Sequence[tuple[str, int]], nodes: bool = True) -> Path:
    """A machine with Intel graphics: a PCI address and a number of tiles each."""
    files = {}
    for number, (slot, tiles) in enumerate(cards, 128):
        place = f"sys/class/drm/renderD{number}/device"
        files |= {
            f"{place}/vendor": "0x8086\n",
            f"{place}/uevent": f"DRIVER=xe\nPCI_SLOT_NAME={slot}\n",
        }
        files |= {f"{place}/tile{tile}/id": "" for tile in range(tiles)}
        if nodes:
            files[f"dev/dri/renderD{number}"] = ""
    return tree(root, files)


def ascend(root: Path, nodes: Sequence[int], *, manager: bool = True, driver: bool = True) -> Path:
    """A machine, or a container, with Ascend chips."""
    files = {f"dev/davinci{number}": "" for number in nodes}
    if manager:
        files["dev/davinci_manager"] = ""
    if driver:
        files["usr/local/Ascend/driver/version.info"] = (
            "Version=24.1.0\nascendhal_version=7.35.23\n"
        )
    return tree(root, files)
