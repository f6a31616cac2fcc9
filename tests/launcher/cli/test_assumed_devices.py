"""A plan that is only printed can have devices that this host lacks; a job cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

KINDS = [("npu", "ASCEND_RT_VISIBLE_DEVICES"), ("cuda", "CUDA_VISIBLE_DEVICES")]


@pytest.mark.parametrize(("kind", "variable"), KINDS)
def test_devices_of_another_host_are_planned(
    pdrun: Callable[..., Any], kind: str, variable: str
) -> None:
    words = ("--dry-run", "--backend", kind, "--devices", "2")
    outcome = pdrun(*words, "--json", "train.py")
    if "assumed" not in outcome.err:
        pytest.skip(f"this host has {kind} devices")
    assert outcome.code == 0
    assert f"2 {kind} devices assumed: this host has none (" in outcome.err
    plan = json.loads(outcome.out)
    assert any("assumed" in note for note in plan["notes"])
    assert [worker["visibility"][variable] for worker in plan["workers"]] == ["0,1"] * 2
    local = pdrun(*words, "--nodes", "2", "--local", "train.py")
    assert f"{variable}=2,3" in local.out


def test_a_job_needs_its_devices(pdrun: Callable[..., Any]) -> None:
    assumed = pdrun("--dry-run", "--backend", "npu", "--devices", "2", "train.py")
    if "assumed" not in assumed.err:
        pytest.skip("this host has NPUs")
    for words in (("--devices", "2"), ("--dry-run",)):
        outcome = pdrun("--backend", "npu", *words, "train.py")
        assert outcome.code == 78
        assert "npu cannot be used" in outcome.err
