"""
Envelope <-> bytes: JSON, read strictly against the type hints of the message dataclasses.

What a peer sends is data from outside. Anything that is not exactly a message is refused with a
CodecError that names the place: unknown, missing or mistyped fields, a bool where an int belongs,
numbers beyond 64 bits or not finite, keys that appear twice, text above 64 KiB (but for spec,
traceback and lines), lone surrogates, nesting deeper than 16, more than `Envelope.LIMIT` bytes.
Nothing in it can name code.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from typing import Any, Literal, NoReturn, get_args, get_origin

from pdrun.rendezvous.protocol import events
from pdrun.rendezvous.protocol.events import Happening, Received
from pdrun.rendezvous.protocol.messages import Envelope, Message
from pdrun.rendezvous.protocol.schema import LONGEST, SURROGATE, Misfit, hints, reader, short, whole

__all__ = [
    "LONGEST",
    "CodecError",
    "decode",
    "encode",
    "event_from_plain",
    "event_to_plain",
    "from_plain",
    "load_json",
    "to_plain",
]

DEEPEST = 16

_TYPES: dict[str, Any] = {cls.__name__: cls for cls in get_args(Message)}
_EVENTS: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(events.Happening)}
_HEAD = dict.fromkeys(("sender", "incarnation", "sequence", "type", "body")).keys()
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
_WRITER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class CodecError(ValueError):
    """
    Bytes that are no message, or a message that does not fit into bytes; the text names the place.
    """


def encode(envelope: Envelope) -> bytes:
    """
    Return the envelope as bytes. Lone surrogates (from a worker's broken output) become U+FFFD.

    Raises:
        CodecError: it would be longer than `Envelope.LIMIT` bytes, or holds a number that is not
            finite.
    """
    body = _body(envelope.body)
    kind = type(envelope.body).__name__
    data = (
        (
            f'{{"sender":{_quoted(envelope.sender)},"incarnation":{envelope.incarnation:d},'
            f'"sequence":{envelope.sequence:d},"type":"{kind}","body":'
        ).encode()
        + body
        + b"}"
    )
    if len(data) > Envelope.LIMIT:
        raise CodecError(f"{kind}: {len(data)} bytes are more than {Envelope.LIMIT}")
    return data


def decode(data: bytes) -> Envelope:
    """
    Return the envelope that ``data`` holds.

    Raises:
        CodecError: it holds none; names the place.
    """
    value = _json(data)
    if type(value) is not dict or value.keys() != _HEAD:
        raise CodecError(f"a message has the fields {', '.join(_HEAD)}")
    kind = value["type"]
    if not isinstance(kind, str) or kind not in _TYPES:
        raise CodecError(f"type: {short(kind)} is no message")
    found = object.__new__(Envelope)  # see `_dataclass_reader`
    content = found.__dict__
    place = ""
    try:
        content["sender"] = reader(str, place := "sender")(value[place])
        content["incarnation"] = whole(value[place := "incarnation"])
        content["sequence"] = whole(value[place := "sequence"])
        place = kind
        content["body"] = reader(_TYPES[kind], "")(value["body"])
    except Misfit as error:
        raise CodecError(error.named(place)) from None
    return found


def to_plain(value: Any) -> Any:
    """
    Return a frozen value of this package as plain JSON values; not to be changed, they may be the
    value's own.
    """
    return _plain(value)


def from_plain(cls: type[Any], value: Any, place: str) -> Any:
    """
    Return the value of type ``cls``, a dataclass as a rule, that plain JSON values describe, read
    strictly.

    Raises:
        CodecError: they describe none; ``place`` is what the text calls the value.
    """
    hint: Any = cls
    try:
        return reader(hint, "")(value)
    except Misfit as error:
        raise CodecError(error.named(place)) from None


def event_to_plain(event: Happening) -> dict[str, Any]:
    """Return an event of the membership machine as plain JSON values, for the journal."""
    if isinstance(event, Received):
        message = event.message
        return {
            "kind": "Received",
            "peer": event.peer,
            "type": type(message).__name__,
            "body": _plain(message),
        }
    return {"kind": type(event).__name__, "body": _plain(event)}


def event_from_plain(value: Any, place: str) -> Happening:
    """
    Inverse of `event_to_plain`.

    Raises:
        CodecError: the values describe no event.
    """
    kind = value.get("kind") if isinstance(value, dict) else None
    if (
        kind == "Received"
        and set(value) == {"kind", "peer", "type", "body"}
        and value["type"] in tuple(_TYPES)
    ):
        name = value["type"]
        return Received(
            from_plain(str, value["peer"], f"{place}.peer"),
            from_plain(_TYPES[name], value["body"], name),
        )
    if kind != "Received" and kind in tuple(_EVENTS) and set(value) == {"kind", "body"}:
        event: Happening = from_plain(_EVENTS[kind], value["body"], f"{place}.{kind}")
        return event
    raise CodecError(f"{place}: no event")


def load_json(data: bytes, limit: int = Envelope.LIMIT) -> Any:
    """Return the JSON value in ``data``; everything that strict JSON refuses is a CodecError."""
    return _json(data, limit)


# Messages to bytes
# ----------------------------------------------------------------------------------------------------

_last: tuple[Any, bytes] = (None, b"")
"""The body that was written last: what all nodes are told is one object, and is written once."""


def _body(message: Any) -> bytes:
    global _last
    known, data = _last
    if known is message:
        return data
    try:
        text = _WRITER.encode(_plain(message))
    except ValueError as error:
        raise CodecError(f"{type(message).__name__}: {error}") from None
    data = _utf8(text)
    _last = (message, data)
    return data


@lru_cache(256)
def _quoted(text: str) -> str:
    return _WRITER.encode(SURROGATE.sub("\ufffd", text))


def _utf8(text: str) -> bytes:
    if text.isascii():
        return text.encode()
    return SURROGATE.sub("\ufffd", text).encode()


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    names = _fields_of(kind)
    if names is None:
        if isinstance(value, tuple):
            return [_plain(item) for item in value]
        return value
    if names:
        return {name: _plain(getattr(value, name)) for name in names}
    return vars(value)


@cache
def _fields_of(cls: Any) -> tuple[str, ...] | None:
    """
    Return the names of a dataclass's fields, none where their values are plain as they are; None:
    it is no such.
    """
    if not is_dataclass(cls):
        return None
    types = hints(cls)
    simple = (str, int, float, bool, int | None, dict[str, str])
    if all(
        types[item.name] in simple or get_origin(types[item.name]) is Literal
        for item in fields(cls)
    ):
        return ()
    return tuple(item.name for item in fields(cls))


# Bytes to JSON values
# -------------------------------------------------------------------------------------------------


def _json(data: bytes, limit: int = Envelope.LIMIT) -> Any:
    if len(data) > limit:
        raise CodecError(f"{len(data)} bytes are more than {limit}")
    if data.count(b"[") + data.count(b"{") > DEEPEST:
        _check_depth(data)
    try:
        return _PARSER.decode(data.decode())
    except CodecError:
        raise
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON: {str(error)[:120]}") from None


def _check_depth(data: bytes) -> None:
    """
    Refuse deep nesting before the parser sees it. Linear in the length, also for broken input.
    """
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
        raise CodecError(f"{short(twice)} appears twice")
    return result


def _constant(name: str) -> NoReturn:
    raise CodecError(f"{name} is not a number")


_PARSER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_constant)
