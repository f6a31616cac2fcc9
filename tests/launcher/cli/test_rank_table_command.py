from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pdrun.launcher.jobs import status as job_status
from pdrun.ui.job_status import JobStatus, NodeStatus
from tests.launcher.cli.conftest import Outcome
from tests.launcher.cli.conftest import folder as folder  # a fixture, which the next one needs
from tests.launcher.ranktables.test_verdicts import GOOD, REFUSED, TABLES

Call = Callable[..., Outcome]


def test_check_says_of_each_file_what_it_is(pdrun: Call) -> None:
    outcome = pdrun("rank-table", "check", *(str(TABLES / name) for name in (*GOOD, *REFUSED)))
    assert outcome.code == 78
    lines = outcome.out.splitlines()
    for name in GOOD:
        assert any(line.startswith(f"{TABLES / name}: good: ") for line in lines), name
    for name, words in REFUSED.items():
        assert f"{TABLES / name}: refused" in lines
        assert any(words in line for line in lines), name
    assert pdrun("rank-table", "check", *(str(TABLES / name) for name in GOOD)).code == 0


def test_convert_sets_the_json_types_right(pdrun: Call, tmp_path: Path) -> None:
    bad = str(TABLES / "31_v1.0_16p_merge_hccl_int_ranks.json")
    out = tmp_path / "right.json"
    outcome = pdrun("rank-table", "convert", bad, "--to", "1.0", "-o", str(out))
    assert outcome.code == 0
    assert outcome.err.count("must be text, got the number") == 5
    assert "... and 11 more" in outcome.err
    assert pdrun("rank-table", "check", str(out)).code == 0
    assert json.loads(out.read_text())["server_list"][1]["device"][7]["rank_id"] == "15"


def test_convert_drops_nothing_without_lossy(pdrun: Call) -> None:
    pods = str(TABLES / "20_v1.2_16p_a3_superpod.json")
    outcome = pdrun("rank-table", "convert", pods, "--to", "1.0")
    assert outcome.code == 2
    assert "does not support super_device_id, super_pod_list" in outcome.err
    outcome = pdrun("rank-table", "convert", pods, "--to", "1.0", "--lossy")
    assert outcome.code == 0
    assert "left out: super_pod_list" in outcome.err
    assert "super_pod_list" not in json.loads(outcome.out)


def test_make_merge_and_show(pdrun: Call, tmp_path: Path) -> None:
    for number in (1, 2):
        text = "".join(f"address_{device}=10.{number}.0.{device + 1}\n" for device in range(2))
        (tmp_path / f"n{number}.conf").write_text(text)
        out = str(tmp_path / f"n{number}.json")
        conf = str(tmp_path / f"n{number}.conf")
        assert (
            pdrun("rank-table", "make", "--hosts", f"n{number}", "--hccn", conf, "-o", out).code
            == 0
        )
    merged = tmp_path / "all.json"
    files = [str(tmp_path / "n1.json"), str(tmp_path / "n2.json")]
    assert pdrun("rank-table", "merge", *files, "-o", str(merged)).code == 0
    cards = [f"n1={tmp_path / 'n1.conf'}", f"n2={tmp_path / 'n2.conf'}"]
    whole = pdrun("rank-table", "make", "--hosts", "n1,n2", "--hccn", cards[0], "--hccn", cards[1])
    assert whole.out == merged.read_text()
    shown = pdrun("rank-table", "show", str(merged)).out.splitlines()
    assert shown[0] == "version 1.0, 4 rank(s) on 2 server(s)"
    assert shown[2].split() == ["0", "n1", "0", "10.1.0.1", "n1"]
    assert shown[5].split() == ["3", "n2", "1", "10.2.0.2", "n2"]


def test_a_table_of_a_job_that_runs(pdrun: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {name: NodeStatus(name, "running", index, 2) for index, name in ((1, "n1"), (0, "n2"))}
    monkeypatch.setattr(job_status, "list_statuses", lambda job: [JobStatus(job=job, nodes=nodes)])
    outcome = pdrun("rank-table", "make", "--job", "mine")
    assert outcome.code == 2
    assert "the address of device 0 of n2 is missing" in outcome.err
    nodes.pop("n1")
    made = json.loads(pdrun("rank-table", "make", "--job", "mine").out)
    assert [server["server_id"] for server in made["server_list"]] == ["n2"]
    assert len(made["server_list"][0]["device"]) == 2


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("make", "--hosts", "a:2", "--hostfile", "x"), 2, "exclude each other"),
        (("make", "--hosts", "a:2,b:2"), 2, "the address of device 0 of a is missing"),
        (("make", "--hosts", "a,b", "--hccn", "x"), 2, "must be HOST=FILE"),
        (("make", "--hosts", "a,b", "--hccn", "c=x"), 2, "c is not in the list of hosts"),
        (("make", "--hosts", "a;b"), 2, "is neither a host name"),
        (("make", "--hosts", "a:1", "--devices", "x"), 2, "--devices: 'x' is not a whole number"),
        (("make", "--hosts", "a:1", "-o", "/nope/t.json"), 78, "/nope/t.json: cannot be written"),
        (("convert", "nope", "--to", "1.0"), 2, "no such file 'nope'"),
        (("convert", "nope", "--to", "3"), 2, "'3' is not one of 1.0, 1.2, 2.0, group, lab"),
        (("show", "nope"), 2, "no such file 'nope'"),
        (("check",), 2, "Missing argument"),
    ],
)
def test_a_mistake_is_one_line(pdrun: Call, argv: tuple[str, ...], code: int, words: str) -> None:
    outcome = pdrun("rank-table", *argv)
    assert outcome.code == code
    assert words.lower() in outcome.err.lower()
    assert "Traceback" not in outcome.err
