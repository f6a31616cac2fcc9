"""Kinds of scales, without those that this torch does not have on CPUs: rows in 2.11."""

from __future__ import annotations

import pytest
import torch

from pdrun.errors import UsageError
from pdrun.parallel.fp8 import product
from pdrun.parallel.fp8.modules import check_device


def _mark(scales: str) -> object:
    try:
        check_device(torch.device("cpu"), scales)
    except UsageError as error:
        return pytest.param(scales, marks=pytest.mark.skip(str(error)))
    return scales


SCALES = [_mark(scales) for scales in product.SCALES]
