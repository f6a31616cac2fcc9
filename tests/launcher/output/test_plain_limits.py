"""Lines and names from elsewhere: a line is cut, a name stays in its folder."""

from __future__ import annotations

import pytest

from pdrun.launcher.output.log_names import fill_template
from tests.launcher.output.test_line_splitter import split


def test_a_line_without_end_is_cut_into_pieces() -> None:
    assert [line.text for line in split([b"x" * 20], limit=8)] == [b"x" * 8, b"x" * 8, b"x" * 4]
    assert next(line.text for line in split([b"x" * 5] * 4, limit=8)) == b"x" * 8


@pytest.mark.parametrize("value", ["../up", "a/b", "/etc/passwd", "..", "a\nb", "\x1b[31m"])
def test_a_value_adds_no_folder_to_a_name(value: str) -> None:
    stem = fill_template("{node}_{rank}", rank=1, local_rank=1, node=value, ip="", hostname="")
    assert "/" not in stem and not stem.startswith(".") and stem.isprintable()
