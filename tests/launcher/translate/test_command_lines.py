"""
Command lines of other launchers mean the same under pdrun, or are refused with a way out.

``cases.txt`` has a command line, and below it what the launcher itself makes of it. The values of
torchrun, accelerate, deepspeed, horovodrun and msrun are those of their own parsers (`real_tools`),
which the thorough run asks again where they are installed. Those of mpirun and colossalai follow
their documentation.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pdrun.errors import PdrunError
from pdrun.launcher.cli.run import parse_arguments
from pdrun.launcher.translate import notices
from pdrun.launcher.translate.command_line import translate_command_line
from tests.launcher.translate import real_tools
from tests.launcher.translate.shapes import JobShape, shape_of_spec
from tests.launcher.translate.test_any_options import TABLES

HERE = Path(__file__).parent
LINES = (HERE / "cases.txt").read_text().splitlines()
CASES = list(zip(LINES[::2], (line.strip() for line in LINES[1::2]), strict=True))
REFUSED = "refused: "


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the host files and configurations that the cases name."""
    for file in (HERE / "files").iterdir():
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def translated_shape(line: str) -> JobShape:
    found = translate_command_line(shlex.split(line), {})
    spec = parse_arguments(found.words).resolved.spec
    shape = shape_of_spec(spec, found.environment.get("CUDA_VISIBLE_DEVICES", ""))
    shape.argv = ["python" if word == spec.program.python else word for word in shape.argv]
    return shape


@pytest.mark.parametrize(("line", "right"), CASES, ids=[line for line, _ in CASES])
def test_a_command_line_keeps_its_meaning_or_is_refused(line: str, right: str) -> None:
    if right.startswith(REFUSED):
        with pytest.raises(PdrunError) as caught:
            translated_shape(line)
        assert right.removeprefix(REFUSED) in str(caught.value)
    else:
        assert translated_shape(line).describe() == right


def test_there_are_many_cases_of_every_launcher() -> None:
    assert len(CASES) >= 120
    for name in ("torchrun", "torch.distributed.launch", "msrun", "accelerate", "deepspeed"):
        assert sum(name in line for line, _ in CASES) >= 9, name


OWN = [
    (line.partition(" ")[2], right)
    for line, right in CASES
    if line.startswith(("torchrun ", "msrun ")) and not right.startswith(REFUSED)
]
NEEDS_OTHER_WORDS = (
    "--nproc_per_node 8 --nproc_per_node 4",
    "--node_rank=1 --rdzv_backend=c10d",
    "--join=False",
)
"""
Refused if given to pdrun: a value given twice, a rank that c10d ignores, a job in the background.
"""
MACROS = ("${local_rank}", "$$")
"""What torchrun replaces in arguments. pdrun prints a warning."""


@pytest.mark.parametrize(("words", "right"), OWN, ids=[words for words, _ in OWN])
def test_options_of_torchrun_and_msrun_can_be_given_to_pdrun(words: str, right: str) -> None:
    if any(other in words for other in NEEDS_OTHER_WORDS):
        with pytest.raises(PdrunError):
            parse_arguments(shlex.split(words))
        return
    resolved = parse_arguments(shlex.split(words)).resolved
    if any(macro in words for macro in MACROS):
        assert "passed as typed" in next(notices.find_macros(resolved))
        return
    assert list(notices.find_macros(resolved)) == []
    spec = resolved.spec
    shape = shape_of_spec(spec)
    shape.argv = ["python" if word == spec.program.python else word for word in shape.argv]
    if "nproc" not in words and "worker_num" not in words:
        shape.workers = right.split(" ")[2].rstrip(",:")  # pdrun's own default is one per device
    if shape.nodes == "1" and "c10d" in words:
        shape.meet = ""  # torchrun chooses another port for the workers, pdrun takes this one
    assert shape.describe() == right


def ask_torchrun(words: list[str]) -> JobShape:
    pytest.importorskip("torch.distributed.run")
    return real_tools.torchrun_shape(words)


def ask_launch(words: list[str]) -> JobShape:
    pytest.importorskip("torch.distributed.run")
    return real_tools.torchrun_shape(words, is_launch=True)


def ask_accelerate(words: list[str]) -> JobShape:
    pytest.importorskip("accelerate")
    return real_tools.accelerate_shape(words[1:] if words[:1] == ["launch"] else words)


def ask_deepspeed(words: list[str]) -> JobShape:
    return real_tools.deepspeed_shape(words, pytest.importorskip("deepspeed.launcher.runner"))


def ask_horovodrun(words: list[str]) -> JobShape:
    pytest.importorskip("horovod")
    return real_tools.horovod_shape(words)


def ask_msrun(words: list[str]) -> JobShape:
    run = pytest.importorskip("mindspore.parallel.cluster.run")
    entity = pytest.importorskip("mindspore.parallel.cluster.process_entity._utils")
    return real_tools.msrun_shape(words, run, entity)


REAL_TOOLS: dict[str, Callable[[list[str]], JobShape]] = {
    "torchrun": ask_torchrun,
    "torch.distributed.run": ask_torchrun,
    "torch.distributed.launch": ask_launch,
    "accelerate": ask_accelerate,
    "accelerate-launch": ask_accelerate,
    "accelerate.commands.launch": ask_accelerate,
    "deepspeed": ask_deepspeed,
    "horovodrun": ask_horovodrun,
    "msrun": ask_msrun,
}


_FAMILIES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate-launch": "accelerate",
}


@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.parametrize("name", ["torchrun", "accelerate", "deepspeed", "horovodrun", "msrun"])
def test_the_real_tool_gives_the_same_values(name: str) -> None:
    """The values in ``cases.txt`` are the tool's own, if it is installed."""
    count = 0
    for line, right in CASES:
        words = shlex.split(line)
        devices = ""
        while "=" in words[0]:
            if words[0].startswith("CUDA_VISIBLE_DEVICES="):
                devices = words[0].partition("=")[2]
            words = words[1:]
        tool, rest = words[0], words[1:]
        if tool.startswith("python"):
            place = rest.index("-m")
            tool, rest = rest[place + 1], rest[place + 2 :]
        if name not in (tool, _FAMILIES.get(tool)) or right.startswith(REFUSED):
            continue
        shape = REAL_TOOLS[tool](rest)
        shape.devices = shape.devices or devices
        assert shape.describe() == right, line
        count += 1
    assert count > 8


OPTIONS_REFUSED_TOGETHER = ("--megatron", "--fp8", "--parallelism")
"""Beginnings of options of accelerate that are refused without a line in the table."""


@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.parametrize("name", ["torchrun", "accelerate", "deepspeed", "horovodrun", "msrun"])
def test_the_table_has_every_option_of_the_real_tool(name: str) -> None:
    """An option of a newer version is not called unknown without notice here."""
    key = "accelerate launch" if name == "accelerate" else name
    known = {text: option.values > 0 for option in TABLES[key] for text in option.names}
    options = real_tools.list_options(lambda: REAL_TOOLS[name]([]))
    assert len(options) > 8
    unknown = [text for text in options if text not in known]
    assert [text for text in unknown if not text.startswith(OPTIONS_REFUSED_TOGETHER)] == []
    assert [text for text, takes in options.items() if known.get(text, takes) != takes] == []
