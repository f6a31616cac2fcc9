"""What a dump of torch's flight recorder says, and that nothing in it is carried out."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.launcher.diagnosis import flight_recorder
from pdrun.launcher.diagnosis.flight_recorder import (
    DumpRequest,
    parse_plain_pickle,
    read_dump,
    summarize_dump,
    trace_variables,
)
from pdrun.rendezvous.protocol.messages import CollectiveReport

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 62), 1 << 62)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.tuples(inner)
    ),
    max_leaves=20,
)


def entry(sequence: int, state: str, at: int = 0, **changes: Any) -> dict[str, Any]:
    """As torch 2.11 to 2.13 write it, without what nobody reads."""
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": at,
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        **changes,
    }


def dump(*entries: dict[str, Any]) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": config, "entries": list(entries)}


@given(PLAIN, st.sampled_from([2, 3, 4]))
def test_plain_values_are_read(value: Any, protocol: int) -> None:
    assert parse_plain_pickle(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize(
    "value", [Path("x"), os.system, {1, 2}, b"bytes", bytearray(b"x"), ValueError("x")]
)
def test_nothing_else_is_read(value: object) -> None:
    with pytest.raises(ValueError, match=r"opcode|damaged"):
        parse_plain_pickle(pickle.dumps(value, 2))


def test_nothing_is_carried_out(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'done'}",)

    (tmp_path / "dump").write_bytes(pickle.dumps({"entries": [Bad()]}, 2))
    assert read_dump(tmp_path / "dump") is None and not (tmp_path / "done").exists()


@given(st.binary(max_size=200))
def test_damaged_dumps_are_refused(data: bytes) -> None:
    try:
        summarize_dump(parse_plain_pickle(data))
    except ValueError:
        pass


@given(PLAIN)
def test_any_content_is_summarized_or_refused(value: Any) -> None:
    summarize_dump({"entries": [value, entry(1, "completed", process_group=value)]})
    summarize_dump({"entries": [], "pg_config": value})


def test_the_first_collective_that_waits_is_that_of_its_group() -> None:
    found = summarize_dump(
        dump(
            entry(99, "completed", 10),
            entry(100, "scheduled", 20),
            entry(101, "scheduled", 30, profiling_name="nccl:broadcast"),
            entry(7, "completed", 40, process_group=("1", "undefined")),
        )
    )
    assert found is not None
    assert found.states == (
        CollectiveReport((), "0 (default_pg)", 100, "all_reduce", True, (0, 1)),
        CollectiveReport((), "1", 7, "all_reduce", False, ()),
    )
    assert (found.newest_ns, found.waiting_since_ns) == (40, 20)
    assert found.waiting == found.states[0]


def test_a_call_of_two_ranks_counts_only_while_it_waits() -> None:
    pair = {"is_p2p": True, "profiling_name": "nccl:recv 0<-1"}
    alone = summarize_dump(dump(entry(0, "completed", 1, **pair)))
    assert alone is not None
    assert alone.states == ()
    found = summarize_dump(dump(entry(5, "completed", 1), entry(0, "scheduled", 2, **pair)))
    assert found is not None
    assert found.waiting == CollectiveReport((), "", 0, "recv 0<-1", True)


def test_a_worker_answers_at_its_pipe(tmp_path: Path) -> None:
    names = trace_variables(str(tmp_path))
    pipe = Path(names["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "3.pipe")
    request = DumpRequest(tmp_path, 3, 100.0)
    assert request.is_over and not request.was_asked, "there is no pipe"
    os.mkfifo(pipe)
    assert DumpRequest(tmp_path, 3, 100.0).is_over, "nobody reads it"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    target = Path(names["TORCH_FR_DUMP_TEMP_FILE"] + "3")
    target.write_text("of an earlier request")
    os.utime(target, (1, 1))
    request = DumpRequest(tmp_path, 3, 100.0)
    assert os.read(reader, 10) and not request.is_over
    assert request.poll(101.0) is None and not request.is_over
    target.write_text(json.dumps(dump(entry(4, "scheduled", 9))))
    assert request.poll(102.0) is None, "it may still grow"
    record = request.poll(102.2)
    assert record is not None and record.waiting is not None and record.waiting.sequence == 4
    late = DumpRequest(tmp_path, 3, 100.0)
    os.utime(target, (1, 1))
    assert late.poll(100.0 + flight_recorder.GIVE_UP_SECONDS) is None and late.is_over
    os.close(reader)


REAL = """
import os, sys
import torch, torch.distributed as dist
from torch._C import _distributed_c10d
if not hasattr(_distributed_c10d, "_dump_fr_trace"):
    sys.exit(7)
store = dist.FileStore(sys.argv[1] + "/store", 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(2))
dist.barrier()
with open(sys.argv[1] + "/dump", "wb") as file:
    file.write(_distributed_c10d._dump_fr_trace())
os._exit(0)
"""


@pytest.mark.torch
def test_a_dump_of_this_torch_is_understood(tmp_path: Path) -> None:
    """Real entries, of a gloo group of one rank, in torch's own format."""
    pytest.importorskip("torch", reason="torch is not installed")
    command = [sys.executable, "-c", REAL, str(tmp_path)]
    code = subprocess.run(command, timeout=120, check=False).returncode
    if code == 7:
        pytest.skip("this torch has no flight recorder for gloo")
    record = read_dump(tmp_path / "dump")
    assert code == 0 and record is not None and record.newest_ns > 0
    last = record.states[0]
    assert (last.operation, last.members) == ("barrier", (0,)), record
    assert last.sequence == 4 and last.group.endswith("(default_pg)")
