"""How a process of the trainer begins and ends: no collection while libraries are loaded, nothing taken apart at the end."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.processes.start import keep_bitsandbytes_out, name_of_process, name_process
from tests.support.forked_ranks import run_processes
from tests.support.tiny_model import plan_of, tiny_spec

LOADING = """
import sys
made = [[number] for number in range(100_000)]
"""
"""A module that makes more objects than the collector's thresholds allow for."""


def python(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False, timeout=60)


def test_nothing_is_collected_while_modules_are_loaded_and_what_they_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "many_objects.py").write_text(LOADING)
    done = python(
        "import gc\n"
        "from finetune_trainer.processes.start import preload\n"
        "runs = []\n"
        "gc.callbacks.append(lambda phase, facts: runs.append(phase))\n"
        "preload('many_objects')\n"
        "during, kept = len(runs), gc.get_freeze_count()\n"
        "gc.collect()\n"
        "print(during, kept > 100_000, gc.isenabled(), len(runs))",
        tmp_path,
    )
    assert done.stdout.split() == ["0", "True", "True", "2"], done.stderr


def test_the_collector_runs_again_after_a_module_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ImportError('a library is missing')")
    done = python(
        "import gc\n"
        "from finetune_trainer.processes.start import preload\n"
        "try:\n    preload('broken')\n"
        "except ImportError as error:\n    print(error, gc.isenabled())",
        tmp_path,
    )
    assert done.stdout.strip() == "a library is missing True", done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="numpy starts no threads on one processor")
def test_numpy_starts_no_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    threads = "import os\nprint(len(os.listdir('/proc/self/task')))"
    alone = python(f"import numpy\n{threads}", tmp_path)
    done = python(f"from finetune_trainer.processes.start import preload\npreload('numpy')\n{threads}", tmp_path)
    assert int(alone.stdout) > int(done.stdout) == 1, done.stderr


@pytest.mark.parametrize("code", [0, 7])
def test_a_process_ends_with_its_output_written_and_takes_nothing_apart(code: int, tmp_path: Path) -> None:
    done = python(
        "import logging, sys, threading, time\n"
        "from logging.handlers import MemoryHandler\n"
        "from finetune_trainer.processes.start import end\n"
        "class Library:\n    def __del__(self):\n        print('taken apart')\n"
        "library = Library()\n"
        "threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        "logging.basicConfig(handlers=[MemoryHandler(100, target=logging.FileHandler('log'))])\n"
        "logging.warning('the last line of the log')\n"
        "print('an answer without an end of line', end='')\n"
        "print('a complaint', end='', file=sys.stderr)\n"
        f"end({code})",
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "an answer without an end of line", "a complaint")
    assert "the last line of the log" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("changes", "is_there"),
    [
        ({}, False),
        ({"method": {"type": "DoRA"}}, False),
        ({"method": {"type": "QLoRA"}}, True),
        ({"method": {"type": "QDoRA"}}, True),
        ({"model": {"allowRemoteCode": True}}, True),
    ],
)
def test_bitsandbytes_is_for_plans_that_may_need_it(
    changes: dict[str, Any], is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    keep_bitsandbytes_out(plan_of(tiny_spec(**changes)))
    assert (importlib.util.find_spec("bitsandbytes") is not None) is is_there
    # Not left for the tests that follow.
    sys.modules.pop("bitsandbytes", None)


def test_bitsandbytes_that_is_there_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", pytest)
    keep_bitsandbytes_out(plan_of(tiny_spec()))
    assert sys.modules["bitsandbytes"] is pytest


def _named() -> bool:
    name_process("rank-00007")
    return name_of_process(os.getpid()) != "rank-00007"


def test_a_process_has_a_name_of_its_own() -> None:
    assert run_processes([_named]) == [0]
    assert name_of_process(2**22 + 1) == ""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert name_of_process(process.pid) == "", "it has ended"
    process.wait()
