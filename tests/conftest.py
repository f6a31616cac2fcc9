"""
The suite is about CPUs: accelerators of the machine that it runs on are hidden, so that `auto` is
one worker.

Device tables are tested against fakes (tests/backends); tests that look for a real accelerator find
none, unless PDRUN_TEST_GPUS=2 says that it has so many and that tests/parallel/test_gpu.py is to
use them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from pdrun import process_setup

_HIDES = {
    "/dev/nvidia0": "CUDA_VISIBLE_DEVICES",
    "/dev/kfd": "HIP_VISIBLE_DEVICES",
    "/dev/davinci0": "ASCEND_RT_VISIBLE_DEVICES",
}

for _path, _name in _HIDES.items():
    if Path(_path).exists() and not os.environ.get("PDRUN_TEST_GPUS"):
        os.environ[_name] = ""

# What a background job of a shell, or nohup, has made this process ignore, all that is started here
# would ignore too.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

# How long an example takes says nothing on a machine that others use as well.
settings.register_profile("pdrun", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pdrun")


@pytest.fixture(autouse=True)
def no_token_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A process keeps the token that it once found; tests in one process are to be as separate ones.
    """
    monkeypatch.setattr(process_setup, "_taken_token", [])
