"""``python -m pdrun`` and the console script."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    cli = importlib.import_module("pdrun.launcher.cli")
    sys.exit(cli.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
