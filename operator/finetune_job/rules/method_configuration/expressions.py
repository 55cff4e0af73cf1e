r"""Rules on regular expressions for module names. They are never compiled here.

32 kB of `(?i:[\u0080-\uffff]...)` take 23 seconds of CPU to compile, and a page of text can take hours to match. The operator's
event loop serves all tenants, so rules find only the faults that a single scan of the text shows. Preflight, which runs in the
tenant's own pod with limits, compiles the expressions and reports other faults under the same ids (`expression_problems`).
"""

from __future__ import annotations

from collections.abc import Callable

from finetune_job.method_settings import PATTERNS
from finetune_job.module_expressions import is_plainly_malformed, key_expression
from finetune_job.plan.method_plan import MethodPlan
from finetune_job.rules.method_configuration.modules import LISTS, LORA, SETTINGS, ManifestSettings, manifest_settings
from finetune_job.rules.rule import Problem, RuleContext, rule

Malformed = Callable[[str], bool]


def _malformed_text(written: ManifestSettings, is_malformed: Malformed) -> Problem | None:
    wrong = {setting: text for setting in LISTS if isinstance(text := written.values.get(setting), str) and is_malformed(text)}
    if not wrong:
        return None
    setting, text = next(iter(wrong.items()))
    return Problem(
        field=written.field(setting),
        value=f"{setting}: {text}",
        message=f'"{text}" is a string, not a list, so PEFT takes it for a regular expression on whole module names, but '
        "it is none",
        fix="write a list of names, as in [q_proj, v_proj]",
        changes={written.path(name): None for name in wrong},
    )


def _malformed_key(written: ManifestSettings, is_malformed: Malformed) -> Problem | None:
    values = {setting: written.values.get(setting) for setting in PATTERNS}
    patterns = {setting: pattern for setting, pattern in values.items() if isinstance(pattern, dict)}
    rest = {
        setting: {key: value for key, value in pattern.items() if key.strip() and not is_malformed(key_expression(key))}
        for setting, pattern in patterns.items()
    }
    wrong_settings = [setting for setting, pattern in patterns.items() if len(rest[setting]) < len(pattern)]
    if not wrong_settings:
        return None
    key = next(key for key in patterns[wrong_settings[0]] if key not in rest[wrong_settings[0]])
    return Problem(
        field=written.field(wrong_settings[0]),
        value=f'{wrong_settings[0]}: "{key}"',
        message=f'"{key}" is not a regular expression on the end of a module name',
        fix="write a module name such as q_proj, or a regular expression such as layers\\.0\\..*",
        changes={written.path(setting): rest[setting] or None for setting in wrong_settings},
    )


@rule("module-expression-malformed")
def module_expression_malformed(context: RuleContext) -> Problem | None:
    return _malformed_text(manifest_settings(context), is_plainly_malformed)


@rule("adapter-pattern-malformed")
def adapter_pattern_malformed(context: RuleContext) -> Problem | None:
    return _malformed_key(manifest_settings(context), is_plainly_malformed)


def expressions_of(method: MethodPlan) -> list[str]:
    """List all regular expressions of a method, in the form in which PEFT compiles them."""
    written = _settings_of_plan(method)
    texts = [text for setting in LISTS if isinstance(text := written.values.get(setting), str)]
    patterns = [pattern for setting in PATTERNS if isinstance(pattern := written.values.get(setting), dict)]
    return [*texts, *(key_expression(key) for pattern in patterns for key in pattern)]


def expression_problems(method: MethodPlan, is_malformed: Malformed) -> dict[str, Problem]:
    """Return problems by rule id. is_malformed: checks an expression; preflight passes a stricter check than the rules."""
    written = _settings_of_plan(method)
    problems = {
        "module-expression-malformed": _malformed_text(written, is_malformed),
        "adapter-pattern-malformed": _malformed_key(written, is_malformed),
    }
    return {identifier: problem for identifier, problem in problems.items() if problem is not None}


def _settings_of_plan(method: MethodPlan) -> ManifestSettings:
    if method.lora is not None:
        return ManifestSettings(LORA, {"rankPattern": method.lora.rank_pattern, "alphaPattern": method.lora.alpha_pattern})
    return ManifestSettings(SETTINGS, method.adapter.settings if method.adapter is not None else {})
