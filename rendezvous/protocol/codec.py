"""
Envelope <-> bytes: JSON, checked strictly against the type hints of the message dataclasses.

Received bytes are untrusted. Anything that is not exactly a message raises a CodecError that names
the place: unknown, missing or mistyped fields, a bool instead of an int, numbers beyond 64 bits or
not finite, duplicate keys, text above 64 KiB (except spec, traceback and lines), lone surrogates,
nesting deeper than 16, more than `Envelope.LIMIT` bytes. Nothing in a message can name code.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from typing import Any, Literal, NoReturn, get_args, get_origin

from pdrun.rendezvous.protocol.events import JOURNAL_TAGS, MembershipEvent, MessageReceived
from pdrun.rendezvous.protocol.messages import Envelope, Message
from pdrun.rendezvous.protocol.schema import (
    MAX_TEXT_CHARS,
    SURROGATE,
    SchemaError,
    field_types,
    make_reader,
    read_integer,
    shorten_value,
)

__all__ = [
    "MAX_TEXT_CHARS",
    "CodecError",
    "decode",
    "encode",
    "event_from_plain",
    "event_to_plain",
    "from_plain",
    "load_json",
    "to_plain",
]

MAX_DEPTH = 16

_MESSAGE_TYPES: dict[str, Any] = {cls.__name__: cls for cls in get_args(Message)}
_EVENT_TYPES: dict[str, type[Any]] = {tag: cls for cls, tag in JOURNAL_TAGS.items()}
_ENVELOPE_FIELDS = dict.fromkeys(("sender", "incarnation", "sequence", "type", "body")).keys()
_TOKEN_PATTERN = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
_JSON_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class CodecError(ValueError):
    """
    Bytes that are not a message, or a message that cannot be encoded. The text names the place.
    """


def encode(envelope: Envelope) -> bytes:
    """
    Return the envelope as bytes. Lone surrogates (from a worker's broken output) become U+FFFD.

    Raises:
        CodecError: it is longer than `Envelope.LIMIT` bytes, or contains a number that is not
            finite.
    """
    body = _encode_body(envelope.body)
    kind = type(envelope.body).__name__
    data = (
        (
            f'{{"sender":{_quote_text(envelope.sender)},"incarnation":{envelope.incarnation:d},'
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
    Return the envelope in ``data``.

    Raises:
        CodecError: ``data`` is not an envelope; names the place.
    """
    value = load_json(data)
    if type(value) is not dict or value.keys() != _ENVELOPE_FIELDS:
        raise CodecError(f"a message has the fields {', '.join(_ENVELOPE_FIELDS)}")
    kind = value["type"]
    if not isinstance(kind, str) or kind not in _MESSAGE_TYPES:
        raise CodecError(f"type: {shorten_value(kind)} is not a message")
    found = object.__new__(Envelope)  # see `_dataclass_reader`
    content = found.__dict__
    place = ""
    try:
        content["sender"] = make_reader(str, place := "sender")(value[place])
        content["incarnation"] = read_integer(value[place := "incarnation"])
        content["sequence"] = read_integer(value[place := "sequence"])
        place = kind
        content["body"] = make_reader(_MESSAGE_TYPES[kind], "")(value["body"])
    except SchemaError as error:
        raise CodecError(error.describe_place(place)) from None
    return found


def from_plain(cls: type[Any], value: Any, place: str) -> Any:
    """
    Return the value of type ``cls``, usually a dataclass, from plain JSON values, checked strictly.

    Raises:
        CodecError: the values do not fit; ``place`` is the name of the value in the message.
    """
    hint: Any = cls
    try:
        return make_reader(hint, "")(value)
    except SchemaError as error:
        raise CodecError(error.describe_place(place)) from None


def event_to_plain(event: MembershipEvent) -> dict[str, Any]:
    """Return an event of the membership machine as plain JSON values, for the journal."""
    if isinstance(event, MessageReceived):
        message = event.message
        return {
            "kind": "Received",
            "peer": event.peer,
            "type": type(message).__name__,
            "body": to_plain(message),
        }
    return {"kind": JOURNAL_TAGS[type(event)], "body": to_plain(event)}


def event_from_plain(value: Any, place: str) -> MembershipEvent:
    """
    Inverse of `event_to_plain`.

    Raises:
        CodecError: the values are not an event.
    """
    kind = value.get("kind") if isinstance(value, dict) else None
    if (
        kind == "Received"
        and set(value) == {"kind", "peer", "type", "body"}
        and value["type"] in tuple(_MESSAGE_TYPES)
    ):
        name = value["type"]
        return MessageReceived(
            from_plain(str, value["peer"], f"{place}.peer"),
            from_plain(_MESSAGE_TYPES[name], value["body"], name),
        )
    if kind != "Received" and kind in tuple(_EVENT_TYPES) and set(value) == {"kind", "body"}:
        event: MembershipEvent = from_plain(_EVENT_TYPES[kind], value["body"], f"{place}.{kind}")
        return event
    raise CodecError(f"{place}: not an event")


# Messages to bytes
# -----------------

_last_encoded: tuple[Any, bytes] = (None, b"")
"""The last encoded body. A message for all nodes is one object, and is encoded once."""


def _encode_body(message: Any) -> bytes:
    global _last_encoded
    known, data = _last_encoded
    if known is message:
        return data
    try:
        text = _JSON_ENCODER.encode(to_plain(message))
    except ValueError as error:
        raise CodecError(f"{type(message).__name__}: {error}") from None
    data = _encode_utf8(text)
    _last_encoded = (message, data)
    return data


@lru_cache(256)
def _quote_text(text: str) -> str:
    return _JSON_ENCODER.encode(SURROGATE.sub("\ufffd", text))


def _encode_utf8(text: str) -> bytes:
    if text.isascii():
        return text.encode()
    return SURROGATE.sub("\ufffd", text).encode()


def to_plain(value: Any) -> Any:
    """
    Return a frozen value of this package as plain JSON values.

    Do not change them: they may be the value's own.
    """
    kind: Any = type(value)
    names = _fields_of(kind)
    if names is None:
        if isinstance(value, tuple):
            return [to_plain(item) for item in value]
        return value
    if names:
        return {name: to_plain(getattr(value, name)) for name in names}
    return vars(value)


@cache
def _fields_of(cls: Any) -> tuple[str, ...] | None:
    """
    Return the names of a dataclass's fields; empty if their values are plain already; None if it is
    not a dataclass.
    """
    if not is_dataclass(cls):
        return None
    types = field_types(cls)
    simple = (str, int, float, bool, int | None, dict[str, str])
    if all(
        types[item.name] in simple or get_origin(types[item.name]) is Literal
        for item in fields(cls)
    ):
        return ()
    return tuple(item.name for item in fields(cls))


# Bytes to JSON values
# --------------------


def load_json(data: bytes, limit: int = Envelope.LIMIT) -> Any:
    """Return the JSON value in ``data``; everything that strict JSON refuses is a CodecError."""
    if len(data) > limit:
        raise CodecError(f"{len(data)} bytes are more than {limit}")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(data)
    try:
        return _JSON_DECODER.decode(data.decode())
    except CodecError:
        raise
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON: {str(error)[:120]}") from None


def _check_depth(data: bytes) -> None:
    """
    Refuse deep nesting before the parser sees it. Linear in the length, also for broken input.
    """
    depth = 0
    for token in _TOKEN_PATTERN.finditer(data):
        first = token[0][:1]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise CodecError(f"nested deeper than {MAX_DEPTH}")
        elif first in b"]}":
            depth -= 1


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CodecError(f"{shorten_value(key)} appears twice")
            seen.add(key)
    return result


def _reject_constant(name: str) -> NoReturn:
    raise CodecError(f"{name} is not a number")


_JSON_DECODER = json.JSONDecoder(
    object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant
)
