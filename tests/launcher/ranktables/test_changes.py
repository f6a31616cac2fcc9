"""Rare rank tables: a file that is replaced while it is read, a super pod that is torn apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdrun.launcher.ranktables import files
from pdrun.launcher.ranktables.check import check_table
from pdrun.launcher.ranktables.model import RankTable, Server, SuperPod, TableDevice


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hccl.json"
    path.write_text("before")
    read = files.read_text

    def read_and_replace(name: str, limit: int) -> str:
        text = read(name, limit)
        if text == "before":
            (tmp_path / "new").write_text("afterwards")
            (tmp_path / "new").replace(path)
        return text

    monkeypatch.setattr(files, "read_text", read_and_replace)
    assert files._read_unchanged(str(path)) == "afterwards"


@pytest.mark.parametrize(
    ("pods", "is_good"), [(("ab", "c"), True), (("a", "bc"), True), (("ac", "b"), False)]
)
def test_servers_of_a_super_pod_are_consecutive(pods: tuple[str, ...], is_good: bool) -> None:
    servers = tuple(
        Server(name, (TableDevice(rank, 0, (f"10.0.0.{rank}",), str(rank)),))
        for rank, name in enumerate("abc")
    )
    listed = tuple(SuperPod(f"pod{number}", tuple(names)) for number, names in enumerate(pods))
    faults = check_table(RankTable("1.2", "completed", servers, listed))
    assert [fault.what for fault in faults] == (
        [] if is_good else ["the servers of a super pod must be consecutive in rank order"]
    )
