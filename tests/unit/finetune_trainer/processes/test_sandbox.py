"""A library at work on a user's file cannot harm the process that called it."""

from pathlib import Path

import psutil
import pytest

from finetune_job.finding import Finding
from finetune_trainer.processes import child, sandbox
from finetune_trainer.processes.sandbox import SandboxEndedError, run_sandboxed
from tests.support.living import living
from tests.unit.finetune_trainer.processes.hostile_children import opened, taken_over

FINDING = Finding(rule="r", severity="error", field="spec.model", value="\ud800", message="é \x00", fix="f")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What is waited for in vain. All other bounds stay long: the machine may be busy."""
    if "closed" in request.node.name or "too" in request.node.name:
        monkeypatch.setattr(child, "ENDING_SECONDS", 0.5)


@pytest.fixture(autouse=True)
def family() -> object:
    """No child is left by any test."""
    before = psutil.Process().children(recursive=True)
    yield
    assert [each for each in living(psutil.Process().children(recursive=True)) if each not in before] == []


def test_findings_leave_the_sandbox_as_they_were() -> None:
    assert run_sandboxed(lambda: [FINDING, FINDING]) == [FINDING, FINDING]
    assert run_sandboxed(list) == []


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("garbage", "not a list of findings"),
        ("without_end", "wrote more than it may"),
        ("never", "does not end within 1 s"),
        ("closed", "closed its output and did not end"),
    ],
)
def test_a_sandbox_that_was_taken_over_is_a_reason_and_nothing_else(
    behaviour: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if behaviour == "never":
        monkeypatch.setattr(sandbox, "WALL_SECONDS", 1.0)
    before, trap = opened(), tmp_path / "trap"
    resident = psutil.Process().memory_info().rss
    with pytest.raises(SandboxEndedError, match=said):
        run_sandboxed(lambda: taken_over(behaviour, before, trap))  # type: ignore[arg-type, return-value]
    assert not trap.exists()
    assert psutil.Process().memory_info().rss - resident < 64 << 20


def test_code_in_the_sandbox_cannot_raise_its_bounds() -> None:
    def work() -> list[Finding]:
        import resource

        for which in (resource.RLIMIT_DATA, resource.RLIMIT_CPU):
            soft, hard = resource.getrlimit(which)
            assert soft != resource.RLIM_INFINITY
            assert hard <= soft + 5
        return [FINDING]

    assert run_sandboxed(work) == [FINDING]
