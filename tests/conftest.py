"""What all suites share: the profiles of the property tests.

By default the examples are the same on every run, so that a change is judged by its own merits and not by luck. `make explore`
draws new ones; what it finds becomes a case of its own.

A log that nobody has configured shows plain tracebacks: those with the values of all variables take seconds for a job and its
plan.

Torch computes with one thread, as `tests.suites` has it: with more the order of sums, and so the last bit, depends on the
machine.

Commands that tests call in their own process are built once: Typer would build all of them for each call, which takes longer than
most do.

Tests that are skipped or left for the night are noted for the summary of `tests.suites`.
"""

import asyncio
import functools
import gc
import inspect
import os
from collections.abc import Generator, Sequence

import pytest
import structlog
import typer.testing
from hypothesis import settings

from finetune_trainer.processes import child
from tests import left_out
from tests.support import collector, documented_by

collector.collect_rarely()
typer.testing._get_command = functools.cache(typer.testing._get_command)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
_threads = child.threads
settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


def pytest_configure(config: pytest.Config) -> None:
    """Markers."""
    config.addinivalue_line("markers", f"{left_out.NIGHTLY}: left out by `make test`, run by `make nightly`")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """By a marker, or by a name that a person gave."""
    left_out.note((item.nodeid for item in items if item.get_closest_marker(left_out.NIGHTLY)), left_out.FOR_THE_NIGHT)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test."""
    _note_skipped(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module."""
    _note_skipped(report)


def _note_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        left_out.note([report.nodeid], report.longrepr[2])


def pytest_collection_finish() -> None:
    """All tests, and the libraries that they import, are loaded.

    Tests fork this process, which has threads of pytest-xdist's and of libraries; programs of the trainer are not let do that.
    """
    collector.leave_what_is_there()
    runner = os.getpid()
    child.threads = lambda pid: {} if pid == runner else _threads(pid)


def pytest_unconfigure() -> None:
    """Libraries that count what is left of their objects at the end complain of what is frozen."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that is said to execute commands of the pages fails if it has not executed all of them as they are written."""
    report = yield
    if report.when == "call" and report.passed and (missing := documented_by.not_executed(item.nodeid)):
        report.outcome = "failed"
        report.longrepr = "\n  ".join(
            ["tests/support/documented_by.yaml says that this test executes these as they are:", *missing]
        )
    return report
