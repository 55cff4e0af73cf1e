"""`python -m finetune_trainer.data.worker SETTINGS`: processes that work on parts of files; started by workers.py.

The first process loads the tokenizer and forks the others, which share its memory. torch is kept out of them: only the tokenizer is
needed, and torch takes seconds and hundreds of MB. Every process dies with the one that started it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from finetune_trainer.data.parts import work_on
from finetune_trainer.data.render_limit import RecordNote
from finetune_trainer.data.tokenize import Tokenizer
from finetune_trainer.processes.sandbox import limit_memory
from finetune_trainer.processes.start import die_with, keep_torch_out


def main(arguments: str) -> int:
    """Load, fork, wait; the first exit status of a worker that is not 0 (negative: the signal that ended it)."""
    settings = json.loads(arguments)
    die_with(settings["parent"])
    if not settings["allow_remote_code"]:
        keep_torch_out()
    from finetune_trainer.data.tokenizer import load_tokenizer

    tokenizer, findings = load_tokenizer(Path(settings["model_directory"]), settings["allow_remote_code"])
    if tokenizer is None:
        print(*(finding.message for finding in findings), file=sys.stderr)
        return 1
    loader, descriptors = os.getpid(), settings["descriptors"]
    for descriptor, noted in descriptors:
        if os.fork() == 0:
            for other, _ in descriptors:
                if other != descriptor:
                    os.close(other)
            serve(Connection(descriptor), tokenizer, loader, RecordNote(noted))
    for descriptor, _ in descriptors:
        os.close(descriptor)
    for _ in descriptors:
        status = os.waitstatus_to_exitcode(os.wait()[1])
        if status != 0:
            return 128 - status if status < 0 else status
    return 0


def serve(connection: Connection, tokenizer: Tokenizer, parent: int, note: RecordNote) -> NoReturn:
    """Work on what comes through the connection until it closes; ends this process, which `parent` forked."""
    status = 1
    try:
        die_with(parent)
        # A chat template may ask for any amount.
        limit_memory()
        while True:
            try:
                task = connection.recv()
            except EOFError:
                break
            try:
                connection.send((work_on(task, tokenizer, note), None, ""))
            except Exception as error:  # noqa: BLE001 - whatever it is, the process that asked has to know
                connection.send((None, error if isinstance(error, OSError | MemoryError) else None, traceback.format_exc()))
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
