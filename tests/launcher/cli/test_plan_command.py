"""``pdrun plan``: a plan for devices that this machine does not have."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import click
import pytest

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.cli import plan
from pdrun.launcher.cli.plan import parse_fixed, plan_command, plan_script

OPTIONS = {"devices": 4, "topology": "h100x8", "memory": None, "rows": None, "search": None}
SCRIPT = """
    import pdrun, torch
    from torch import nn

    context = pdrun.init()
    assert context.world_size == 4 and not torch.distributed.is_initialized()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    batch = (torch.zeros(32, 64), torch.zeros(32, dtype=torch.long))
    loss = lambda output, batch: (output.sum(), len(batch[0]))
    pdrun.parallelize(model, torch.optim.AdamW, loss, sample=batch)
    raise RuntimeError("not reached")
"""


@pytest.mark.torch
def test_script_ends_at_its_first_call(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    saved = tmp_path / "plan.json"
    options = {**OPTIONS, "top": 3, "save": str(saved)}
    assert plan_script("train.py", (), {}, options) == 0
    out = capfd.readouterr().out
    assert out.startswith("4 devices, 73.6 GiB each, 32 rows per step; topology h100x8")
    assert "saved; run it with parallelize(" in out
    mesh = json.loads(saved.read_text())["mesh"]
    assert mesh["dp"] * mesh["tp"] == 4


@pytest.mark.torch
def test_arguments_that_the_search_replaces_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = "sample=batch, recompute='full', strategy=pdrun.Auto({'0.weight': (4, 1)})"
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT.replace("sample=batch", arguments)))
    options = {**OPTIONS, "top": 1, "save": None}
    assert plan_script("train.py", (), {}, options) == 0
    first = capfd.readouterr().out.splitlines()[0]
    assert first.startswith("not used: strategy=, recompute= of the script; the search chooses")


def test_script_without_the_call_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('nothing')\n")
    options = {**OPTIONS, "top": 3, "save": None}
    with pytest.raises(ConfigError, match=r"ended without a call of pdrun\.parallelize"):
        plan_script(str(script), (), {}, options)
    script.write_text("raise SystemExit(7)\n")
    assert plan_script(str(script), (), {}, options) == 7
    with pytest.raises(ConfigError, match="no such file"):
        plan_script(str(tmp_path / "other.py"), (), {}, options)


def test_fixed_degrees_are_parsed() -> None:
    assert parse_fixed(("tp=8,pp=2", "level=1")) == {"tp": 8, "pp": 2, "level": 1}
    with pytest.raises(UsageError, match=r"--fix: must be NAME=N, got 'tp'"):
        parse_fixed(("tp",))


def call_with(words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what `plan_script` gets for the words of a command line."""
    seen: dict[str, Any] = {}

    def note(script: str, args: tuple[str, ...], fixed: Any, options: Any) -> int:
        seen.update(script=script, args=args, fixed=fixed, **options)
        return 0

    monkeypatch.setattr(plan, "plan_script", note)
    plan_command().main(words, standalone_mode=False)
    return seen


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("train.py --devices 64 --topology mine.json", {"topology": "mine.json", "args": ()}),
        ("--devices 64 train.py --topology=mine.json", {"topology": "mine.json", "args": ()}),
        ("train.py --lr 0.1 --devices=64 data", {"args": ("--lr", "0.1", "data")}),
        ("train.py --devices 64 --fix tp=2 --fix pp=2", {"fixed": {"tp": 2, "pp": 2}}),
        ("train.py --devices 64 -- --devices 3 -h", {"args": ("--devices", "3", "-h")}),
        ("--devices 64 -- train.py --top 5 -x", {"top": 5, "args": ("-x",)}),
        ("--devices 64 train.py -- -- x", {"args": ("--", "x")}),
        ("--devices 64 train.py - --top=3 --to 4", {"top": 3, "args": ("-", "--to", "4")}),
    ],
)
def test_options_can_be_behind_the_script(
    line: str, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = call_with(line.split(), monkeypatch)
    assert {"script": "train.py", "devices": 64, **wanted}.items() <= seen.items()


@pytest.mark.parametrize(
    ("line", "error", "text"),
    [
        ("--devices 8 train.py --devices 4", UsageError, "train.py -- --devices"),
        ("--devices=8 train.py --devices=4", UsageError, "--devices: is given twice"),
        ("train.py --devices 8 --rows 4 --rows 2", UsageError, "--rows: is given twice"),
        ("--fix tp=2 train.py --devices 8 --fix pp=2", UsageError, "--fix: is given twice"),
        ("train.py --devices", click.UsageError, "requires an argument"),
        ("train.py --devices two", click.UsageError, "'two' is not a valid integer"),
        ("--devcies 8 train.py", click.UsageError, "No such option '--devcies'"),
        ("--devices", click.UsageError, "requires an argument"),
        ("--devices 8", click.MissingParameter, "script"),
    ],
)
def test_ambiguous_and_wrong_options_are_named(
    line: str, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error) as caught:
        call_with(line.split(), monkeypatch)
    message = getattr(caught.value, "message", "") or str(caught.value)
    assert text in message.replace("No such option: --devcies", "No such option '--devcies'")


def test_devices_are_asked_for() -> None:
    with pytest.raises(UsageError, match="--devices: is missing") as caught:
        plan_command().main(["train.py", "--rows", "8"], standalone_mode=False)
    assert "pdrun plan train.py --devices 64" in str(caught.value.hint)


JOBS = """
    import json, os, sys
    if "PDRUN_PLAN" in os.environ:
        request = json.loads(os.environ["PDRUN_PLAN"])
        open(request["reached"], "w").close()
        for place in range(request["measure"]):
            plan = {"predicted": {"seconds": 0.002}, "mesh": {"dp": 1, "tp": 1}, "place": place,
                    "options": {"optimizer_level": place}, "pipeline": None}
            with open(os.path.join(request["folder"], f"plan-{place:04}.json"), "w") as file:
                json.dump(plan, file)
    else:
        request = json.loads(os.environ["PDRUN_MEASURE_PLAN"])
        with open(request["plan"]) as file:
            place = json.load(file)["place"]
        assert request["rows"] == 8 and sys.argv[1:] == ["--lr", "3"]
        if place in map(int, os.environ.get("FAILING", "").split()):
            sys.exit("no memory for place %d" % place)
        with open(request["result"], "w") as file:
            json.dump({"seconds": 0.004 - 0.001 * place}, file)
"""


def measure_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: str, count: int) -> int:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAILING", failing)
    (tmp_path / "train.py").write_text(textwrap.dedent(JOBS))
    options = {**OPTIONS, "devices": 1, "rows": 8, "measure": count, "save": "best.json"}
    return plan_script("train.py", ("--lr", "3"), {}, options)


