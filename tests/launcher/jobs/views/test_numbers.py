"""``pdrun plot`` and ``pdrun export``: files for people and for other programs."""

from __future__ import annotations

import csv
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.jobs.views.numbers import export_numbers, write_pipeline, write_plot
from tests.ui.report.test_history import LOG
from tests.ui.report.test_plot import line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for run, shift in (("train-1", 0.0), ("train-2", 1.0)):
        (tmp_path / run).mkdir()
        lines = [line(step, loss=2.5 + shift - step / 10) for step in range(4)]
        lines.append(line(4, loss=None, lr=0.1))
        (tmp_path / run / "events.jsonl").write_text("".join(lines))
    return tmp_path


def test_a_plot_of_two_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_plot(["./train-1", "./train-2"], "", []) == 0
    found = (folder / "train-1.svg").read_text()
    assert "train-1" in found and "train-2" in found and found.count("<polyline") == 2
    assert write_plot(["./train-1"], "-", ["loss"]) == 0
    assert capsys.readouterr().out.startswith("<svg ")


def test_what_cannot_be_drawn(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--values: no number 'los'; known: loss, lr"):
        write_plot(["./train-1"], "-", ["los"])
    with pytest.raises(UsageError, match="no number with two steps"):
        write_plot(["./train-1"], "-", ["lr"])
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        write_plot(["./train-1"], "no/such/x.svg", [])
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        write_plot(["./train-3"], "", [])


def test_png_needs_a_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(ConfigError, match="pip install cairosvg"):
        write_plot(["./train-1"], "x.png", [])
    library = SimpleNamespace(svg2png=lambda bytestring, scale: b"\x89PNG" + bytestring[:4])
    monkeypatch.setitem(sys.modules, "cairosvg", library)  # type: ignore[arg-type]
    write_plot(["./train-1"], "x.png", [])
    assert (folder / "x.png").read_bytes() == b"\x89PNG<svg"


def test_csv_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_numbers("./train-1", "csv", "x.csv")
    rows = list(csv.DictReader((folder / "x.csv").open()))
    means = [row["mean"] for row in rows if row["name"] == "loss"]
    assert means == ["2.5", "2.4", "2.3", "2.2", ""]
    assert rows[-2]["bad_rank"] == "2" and rows[-1]["name"] == "lr"
    capsys.readouterr()
    export_numbers("./train-1", "json", "")
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [one["step"] for one in lines] == [0, 1, 2, 3, 4]
    assert lines[4]["values"]["loss"]["mean"] is None


def test_tensorboard_by_its_own_writer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[object, ...]] = []

    class Writer:
        def __init__(self, place: str) -> None:
            added.append((place,))

        def add_scalar(self, name: str, value: float, step: int, wall_time: float) -> None:
            added.append((name, value, step, wall_time))

        def close(self) -> None:
            added.append(("closed",))

    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    own = SimpleNamespace(Writer=Writer)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", own)  # type: ignore[arg-type]
    export_numbers("./train-1", "tensorboard", "")
    assert added[0] == ("train-1-tensorboard",) and added[-1] == ("closed",)
    assert added[1] == ("loss", 2.5, 0, 100.0) and len(added) == 8
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        export_numbers("./train-1", "tensorboard", "")


def test_tensorboard_reads_it_back(folder: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    export_numbers("./train-1", "tensorboard", "tb")
    found = reader.EventAccumulator("tb", size_guidance={"tensors": 0})
    found.Reload()
    assert [event.step for event in found.Tensors("loss")] == [0, 1, 2, 3, 4]


def test_a_pipeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "staged").mkdir()
    (folder / "staged" / "events.jsonl").write_text("\n".join(LOG) + "\n")
    assert write_pipeline(["./staged"], "", "") == 0
    found = ET.fromstring((folder / "staged-pipeline.svg").read_text())
    assert sum(one.get("class", "").startswith("cell") for one in found.iter()) == 8
    assert write_pipeline(["./staged"], "-", "") == 0
    assert "40.0% of the ranks' time is idle" in capsys.readouterr().out
    with pytest.raises(UsageError, match="the log has no pipeline"):
        write_pipeline(["./train-1"], "", "")
    with pytest.raises(UsageError, match="one job, without --values"):
        write_pipeline(["./staged", "./train-1"], "", "")
    with pytest.raises(UsageError, match="cannot be read"):
        write_pipeline(["./missing"], "", "")
