"""Runs the unit tests of a part against a copy of the product with one mutant, in a process forked from one that has imported
everything that is not mutated: most of a short test run is imports."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.set import PACKAGE, ROOT, Mutant

SOURCES = ("operator", "trainer_image")
"""Directories that are copied, with the mutant in one of them."""

TESTS = {
    "decide/": ("tests/unit/finetune_operator/decide", "tests/unit/finetune_operator/releases"),
    "children/": ("tests/unit/finetune_operator/children", "tests/unit/finetune_operator/releases"),
    "": ("tests/unit/finetune_operator/cluster", "tests/unit/finetune_operator"),
}
"""Folders of tests by the beginning of a file's path; the first that fits."""
SLOW = ("test_random_walks",)
"""Not run: they would find much, and tell little about what is broken."""
STARTS_PROGRAMS = ("test_app", "test_fence", "test_watch", "test_leadership", "test_access")
FOREIGN = (
    "pytest",
    "hypothesis",
    "pydantic",
    "aiohttp",
    "kopf",
    "kubernetes.aio.client",
    "prometheus_client",
    "structlog",
    "yaml",
)
WITH_TENSORS = (*FOREIGN, "numpy", "safetensors.torch", "transformers.utils.chat_template_utils", "peft", "tokenizers")
"""Of the other packages, whose tests use what trains."""
TIMEOUT_SECONDS = 180.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant | None
    killed: bool
    by: str
    """The first test that failed, or what else ended it; empty where it survived."""
    seconds: float


def chosen_tests(mutant: Mutant) -> list[str]:
    """Files of tests to run for a mutant: those that it names, or those that belong to its file."""
    return list(mutant.tests) or relevant_tests(mutant.file)


def relevant_tests(file: str) -> list[str]:
    """Files of tests to run for a mutated file: those that have its name first, then those that speak of it, the slow ones
    last."""
    folders = next(folders for prefix, folders in TESTS.items() if file.startswith(prefix))
    name = Path(file).stem
    word = re.compile(rf"\b{re.escape(name)}\b")

    def order(path: Path) -> tuple[bool, bool, bool]:
        return name not in path.stem, path.stem in STARTS_PROGRAMS, word.search(path.read_text(encoding="utf-8")) is None

    found = [path for folder in folders for path in sorted((ROOT / folder).glob("test_*.py")) if path.stem not in SLOW]
    return [str(path.relative_to(ROOT)) for path in sorted(found, key=order)]


def warm_up(mutants: list[Mutant]) -> None:
    """Import what all runs share."""
    for name in FOREIGN if all(mutant.package == PACKAGE for mutant in mutants) else WITH_TENSORS:
        importlib.import_module(name)


def run(mutant: Mutant | None, tests: list[str], timeout: float = TIMEOUT_SECONDS) -> Verdict:
    """Run the tests against a mutated copy (None: against an unchanged one)."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        place = Path(folder)
        for sources in SOURCES:
            shutil.copytree(ROOT / sources, place / sources, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            path = place / mutant.path
            path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        output = place / "output"
        child = os.fork()
        if child == 0:
            os._exit(_in_child([place / sources for sources in SOURCES], tests, output))
        code = _wait(child, timeout)
        said = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    seconds = time.monotonic() - started
    if code is None:
        return Verdict(mutant, True, f"no end within {timeout:g} s", seconds)
    if code == 0:
        return Verdict(mutant, False, "", seconds)
    failed = _FAILED.search(said)
    by = failed.group(1) if failed else (said.strip().splitlines() or [f"exit code {code}"])[-1]
    return Verdict(mutant, True, by, seconds)


def _in_child(copies: list[Path], tests: list[str], output: Path) -> int:
    os.setsid()
    os.chdir(ROOT)
    sys.path[:0] = map(str, copies)
    # Programs that tests start see the mutant too.
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (*copies, ROOT)))
    sys.dont_write_bytecode = True
    with output.open("w", encoding="utf-8") as sink, redirect_stdout(sink), redirect_stderr(sink):
        import pytest

        # Collection prints through file descriptors, too.
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        options = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
        try:
            return int(pytest.main([*options, *tests]))
        except BaseException as error:  # noqa: BLE001 - a mutant may end the process in any way
            print(repr(error))
            return 3


def _wait(child: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
