"""Output of `finetune explain` for rules, other findings, fields and words, as text and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from finetune_cli.render.verdicts import labelled
from finetune_job.api.documentation import Word
from finetune_job.catalogue.book import TOPICS
from finetune_job.catalogue.entry import Entry
from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.fields import FieldFacts
from finetune_job.names import JOB_KIND
from finetune_job.rules.book import RULES
from finetune_job.rules.cel import conditions_of
from finetune_job.rules.cel.condition import Transition
from finetune_job.rules.rule import Rule
from finetune_operator.decide.restart_policy import POLICY

Explained = Rule | Entry | Transition | Word | FieldFacts
"""The things that a word may stand for."""
_EFFECTS = {"error": "refuses the job", "warning": "warns", "either": "refuses some jobs, and warns of others"}
_APPLIES_TO = {
    "ours": "",
    "accelerate": "; affects accelerate only, not this trainer",
    "Trainer": "; affects transformers' Trainer only, not this trainer",
}


def explained_text(meanings: Sequence[Explained]) -> str:
    """The text on each of them."""
    return "\n".join(_text(each) for each in meanings)


def _text(each: Explained) -> str:
    match each:
        case Rule():
            return rule_text(each)
        case Entry():
            return entry_text(each)
        case Transition():
            return transition_text(each)
        case FieldFacts():
            return field_text(each)
        case Word():
            return word_text(each)


def explained_document(asked: str, meanings: Sequence[Explained]) -> dict[str, Any]:
    """The explanations as plain data."""
    return {"word": asked, "meanings": [_document(each) for each in meanings]}


def _document(each: Explained) -> dict[str, Any]:
    match each:
        case Rule():
            shown = each.reproduction
            return {
                "kind": "rule",
                "id": each.id,
                "title": each.title,
                "topic": each.topic,
                "severity": each.severity,
                "appliesTo": each.applies_to,
                "gates": _gates(each),
                "reads": list(each.reads),
                "holdsFor": each.holds_for,
                "observed": None if shown is None else shown.observed,
                "test": None if shown is None else shown.test,
                "sources": list(each.sources),
                "needsHuman": each.needs_human,
            }
        case Entry():
            return {
                "kind": "finding",
                "id": each.id,
                "title": each.title,
                "severity": each.severity,
                "gates": [each.gate.value],
                "reason": each.why,
                "fix": each.fix,
                "test": each.reproduction or None,
            }
        case Transition():
            return {
                "kind": "refused change",
                "id": each.rule,
                "title": each.title,
                "gates": ["API server"],
                "fix": each.fix,
                "test": each.reproduction,
            }
        case FieldFacts():
            return {
                "kind": "field",
                "object": each.kind,
                "path": each.path,
                "type": each.type,
                "required": each.is_required,
                "default": each.default or None,
                "unit": each.unit or None,
                "bounds": each.bounds or None,
                "pattern": each.pattern or None,
                "meaning": each.meaning,
                "device": each.device or None,
                "rules": [rule.id for rule in _rules_reading(each)],
                "fields": list(each.children),
            }
        case Word():
            return {"kind": each.kind, "word": each.text, "meaning": each.meaning, **_policy_document(each)}


def _policy_document(word: Word) -> dict[str, Any]:
    failure = _failure(word)
    if failure is None:
        return {}
    policy = POLICY[failure]
    return {
        "exitCode": EXIT_CODES.get(failure),
        "seen": policy.evidence,
        "retry": policy.retry.value,
        "fix": policy.advice or None,
    }


def overview_document() -> dict[str, Any]:
    """All findings."""
    rules = [{"id": rule.id, "topic": rule.topic, "severity": rule.severity, "title": rule.title} for rule in RULES]
    others = [
        {"id": entry.id, "topic": topic.lower(), "severity": entry.severity, "title": entry.title}
        for topic, entries in TOPICS.items()
        for entry in entries
    ]
    return {"findings": [*rules, *others]}


def field_text(field: FieldFacts) -> str:
    """One field, and the rules that look at it."""
    unset = "" if field.default else "none: required" if field.is_required else "unset"
    rows = [
        ("type", field.type),
        ("default", field.default or unset),
        ("unit", field.unit),
        ("bounds", field.bounds),
        ("pattern", field.pattern),
        ("means", field.meaning),
        ("device", field.device),
        ("rules", ", ".join(rule.id for rule in _rules_reading(field))),
        ("fields", ", ".join(field.children)),
    ]
    title = f"{field.path}: field of {field.kind}"
    return "\n".join([title, *(labelled(label, text) for label, text in rows if text), ""])


def _rules_reading(field: FieldFacts) -> list[Rule]:
    if field.kind != JOB_KIND:
        return []
    path = field.path.replace("[]", "")
    return [rule for rule in RULES if any(_is_within(read, path) for read in rule.reads)]


def _is_within(read: str, path: str) -> bool:
    """Whether a rule that reads one field looks at another: itself, or a part of it."""
    return read == path or path.startswith(f"{read}.")


def rule_text(rule: Rule) -> str:
    """A rule, and how to see the failure that it prevents."""
    effect = _EFFECTS[rule.severity]
    lines = [
        f"{rule.id}: {rule.title}",
        labelled("topic", rule.topic.replace("_", " ")),
        labelled("effect", effect + _APPLIES_TO[rule.applies_to]),
        labelled("gates", ", ".join(_gates(rule))),
        labelled("reads", ", ".join(rule.reads)),
        labelled("holds", rule.holds_for),
    ]
    if rule.reproduction is not None:
        lines += [
            labelled("shown", f"reproduced on the real libraries: {rule.reproduction.observed}"),
            labelled("test", rule.reproduction.test),
            labelled("rerun", f"make environment && .venv/bin/pytest {rule.reproduction.test}"),
        ]
    else:
        lines.append(labelled("shown", f"there is no reproduction: {rule.not_reproduced}"))
    lines.append(labelled("source", "; ".join(rule.sources)))
    short = "; ".join(dict.fromkeys(condition.says for condition in conditions_of(rule)))
    fix = "decide by hand; finetune validate --fix leaves it" if rule.needs_human else "finetune validate --fix -f FILE"
    lines.append(labelled("fix", f"{short}; {fix}" if short else fix))
    return "\n".join([*lines, ""])


def _gates(rule: Rule) -> list[str]:
    later = [f"preflight ({rule.in_preflight})"] if rule.in_preflight else []
    return [*(["API server"] if conditions_of(rule) else []), "finetune validate", "operator", *later]


def transition_text(transition: Transition) -> str:
    """A change that only the API server can refuse, because it knows the object before the change."""
    return "\n".join(
        [
            f"{transition.rule}: {transition.title}",
            labelled("effect", "refuses the change"),
            labelled("gates", "API server"),
            labelled("fix", transition.fix),
            labelled("test", transition.reproduction),
            "",
        ]
    )


def overview_text() -> str:
    """All rules and all other findings, by topic."""
    lines: list[str] = []
    for topic in dict.fromkeys(rule.topic for rule in RULES):
        of_topic = [rule for rule in RULES if rule.topic == topic]
        lines += [topic.replace("_", " "), *(f"  {rule.severity:8}{rule.id:40}{rule.title}" for rule in of_topic), ""]
    for topic, entries in TOPICS.items():
        lines += [topic.lower(), *(f"  {entry.severity:8}{entry.id:40}{entry.title}" for entry in entries), ""]
    counts = Counter((rule.severity, rule.evidence) for rule in RULES)
    shares = ", ".join(f"{number} {severity}s {evidence}" for (severity, evidence), number in sorted(counts.items()))
    others = sum(map(len, TOPICS.values()))
    return "\n".join([*lines, f"{len(RULES)} rules: {shares}; {others} findings of other gates.", ""])


def entry_text(entry: Entry) -> str:
    """A finding that is not made by the rule book, and the test that makes it."""
    shown = (
        [labelled("test", entry.reproduction), labelled("rerun", f"make environment && .venv/bin/pytest {entry.reproduction}")]
        if entry.reproduction
        else [labelled("shown", f"there is no reproduction: {entry.not_reproduced}")]
    )
    lines = [
        f"{entry.id}: {entry.title}",
        labelled("effect", _EFFECTS[entry.severity]),
        labelled("gate", entry.gate),
        labelled("reason", entry.why),
        labelled("fix", entry.fix),
        *shown,
    ]
    return "\n".join([*lines, ""])


def word_text(word: Word) -> str:
    """A word that is not a finding's id; for a failure class also what the operator does about it."""
    lines = [f"{word.text}: {word.kind}", labelled("means", word.meaning)]
    failure = _failure(word)
    if failure is not None:
        policy, code = POLICY[failure], EXIT_CODES.get(failure)
        lines += [
            *([labelled("exit", f"code {code} of the container")] if code is not None else []),
            labelled("seen", policy.evidence),
            labelled("retry", policy.retry.value),
            *([labelled("fix", policy.advice)] if policy.advice else []),
        ]
    return "\n".join([*lines, ""])


def _failure(word: Word) -> FailureClass | None:
    return next((each for each in FailureClass if each == word.failure), None)
