"""`python -m finetune_trainer.roles.agent`: torchrun on this node, started by its supervisor (roles/torchrun.py).

The agent has the threads of its store, and a lock that one of them holds at a fork would stay locked in the rank forever. So
ranks are forks of another process: the fork server of Python's multiprocessing, a program of its own with a single thread, which
imports what ranks need while this process imports torchrun. Each rank checks that the fork server has a single thread
(train/__main__.py).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

from finetune_trainer.processes.start import die_with


def main(argv: list[str]) -> None:
    """Run torchrun to its end. Raises ChildFailedError, whose text names the ranks that failed."""
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.roles.agent", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process with which this one ends")
    parser.add_argument("--preload", required=True, help="modules of the fork server, separated by commas")
    parser.add_argument("--scratch", type=Path, required=True, help="directory for the socket of the fork server")
    arguments, of_torchrun = parser.parse_known_args(argv)
    die_with(arguments.parent)
    # A socket's address has at most 107 bytes, and the directory's own name may be longer.
    tempfile.tempdir = f"/proc/self/fd/{os.open(arguments.scratch, os.O_RDONLY | os.O_DIRECTORY)}"
    multiprocessing.set_forkserver_preload(arguments.preload.split(","))
    forkserver.ensure_running()
    from torch.distributed import run

    run.main(of_torchrun)


if __name__ == "__main__":
    main(sys.argv[1:])
