"""
What a controller sends to the tasks that another launcher starts: JSON, deflated, in base64, in one
environment variable.

Every launcher passes one variable unchanged, whatever arguments and values it contains. No list of
processes shows it. Limit: Linux accepts 128 KiB per variable.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from typing import Any

from pdrun.errors import ConfigError, UsageError

MAX_TEXT_CHARACTERS = 120 << 10
MAX_DECODED_BYTES = 16 << 20


def encode(payload: dict[str, Any]) -> str:
    """
    Return the text of the variable.

    Raises:
        UsageError: arguments and variables are too long for it.
    """
    data = zlib.compress(json.dumps(payload).encode("ascii"), 9)
    text = base64.b64encode(data).decode("ascii")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise UsageError(
            f"the job's arguments and forwarded variables must fit in {MAX_TEXT_CHARACTERS} "
            f"characters, got {len(text)}",
            hint="put them into a file, or use --launcher ssh",
        )
    return text


def decode(text: str) -> dict[str, Any]:
    """Inverse of `encode`. Raises ConfigError for any other text."""
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), MAX_DECODED_BYTES)
        payload = json.loads(data)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ConfigError(f"is not a payload of pdrun: {error}", where="PDRUN_ORDER") from None
    if not isinstance(payload, dict):
        raise ConfigError("is not a payload of pdrun", where="PDRUN_ORDER")
    return payload
