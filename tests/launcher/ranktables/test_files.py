from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from pdrun.errors import ConfigError, DeadlineExceeded, UsageError
from pdrun.launcher.ranktables import files
from tests.launcher.ranktables.test_rules import table

INITIALIZING = '{"status": "initializing"}'


class Time:
    """A clock that goes on when somebody sleeps, and then does what is due."""

    def __init__(self, due: dict[float, object]) -> None:
        self.now, self.due = 100.0, due

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in sorted(at for at in self.due if 100.0 + at <= self.now):
            action = self.due.pop(at)
            assert callable(action)
            action()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hccl.json"


def test_a_table_in_the_making_is_waited_for(path: Path) -> None:
    path.write_text(INITIALIZING)
    said: list[str] = []
    time = Time({25.0: lambda: files.write_file(str(path), json.dumps(table()))})
    found = files.wait_for_table(str(path), 60.0, said.append, time, time.sleep)
    assert len(found.devices) == 4
    assert time.now < 127
    assert said == ["waiting for the rank table: hccl.json is initializing"] * 3


def test_one_that_never_completes_is_a_deadline(path: Path) -> None:
    path.write_text(INITIALIZING)
    time = Time({})
    with pytest.raises(DeadlineExceeded, match="not complete after 5 s") as caught:
        files.wait_for_table(str(path), 5.0, clock=time, sleep=time.sleep)
    assert caught.value.exit_code == 124
    assert time.now == pytest.approx(105.0)


def test_a_fresh_file_that_is_cut_off_is_read_again(path: Path) -> None:
    whole = json.dumps(table())
    path.write_text(whole[:100])
    time = Time({1.0: lambda: path.write_text(whole)})
    assert len(files.wait_for_table(str(path), 60.0, clock=time, sleep=time.sleep).devices) == 4


def test_a_file_that_is_cut_off_and_stays_as_it_is_is_refused(path: Path) -> None:
    path.write_text(json.dumps(table())[:100])
    time = Time({})
    with pytest.raises(ConfigError, match="ends in the middle"):
        files.wait_for_table(str(path), 60.0, clock=time, sleep=time.sleep)
    assert time.now == 100.0 + files.SETTLED_SECONDS
    with pytest.raises(ConfigError, match="ends in the middle"):
        files.wait_for_table(str(path), clock=time, sleep=time.sleep)
    assert time.now == 100.0 + files.SETTLED_SECONDS, (
        "without any time to wait it is refused at once"
    )


def test_the_clock_of_a_file_server_does_not_count(path: Path) -> None:
    whole = json.dumps(table())

    def grow(size: int) -> None:
        path.write_text(whole[:size])
        os.utime(path, (1000.0 + size, 1000.0 + size))

    grow(40)
    time = Time(
        {1.0: lambda: grow(100), 2.5: lambda: grow(200), 4.0: lambda: path.write_text(whole)}
    )
    assert len(files.wait_for_table(str(path), 60.0, clock=time, sleep=time.sleep).devices) == 4


def test_a_file_that_changes_while_it_is_read_is_read_whole(path: Path) -> None:
    """
    A writer truncates and writes as MindCluster does; whatever is taken is one of its two tables,
    never a mix.
    """
    texts = [json.dumps(table(1, 2)), json.dumps(table(2, 8), indent=4)]
    path.write_text(texts[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                path.write_text(text)

    writer = threading.Thread(target=write)
    writer.start()
    taken = refused = 0
    try:
        for _ in range(300):
            try:
                found = files.load_table(str(path))
            except ConfigError:  # empty, cut off or changing too fast: said, and never half a table
                refused += 1
                continue
            assert found.errors == ()
            assert found.table is not None
            assert len(found.table.devices) in (2, 16)
            taken += 1
    finally:
        stop.set()
        writer.join()
    assert taken + refused == 300


def test_a_mounted_link_may_be_swapped(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "hccl.json").write_text(json.dumps(table(number)))
    (tmp_path / "data").symlink_to("v1")
    (tmp_path / "hccl.json").symlink_to("data/hccl.json")
    assert len(files.wait_for_table(str(tmp_path / "hccl.json")).servers) == 1
    (tmp_path / "new").symlink_to("v2")
    (tmp_path / "new").rename(tmp_path / "data")
    assert len(files.wait_for_table(str(tmp_path / "hccl.json")).servers) == 2


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "nope", "."):
        with pytest.raises(UsageError):
            files.load_table(str(tmp_path / name))
    with pytest.raises(UsageError, match="is not a regular file"):
        files.load_table("/dev/zero")


def test_writing_is_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    files.write_file(str(path), "one\n")
    files.write_file(str(path), "two\n")
    assert path.read_text() == "two\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]
    with pytest.raises(ConfigError, match="cannot be written"):
        files.write_file(str(tmp_path / "no" / "t.json"), "x")
    for folder in (".", "/", "", "..", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"is a folder|cannot be written"):
            files.write_file(folder, "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]


def test_the_first_fault_is_reported_and_the_others_counted(path: Path) -> None:
    data = table()
    for server in data["server_list"]:
        for device in server["device"]:
            device["rank_id"] = int(device["rank_id"])
    path.write_text(json.dumps(data, indent=1))
    with pytest.raises(ConfigError, match="3 more: pdrun rank-table check") as caught:
        files.wait_for_table(str(path))
    assert caught.value.where.startswith("hccl.json:")


def test_a_large_table_is_read_in_reasonable_time(path: Path) -> None:
    data = table(512, 16)
    for number, server in enumerate(data["server_list"]):
        server["server_id"] = f"node{number}"
        for at, device in enumerate(server["device"]):
            device["device_ip"] = f"10.{number // 256}.{number % 256}.{at + 1}"
    path.write_text(json.dumps(data))
    assert len(files.wait_for_table(str(path)).devices) == 8192
