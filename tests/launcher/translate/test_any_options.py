"""Whatever options are put together: a line that pdrun accepts, or a refusal."""

from __future__ import annotations

import io
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdrun.errors import PdrunError
from pdrun.launcher.cli.main import main
from pdrun.launcher.cli.run import parse_arguments
from pdrun.launcher.translate import (
    accelerate,
    deepspeed,
    horovodrun,
    mpi,
    msrun,
    option_table,
    torchrun,
)
from pdrun.launcher.translate.command_line import translate_command_line
from pdrun.launcher.translate.option_table import ForeignOption

TABLES: dict[str, tuple[ForeignOption, ...]] = {
    "torchrun": option_table.parse_table(torchrun.TORCHRUN_TABLE),
    "python -m torch.distributed.launch": option_table.parse_table(torchrun.LAUNCH_TABLE),
    "msrun": option_table.parse_table(msrun.MSRUN_TABLE),
    "accelerate launch": accelerate.accelerate_table(),
    "deepspeed": option_table.parse_table(deepspeed.DEEPSPEED_TABLE),
    "mpirun": mpi.mpirun_table(),
    "horovodrun": option_table.parse_table(horovodrun.HOROVOD_TABLE),
    "colossalai run": option_table.parse_table(torchrun.COLOSSALAI_TABLE),
}
VALUES = [
    *("1", "2", "8", "0", "-1", "x", "h:1", "h", "a:2,b:2", "localhost:0,1", "True", "0:3,1:1"),
    *(
        "ppr:2:node",
        "",
        "A=1",
        "[::1]:2",
        "1:4",
        "4:1",
        "none",
        "c10d",
        "a b",
        "9" * 12,
        "node[1-2]",
    ),
]
PROGRAMS = [["train.py", "--x"], ["python", "train.py"], ["python", "-m", "a"], [], ["--", "x"]]


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    launcher = draw(st.sampled_from(sorted(TABLES)))
    words = shlex.split(launcher)
    for option in draw(st.lists(st.sampled_from(TABLES[launcher]), max_size=5)):
        name = draw(st.sampled_from(option.names))
        values = [draw(st.sampled_from(VALUES)) for _ in range(option.values)]
        if len(values) == 1 and draw(st.booleans()):
            words.append(f"{name}={values[0]}")
        else:
            words += [name, *values]
    return [*words, *draw(st.sampled_from(PROGRAMS))]


def translate_printed(words: list[str]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of ``pdrun translate``."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["translate", "--", *words])
    return code, out.getvalue(), err.getvalue()


@given(command_lines())
@example(["torchrun", "--virtual-local-rank", "train.py"])
@example(["torchrun", "--numa-binding", "socket", "train.py"])
@example(["torchrun", "--signals-to-handle", "SIGUSR1", "train.py"])
@example(["horovodrun", "-np", "2", "--start-timeout", "x", "python", "train.py"])
def test_a_printed_line_is_accepted_by_pdrun(words: list[str]) -> None:
    code, out, err = translate_printed(words)
    if code:
        assert code in (2, 78) and err.startswith("pdrun: error: ") and not out
        return
    line = shlex.split(out)
    ours = line[line.index("pdrun") + 1 : -1 if line[-1] == "&" else None]
    if "--rank-table" not in ours:
        parse_arguments(ours)


BASES = {
    "torchrun": "--nnodes 2",
    "python -m torch.distributed.launch": "--nnodes 2 --nproc-per-node 3",
    "msrun": "--worker_num 4 --local_worker_num 2",
    "accelerate launch": "--num_machines 2 --main_process_ip h --num_processes 2",
    "deepspeed": "--hostfile hosts.txt",
    "mpirun": "-np 2",
    "horovodrun": "-np 2",
    "colossalai run": "--nproc_per_node 2 --hostfile hosts.txt",
}
"""Beginnings of command lines to which each option is added."""
CHECKED_ONLY = {
    *("monitor_interval", "start_method", "event_log_handler", "rdzv_backend"),
    *("multi_gpu", "cpu"),  # the number of processes decides; --cpu alone is in cases.txt
}
"""Options whose value is checked: pdrun does the same without them."""


@pytest.mark.parametrize("launcher", sorted(TABLES))
def test_no_option_is_ignored_in_silence(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option changes the line, is named in a note, or is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text("a slots=2\nb slots=2\n")
    start = [*launcher.split(), *BASES[launcher].split()]

    def outcome_of(*more: str) -> tuple[str, str]:
        try:
            found = translate_command_line([*start, *more, "python", "t.py"], {"HF_HOME": "/none"})
        except PdrunError as error:
            return "", str(error)
        return found.format_line(), " ".join([*found.notes, *found.left_out])

    base, base_notes = outcome_of()
    assert base
    for option in TABLES[launcher]:
        name = option.names[0]
        for value in ("", "2", "h", "a:2", "True", "x=1", "bf16", "none", "core", "hosts.txt"):
            line, text = outcome_of(name, *[value] * option.values)
            is_named = name in text or (value == "hosts.txt" and value in text)
            if (line and line != base) or (text != base_notes and is_named):
                break
        else:
            assert option.key in CHECKED_ONLY, name
