"""Every rule of the operator engine, proven against the operator itself."""

from __future__ import annotations

import collections
import functools
import re
from pathlib import Path
from typing import Any

import pytest

from pdrun.parallel.operators import rule_checker as checker
from pdrun.parallel.operators.plan import OperatorSharding
from pdrun.parallel.operators.rules.examples import OperatorExample, all_examples
from pdrun.parallel.operators.rules.rule import LOCAL_CALLS, PARTIAL, REPLICATED, RULES, OpSplit

pytestmark = pytest.mark.torch


@functools.cache
def by_kind() -> dict[str, list[OperatorExample]]:
    """Return all examples, sorted by kind."""
    found: dict[str, list[OperatorExample]] = collections.defaultdict(list)
    for example in all_examples():
        found[example.kind].append(example)
    return found


def test_every_rule_has_an_example() -> None:
    assert set(RULES) == set(by_kind())
    assert set(LOCAL_CALLS) <= set(RULES)


@pytest.mark.parametrize("kind", sorted(RULES))
def test_the_parts_of_an_operator_make_the_whole(kind: str) -> None:
    for example in by_kind()[kind]:
        for case in checker.list_cases(example):
            assert checker.check_case(case) == "", case


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("softmax", OpSplit((1,), (1,))),  # the dim that is normalised over
        ("relu", OpSplit((PARTIAL,), (PARTIAL,))),  # not linear
        ("mm", OpSplit((1, 0), (REPLICATED,))),  # a sum that isn't one
        ("layer_norm", OpSplit((2, 0, 0), (2,))),
    ],
)
def test_the_checker_finds_wrong_rules(kind: str, split: OpSplit) -> None:
    example = by_kind()[kind][0]
    right: Any = next(iter(checker.list_cases(example)))
    wrong = checker.RuleCase(example, right.grid, OperatorSharding({"a": split}, ("a",)))
    assert checker.check_case(wrong) != ""


def test_the_docs_list_every_rule() -> None:
    text = (Path(__file__).parents[3] / "docs" / "operators.md").read_text()
    rows = [
        line.split("|")[1]
        for line in text.split("## Rules")[1].splitlines()
        if line.startswith("| `")
    ]
    listed = {kind for row in rows for kind in re.findall(r"`(\w+)`", row)}
    assert listed == set(RULES)
