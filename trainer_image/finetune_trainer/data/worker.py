"""`python -m finetune_trainer.data.worker SETTINGS`: runs the processes that prepare parts of files. Started by workers.py.

The first process loads the tokenizer and forks the others, which share its memory. torch is not imported: only the tokenizer is
needed, and torch takes seconds and hundreds of MB. Every process dies with its parent.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from mmap import mmap
from pathlib import Path
from socket import socket

from finetune_trainer.data.file_parts import PartResult, work_on
from finetune_trainer.data.messages import failure_line, read_task, result_line
from finetune_trainer.data.records import RecordProblem
from finetune_trainer.data.render_chat import endless_template_error
from finetune_trainer.data.render_limit import END_SECONDS, ENDED_BY, RecordNote
from finetune_trainer.data.tokenize import Tokenizer
from finetune_trainer.processes.child import ENDING_SECONDS, Child, fork, wait_for_ends
from finetune_trainer.processes.sandbox import limit_memory
from finetune_trainer.processes.start import die_with, keep_torch_out

LOOK_SECONDS = 1.0
"""Time between two checks that the workers still have their connections."""


def main(arguments: str) -> int:
    """Load the tokenizer, fork the workers, wait. Returns 0, or a failed worker's status (128 plus the signal that killed it).

    If a chat template does not finish, its worker is killed. This process then answers in its place and forks a new worker.
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
    connections = [socket(fileno=descriptor) for descriptor in settings["descriptors"]]
    # Shared memory in which each worker notes the record that it is rendering.
    notes = memoryview(mmap(-1, 8 * len(connections))).cast("q")

    def start(number: int) -> Child:
        return fork(partial(serve, connections, number, tokenizer, notes[number : number + 1]))

    children = {start(number): number for number in range(len(connections))}
    while children:
        ended = next(wait_for_ends(list(children), float("inf"), LOOK_SECONDS))
        if ended is None:
            # This process has a copy of each connection, so the other end does not see that a worker has closed its own.
            closed = next((child for child, number in children.items() if not _has(child, connections[number])), None)
            if closed is not None and closed.wait(ENDING_SECONDS) is None:
                print("a worker closed its connection and did not end", file=sys.stderr)
                return 1
            continue
        child, end = ended
        number = children.pop(child)
        if end.code == -ENDED_BY and notes[number]:
            error = endless_template_error(f"takes more than {END_SECONDS:g} s of CPU time")
            result = PartResult()
            result.found_endless(RecordProblem(notes[number], error.key, "", error.reason, error.fix, is_of_source=True))
            notes[number] = 0
            connections[number].sendall(result_line(result))
            children[start(number)] = number
        elif end.code != 0:
            # The other workers die with this process.
            return 128 - end.code if end.code < 0 else end.code
        else:
            # This shows the other end that no further answer comes from this worker.
            connections[number].close()
    return 0


def _has(child: Child, connection: socket) -> bool:
    """Whether a child still has its copy of a connection, which has the same descriptor number in both processes."""
    try:
        return os.path.samestat(Path(f"/proc/{child.pid}/fd/{connection.fileno()}").stat(), os.fstat(connection.fileno()))
    except OSError:
        return False


def serve(connections: list[socket], number: int, tokenizer: Tokenizer, note: RecordNote) -> None:
    """Work on the tasks from connection `number` until it closes, in a separate process."""
    for other in connections[:number] + connections[number + 1 :]:
        other.close()
    # A chat template may allocate any amount of memory.
    limit_memory()
    with connections[number].makefile("rb") as tasks:
        for line in tasks:
            try:
                answer = result_line(work_on(read_task(line), tokenizer, note))
            except Exception as error:  # noqa: BLE001 - the process that sent the task needs every error
                answer = failure_line(error)
            connections[number].sendall(answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
