"""``python -m pdrun`` and the console script."""

from __future__ import annotations

import sys

import pdrun
from pdrun import early


def main() -> None:
    """Run the command line and leave with its exit code."""
    early.begin()
    try:
        cli = pdrun._load("pdrun.launcher.cli")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError):
            raise
        sys.stderr.write(f"pdrun: error: {error}\n")
        sys.exit(78)
    sys.exit(cli.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
