"""A process for what may end it. It is a copy of this one, so that nothing has to be imported again."""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable


def forked(act: Callable[[], object]) -> tuple[int, str]:
    """Call `act` in a process of its own: 0 if it returned, and what was written to standard error."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(reading)
            os.dup2(writing, 2)
            faulthandler.disable()
            act()
            status = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as said:
        text = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), text
