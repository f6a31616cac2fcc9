"""Options that are valid alone, but not together."""

from __future__ import annotations

import pytest

from pdrun.errors import UsageError
from tests.launcher.config.test_aliases import resolve_line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--devices 2 --show-stderr 0,7-9 x", "--show-stderr: there is no rank 7-9; the ranks are"),
        ("--devices 1 --show-stderr 1 x", "there is no rank 1; the only rank is 0"),
        ("--devices 2 --stdin 2 x", "--stdin: there is no rank 2; the ranks are 0-1"),
        ("--nodes 2 --devices 2 --local --show-stderr 4 x", "the ranks are 0-3"),
        ("--hosts a:1,b:3 --show-stderr 1,4 x", "there is no rank 4; the ranks are 0-3"),
        ("--hosts a,b --devices 2 --show-stderr 4 x", "the ranks are 0-3"),
        ("--nodes 2:4 --devices 1 --local --show-stderr 4 x", "the ranks are 0-3"),
    ],
)
def test_ranks_that_the_job_cannot_have_are_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_line(line)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "--devices 2 --show-stderr 0-1 --stdin 1 x",
        "--devices 2 --show-stderr none x",
        "--show-stderr 9 x",  # the number of devices is not known yet
        "--nodes 2 --scheduler h:1 --devices 2 --show-stderr 9 x",  # the other node may have more
        "--nodes 2:4 --devices 1 --local --show-stderr 3 x",
        "--hosts a:1,b --show-stderr 9 x",
        "--nproc-per-node 2 --redirects 0:2,7:1 x",  # torchrun's local ranks
    ],
)
def test_ranks_that_the_job_may_have_are_accepted(line: str) -> None:
    resolve_line(line)
