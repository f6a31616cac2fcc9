"""The length of a safetensors header bounds what is read, and is bounded itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdrun.errors import ConfigError
from pdrun.parallel.checkpoint.safetensors import MAX_HEADER_BYTES, SafetensorsFile

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("length", [0, 93, MAX_HEADER_BYTES + 1, 2**63])
def test_a_header_of_a_wrong_length_is_not_read(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(100 if length < 100 else MAX_HEADER_BYTES + 100)
    with pytest.raises(ConfigError, match=f"a header of {length} bytes"):
        SafetensorsFile(path)
