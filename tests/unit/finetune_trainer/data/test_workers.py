"""Processes that prepare: what one meets is reported, none outlives its parent, and a killed run leaves nothing that counts."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.failures import FailureClass
from finetune_job.plan.run_plan import DataPlan
from finetune_trainer.data import file_parts as file_parts_module
from finetune_trainer.data.file_parts import PartSettings, PartTask, file_parts
from finetune_trainer.data.prepare import prepare
from finetune_trainer.data.workers import WorkerError, WorkerKilledError, in_workers
from finetune_trainer.errors import classify
from tests.support.living import living
from tests.unit.finetune_trainer.data.test_prepare import data_set, plan
from tests.unit.finetune_trainer.data.tokenizers_by_hand import word_tokenizer

DEADLINE_SECONDS = 120
SETTINGS = PartSettings(
    DataPlan(
        train=(),
        validation=None,
        format=DataFormat.PROMPT_COMPLETION,
        loss_on=LossOn.COMPLETION,
        max_sequence_length=100,
        packing=True,
    )
)


@pytest.fixture
def claims(tmp_path):
    (tmp_path / "data").mkdir()
    word_tokenizer().save_pretrained(tmp_path / "models")
    lines = [json.dumps({"prompt": "a " * (n % 5), "completion": "b c " * (n % 7 + 1)}) for n in range(200)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines))
    return tmp_path


def tasks(claims, monkeypatch):
    monkeypatch.setattr(file_parts_module, "PART_BYTES", 500)
    (claims / "scratch").mkdir(exist_ok=True)
    listed = file_parts(0, claims / "data" / "train.jsonl")
    return [PartTask(part, SETTINGS, claims / "scratch" / str(number)) for number, part in enumerate(listed)]


@pytest.fixture
def others():
    """Processes of other tests, such as the server that ranks are forked from."""
    return set(psutil.Process().children(recursive=True))


def family_besides(others):
    return [process for process in psutil.Process().children(recursive=True) if process not in others]


def wait_until_ended(processes):
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_SECONDS)
    assert not alive


def test_results_come_in_order_and_no_process_is_left(claims, monkeypatch, others):
    given = tasks(claims, monkeypatch)
    found = list(in_workers(iter(given), 2, claims / "models", allow_remote_code=False))
    assert [task for task, _ in found] == given
    assert sum(result.num_records for _, result in found) == 200
    assert not family_besides(others)


def test_a_killed_worker_is_an_error_that_speaks_of_memory(claims, monkeypatch, others):
    results = in_workers(iter(tasks(claims, monkeypatch)), 2, claims / "models", allow_remote_code=False)
    next(results)
    family = family_besides(others)
    (loader,) = [process for process in family if process.ppid() == os.getpid()]
    assert len(loader.children()) == 2
    for worker in loader.children():
        worker.kill()
    with pytest.raises(WorkerKilledError, match="memory") as caught:
        list(results)
    assert classify(caught.value)[0] is FailureClass.HOST_OUT_OF_MEMORY
    wait_until_ended(family)


def test_an_error_of_the_file_system_in_a_worker_is_raised_here(claims, monkeypatch):
    given = tasks(claims, monkeypatch)
    (claims / "scratch").rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        list(in_workers(iter(given), 1, claims / "models", allow_remote_code=False))
    assert str(caught.value.filename).startswith(str(claims / "scratch"))


def test_any_other_error_in_a_worker_is_shown(claims, monkeypatch):
    task = tasks(claims, monkeypatch)[0]
    wrong = SETTINGS.plan.model_copy(update={"max_sequence_length": "many"})
    broken = PartTask(task.part, replace(SETTINGS, plan=wrong), task.result)
    with pytest.raises(WorkerError, match="max_sequence_length"):
        list(in_workers(iter([broken]), 1, claims / "models", allow_remote_code=False))


def test_a_tokenizer_that_does_not_load_in_a_worker_is_shown(claims, monkeypatch):
    (claims / "models" / "tokenizer.json").write_text("{")
    with pytest.raises(WorkerError, match="the tokenizer does not load"):
        list(in_workers(iter(tasks(claims, monkeypatch)), 1, claims / "models", allow_remote_code=False))


def test_abandoning_the_results_ends_the_processes(claims, monkeypatch, others):
    results = in_workers(iter(tasks(claims, monkeypatch)), 2, claims / "models", allow_remote_code=False)
    next(results)
    family = family_besides(others)
    results.close()
    wait_until_ended(family)


BLOCKED = """
import sys, time
from pathlib import Path
from finetune_trainer.data import file_parts
from finetune_trainer.data.prepare import prepare
from finetune_trainer.data.progress import PreparingProgress
from tests.unit.finetune_trainer.data.test_prepare import plan
from tests.unit.finetune_trainer.data.tokenizers_by_hand import word_tokenizer

def block(self, num_bytes):
    print("blocked", flush=True)
    time.sleep(3600)

PreparingProgress.advance = block
file_parts.PART_BYTES = 500
claims = Path(sys.argv[1])
prepare(plan(), claims, claims / "models", word_tokenizer(), claims / "prepared", num_workers=2)
"""


def test_a_killed_preparation_leaves_no_process_and_the_next_one_prepares_the_same(claims):
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(claims)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4]
    )
    assert process.stdout.readline() == "blocked\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 3
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_SECONDS)
    process.stdout.close()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while living(family):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (leftover,) = claims.glob("prepared.tmp-*")
    assert any(leftover.rglob("*.i4"))
    data_plan = plan(train=(data_set("pvc://data/train.jsonl"),))
    hashes = []
    for name in ("prepared", "undisturbed"):
        with prepare(data_plan, claims, claims / "models", word_tokenizer(), claims / name, num_workers=0) as preparation:
            hashes.append(preparation.publish())
    assert hashes[0] == hashes[1]
    assert not list(claims.glob("prepared.tmp-*"))
