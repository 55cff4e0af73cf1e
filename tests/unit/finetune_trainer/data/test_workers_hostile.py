"""A worker that a record or a tokenizer has taken over: an error in bounded time and memory, and none of its code runs here."""

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune_trainer.data import workers
from finetune_trainer.data.file_parts import DOCUMENT_TYPE, FilePart, PartFilesError, PartTask, documents_file, read_documents
from finetune_trainer.data.workers import WorkerError, in_workers
from finetune_trainer.files import SpecialFileError
from tests.support.living import living
from tests.unit.finetune_trainer.data.test_workers import SETTINGS

SAID = {
    "garbage": "wrote something other than a result",
    "without_end": "wrote something other than a result",
    "never": "did not finish train.jsonl",
    "closed": "closed its connection and did not end",
}
HOSTILE = """
import json, sys
from pathlib import Path
from tests.unit.finetune_trainer.processes.hostile_children import BEHAVIOURS
behaviour, trap, settings = sys.argv[1:]
BEHAVIOURS[behaviour](json.loads(settings)["descriptors"][0], Path(trap))
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(workers, "EXIT_SECONDS", 0.5)
    if "never" in request.node.name:
        monkeypatch.setattr(workers, "PART_SECONDS", 1.0)


@pytest.fixture
def task(tmp_path: Path) -> PartTask:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n')
    return PartTask(FilePart(0, path, None, path.stat().st_size), SETTINGS, tmp_path / "result")


def fails(results: Generator[Any], said: str) -> None:
    before, resident = psutil.Process().children(recursive=True), psutil.Process().memory_info().rss
    with pytest.raises(WorkerError, match=said):
        list(results)
    assert psutil.Process().memory_info().rss - resident < 64 << 20
    assert [each for each in living(psutil.Process().children(recursive=True)) if each not in before] == []


@pytest.mark.parametrize("behaviour", SAID)
def test_a_worker_that_was_taken_over_is_an_error(
    behaviour: str, task: PartTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trap"
    stand_in(tmp_path, monkeypatch, HOSTILE, behaviour, str(trap))
    fails(in_workers(iter([task]), 1, tmp_path, allow_remote_code=False), SAID[behaviour])
    assert not trap.exists()


def stand_in(directory: Path, monkeypatch: pytest.MonkeyPatch, program: str, *arguments: str) -> None:
    """Have this program started in place of the one that forks workers; its last argument is the settings."""
    (directory / "hostile.py").write_text(program)
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {directory / "hostile.py"} {" ".join(arguments)} "$3"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[4]), *sys.path]))
    monkeypatch.setattr(workers.sys, "executable", str(python))


TAKEN_OVER = """
import os, sys, time
from finetune_trainer.data import tokenizer, worker
behaviour, settings = sys.argv[1:]
def work_on(*_):
    if behaviour == "closes":
        os.closerange(3, 1000)
        time.sleep(1000)
    os._exit(0)
tokenizer.load_tokenizer = lambda *_: (object(), [])
worker.work_on, worker.ENDING_SECONDS, worker.LOOK_SECONDS = work_on, 0.5, 0.1
sys.exit(worker.main(settings))
"""


@pytest.mark.parametrize("behaviour", ["closes", "ends"])
def test_a_worker_that_leaves_its_connection_is_noticed_long_before_the_deadline_of_its_part(
    behaviour: str, task: PartTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PART_SECONDS", 120.0)
    stand_in(tmp_path, monkeypatch, TAKEN_OVER, behaviour)
    fails(in_workers(iter([task]), 1, tmp_path, allow_remote_code=False), "closed its connection and did not end|with status 0")


ANSWERS_UNASKED = """
import json, sys
from socket import socket
from finetune_trainer.data.file_parts import PartResult
from finetune_trainer.data.messages import result_line
connection = socket(fileno=json.loads(sys.argv[1])["descriptors"][0])
answer = result_line(PartResult())
while True:
    connection.sendall(answer)
"""


def test_a_worker_that_reads_nothing_is_an_error(task: PartTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers before it is asked, so that more and more tasks wait for it."""
    monkeypatch.setattr(workers, "TAKING_SECONDS", 0.5)
    stand_in(tmp_path, monkeypatch, ANSWERS_UNASKED)
    tasks: Iterator[PartTask] = (task for _ in range(1_000_000))
    with pytest.raises(WorkerError, match=r"took no task|something else"):
        for _ in in_workers(tasks, 1, tmp_path, allow_remote_code=False):
            pass


@pytest.mark.parametrize("left", [b"", b"\0" * 15, b"\0" * 32])
def test_files_that_are_not_what_the_result_says_are_refused(left: bytes, tmp_path: Path) -> None:
    documents_file(tmp_path / "result").write_bytes(left)
    with pytest.raises(PartFilesError, match="are not 1 documents"):
        list(read_documents(tmp_path / "result", 1))


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(documents_file(tmp_path / "result"))
    with pytest.raises(SpecialFileError):
        list(read_documents(tmp_path / "result", 1))


def test_documents_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from finetune_trainer.data import file_parts as parts

    monkeypatch.setattr(parts, "READ_DOCUMENTS", 3)
    rows = np.arange(7 * 4, dtype="<u4").view(DOCUMENT_TYPE)
    documents_file(tmp_path / "result").write_bytes(rows.tobytes())
    blocks = list(read_documents(tmp_path / "result", 7))
    assert [len(block) for block in blocks] == [3, 3, 1]
    assert np.array_equal(np.concatenate(blocks), rows)
