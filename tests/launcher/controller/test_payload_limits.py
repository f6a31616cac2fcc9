"""A payload from the environment is small, however small the text that it is packed into."""

from __future__ import annotations

import base64
import json
import zlib

import pytest

from pdrun.errors import ConfigError
from pdrun.launcher.controller import payload


def pack_bytes(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def test_a_payload_that_unpacks_to_more_than_its_limit_is_refused() -> None:
    small = {"env": {"X": "x" * 100_000}}
    assert payload.decode(pack_bytes(json.dumps(small).encode())) == small
    large = {"env": {"X": "x" * payload.MAX_DECODED_BYTES}}
    text = pack_bytes(json.dumps(large).encode())
    assert len(text) < 100_000
    with pytest.raises(ConfigError, match="not a payload"):
        payload.decode(text)
