"""The command line. A mistake of a person, and Ctrl+C, end in a line on stderr and an exit code.

The commands are imported by `main`, so that Ctrl+C finds it running.
"""

import io
import sys

from specctl.cli.interrupts import interruptible
from specctl.errors import SpecctlError


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character shows its code
    try:
        with interruptible():
            from specctl.cli.commands import app

            app()
    except SpecctlError as error:
        red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        print(f"{red}specctl: {error}{plain}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        print(f"specctl: {error}", file=sys.stderr)
        sys.exit(1)
