"""The options of torchrun and msrun that pdrun accepts."""

from __future__ import annotations

from pdrun.launcher.config.msrun_options import MSRUN_OPTIONS
from pdrun.launcher.config.torchrun_options import TORCHRUN_OPTIONS

ALIAS_OPTIONS = (*TORCHRUN_OPTIONS, *MSRUN_OPTIONS)
