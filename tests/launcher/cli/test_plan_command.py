"""``pdrun plan``: a plan for devices that this machine does not have."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from pdrun.errors import ConfigError, UsageError
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
    plan = json.loads(saved.read_text())
    assert plan["mesh"]["dp"] * plan["mesh"]["tp"] == 4


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


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train.py", "--devices", "8"], "stand before the script"),
        (["train.py", "--devices=8"], "stand before the script"),
        (["train.py"], "pdrun plan --devices 64 train.py"),
    ],
)
def test_devices_are_asked_for(words: list[str], hint: str) -> None:
    with pytest.raises(UsageError, match="--devices: is missing") as caught:
        plan_command().main(words, standalone_mode=False)
    assert hint in str(caught.value.hint)
