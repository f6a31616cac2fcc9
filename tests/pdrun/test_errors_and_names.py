"""Errors, names, clocks and the face of the package."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdrun
from pdrun import errors
from pdrun.async_file import BackgroundFileWriter
from pdrun.clock import FakeClock, SystemClock
from pdrun.disk import make_private_folder
from pdrun.text import check_name, make_name, natural_key


def test_exit_codes_are_the_documented_ones() -> None:
    codes = {cls.__name__: cls.exit_code for cls in errors.PdrunError.__subclasses__()}
    assert codes == {
        "UsageError": 2,
        "ConfigError": 78,
        "RendezvousError": 69,
        "AuthenticationError": 77,
        "DeadlineExceeded": 124,
        "JobFailed": 70,
        "PeerLost": 69,
    }


def test_an_error_is_one_line_with_place_and_advice() -> None:
    error = errors.ConfigError("has mode 0644", where="/home/u/cookie", hint="chmod 600 it")
    assert str(error) == "/home/u/cookie: has mode 0644; chmod 600 it"


def test_a_failed_job_carries_the_users_traceback() -> None:
    error = errors.JobFailed(
        "rank 1 on n2 ended with exit code 1",
        exit_code=1,
        rank=1,
        host="n2",
        traceback="Tb\nE: x\n",
    )
    assert (error.exit_code, error.rank, error.host) == (1, 1, "n2")
    assert str(error).splitlines() == ["rank 1 on n2 ended with exit code 1", "Tb", "E: x"]


def test_suggestions() -> None:
    assert errors.did_you_mean("--devies", ["--devices", "--nodes"]) == "did you mean '--devices'?"
    assert errors.did_you_mean("zzz", ["--devices"]) == ""


@pytest.mark.parametrize(
    "name", ["../x", "a/b", ".", "..", "", "-rf", "a" * 64, "a\n", "a\x00b", "é", "🚀", "_x"]
)
def test_names_that_could_leave_their_folder_are_refused(name: str) -> None:
    with pytest.raises(errors.UsageError):
        check_name(name, where="--job")


@given(st.text(max_size=100))
def test_name_from_always_gives_a_name(text: str) -> None:
    assert check_name(make_name(text), where="x")


def test_node2_stands_before_node10() -> None:
    names = ["node10", "node2", "node1", "gpu-01-b", "gpu-1-a", "10.0.0.10", "10.0.0.9"]
    assert sorted(names, key=natural_key) == [
        "10.0.0.9",
        "10.0.0.10",
        "gpu-1-a",
        "gpu-01-b",
        "node1",
        "node2",
        "node10",
    ]


@given(st.lists(st.text(max_size=8), max_size=8))
def test_natural_order_is_total(names: list[str]) -> None:
    assert sorted(names, key=natural_key) == sorted(reversed(names), key=natural_key)


def test_clocks() -> None:
    fake = FakeClock()
    before = fake.monotonic(), fake.wall()
    fake.advance(2.5)
    assert (fake.monotonic() - before[0], fake.wall() - before[1]) == (2.5, 2.5)
    with pytest.raises(ValueError, match="must not be negative"):
        fake.advance(-1)
    real = SystemClock()
    assert real.monotonic() <= real.monotonic()


def test_importing_the_face_loads_nothing_heavy() -> None:
    heavy = ("torch", "zmq", "click", "rich", "yaml", "psutil")
    code = f"import sys, pdrun; print([name for name in {heavy} if name in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_public_names_all_load() -> None:
    for name in pdrun.__all__:
        assert getattr(pdrun, name) is not None
    assert set(pdrun.__all__) <= set(dir(pdrun))
    with pytest.raises(AttributeError):
        _ = pdrun.nothing


def test_every_folder_that_is_made_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        make_private_folder(tmp_path / "one" / "two" / "three")
        writer = BackgroundFileWriter(tmp_path / "logs" / "run" / "events.jsonl", lambda count: "")
        writer.put("line")
        assert writer.close(10.0) == 0
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) == 5 and {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    tmp_path.chmod(0o755)
    make_private_folder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755, "one that is there stays as it is"
