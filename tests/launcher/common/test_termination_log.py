"""Where Kubernetes reads why a container has failed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdrun.launcher.common import termination_log
from pdrun.launcher.common.termination_log import (
    MAX_MESSAGE_BYTES,
    termination_log_path,
    write_termination_log,
)

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def test_only_a_pod_has_a_message() -> None:
    assert termination_log_path({}) == ""
    assert termination_log_path(POD) == "/dev/termination-log"
    assert termination_log_path({"PDRUN_TERMINATION_LOG": "/x"}) == "/x"


def test_the_file_of_a_pod_is_replaced_and_never_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "termination-log"
    monkeypatch.setattr(termination_log, "DEFAULT_PATH", str(path))
    assert write_termination_log(["why"], POD) == ""
    assert not path.exists()
    path.write_text("an older and longer message")
    write_termination_log(["why", "and where"], POD)
    assert path.read_text() == "why\nand where"
    write_termination_log(["other"], {})
    assert path.read_text() == "why\nand where"


def test_a_long_message_keeps_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_termination_log(["rank 3: " + "ä" * 5000], {"PDRUN_TERMINATION_LOG": str(path)})
    data = path.read_bytes()
    assert len(data) == MAX_MESSAGE_BYTES
    assert data.decode().startswith("rank 3: ä")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "log"
    fault = write_termination_log(["why"], {"PDRUN_TERMINATION_LOG": str(missing)})
    assert fault == f"PDRUN_TERMINATION_LOG: {missing} cannot be written: No such file or directory"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "cannot be written" in write_termination_log(
        ["why"], {"PDRUN_TERMINATION_LOG": str(fifo)}
    )
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    assert "cannot be written" in write_termination_log(
        ["why"], {"PDRUN_TERMINATION_LOG": str(link)}
    )
