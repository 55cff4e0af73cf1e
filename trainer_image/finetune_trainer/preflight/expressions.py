"""Do the regular expressions of the adapter's settings compile, and in a time that anybody would wait for?

Here and nowhere before: a few characters can keep a processor busy for minutes, so that neither operator nor command line
compiles what a manifest holds. Called by roles/preflight.py, before anything else asks PEFT about these settings.
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
    """The expression, or None for what is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return None


def check_expressions(seen: JobInspection) -> list[Finding]:
    """Fill in `expressions_compile`: PEFT compiles them, too, while the model is looked at."""
    findings = uncompiled_expressions(seen.plan.method)
    seen.expressions_compile = not findings
    return findings


def uncompiled_expressions(method: MethodPlan) -> list[Finding]:
    """A finding where one does not compile; compiled in a process with bounds."""
    if not expressions_of(method):
        return []
    try:
        return run_sandboxed(lambda: expression_findings(method, lambda text: compiled_or_none(text) is None))
    except SandboxEndedError as error:
        (finding, *_) = expression_findings(method, lambda _: True)
        message = f"compiling the regular expressions of this method's settings {error}"
        fix = "write names of modules, or simpler expressions: no ranges of letters beyond those that names hold, and no (?i)"
        return [finding.model_copy(update={"value": finding.value[:200], "message": message, "fix": fix, "changes": ()})]
