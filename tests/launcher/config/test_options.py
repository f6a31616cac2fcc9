"""Options among the words of a command line."""

from __future__ import annotations

import pytest

from pdrun.launcher.config.aliases import ALIAS_OPTIONS
from pdrun.launcher.config.options import drop_options, keep_options
from pdrun.launcher.config.run_options import RUN_OPTIONS

TABLE = (*RUN_OPTIONS, *ALIAS_OPTIONS)


@pytest.mark.parametrize(
    ("words", "dropped", "kept"),
    [
        ("--nodes 2 --local x.py --nodes 3", "--local x.py --nodes 3", "--nodes 2"),
        ("--nodes=2 x.py", "x.py", "--nodes=2"),
        ("--nnodes 2 --grace 5 -m app --nodes 1", "--grace 5 -m app --nodes 1", "--nnodes 2"),
        ("--unknown --nodes 2 -- --nodes", "--unknown -- --nodes", "--nodes 2"),
        ("--nodes", "", "--nodes"),
        ("", "", ""),
    ],
)
def test_options_are_told_from_the_arguments_of_the_program(
    words: str, dropped: str, kept: str
) -> None:
    names = ("--nodes", "--nnodes")
    assert drop_options(words.split(), TABLE, names) == dropped.split()
    assert keep_options(words.split(), TABLE, names) == kept.split()
