"""Visible-device lists compose, and nothing is ever widened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.backends import cpu, cuda, npu, rocm, xpu
from pdrun.backends.base import Backend, DetectedDevice
from pdrun.backends.visibility import (
    DeviceGrant,
    apply_visibility,
    expose_devices,
    grant_devices,
    restrict_to_device,
)
from pdrun.errors import ConfigError, PdrunError
from pdrun.topology import Device
from tests.backends.helpers import UUIDS

FOUND = [DetectedDevice(str(number), uuid) for number, uuid in enumerate(UUIDS)]
EIGHT = [DetectedDevice(str(number)) for number in range(8)]


def names(
    backend: Backend, environ: dict[str, str], found: list[DetectedDevice] | None = None
) -> list[str]:
    return [
        device.name
        for device in apply_visibility(backend, environ, EIGHT if found is None else found).devices
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    # The counts are what the CUDA driver itself said on a machine with two H100 (driver
    # 580.159.04).
    [
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0", 1),
        ("0,1", 2),
        ("1,0", 2),
        (" 0", 1),
        ("0 ,1", 2),
        ("00", 1),
        ("0,abc", 1),
        (",0", 0),
        ("0,", 1),
        ("GPU-", 0),
        ("GPU-055ee1", 1),
        (f"{UUIDS[0]},0", 1),
        (UUIDS[0], 1),
        ("GPU-055EE11A-11B6-D8C2-B506-544FD6091DC8", 1),
        ("gpu-055ee11a-11b6-d8c2-b506-544fd6091dc8", 0),
        ("0,9,1", 1),
        (f"{UUIDS[1]},{UUIDS[0]}", 2),
        ("GPU-ffff", 0),
    ],
)
def test_cuda_counts_what_the_driver_counts(text: str, count: int) -> None:
    assert (
        len(apply_visibility(cuda.BACKEND, {"CUDA_VISIBLE_DEVICES": text}, FOUND).devices) == count
    )


@pytest.mark.parametrize(
    "text", ["0,0", "1,01", f"{UUIDS[0]},{UUIDS[0]}", "GPU-055ee1,GPU-055EE11A", "0,1,0"]
)
def test_a_device_named_twice_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES: .* twice"):
        apply_visibility(cuda.BACKEND, {"CUDA_VISIBLE_DEVICES": text}, FOUND)


@pytest.mark.parametrize("text", ["0;1", "0-1", "1gpu", "0x0", "+0"])
def test_what_the_driver_would_misread_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a device"):
        apply_visibility(cuda.BACKEND, {"CUDA_VISIBLE_DEVICES": text}, FOUND)


def test_the_schedulers_devices_are_kept_and_shared_in_rank_order() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,5"}
    devices = apply_visibility(cuda.BACKEND, environ, EIGHT).devices
    assert devices == (Device("cuda", 0, "4"), Device("cuda", 1, "5"))
    assert grant_devices(cuda.BACKEND, devices, environ) == (
        DeviceGrant(environ, 0),
        DeviceGrant(environ, 1),
    )
    assert restrict_to_device(cuda.BACKEND, devices[1], environ) == {"CUDA_VISIBLE_DEVICES": "5"}


def test_uuids_are_handed_on_as_they_were_written() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": f"{UUIDS[1]},GPU-055ee1"}
    devices = apply_visibility(cuda.BACKEND, environ, FOUND).devices
    assert expose_devices(cuda.BACKEND, devices, environ) == environ


def test_each_worker_sees_only_its_own_mig_instance() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    found = [
        DetectedDevice("MIG-a", "MIG-a", "0"),
        DetectedDevice("MIG-b", "MIG-b", "0"),
        DetectedDevice("MIG-c", "MIG-c", "1"),
    ]
    devices = apply_visibility(cuda.BACKEND, environ, found).devices
    assert grant_devices(cuda.BACKEND, devices, environ) == (
        DeviceGrant({"CUDA_VISIBLE_DEVICES": "MIG-a"}, 0),
        DeviceGrant({"CUDA_VISIBLE_DEVICES": "MIG-b"}, 0),
    )


def test_with_mig_a_number_stays_a_card() -> None:
    found = [
        DetectedDevice("MIG-a", "MIG-a", "0"),
        DetectedDevice("MIG-b", "MIG-b", "0"),
        DetectedDevice("1", UUIDS[0]),
    ]
    assert names(cuda.BACKEND, {"CUDA_VISIBLE_DEVICES": "1"}, found) == ["1"]
    assert names(cuda.BACKEND, {"CUDA_VISIBLE_DEVICES": "2"}, found) == []


def test_blind_lists_take_names_on_trust_but_no_numbers() -> None:
    seen = apply_visibility(cuda.BACKEND, {"CUDA_VISIBLE_DEVICES": "MIG-GPU-1/3/0"}, [], blind=True)
    assert [device.name for device in seen.devices] == ["MIG-GPU-1/3/0"]
    assert (
        apply_visibility(cuda.BACKEND, {"CUDA_VISIBLE_DEVICES": "0"}, [], blind=True).devices == ()
    )


def test_hip_numbers_what_rocr_left() -> None:
    environ = {"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2,0"}
    devices = apply_visibility(rocm.BACKEND, environ, EIGHT).devices
    assert [device.name for device in devices] == ["2", "0"]
    assert restrict_to_device(rocm.BACKEND, devices[0], environ) == {"HIP_VISIBLE_DEVICES": "2"}
    assert names(rocm.BACKEND, {**environ, "HIP_VISIBLE_DEVICES": "3"}) == []


def test_rocr_alone_leaves_hip_to_number_from_zero() -> None:
    environ = {"ROCR_VISIBLE_DEVICES": "6,7"}
    devices = apply_visibility(rocm.BACKEND, environ, EIGHT).devices
    assert expose_devices(rocm.BACKEND, devices, environ) == {"HIP_VISIBLE_DEVICES": "0,1"}


def test_hip_reads_cudas_list_where_its_own_is_unset() -> None:
    assert names(rocm.BACKEND, {"CUDA_VISIBLE_DEVICES": "3"}) == ["3"]
    assert names(rocm.BACKEND, {"CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "1"}) == ["1"]


def test_ascend_ranges_are_handed_on_as_a_plain_list() -> None:
    environ = {"ASCEND_RT_VISIBLE_DEVICES": "0-2, 5"}
    devices = apply_visibility(npu.BACKEND, environ, EIGHT).devices
    assert expose_devices(npu.BACKEND, devices, environ) == {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,5"}


@pytest.mark.parametrize(
    ("text", "words"), [("2,1", "ascending"), ("1-3,2", "twice"), ("3-1", "is not a device")]
)
def test_ascend_lists_that_its_runtime_misreads(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        apply_visibility(npu.BACKEND, {"ASCEND_RT_VISIBLE_DEVICES": text}, EIGHT)


def test_parts_of_an_intel_device() -> None:
    environ = {"ZE_AFFINITY_MASK": "0.1,1"}
    devices = apply_visibility(xpu.BACKEND, environ, EIGHT).devices
    assert [restrict_to_device(xpu.BACKEND, device, environ) for device in devices] == [
        {"ZE_AFFINITY_MASK": "0.1"},
        {"ZE_AFFINITY_MASK": "1"},
    ]
    assert names(xpu.BACKEND, {"ZE_AFFINITY_MASK": "9.0"}) == []
    for text in ("0,0.1", "0.1,0"):
        with pytest.raises(ConfigError, match="twice"):
            apply_visibility(xpu.BACKEND, {"ZE_AFFINITY_MASK": text}, EIGHT)


def test_the_cpu_has_nothing_to_limit() -> None:
    device = Device("cpu", 0)
    assert restrict_to_device(cpu.BACKEND, device, {"CUDA_VISIBLE_DEVICES": "0"}) == {}
    assert grant_devices(cpu.BACKEND, (device, device), {}) == (
        DeviceGrant({}, 0),
        DeviceGrant({}, 0),
    )


def test_widening_is_refused() -> None:
    with pytest.raises(PdrunError, match="device 3 is not among CUDA_VISIBLE_DEVICES=4,5"):
        restrict_to_device(cuda.BACKEND, Device("cuda", 0, "3"), {"CUDA_VISIBLE_DEVICES": "4,5"})


LISTS = st.lists(st.integers(0, 11), max_size=8, unique=True)


@given(LISTS, st.integers(0, 10))
def test_a_list_shows_its_entries_up_to_the_first_that_is_not_there(
    wanted: list[int], present: int
) -> None:
    found = [DetectedDevice(str(number)) for number in range(present)]
    text = ",".join(map(str, wanted))
    shown = [int(name) for name in names(cuda.BACKEND, {"CUDA_VISIBLE_DEVICES": text}, found)]
    valid = next(
        (position for position, number in enumerate(wanted) if number >= present), len(wanted)
    )
    assert shown == wanted[:valid]


@given(LISTS, st.data())
def test_limiting_again_and_again_never_widens(wanted: list[int], data: st.DataObject) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, wanted))}
    devices = apply_visibility(cuda.BACKEND, environ, EIGHT).devices
    while devices:
        before = set(names(cuda.BACKEND, environ))
        chosen = data.draw(st.lists(st.sampled_from(devices), min_size=1, unique=True))
        environ |= expose_devices(cuda.BACKEND, chosen, environ)
        shown = names(cuda.BACKEND, environ)
        assert shown == [device.name for device in chosen]
        assert set(shown) <= before
        devices = apply_visibility(cuda.BACKEND, environ, EIGHT).devices[: len(chosen) - 1]


@given(LISTS, LISTS)
def test_two_rocm_lists_compose(outer: list[int], inner: list[int]) -> None:
    environ = {
        "ROCR_VISIBLE_DEVICES": ",".join(map(str, outer)),
        "HIP_VISIBLE_DEVICES": ",".join(map(str, inner)),
    }
    left = names(cuda.BACKEND, {"CUDA_VISIBLE_DEVICES": environ["ROCR_VISIBLE_DEVICES"]})
    found = [DetectedDevice(str(number)) for number in range(len(left))]
    expected = names(cuda.BACKEND, {"CUDA_VISIBLE_DEVICES": environ["HIP_VISIBLE_DEVICES"]}, found)
    assert names(rocm.BACKEND, environ) == expected


@given(st.text(alphabet="0123456789,-.GPUMIGab x;", max_size=20))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    for backend in (cuda.BACKEND, rocm.BACKEND, npu.BACKEND, xpu.BACKEND):
        environ = {variable.name: text for variable in backend.variables}
        try:
            seen = apply_visibility(backend, environ, FOUND)
        except ConfigError as error:
            assert error.where in environ
        else:
            assert len({device.name for device in seen.devices}) == len(seen.devices) <= len(FOUND)
            assert all(grant.variables for grant in grant_devices(backend, seen.devices, environ))
