"""
Intel GPUs.

Files that are read::

    /dev/dri/renderD128                                the card's compute node
    /sys/class/drm/renderD128/device/vendor            0x8086
    /sys/class/drm/renderD128/device/class             0x038000 (0x030000 on cards with a display)
    /sys/class/drm/renderD128/device/uevent            DRIVER=xe, or i915
                                                       PCI_SLOT_NAME=0000:00:02.0: integrated
                                                       graphics
    /sys/class/drm/renderD128/device/tile0, tile1      tiles of a card (driver xe)

Each tile is a device, unless ZE_FLAT_DEVICE_HIERARCHY selects cards; the runtime's default is FLAT.
Integrated graphics count only if there is no card, as in torch. Limit: driver i915 does not
distinguish tiles from media engines, so its cards count as one device each.
"""

from __future__ import annotations

from pdrun.backends.base import (
    Backend,
    DetectedDevice,
    ProbeEnvironment,
    SearchResult,
    VisibilityVariable,
)
from pdrun.text import plural


def _find_devices(here: ProbeEnvironment) -> SearchResult:
    nodes = [
        (f"dev/dri/renderD{number}", f"{path}/device")
        for number, path in here.list_numbered("sys/class/drm", r"renderD([0-9]+)")
        if here.read_text(f"{path}/device/vendor") == "0x8086"
    ]
    if not nodes:
        return SearchResult((), "no Intel GPU in /sys/class/drm")
    usable = [device for node, device in nodes if here.is_accessible(node)]
    if not usable:
        return SearchResult(
            (),
            f"{plural(len(nodes), 'Intel GPU')}, but this process may open no /dev/dri/renderDN"
            " (group render?)",
        )
    cards = [
        device
        for device in usable
        if "PCI_SLOT_NAME=0000:00:02.0" not in here.read_text(f"{device}/uevent")
    ] or usable
    whole = here.environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT").upper() == "COMPOSITE"
    count = sum(
        1 if whole else max(1, len(here.list_numbered(device, r"tile([0-9]+)"))) for device in cards
    )
    return SearchResult(
        tuple(DetectedDevice(str(index)) for index in range(count)),
        f"{count} device(s) by /dev/dri/renderDN",
    )


BACKEND = Backend(
    name="xpu",
    title="Intel GPU (XPU)",
    variables=(VisibilityVariable("ZE_AFFINITY_MASK", has_parts=True),),
    torch_device="xpu",
    collective="xccl",
    search=_find_devices,
)
