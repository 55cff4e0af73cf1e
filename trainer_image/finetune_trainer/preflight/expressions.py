"""Checks that the regular expressions of the adapter's settings compile, and within a bounded time.

Only preflight checks this: a few characters can keep a processor busy for minutes, so neither operator nor command line
compiles the expressions of a manifest. roles/preflight.py calls this before PEFT sees these settings.
"""

from __future__ import annotations

import re
import warnings

from finetune_job.finding import Finding
from finetune_job.plan.method_plan import MethodPlan
from finetune_job.rules.method_configuration.expressions import expression_findings, expressions_of
from finetune_trainer.preflight.checks import JobInspection
from finetune_trainer.processes.sandbox import SandboxEndedError, run_sandboxed


def compiled_or_none(text: str) -> re.Pattern[str] | None:
    """Compiles the expression; returns None if it is not valid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return None


def check_expressions(seen: JobInspection) -> list[Finding]:
    """Fills in `expressions_compile`; PEFT also compiles them while the model is inspected."""
    findings = uncompiled_expressions(seen.plan.method)
    seen.expressions_compile = not findings
    return findings


def uncompiled_expressions(method: MethodPlan) -> list[Finding]:
    """Returns a finding if an expression does not compile; compiles them in a process with limits."""
    if not expressions_of(method):
        return []
    try:
        return run_sandboxed(lambda: expression_findings(method, lambda text: compiled_or_none(text) is None))
    except SandboxEndedError as error:
        (finding, *_) = expression_findings(method, lambda _: True)
        message = f"compiling the regular expressions of this method's settings {error}"
        fix = "write names of modules, or simpler expressions: no ranges of letters beyond those that names hold, and no (?i)"
        return [finding.model_copy(update={"value": finding.value[:200], "message": message, "fix": fix, "changes": ()})]
