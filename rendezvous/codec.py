"""
Envelope <-> bytes: JSON, read strictly against the type hints of the message dataclasses.

What a peer sends is data from outside. Anything that is not exactly a message is refused with a CodecError that
names the place: unknown, missing or mistyped fields, a bool where an int belongs, numbers beyond 64 bits or not
finite, keys that appear twice, text above 64 KiB (but for spec, traceback and lines), lone surrogates, nesting
deeper than 16, more than `Envelope.LIMIT` bytes. Nothing in it can name code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from pdrun.rendezvous import events, messages
from pdrun.rendezvous.events import Happening, Received
from pdrun.rendezvous.messages import Envelope, Message

LONGEST = 64 * 1024
"""Characters of an ordinary text."""
LONG_FIELDS = frozenset({"spec", "traceback", "lines"})
"""Fields that only the limit of the whole message bounds."""
DEEPEST = 16

_Reader = Callable[[Any, str], Any]
_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Message)}
_EVENTS: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(events.Happening)}
_HEAD = ("sender", "incarnation", "sequence", "type", "body")
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


class CodecError(ValueError):
    """Bytes that are no message, or a message that does not fit into bytes; the text names the place."""


def encode(envelope: Envelope) -> bytes:
    """
    Return the envelope as bytes. Lone surrogates (from a worker's broken output) become U+FFFD.

    Raises:
        CodecError: it would be longer than `Envelope.LIMIT` bytes, or holds a number that is not finite.
    """
    plain = {
        "sender": envelope.sender, "incarnation": envelope.incarnation, "sequence": envelope.sequence,
        "type": type(envelope.body).__name__, "body": _plain(envelope.body),
    }  # fmt: skip
    try:
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise CodecError(f"{plain['type']}: {error}") from None
    data = _SURROGATE.sub("\ufffd", text).encode()
    if len(data) > Envelope.LIMIT:
        raise CodecError(f"{plain['type']}: {len(data)} bytes are more than {Envelope.LIMIT}")
    return data


def decode(data: bytes) -> Envelope:
    """
    Return the envelope that ``data`` holds.

    Raises:
        CodecError: it holds none; names the place.
    """
    value = _json(data)
    if not isinstance(value, dict) or set(value) != set(_HEAD):
        raise CodecError(f"a message has the fields {', '.join(_HEAD)}")
    kind = value["type"]
    if not isinstance(kind, str) or kind not in _TYPES:
        raise CodecError(f"type: {_short(kind)} is no message")
    return Envelope(
        sender=_text(value["sender"], "sender"),
        incarnation=_whole(value["incarnation"], "incarnation"),
        sequence=_whole(value["sequence"], "sequence"),
        body=from_plain(_TYPES[kind], value["body"], kind),
    )


def to_plain(value: Any) -> Any:
    """Return a frozen value of this package as plain JSON values."""
    return _plain(value)


def from_plain(cls: type[Any], value: Any, place: str) -> Any:
    """
    Return the dataclass ``cls`` that plain JSON values describe, read as strictly as a message.

    Raises:
        CodecError: they describe none.
    """
    hint: Any = cls
    return _reader(hint, "")(value, place)


def event_to_plain(event: Happening) -> dict[str, Any]:
    """Return an event of the membership machine as plain JSON values, for the journal."""
    if isinstance(event, Received):
        message = event.message
        return {"kind": "Received", "peer": event.peer, "type": type(message).__name__, "body": _plain(message)}
    return {"kind": type(event).__name__, "body": _plain(event)}


def event_from_plain(value: Any, place: str) -> Happening:
    """
    Inverse of `event_to_plain`.

    Raises:
        CodecError: the values describe no event.
    """
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "Received" and set(value) == {"kind", "peer", "type", "body"} and value["type"] in tuple(_TYPES):
        name = value["type"]
        return Received(_text(value["peer"], f"{place}.peer"), from_plain(_TYPES[name], value["body"], name))
    if kind != "Received" and kind in tuple(_EVENTS) and set(value) == {"kind", "body"}:
        event: Happening = from_plain(_EVENTS[kind], value["body"], f"{place}.{kind}")
        return event
    raise CodecError(f"{place}: no event")


def load_json(data: bytes, limit: int = Envelope.LIMIT) -> Any:
    """Return the JSON value in ``data``; everything that strict JSON refuses is a CodecError."""
    return _json(data, limit)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


# Bytes to JSON values -------------------------------------------------------------------------------------------------


def _json(data: bytes, limit: int = Envelope.LIMIT) -> Any:
    if len(data) > limit:
        raise CodecError(f"{len(data)} bytes are more than {limit}")
    if data.count(b"[") + data.count(b"{") > DEEPEST:
        _check_depth(data)
    try:
        return json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_constant)
    except CodecError:
        raise
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON: {str(error)[:120]}") from None


def _check_depth(data: bytes) -> None:
    """Refuse deep nesting before the parser sees it. Linear in the length, also for broken input."""
    depth = 0
    for token in _TOKENS.finditer(data):
        first = token[0][:1]
        if first in b"[{":
            depth += 1
            if depth > DEEPEST:
                raise CodecError(f"nested deeper than {DEEPEST}")
        elif first in b"]}":
            depth -= 1


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise CodecError(f"{_short(twice)} appears twice")
    return result


def _constant(name: str) -> NoReturn:
    raise CodecError(f"{name} is not a number")


# JSON values to dataclasses -------------------------------------------------------------------------------------------


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a whole number"}
    return names.get(type(value), "null" if value is None else "a number")


def _text(value: Any, place: str, longest: int = LONGEST) -> str:
    if not isinstance(value, str):
        raise CodecError(f"{place}: expected text, got {_kind(value)}")
    if len(value) > longest:
        raise CodecError(f"{place}: {len(value)} characters are more than {longest}")
    if not value.isascii() and _SURROGATE.search(value):
        raise CodecError(f"{place}: a lone surrogate is no text")
    return value


def _whole(value: Any, place: str) -> int:
    if type(value) is not int:
        raise CodecError(f"{place}: expected a whole number, got {_kind(value)}")
    if not -(1 << 63) <= value < 1 << 63:
        raise CodecError(f"{place}: a number beyond 64 bits")
    return value


def _number(value: Any, place: str) -> float:
    if type(value) is int:
        return float(_whole(value, place))
    if type(value) is not float:
        raise CodecError(f"{place}: expected a number, got {_kind(value)}")
    if not math.isfinite(value):
        raise CodecError(f"{place}: a number that is not finite")
    return value


def _truth(value: Any, place: str) -> bool:
    if type(value) is not bool:
        raise CodecError(f"{place}: expected true or false, got {_kind(value)}")
    return value


@cache
def _reader(hint: Any, name: str) -> _Reader:
    """Return the function that reads one type; ``name`` is the field's, which decides how long a text may be."""
    longest = Envelope.LIMIT if name in LONG_FIELDS else LONGEST
    if hint is str:
        return lambda value, place: _text(value, place, longest)
    if hint in (int, float, bool):
        return {int: _whole, float: _number, bool: _truth}[hint]
    if is_dataclass(hint):
        return _dataclass_reader(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _literal_reader(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _tuple_reader(_reader(arguments[0], name))
    if origin is dict and arguments[0] is str:
        return _dict_reader(_reader(arguments[1], name))
    if origin in (UnionType, Union) and len(arguments) == 2 and type(None) in arguments:
        inner = _reader(next(one for one in arguments if one is not type(None)), name)
        return lambda value, place: None if value is None else inner(value, place)
    raise TypeError(f"no reader for {hint!r}")


def _dataclass_reader(cls: Any) -> _Reader:
    hints = get_type_hints(cls, vars(messages) if cls.__module__ == messages.__name__ else None)
    readers = {item.name: _reader(hints[item.name], item.name) for item in fields(cls)}

    def read(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise CodecError(f"{place}: expected an object, got {_kind(value)}")
        if value.keys() != readers.keys():
            for key in value.keys() - readers.keys():
                raise CodecError(f"{place}.{_short(key)}: unknown field")
            raise CodecError(f"{place}.{min(readers.keys() - value.keys())}: missing")
        return cls(**{key: read_one(value[key], f"{place}.{key}") for key, read_one in readers.items()})

    return read


def _literal_reader(allowed: tuple[Any, ...]) -> _Reader:
    def read(value: Any, place: str) -> Any:
        if isinstance(value, str) and value in allowed:
            return value
        raise CodecError(f"{place}: {_short(value)} is none of {', '.join(map(str, allowed))}")

    return read


def _tuple_reader(inner: _Reader) -> _Reader:
    def read(value: Any, place: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise CodecError(f"{place}: expected a list, got {_kind(value)}")
        return tuple(inner(item, f"{place}[{index}]") for index, item in enumerate(value))

    return read


def _dict_reader(inner: _Reader) -> _Reader:
    def read(value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise CodecError(f"{place}: expected an object, got {_kind(value)}")
        return {_text(key, place): inner(item, f"{place}.{_short(key)}") for key, item in value.items()}

    return read
