"""
Huawei Ascend NPUs, through the package torch_npu.

Files that are read (values from Ascend's documentation)::

    /dev/davinci0 ... /dev/davinci7       one node per chip; in a container only its chips
    /dev/davinci_manager                  the driver's own node, needed by every process
    /usr/local/Ascend/driver/version.info         Version=24.1.0

npu-smi is not run: its output changes with every release, and the nodes have the same information.
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


def _find_devices(here: ProbeEnvironment) -> SearchResult:
    nodes = here.list_numbered("dev", r"davinci([0-9]+)")
    version = re.search(
        r"^Version=(\S+)", here.read_text("usr/local/Ascend/driver/version.info"), re.M
    )
    driver = f", driver {version[1]}" if version else ""
    if not nodes:
        if version or here.has_path("dev/davinci_manager"):
            return SearchResult(
                (), f"no /dev/davinciN, though an Ascend driver is installed{driver} (a container?)"
            )
        return SearchResult((), "no /dev/davinciN")
    if not here.has_path("dev/davinci_manager"):
        return SearchResult(
            (),
            f"{len(nodes)} of /dev/davinciN, but no /dev/davinci_manager",
        )
    usable = [number for number, path in nodes if here.is_accessible(path)]
    if not usable:
        return SearchResult(
            (),
            f"{len(nodes)} of /dev/davinciN, but this process may open none (group HwHiAiUser?)",
        )
    # The runtime numbers the chips that it can open from 0, independent of the nodes' numbers.
    found = tuple(DetectedDevice(str(index)) for index in range(len(usable)))
    return SearchResult(found, f"{len(found)} device(s) by /dev/davinciN{driver}")


BACKEND = Backend(
    name="npu",
    title="Ascend NPU (CANN)",
    variables=(
        VisibilityVariable("ASCEND_RT_VISIBLE_DEVICES", has_ranges=True, is_ascending=True),
    ),
    torch_device="npu",
    collective="hccl",
    search=_find_devices,
    plugin="torch_npu",
)
