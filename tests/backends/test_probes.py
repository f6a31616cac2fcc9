"""What each kind finds on machines that are whole, half there, or in a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdrun.backends import detect
from pdrun.backends.base import ToolAnswer, TorchBuild
from tests.backends.helpers import EVERYTHING, Tool, amd, ascend, intel, names, nvidia, probe, tree

MIG_LIST = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-6e6ba0d6-d33d-2b2c-524d-9e3d8d2b8a88)
"""


def mig(root: Path) -> Path:
    return tree(nvidia(root), {"proc/driver/nvidia/capabilities/gpu0/mig/gi1/access": "x"})


def test_cuda_counts_nodes_without_asking_a_tool(tmp_path: Path) -> None:
    tool = Tool(ToolAnswer("hung"))
    found = probe("cuda", nvidia(tmp_path, 8), tool=tool)
    assert found.present
    assert names(found) == [str(number) for number in range(8)]
    assert found.reason == "8 device(s) by /dev/nvidiaN, driver 580.159.04"
    assert tool.asked == []


def test_cuda_in_a_container_with_two_of_the_cards(tmp_path: Path) -> None:
    root = nvidia(tmp_path, 8)
    for card in (0, 1, 2, 3, 6, 7):
        (root / f"dev/nvidia{card}").unlink()
    assert names(probe("cuda", root)) == ["0", "1"]


def test_cuda_driver_without_nodes(tmp_path: Path) -> None:
    found = probe("cuda", nvidia(tmp_path, nodes=False))
    assert not found.present
    assert "driver 580.159.04 is loaded, but there is no /dev/nvidiaN" in found.reason


def test_cuda_nodes_without_driver(tmp_path: Path) -> None:
    found = probe("cuda", nvidia(tmp_path, driver=False))
    assert not found.present
    assert "no driver is loaded" in found.reason


def test_cuda_excluded_card_is_not_counted(tmp_path: Path) -> None:
    root = nvidia(tmp_path, 2)
    path = root / "proc/driver/nvidia/gpus/0000:00:00.0/information"
    path.write_text(path.read_text().replace("Excluded:\t No", "Excluded:\t Yes"))
    assert names(probe("cuda", root)) == ["0"]


def test_nodes_that_may_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: str(path).endswith(("nvidia1", "davinci1")))
    root = ascend(nvidia(tmp_path, 3), (0, 1))
    assert names(probe("cuda", root)) == names(probe("npu", root)) == ["0"]
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "this process may open none" in probe("cuda", root).reason
    assert "this process may open none" in probe("npu", root).reason
    assert "this process may not open /dev/kfd" in probe("rocm", amd(tmp_path)).reason


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_access_sees_what_the_device_cgroup_forbids() -> None:
    """
    The probe's claim about the kernel: access(2) answers for the device cgroup too, without opening
    the device.
    """
    place = Path("/sys/fs/cgroup/devices/pdrun-test-devices")
    if not Path("/sys/fs/cgroup/devices/devices.list").exists():
        pytest.skip("no cgroup v1 device controller")
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        child = os.fork()
        if child == 0:
            (place / "cgroup.procs").write_text(str(os.getpid()))
            (place / "devices.deny").write_text("c 1:5 rwm")
            allowed = [os.access(path, os.R_OK | os.W_OK) for path in ("/dev/zero", "/dev/null")]
            os._exit(10 + allowed[0] + 2 * allowed[1])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 12
    finally:
        place.rmdir()


def test_mig_instances_take_the_place_of_their_card(tmp_path: Path) -> None:
    tool = Tool(ToolAnswer("ok", MIG_LIST))
    found = probe("cuda", mig(tmp_path), tool=tool)
    assert names(found) == [
        "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f",
        "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb",
        "1",
    ]
    assert tool.asked == [("nvidia-smi", "-L")]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ToolAnswer("hung"), "does not answer"),
        (ToolAnswer("missing"), "is not installed"),
        (ToolAnswer("failed", "exit code 9: no devices"), "failed: exit code 9: no devices"),
    ],
)
def test_mig_without_its_tool_is_refused_with_the_reason(
    tmp_path: Path, answer: ToolAnswer, words: str
) -> None:
    found = probe("cuda", mig(tmp_path), tool=Tool(answer))
    assert not found.present
    assert found.devices == ()
    assert words in found.reason


