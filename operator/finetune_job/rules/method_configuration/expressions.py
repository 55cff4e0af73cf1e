r"""Regular expressions on module names. Nothing here compiles one.

32 kB of `(?i:[\u0080-\uffff]...)` take 23 seconds of CPU to compile, and a page of text can take hours to match. The operator's
event loop serves all tenants, so that rules see only faults that one look at each character shows, and preflight, which runs in
the tenant's own pod and with bounds, compiles what is left and reports it under the same ids (`expression_findings`).
"""

from __future__ import annotations

from collections.abc import Callable

from finetune_job.finding import Finding
from finetune_job.method_settings import PATTERNS
from finetune_job.module_expressions import is_plainly_malformed, key_expression
from finetune_job.plan.method_plan import MethodPlan
from finetune_job.rules.method_configuration.modules import LISTS, LORA, SETTINGS, ManifestSettings, manifest_settings
from finetune_job.rules.rule import Problem, Reproduction, Rule, RuleContext, finding_from, rule

_NEVER_COMPILED = "whatever else re.compile refuses; the operator never compiles an expression of a manifest"
Malformed = Callable[[str], bool]


def _malformed_text(written: ManifestSettings, is_malformed: Malformed) -> Problem | None:
    wrong = {setting: text for setting in LISTS if isinstance(text := written.values.get(setting), str) and is_malformed(text)}
    if not wrong:
        return None
    setting, text = next(iter(wrong.items()))
    return Problem(
        field=written.field(setting),
        value=f"{setting}: {text}",
        message=f'"{text}" is a text, not a list, so PEFT takes it for a regular expression on whole module names, which it '
        "is not",
        fix="write a list of names, as in [q_proj, v_proj]",
        changes={written.path(name): None for name in wrong},
    )


def _malformed_key(written: ManifestSettings, is_malformed: Malformed) -> Problem | None:
    held = {setting: written.values.get(setting) for setting in PATTERNS}
    patterns = {setting: pattern for setting, pattern in held.items() if isinstance(pattern, dict)}
    rest = {
        setting: {key: value for key, value in pattern.items() if key.strip() and not is_malformed(key_expression(key))}
        for setting, pattern in patterns.items()
    }
    found = [setting for setting, pattern in patterns.items() if len(rest[setting]) < len(pattern)]
    if not found:
        return None
    key = next(key for key in patterns[found[0]] if key not in rest[found[0]])
    return Problem(
        field=written.field(found[0]),
        value=f'{found[0]}: "{key}"',
        message=f'"{key}" is not a regular expression on the end of a module name',
        fix="write a module name such as q_proj, or a regular expression such as layers\\.0\\..*",
        changes={written.path(setting): rest[setting] or None for setting in found},
    )


@rule(
    "module-expression-malformed",
    "A text in place of a list of names is a regular expression",
    reads=(SETTINGS,),
    sources=("peft: peft/tuners/tuners_utils.py, check_target_module_exists (re.fullmatch of a string)",),
    reproduction=Reproduction(
        "tests/pitfalls/test_adapters.py::test_a_text_in_place_of_names_is_an_expression",
        "re.error: unterminated subpattern",
    ),
    holds_for="every version of peft",
    in_preflight=_NEVER_COMPILED,
)
def module_expression_malformed(context: RuleContext) -> Problem | None:
    return _malformed_text(manifest_settings(context), is_plainly_malformed)


@rule(
    "adapter-pattern-malformed",
    "Pattern keys are regular expressions",
    reads=(f"{LORA}.rankPattern", f"{LORA}.alphaPattern", SETTINGS),
    sources=("peft: peft/utils/other.py, get_pattern_key",),
    reproduction=Reproduction(
        "tests/pitfalls/test_adapters.py::test_pattern_keys_are_regular_expressions",
        "re.error if the key is not a regular expression, and no error if it is blank: the pattern matches no module",
    ),
    holds_for="every version of peft",
    in_preflight=_NEVER_COMPILED,
)
def adapter_pattern_malformed(context: RuleContext) -> Problem | None:
    return _malformed_key(manifest_settings(context), is_plainly_malformed)


RULES = (module_expression_malformed, adapter_pattern_malformed)
_CHECKS: tuple[tuple[Rule, Callable[[ManifestSettings, Malformed], Problem | None]], ...] = (
    (module_expression_malformed, _malformed_text),
    (adapter_pattern_malformed, _malformed_key),
)


def expressions_of(method: MethodPlan) -> list[str]:
    """Every regular expression that a plan holds, as PEFT compiles it."""
    written = _settings_of_plan(method)
    texts = [text for setting in LISTS if isinstance(text := written.values.get(setting), str)]
    held = [pattern for setting in PATTERNS if isinstance(pattern := written.values.get(setting), dict)]
    return [*texts, *(key_expression(key) for pattern in held for key in pattern)]


def expression_findings(method: MethodPlan, is_malformed: Malformed) -> list[Finding]:
    """What the two rules find with `is_malformed` in the place of their own look at the characters."""
    written = _settings_of_plan(method)
    found = [(each, check(written, is_malformed)) for each, check in _CHECKS]
    return [finding_from(each, problem) for each, problem in found if problem is not None]


def _settings_of_plan(method: MethodPlan) -> ManifestSettings:
    if method.lora is not None:
        return ManifestSettings(LORA, {"rankPattern": method.lora.rank_pattern, "alphaPattern": method.lora.alpha_pattern})
    return ManifestSettings(SETTINGS, method.adapter.settings if method.adapter is not None else {})
