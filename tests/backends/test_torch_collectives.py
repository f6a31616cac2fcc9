"""Device and process group of each kind, against a torch that has what this machine lacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdrun.backends import collectives
from pdrun.backends.collectives import group_backend, native_backend, open_device, open_group
from pdrun.backends.detect import KINDS
from pdrun.errors import ConfigError


class FakeTorch:
    """The few names of torch that the file uses."""

    __version__ = "9.9"

    def __init__(
        self, kind: str, count: int, backends: tuple[str, ...], hip: str | None = None
    ) -> None:
        self.version = SimpleNamespace(hip=hip)
        self.current: int | None = None
        self.groups: list[tuple[str, dict[str, Any]]] = []
        self.accelerator = SimpleNamespace(
            is_available=lambda: count > 0, current_accelerator=lambda: SimpleNamespace(type=kind)
        )
        module = SimpleNamespace(
            is_available=lambda: count > 0,
            device_count=lambda: count,
            set_device=lambda index: setattr(self, "current", index),
        )
        setattr(self, kind, module)
        self.distributed = SimpleNamespace(
            is_available=lambda: bool(backends),
            is_backend_available=lambda name: name in backends,
            Backend=SimpleNamespace(
                backend_capability={"gloo": ["cpu", "cuda"], "nccl": ["cuda"], "xccl": ["xpu"]}
            ),
            init_process_group=lambda name, **options: self.groups.append((name, options)),
        )

    @staticmethod
    def device(kind: str, index: int | None = None) -> tuple[str, int | None]:
        return kind, index


def use(monkeypatch: pytest.MonkeyPatch, torch: FakeTorch) -> FakeTorch:
    monkeypatch.setattr(collectives, "import_torch", lambda: torch)
    return torch


@pytest.mark.parametrize(
    ("kind", "backends", "expected"),
    [
        ("cuda", ("nccl", "gloo"), "cpu:gloo,cuda:nccl"),
        ("rocm", ("nccl", "gloo"), "cpu:gloo,cuda:nccl"),
        ("xpu", ("xccl", "gloo"), "cpu:gloo,xpu:xccl"),
        ("npu", ("hccl", "gloo"), "cpu:gloo,npu:hccl"),
        ("mps", ("gloo",), "gloo"),
        ("cpu", ("gloo", "nccl"), "gloo"),
        ("cuda", ("nccl",), "nccl"),
    ],
)
def test_tensors_of_both_kinds_travel(
    monkeypatch: pytest.MonkeyPatch, kind: str, backends: tuple[str, ...], expected: str
) -> None:
    use(monkeypatch, FakeTorch("cuda", 1, backends))
    assert group_backend(KINDS[kind]) == expected


def test_a_lacking_collective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeTorch("cuda", 1, ("gloo",)))
    with pytest.raises(ConfigError, match=r"torch 9\.9 is built without nccl"):
        group_backend(KINDS["cuda"])
    use(monkeypatch, FakeTorch("cuda", 1, ()))
    with pytest.raises(ConfigError, match=r"without torch\.distributed"):
        group_backend(KINDS["cpu"])


@pytest.mark.parametrize(
    ("kind", "collective"), [("cpu", "nccl"), ("xpu", "nccl"), ("cuda", "XCCL")]
)
def test_a_collective_of_other_devices_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, collective: str
) -> None:
    """A build with CUDA has nccl, on a machine without a GPU too."""
    use(monkeypatch, FakeTorch("cuda", 1, ("gloo", "nccl", "xccl")))
    with pytest.raises(ConfigError, match=f"{collective} is for .*; this worker has {kind}"):
        group_backend(KINDS[kind], collective)
    assert group_backend(KINDS["rocm"], "nccl") == "cpu:gloo,cuda:nccl"
    assert group_backend(KINDS["xpu"], "gloo") == "gloo"


def test_the_device_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = use(monkeypatch, FakeTorch("cuda", 4, ("nccl",)))
    assert open_device(KINDS["cuda"], 2) == ("cuda", 2)
    assert torch.current == 2
    with pytest.raises(ConfigError, match="this worker needs cuda:4, but torch sees 4"):
        open_device(KINDS["cuda"], 4)
    assert open_device(KINDS["cpu"], 3) == ("cpu", None)


def test_a_worker_that_sees_one_device_has_number_0(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = use(monkeypatch, FakeTorch("cuda", 1, ("nccl",)))
    assert open_device(KINDS["rocm"], 5) == ("cuda", 0)
    assert torch.current == 0


def test_mps_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeTorch("mps", 1, ("gloo",)))
    assert open_device(KINDS["mps"], 1) == ("mps", None)


def test_a_torch_without_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeTorch("cuda", 0, ("gloo",)))
    for kind, title in (("cuda", "NVIDIA"), ("xpu", "Intel")):
        with pytest.raises(ConfigError, match=rf"torch 9\.9 does not support {title}"):
            open_device(KINDS[kind], 0)


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        (FakeTorch("cuda", 2, ()), "cuda"),
        (FakeTorch("cuda", 2, (), hip="6.4"), "rocm"),
        (FakeTorch("xpu", 1, ()), "xpu"),
        (FakeTorch("npu", 1, ()), "npu"),
        (FakeTorch("cuda", 0, ()), "cpu"),
        (FakeTorch("tpu", 1, ()), "cpu"),
    ],
)
def test_what_torch_itself_has(
    monkeypatch: pytest.MonkeyPatch, torch: FakeTorch, expected: str
) -> None:
    use(monkeypatch, torch)
    assert native_backend().name == expected


def test_nccl_is_tied_to_its_device_and_gloo_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = use(monkeypatch, FakeTorch("cuda", 2, ("nccl", "gloo")))
    open_group(KINDS["cuda"], "", ("cuda", 1), 1, 2, None, None)  # type: ignore[arg-type]
    open_group(KINDS["cuda"], "gloo", ("cuda", 1), 1, 2, 5.0, "store")  # type: ignore[arg-type]
    (first, options), (second, others) = torch.groups
    assert (first, options) == (
        "cpu:gloo,cuda:nccl",
        {"rank": 1, "world_size": 2, "device_id": ("cuda", 1)},
    )
    assert second == "gloo"
    assert others["timeout"].total_seconds() == 5
    assert others["store"] == "store"
    assert "device_id" not in others
