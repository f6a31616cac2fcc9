"""Whatever options are put together: a line that pdrun accepts, or a refusal."""

from __future__ import annotations

import shlex

import click
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import PdrunError
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


@given(command_lines())
def test_a_line_is_accepted_by_pdrun_or_refused(words: list[str]) -> None:
    try:
        found = translate_command_line(words, {"HF_HOME": "/none"})
    except PdrunError as error:
        assert str(error)
        return
    assert found.format_line()
    if "--rank-table" in found.options:
        return
    try:
        parse_arguments(found.words)
    except (PdrunError, click.ClickException) as error:
        assert str(error)
