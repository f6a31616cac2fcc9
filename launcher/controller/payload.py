"""
What a front tells the tasks that another launcher starts for it: JSON, deflated, in base64, in one
variable.

One variable is passed by every launcher, byte for byte, however wild the arguments and values in
it; it shows in no list of processes. Limit: Linux takes 128 KiB for a variable.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from typing import Any

from pdrun.errors import ConfigError, UsageError

LONGEST = 120 << 10
_MOST = 16 << 20


def encode(order: dict[str, Any]) -> str:
    """
    Return the text of the variable.

    Raises:
        UsageError: arguments and variables are too long for it.
    """
    text = base64.b64encode(zlib.compress(json.dumps(order).encode("ascii"), 9)).decode("ascii")
    if len(text) > LONGEST:
        raise UsageError(
            f"the job's arguments and forwarded variables take {len(text)} characters, and {LONGEST} fit",
            hint="put them into a file, or use --launcher ssh",
        )
    return text


def decode(text: str) -> dict[str, Any]:
    """Inverse of `encode`. Raises ConfigError for anything else."""
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), _MOST)
        order = json.loads(data)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ConfigError(f"is no order: {error}", where="PDRUN_ORDER") from None
    if not isinstance(order, dict):
        raise ConfigError("is no order", where="PDRUN_ORDER")
    return order
