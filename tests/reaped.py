"""`python -m tests.reaped COMMAND...`: runs a command and inherits what it leaves, so that all of its processor time is counted.

A fork server outlives the process that started it by a moment, and a container's processes are children of a daemon: nobody
waits for them, so their time would be in nobody's account. Here they become children of this process, which waits for them for
some seconds after the command; what still runs then is named. The exit code is the command's.

If the process that started it ends, or it is told to end, the command is interrupted: tests then take down what they have set up.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""prctl(2)."""
PATIENCE_SECONDS = 5.0
"""How long what a command leaves may take to end."""


def main(command: list[str]) -> int:
    """Run the command; its exit code, 128 and more where a signal ended it."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_CHILD_SUBREAPER, 1), (PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    # A shell has what it runs in the background ignore this signal, and the command would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGINT))
    code = None
    while code is None:
        pid, status = os.wait()
        if pid == process.pid:
            code = process.returncode = os.waitstatus_to_exitcode(status)
    for left in _wait_for_the_rest(time.monotonic() + PATIENCE_SECONDS):
        print(f"left running by {command[0]}: {left}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _wait_for_the_rest(deadline: float) -> list[str]:
    """Reap every child until the deadline. Returns the command lines of those that still run."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if pid == 0:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [f"{child} {_command_line(child)}" for child in children]


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "(ended)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
