"""Where every thread of this process is, as text; also while the training thread is stuck in native
code.
"""

from __future__ import annotations

import faulthandler
import re
import tempfile
import threading

__all__ = ["stacks"]

_HEADER = re.compile(r"^((?:Current thread|Thread) 0x([0-9a-f]+))")


def stacks() -> str:
    """Stacks of all threads, most recent call first, each under its thread's name."""
    # faulthandler takes the frames without running Python in the other threads. It writes to a file
    # with a number only.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    names = {thread.ident: thread.name for thread in threading.enumerate()}

    def named(line: str) -> str:
        found = _HEADER.match(line)
        name = names.get(int(found[2], 16)) if found else None
        return line if found is None or name is None else f"{name}: {line}"

    return "\n".join(named(line) for line in text.splitlines())