def test_fastest_measured_plan_is_saved_and_failures_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_jobs(monkeypatch, tmp_path, "2", 3) == 0
    lines = capfd.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line[:3].strip().isdigit()]
    assert rows[0][1:] == ["2.00", "ms", "4.00", "ms", "2.00", "optimizer_level=0"]
    assert rows[1][1:] == ["2.00", "ms", "3.00", "ms", "1.50", "optimizer_level=1"]
    assert rows[2][3] == "failed"
    assert any("no memory for place 2" in line for line in lines)
    assert "fastest: 2, optimizer_level=1" in lines
    saved = json.loads((tmp_path / "best.json").read_text())
    assert saved["place"] == 1
    assert saved["measured"] == {"seconds": 0.003}


@pytest.mark.thorough
def test_nothing_is_saved_if_every_measured_job_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_jobs(monkeypatch, tmp_path, "0 1", 2) == 1
    assert not (tmp_path / "best.json").exists()


@pytest.mark.torch
@pytest.mark.thorough
def test_best_plans_run_on_this_machine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = SCRIPT.replace("assert context.world_size == 4 and not", "_ =")
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    options = {**OPTIONS, "devices": 2, "topology": "cpu", "top": 1, "measure": 2}
    assert plan_script("train.py", (), {}, {**options, "save": "best.json"}) == 0
    out = capfd.readouterr().out
    assert "measured here, 2 devices" in out
    assert "failed" not in out
    saved = json.loads((tmp_path / "best.json").read_text())
    assert saved["measured"]["seconds"] > 0
