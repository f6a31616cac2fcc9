"""The command line of `tests.launcher.cli`, which reads the job files of these tests."""

from tests.launcher.cli.conftest import folder, pdrun

__all__ = ["folder", "pdrun"]
