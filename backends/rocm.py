"""
AMD GPUs. torch calls them ``cuda`` and RCCL ``nccl``.

Files that are read (values from the kernel's amdkfd documentation)::

    /dev/kfd                                           the compute driver's one node
    /sys/class/kfd/kfd/topology/nodes/1/gpu_id         50432; 0: CPU; unreadable: another user's
    /sys/class/kfd/kfd/topology/nodes/1/properties     simd_count 440
                                                       drm_render_minor 128
                                                       unique_id 5508303925133741523
    /dev/dri/renderD128                                in a container only its cards
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
from pdrun.text import plural

_NODES = "sys/class/kfd/kfd/topology/nodes"


def _find_devices(here: ProbeEnvironment) -> SearchResult:
    if not here.has_path("dev/kfd"):
        if here.has_path(_NODES):
            return SearchResult(
                (),
                "amdgpu is loaded, but there is no /dev/kfd (container without --device=/dev/kfd?)",
            )
        return SearchResult((), "no /dev/kfd")
    if not here.is_accessible("dev/kfd"):
        return SearchResult((), "this process may not open /dev/kfd (group render or video?)")
    cards = [
        facts
        for _, path in here.list_numbered(_NODES, "([0-9]+)")
        if (facts := _read_card(here, path))
    ]
    if not cards:
        return SearchResult(
            (), "/dev/kfd exists, but /sys/class/kfd lists no GPU that this process may use"
        )
    usable = [
        facts
        for facts in cards
        if here.is_accessible(f"dev/dri/renderD{facts['drm_render_minor']}")
    ]
    if not usable:
        return SearchResult(
            (),
            f"{plural(len(cards), 'GPU')} in /sys/class/kfd, but this process may not open"
            " their /dev/dri/renderDN",
        )
    found = tuple(
        DetectedDevice(str(index), _format_uuid(facts)) for index, facts in enumerate(usable)
    )
    return SearchResult(found, f"{len(found)} device(s) by /dev/kfd and /dev/dri/renderDN")


def _read_card(here: ProbeEnvironment, path: str) -> dict[str, str]:
    """Return the properties of a topology node if it is a GPU, or an empty dict."""
    facts = dict(re.findall(r"^(\w+) (\d+)$", here.read_text(f"{path}/properties"), re.M))
    is_gpu = (
        here.read_text(f"{path}/gpu_id") not in ("", "0") and int(facts.get("simd_count", "0")) > 0
    )
    return facts if is_gpu and "drm_render_minor" in facts else {}


def _format_uuid(facts: dict[str, str]) -> str:
    number = int(facts.get("unique_id", "0"))
    return f"GPU-{number:016x}" if number else ""


BACKEND = Backend(
    name="rocm",
    title="AMD GPU (ROCm)",
    variables=(
        VisibilityVariable("ROCR_VISIBLE_DEVICES", prefixes=("GPU-",)),
        VisibilityVariable("HIP_VISIBLE_DEVICES", alias="CUDA_VISIBLE_DEVICES", prefixes=("GPU-",)),
    ),
    torch_device="cuda",
    collective="nccl",
    search=_find_devices,
)
