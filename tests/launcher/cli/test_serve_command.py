"""The command line of ``pdrun serve``: plans, and what it refuses before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.launcher.cli.conftest import Outcome

HEALTH = ("--health", "http://127.0.0.1:{port}/v1/completions")


def plan_of(pdrun: Callable[..., Outcome], *words: str) -> dict[str, object]:
    found = pdrun("serve", "--dry-run", "--json", *words)
    assert found.code == 0, found.err
    plan: dict[str, object] = json.loads(found.out)
    return plan


def test_one_server_per_node_sees_all_devices(
    pdrun: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--backend", "cuda", "--devices", "4", "python", "-V")
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in pdrun("serve", "--dry-run", *words).out
    plan = plan_of(pdrun, *words)
    (worker,) = plan["workers"]  # type: ignore[misc]
    assert json.loads(worker["argv"][4])["devices"] == 4
    assert worker["argv"][5:] == ["python", "-V"]
    plan = plan_of(pdrun, "--per", "device", "--backend", "cuda", "--devices", "4", "python")
    workers = plan["workers"]
    assert isinstance(workers, list)
    assert [json.loads(one["argv"][4])["devices"] for one in workers] == [1] * 4
    assert json.loads(workers[0]["argv"][4])["probed"] == [[0, 1_000_000]]


def test_nodes_compare_probes(pdrun: Callable[..., Outcome]) -> None:
    one = plan_of(pdrun, "--port", "8000", "python")
    other = plan_of(pdrun, "--port", "8001", "python")
    assert one["job"] != other["job"]
    assert plan_of(pdrun, "--group", "decode", "python")["job"] == "decode"
    assert plan_of(pdrun, "--group", "decode", "--job", "mine", "python")["job"] == "mine"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "no server to run"),
        (("train.py",), 2, "write python train.py"),
        (("no-such-server",), 127, "command not found"),
        (("--health", "http://h:1/v1/models", "python"), 2, "/v1/models does not generate"),
        (("--health", "h:1/v1/completions", "python"), 2, "is not a URL"),
        (("--ready", "ftp://h/", "python"), 2, "is not a URL"),
        (
            ("--ready", "http://h:{prot}/", "python"),
            2,
            r"no placeholder \{prot\}; did you mean 'port'",
        ),
        (("python", "--port={prot}"), 2, r"no placeholder \{prot\}"),
        (("--health-body", "{}", "python"), 2, "add --health"),
        ((*HEALTH, "--health-body", "[]", "python"), 2, "must be a JSON object"),
        ((*HEALTH, "--health-body", "{", "python"), 2, "is not JSON"),
        ((*HEALTH, "--health-failures", "0", "python"), 2, "below 1"),
        (("--health-interval", "1s", "python"), 2, "add --health"),
        (("--probe-ranks", "0", "python"), 2, "add --ready or --health"),
        (("--port", "8000", "--port", "8001", "python"), 2, "contradicts --port 8000"),
        (("--port", "65000", "python"), 2, "at most 64535"),
        (("--per", "gpu", "python"), 2, "not one of node, device"),
        (("--python", "x", "python"), 2, "no such option --python"),
        (("--group", "a", "python", ":"), 2, "group 1 is empty"),
        (("--group", "a", "python", ":", "python"), 2, "group 1 .'python'. has no name"),
        (("--group", "a", "python", ":", "--group", "a", "python"), 2, "two groups are called a"),
        (("--group", "a", "python", ":", "--group", "b", "python"), 2, "have the port 8000"),
        (("--group", "a", "python", ":", "--group", "b", "--port", "x", "python"), 2, "--port"),
    ],
)
def test_refused(
    pdrun: Callable[..., Outcome], words: tuple[str, ...], code: int, message: str
) -> None:
    found = pdrun("serve", *words)
    assert found.code == code
    assert "Traceback" not in found.err
    assert re.search(message, found.err), found.err


def test_words_in_braces_of_the_server_stay(pdrun: Callable[..., Outcome]) -> None:
    plan = plan_of(pdrun, "python", "{{messages}}", '{"kv_role": "producer"}', "{title}")
    (worker,) = plan["workers"]  # type: ignore[misc]
    assert worker["argv"][6:] == ["{{messages}}", '{"kv_role": "producer"}', "{title}"]
