"""`python -m finetune_trainer.data.worker SETTINGS`: processes that work on parts of files; started by workers.py.

The first process loads the tokenizer and forks the others, which share its memory. torch is not imported: only the tokenizer is
needed, and torch takes seconds and hundreds of MB. Every process dies with the one that started it.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from socket import socket

from finetune_trainer.data.file_parts import work_on
from finetune_trainer.data.messages import failure_line, read_task, result_line
from finetune_trainer.data.render_limit import RecordNote
from finetune_trainer.data.tokenize import Tokenizer
from finetune_trainer.processes.child import fork, wait_for_ends
from finetune_trainer.processes.sandbox import limit_memory
from finetune_trainer.processes.start import die_with, keep_torch_out


def main(arguments: str) -> int:
    """Load the tokenizer, fork the workers and wait; returns the first exit status of a worker that is not 0 (negative: a
    signal).
    """
    settings = json.loads(arguments)
    die_with(settings["parent"])
    if not settings["allow_remote_code"]:
        keep_torch_out()
    from finetune_trainer.data.tokenizer import load_tokenizer

    tokenizer, findings = load_tokenizer(Path(settings["model_directory"]), settings["allow_remote_code"])
    if tokenizer is None:
        print(*(finding.message for finding in findings), file=sys.stderr)
        return 1
    descriptors: list[tuple[int, int]] = settings["descriptors"]
    children = [fork(partial(_serve_one, number, descriptors, tokenizer)) for number in range(len(descriptors))]
    for descriptor, _ in descriptors:
        os.close(descriptor)
    for ended in wait_for_ends(children, float("inf")):
        if ended is not None and ended[1].code != 0:
            # The other workers die with this process.
            return 128 - ended[1].code if ended[1].code < 0 else ended[1].code
    return 0


def _serve_one(number: int, descriptors: list[tuple[int, int]], tokenizer: Tokenizer) -> None:
    for other, (descriptor, _) in enumerate(descriptors):
        if other != number:
            os.close(descriptor)
    own, note = descriptors[number]
    serve(socket(fileno=own), tokenizer, RecordNote(note))


def serve(connection: socket, tokenizer: Tokenizer, note: RecordNote) -> None:
    """Work on the tasks from the connection until it closes, in a process of its own."""
    # A chat template may allocate any amount.
    limit_memory()
    with connection.makefile("rb") as tasks:
        for line in tasks:
            try:
                answer = result_line(work_on(read_task(line), tokenizer, note))
            except Exception as error:  # noqa: BLE001 - whatever it is, the process that sent the task has to know
                answer = failure_line(error)
            connection.sendall(answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