def test_mig_without_its_tool_takes_the_names_that_the_scheduler_gave(tmp_path: Path) -> None:
    found = probe(
        "cuda", mig(tmp_path), {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, Tool(ToolAnswer("hung"))
    )
    assert found.present
    assert names(found) == ["MIG-a", "MIG-b"]


def test_wsl_asks_the_tool(tmp_path: Path) -> None:
    found = probe(
        "cuda",
        tree(tmp_path, {"dev/dxg": ""}),
        tool=Tool(ToolAnswer("ok", MIG_LIST.splitlines()[0])),
    )
    assert names(found) == ["0"]


def test_rocm_counts_cards_with_a_render_node(tmp_path: Path) -> None:
    assert names(probe("rocm", amd(tmp_path, 4, nodes=(1, 2)))) == ["0", "1"]


def test_rocm_half_there(tmp_path: Path) -> None:
    root = amd(tmp_path, 2, nodes=())
    assert "this process may not open their /dev/dri/renderDN" in probe("rocm", root).reason
    (root / "dev/kfd").unlink()
    assert "amdgpu is loaded, but there is no /dev/kfd" in probe("rocm", root).reason


def test_rocm_only_the_cpu_in_the_topology(tmp_path: Path) -> None:
    assert "lists no GPU" in probe("rocm", amd(tmp_path, 0)).reason


def test_npu_numbers_from_zero_whatever_the_nodes_are(tmp_path: Path) -> None:
    found = probe("npu", ascend(tmp_path, (4, 10, 9)))
    assert names(found) == ["0", "1", "2"]
    assert "driver 24.1.0" in found.reason


def test_npu_half_there(tmp_path: Path) -> None:
    assert (
        "no /dev/davinciN, though an Ascend driver"
        in probe("npu", ascend(tmp_path / "a", ())).reason
    )
    assert (
        "no /dev/davinci_manager"
        in probe("npu", ascend(tmp_path / "b", (0,), manager=False)).reason
    )


def test_xpu_tiles_cards_and_processor_graphics(tmp_path: Path) -> None:
    inside, card = ("0000:00:02.0", 1), ("0000:3a:00.0", 2)
    assert names(probe("xpu", intel(tmp_path / "a", [inside]))) == ["0"]
    both = intel(tmp_path / "b", [inside, card])
    assert names(probe("xpu", both)) == ["0", "1"]
    assert names(probe("xpu", both, {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"})) == ["0"]
    assert "group render" in probe("xpu", intel(tmp_path / "c", [card], nodes=False)).reason


def test_xpu_ignores_other_vendors(tmp_path: Path) -> None:
    root = intel(tmp_path, [("0000:3a:00.0", 1)])
    (root / "sys/class/drm/renderD128/device/vendor").write_text("0x10de\n")
    assert probe("xpu", root).reason == "no Intel GPU in /sys/class/drm"


def test_mps_only_on_apple_processors(tmp_path: Path) -> None:
    assert probe("mps", tmp_path, platform="darwin", machine="arm64").present
    assert "x86_64" in probe("mps", tmp_path, platform="darwin", machine="x86_64").reason
    assert not probe("mps", tmp_path).present


def test_a_machine_with_nothing_starts_no_tool_and_keeps_every_reason(tmp_path: Path) -> None:
    tool = Tool(ToolAnswer("ok", MIG_LIST))
    probes = detect.probe_all({}, tmp_path, tool, platform="linux")
    assert [found.name for found in probes] == ["cuda", "rocm", "npu", "xpu", "mps", "cpu"]
    assert [found.present for found in probes] == [False] * 5 + [True]
    assert all(found.reason for found in probes)
    assert tool.asked == []


def test_devices_that_the_installed_torch_cannot_use_are_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    found = probe("cuda", nvidia(tmp_path), build=TorchBuild("2.13.0+cpu", frozenset({"cpu"})))
    assert not found.present
    assert len(found.devices) == 2
    assert found.reason.endswith("but torch 2.13.0+cpu is built without cuda")


def test_npu_without_torch_npu(tmp_path: Path) -> None:
    found = probe("npu", ascend(tmp_path, (0,)), build=TorchBuild("2.13", frozenset({"cpu"})))
    assert found.reason.endswith("but torch_npu is not installed")


def test_without_torch_the_devices_speak_for_themselves(tmp_path: Path) -> None:
    assert probe("cuda", nvidia(tmp_path), build=None).present


def test_build_is_read_from_the_version_file(tmp_path: Path) -> None:
    text = (
        "__version__ = '2.8.0+rocm6.4'\ncuda: Optional[str] = None\nhip: Optional[str] ="
        " '6.4.43484'\n"
    )
    tree(tmp_path, {"torch/version.py": text})
    build = detect.installed_torch([str(tmp_path)])
    assert build == TorchBuild("2.8.0+rocm6.4", frozenset({"cpu", "mps", "rocm"}))
    assert detect.installed_torch([str(tmp_path / "elsewhere")]) is None
    assert (
        "cuda"
        in detect.parse_torch_version(
            "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n"
        ).kinds
    )
    assert "npu" in detect.parse_torch_version("", npu=True).kinds


def test_everything_hidden_says_by_what(tmp_path: Path) -> None:
    found = probe("cuda", nvidia(tmp_path), {"CUDA_VISIBLE_DEVICES": "-1"}, build=EVERYTHING)
    assert not found.present
    assert found.reason.endswith("all hidden: 0 of 2 by CUDA_VISIBLE_DEVICES=-1")
