"""The command line: ``python -m bsrgemm info | verify | compile``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ._cli import compile as compile_command
from ._cli import info as info_command
from ._cli import verify as verify_command
from ._version import __version__

#: What a shell reports for a process that an interrupt ended: 128 + SIGINT.
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bsrgemm", description="Block-sparse matrix products for NumPy and CuPy."
    )
    parser.add_argument("--version", action="version", version=f"bsrgemm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (info_command, verify_command, compile_command):
        module.add_command(commands)
    args = parser.parse_args(argv)
    try:
        status: int = args.command(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough; nothing may be flushed into the pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
