"""
JSON values -> frozen dataclasses, checked strictly against their type hints.

A value of another type raises SchemaError with its place. The scheduler spends most of its time
here, so a valid value costs no more than the checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pdrun.rendezvous.protocol import messages
from pdrun.rendezvous.protocol.messages import Envelope

MAX_TEXT_CHARS = 64 * 1024
"""Maximum characters of an ordinary text."""
LONG_FIELDS = frozenset({"spec", "traceback", "lines"})
"""Fields that only the limit of the whole message bounds."""
SURROGATE = re.compile("[\ud800-\udfff]")

Reader = Callable[[Any], Any]


class SchemaError(Exception):
    """
    A value that is not of its type.

    The place is put together while the exception is raised through the readers, so valid values pay
    nothing for it.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.place = ""

    def add_step(self, step: str) -> SchemaError:
        """Prepend a step to the place, from the enclosing value."""
        self.place = step + self.place
        return self

    def describe_place(self, what: str) -> str:
        """Return the message; ``what`` is the name of the outermost value."""
        return f"{what}{self.place}: {self.why}"


@cache
def make_reader(hint: Any, name: str) -> Reader:
    """
    Return the function that reads one type; ``name`` is the field's name, which decides the maximum
    length of a text.
    """
    if hint is str:
        return _text_reader(Envelope.LIMIT if name in LONG_FIELDS else MAX_TEXT_CHARS)
    if hint in (int, float, bool):
        return {int: read_integer, float: _read_number, bool: _read_boolean}[hint]
    if is_dataclass(hint):
        return _dataclass_reader(hint)
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Literal:
        return _literal_reader(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _tuple_reader(make_reader(arguments[0], name))
    if origin is dict and arguments[0] is str:
        return _dict_reader(make_reader(arguments[1], name))
    if origin in (UnionType, Union) and len(arguments) == 2 and type(None) in arguments:
        inner = make_reader(next(one for one in arguments if one is not type(None)), name)
        return lambda value: None if value is None else inner(value)
    raise TypeError(f"no reader for {hint!r}")


def field_types(cls: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    return get_type_hints(cls, vars(messages) if cls.__module__ == messages.__name__ else None)


def shorten_value(value: Any) -> str:
    """Return a received value in short, for an error."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _json_kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "a truth value",
        int: "a whole number",
    }
    return names.get(type(value), "null" if value is None else "a number")


def _text_reader(longest: int) -> Reader:
    def read(value: Any) -> str:
        if type(value) is not str:
            raise SchemaError(f"expected text, got {_json_kind(value)}")
        if len(value) > longest:
            raise SchemaError(f"{len(value)} characters are more than {longest}")
        if not value.isascii() and SURROGATE.search(value):
            raise SchemaError("a lone surrogate is not text")
        return value

    return read


def read_integer(value: Any) -> int:
    """Read an integer of at most 64 bits."""
    if type(value) is not int:
        raise SchemaError(f"expected a whole number, got {_json_kind(value)}")
    if not -(1 << 63) <= value < 1 << 63:
        raise SchemaError("a number beyond 64 bits")
    return value


def _read_number(value: Any) -> float:
    if type(value) is int:
        return float(read_integer(value))
    if type(value) is not float:
        raise SchemaError(f"expected a number, got {_json_kind(value)}")
    if not math.isfinite(value):
        raise SchemaError("a number that is not finite")
    return value


def _read_boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise SchemaError(f"expected true or false, got {_json_kind(value)}")
    return value


def _dataclass_reader(cls: Any) -> Reader:
    types = field_types(cls)
    readers = [(item.name, make_reader(types[item.name], item.name)) for item in fields(cls)]
    count = len(readers)
    names = {name for name, _ in readers}
    if hasattr(cls, "__post_init__") or hasattr(cls, "__slots__"):
        raise TypeError(f"no reader for {cls.__name__}, which is more than its fields")

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise SchemaError(f"expected an object, got {_json_kind(value)}")
        if len(value) != count or not names.issuperset(value):
            for key in value.keys() - names:
                raise SchemaError("unknown field").add_step(f".{shorten_value(key)}")
            raise SchemaError("missing").add_step(f".{min(names - value.keys())}")
        # Not by __init__: a frozen class sets each field through object.__setattr__, which is five
        # times slower.
        found = object.__new__(cls)
        content = found.__dict__
        try:
            for name, read_one in readers:
                content[name] = read_one(value[name])
        except SchemaError as error:
            raise error.add_step(f".{name}") from None
        return found

    return read


def _literal_reader(allowed: tuple[Any, ...]) -> Reader:
    def read(value: Any) -> Any:
        if isinstance(value, str) and value in allowed:
            return value
        names = ", ".join(map(str, allowed))
        raise SchemaError(f"must be one of {names}, got {shorten_value(value)}")

    return read


def _tuple_reader(inner: Reader) -> Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise SchemaError(f"expected a list, got {_json_kind(value)}")
        found: list[Any] = []
        try:
            for item in value:
                found.append(inner(item))
        except SchemaError as error:
            raise error.add_step(f"[{len(found)}]") from None
        return tuple(found)

    return read


def _dict_reader(inner: Reader) -> Reader:
    read_key = _text_reader(MAX_TEXT_CHARS)

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise SchemaError(f"expected an object, got {_json_kind(value)}")
        for key in value:
            read_key(key)
        found: dict[str, Any] = {}
        try:
            for key, item in value.items():
                found[key] = inner(item)
        except SchemaError as error:
            raise error.add_step(f".{shorten_value(key)}") from None
        return found

    return read
