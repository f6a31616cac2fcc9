"""``python -m pdrun`` and the console script."""

from __future__ import annotations

import os
import sys

import pdrun


def main() -> None:
    """
    Run the command line and exit with its code.

    The exit skips the interpreter's finalization, which would take 20 ms or more. Everything is
    closed and flushed before.
    """
    # Before any import that a file in the working directory could shadow.
    pdrun.put_standard_library_first(sys.path)
    from pdrun import process_setup

    process_setup.setup_process()
    try:
        prestart = pdrun._import_module("pdrun.launcher.launch.prestart")
        prestart.start(sys.argv[1:])
        cli = pdrun._import_module("pdrun.launcher.cli.main")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError):
            raise
        sys.stderr.write(f"pdrun: error: {error}\n")
        sys.exit(78)
    code = cli.main(sys.argv[1:])
    prestart.discard()
    from pdrun import async_writer

    async_writer.flush_messages()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # the command line has reported it
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
