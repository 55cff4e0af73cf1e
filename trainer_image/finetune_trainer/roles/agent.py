"""`python -m finetune_trainer.roles.agent`: runs torchrun on this node, started by its supervisor (roles/torchrun.py).

Ranks are not forked from the agent: its store runs threads, and a lock that a thread holds during a fork would stay locked in the
rank forever. They are forked from the fork server of Python's multiprocessing, a separate program with a single thread, which
imports what ranks need while this process imports torchrun. Each rank checks that the fork server has a single thread
(train/__main__.py).

Agent and fork server outlive the ranks, so ranks that are started again need no imports.

A rank that has done its work waits until the agent has its result. The event with which torchrun ends that wait would block the
agent forever if a rank is killed while it waits, so the agent gives the ranks an EndSignal in its place.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from finetune_trainer.processes.end_signal import EndSignal
from finetune_trainer.processes.start import die_with, end

ENDS_WITH_PARENT = "finetune_trainer.processes.ends_with_parent"
"""Module that the fork server imports first. Ranks end with the fork server, so the server must not wait for them."""


def main(argv: list[str]) -> None:
    """Run torchrun once for each line of `--orders`, a JSON list of arguments, and write each exit status to `--answers`.

    What torchrun prints before an answer names the ranks that failed. After any other error, the agent exits.
    """
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.roles.agent", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process with which this one ends")
    parser.add_argument("--preload", required=True, help="modules of the fork server, separated by commas")
    parser.add_argument("--scratch", type=Path, required=True, help="directory for the socket of the fork server")
    parser.add_argument("--orders", type=int, required=True, help="descriptor to read arguments of torchrun from")
    parser.add_argument("--answers", type=int, required=True, help="descriptor to write exit statuses to")
    arguments = parser.parse_args(argv)
    die_with(arguments.parent)
    # A socket's address has at most 107 bytes, and the directory's own path may be longer.
    tempfile.tempdir = f"/proc/self/fd/{os.open(arguments.scratch, os.O_RDONLY | os.O_DIRECTORY)}"
    multiprocessing.set_forkserver_preload([ENDS_WITH_PARENT, *arguments.preload.split(",")])
    forkserver.ensure_running()
    from torch.distributed import run
    from torch.distributed.elastic import multiprocessing as torchrun_processes
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    class Ranks(torchrun_processes.MultiprocessContext):
        """The processes of the ranks."""

        def __init__(self, *positional: Any, **named: Any) -> None:
            super().__init__(*positional, **named)
            self._worker_finished_event = EndSignal()  # type: ignore[assignment]

    torchrun_processes.MultiprocessContext = Ranks  # type: ignore[misc]
    try:
        with os.fdopen(arguments.orders) as orders:
            for order in orders:
                status = 0
                try:
                    run.main(json.loads(order))
                except ChildFailedError:
                    traceback.print_exc()
                    status = 1
                sys.stdout.flush()
                sys.stderr.flush()
                os.write(arguments.answers, f"{status}\n".encode())
    except BaseException:  # noqa: BLE001 - torchrun raises on SIGTERM, after it has stopped the ranks that it knows of
        traceback.print_exc()
    finally:
        # An interpreter that ends normally would wait for ranks that torchrun was just starting. They end with the fork server.
        end(1)


if __name__ == "__main__":
    main(sys.argv[1:])
