"""Classes of the quick decorator behave as those of `dataclasses`."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pdrun.quick_dataclass import dataclass

ROOT = Path(__file__).parents[2]
Decorator = Callable[..., Any]


@dataclass(frozen=True)
class Place:
    """At the module's level, so that it can be pickled."""

    host: str
    ports: tuple[int, ...] = ()


def make_class(decorator: Decorator, **options: bool) -> Any:
    class Sample:
        """A class with every kind of field that pdrun uses."""

        LIMIT: ClassVar[int] = 3
        name: str
        count: int = 1
        items: list[int] = field(default_factory=list)
        secret: str = field(default="s", repr=False)
        source: str = field(default="", compare=False)

        @property
        def double(self) -> int:
            return self.count * 2

    return decorator(**options)(Sample)


KINDS = [{"frozen": True}, {"frozen": False}]
VALUES: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("a",), {}),
    (("a", 1), {"items": []}),
    (("a", 2), {"items": [1]}),
    (("b",), {"secret": "t"}),
    (("a",), {"source": "x"}),
    ((float("nan"),), {}),
]


@pytest.mark.parametrize("options", KINDS)
def test_values_are_compared_and_shown_as_with_dataclasses(options: dict[str, bool]) -> None:
    ours = make_class(dataclass, **options)
    theirs = make_class(dataclasses.dataclass, **options)
    our_values = [ours(*args, **named) for args, named in VALUES]
    their_values = [theirs(*args, **named) for args, named in VALUES]
    for one, right in zip(our_values, their_values, strict=True):
        assert repr(one) == repr(right)
        assert dataclasses.asdict(one) == dataclasses.asdict(right) or "nan" in repr(right)
        assert one.double == right.double and one.LIMIT == 3
        changed = dataclasses.replace(one, count=7)
        assert changed.count == 7 and changed.name is one.name
        assert [one == other for other in our_values] == [right == other for other in their_values]
    assert our_values[0] != their_values[0] and our_values[0] != "a"
    assert our_values[0].items is not our_values[3].items
    names = [item.name for item in dataclasses.fields(theirs)]
    assert [item.name for item in dataclasses.fields(ours)] == names
    assert ours.__match_args__ == theirs.__match_args__


@pytest.mark.parametrize("words", [(), ("a", 1, [], "s", "", 6)])
def test_wrong_arguments_are_refused_in_the_same_words(words: tuple[Any, ...]) -> None:
    texts = []
    for decorator in (dataclass, dataclasses.dataclass):
        with pytest.raises(TypeError) as caught:
            make_class(decorator, frozen=True)(*words)
        texts.append(str(caught.value))
    assert texts[0].rpartition(".")[2] == texts[1].rpartition(".")[2]


def test_a_frozen_value_is_hashed_by_its_fields_and_never_changes() -> None:
    one, same, other = Place("a", (1,)), Place("a", (1,)), Place("a", (2,))
    assert hash(one) == hash(same) and len({one, same, other}) == 2
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'host'"):
        one.host = "b"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'hots'"):
        one.hots = "b"  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'host'"):
        del one.host
    assert one == same
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == copy.copy(one) == one


def test_a_value_that_can_change_has_no_hash() -> None:
    sample = make_class(dataclass)("a")
    sample.count = 5
    assert sample.count == 5
    with pytest.raises(TypeError, match="unhashable"):
        hash(sample)


def test_methods_of_the_class_itself_are_kept() -> None:
    @dataclass(frozen=True)
    class Secret:
        """A value that does not show itself."""

        text: str

        def __repr__(self) -> str:
            return "Secret"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

    assert repr(Secret("a")) == "Secret" and Secret("a") == Secret("b") and hash(Secret("a")) == 5


def test_a_value_may_contain_itself() -> None:
    sample = make_class(dataclass)("a")
    sample.items = [sample]
    assert "items=[...]" in repr(sample)


def test_files_of_the_start_use_it() -> None:
    """A new class in these files costs a start half a millisecond if it forgets the decorator."""
    for name in ("rendezvous/protocol/messages.py", "launcher/plan/model.py"):
        text = (ROOT / name).read_text()
        assert "from pdrun.quick_dataclass import dataclass" in text
