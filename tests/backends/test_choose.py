"""Which kind is taken, and how refusals are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdrun.backends import detect
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.plan.model import BackendFacts
from tests.backends.helpers import EVERYTHING, Tool, amd, nvidia


def probes(root: Path, environ: dict[str, str] | None = None):  # type: ignore[no-untyped-def]
    return detect.probe_all(environ or {}, root, Tool(), build=lambda: EVERYTHING, platform="linux")


def test_auto_takes_the_first_and_says_why_not_the_others(tmp_path: Path) -> None:
    table, reason = detect.choose_backend("auto", probes(amd(tmp_path)))
    assert table.name == "rocm"
    assert "not cuda: no /dev/nvidiaN" in reason


def test_auto_without_accelerators_is_the_cpu_with_five_reasons(tmp_path: Path) -> None:
    table, reason = detect.choose_backend("auto", probes(tmp_path))
    assert table.name == "cpu"
    assert reason.count("; not ") == 5


def test_a_kind_that_is_not_here_is_refused_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--backend: cuda cannot be used: no /dev/nvidiaN.*; usable here: rocm, cpu",
    ):
        detect.choose_backend("cuda", probes(amd(tmp_path)))


def test_a_contradiction_stops_auto_but_not_another_kind(tmp_path: Path) -> None:
    found = probes(nvidia(tmp_path), {"CUDA_VISIBLE_DEVICES": "0,0"})
    with pytest.raises(ConfigError, match="names device 0 twice"):
        detect.choose_backend("auto", found)
    with pytest.raises(ConfigError, match="names device 0 twice"):
        detect.choose_backend("cuda", found)
    assert detect.choose_backend("cpu", found)[0].name == "cpu"


def test_the_launchers_copy_of_a_probe_is_as_good(tmp_path: Path) -> None:
    facts = [
        BackendFacts(found.name, found.present, found.reason, found.devices, found.broken)
        for found in probes(nvidia(tmp_path))
    ]
    assert detect.choose_backend("auto", facts)[0].name == "cuda"


def test_unknown_kind_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match="did you mean 'cuda'"):
        detect.get_backend("cuba")


def test_tables_are_complete() -> None:
    assert {
        name: (table.torch_device, table.collective) for name, table in detect.KINDS.items()
    } == {
        "cuda": ("cuda", "nccl"),
        "rocm": ("cuda", "nccl"),
        "npu": ("npu", "hccl"),
        "xpu": ("xpu", "xccl"),
        "mps": ("mps", "gloo"),
        "cpu": ("cpu", "gloo"),
    }
    assert {
        name: [variable.name for variable in table.variables]
        for name, table in detect.KINDS.items()
    } == {
        "cuda": ["CUDA_VISIBLE_DEVICES"],
        "rocm": ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"],
        "npu": ["ASCEND_RT_VISIBLE_DEVICES"],
        "xpu": ["ZE_AFFINITY_MASK"],
        "mps": [],
        "cpu": [],
    }
