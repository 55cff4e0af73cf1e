"""Checks that the regular expressions in the adapter's settings compile within a bounded time.

Only preflight checks this: a few characters can keep a processor busy for minutes, so the operator and the command line compile
no expression of a manifest. job_steps.py calls this before PEFT gets these settings.
"""

from __future__ import annotations

import re
import warnings

from finetune_job.finding import Finding
from finetune_job.plan.method_plan import MethodPlan
from finetune_job.rules.book import RULES
from finetune_job.rules.method_configuration.expressions import Malformed, expression_problems, expressions_of
from finetune_trainer.processes.sandbox import SandboxEndedError, run_sandboxed


def compiled_or_none(text: str) -> re.Pattern[str] | None:
    """Compiles the expression; returns None if it is not valid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return None


def uncompiled_expressions(method: MethodPlan) -> list[Finding]:
    """Returns findings if expressions do not compile. They are compiled in a process with limits."""
    if not expressions_of(method):
        return []
    try:
        return run_sandboxed(lambda: _findings(method, lambda text: compiled_or_none(text) is None))
    except SandboxEndedError as error:
        (finding, *_) = _findings(method, lambda _: True)
        message = f"compiling the regular expressions of this method's settings {error}"
        fix = "write names of modules, or simpler expressions: no ranges of letters beyond those that names hold, and no (?i)"
        return [finding.model_copy(update={"value": finding.value[:200], "message": message, "fix": fix, "changes": ()})]


def _findings(method: MethodPlan, is_malformed: Malformed) -> list[Finding]:
    problems = expression_problems(method, is_malformed)
    return [rule.finding(problems[rule.id]) for rule in RULES if rule.id in problems]
