"""Output of `finetune explain` for rules, other findings, fields and words, as text and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from finetune_cli.render.verdicts import labelled
from finetune_job.api.documentation import Word
from finetune_job.catalogue.book import Entry, topics
from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.fields import FieldFacts
from finetune_job.names import JOB_KIND
from finetune_job.rules.book import RULES, Rule
from finetune_job.rules.cel import conditions_of
from finetune_job.rules.cel.condition import Transition
from finetune_operator.decide.failures.restart_policy import POLICY

Explained = Rule | Entry | Transition | Word | FieldFacts
"""The things that a word may mean."""
_EFFECTS = {"error": "refuses the job", "warning": "warns", "either": "refuses some jobs, and warns of others"}
_APPLIES_TO = {
    "ours": "",
    "accelerate": "; affects accelerate only, not this trainer",
    "Trainer": "; affects transformers' Trainer only, not this trainer",
}


def explained_text(meanings: Sequence[Explained]) -> str:
    """Return each meaning as text: a title and labelled lines."""
    texts = []
    for meaning in meanings:
        name, what, rows = _rows(meaning)
        texts.append("\n".join([f"{name}: {what}", *(labelled(label, text) for label, text in rows if text), ""]))
    return "\n".join(texts)


def _rows(meaning: Explained) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the name of a meaning, a title or kind, and the labelled lines of the explanation."""
    match meaning:
        case Rule():
            short = "; ".join(dict.fromkeys(condition.says for condition in conditions_of(meaning)))
            gates = [*(["API server"] if conditions_of(meaning) else []), "finetune validate", "operator"]
            gates += [f"preflight ({meaning.in_preflight})"] if meaning.in_preflight else []
            by_hand = "decide by hand; finetune validate --fix does not change it"
            fix = by_hand if meaning.needs_human else "finetune validate --fix -f FILE"
            return (
                meaning.id,
                meaning.title,
                [
                    ("topic", meaning.topic.replace("_", " ")),
                    ("effect", _EFFECTS[meaning.severity] + _APPLIES_TO[meaning.applies_to]),
                    ("gates", ", ".join(gates)),
                    ("reads", ", ".join(meaning.reads)),
                    ("holds", meaning.holds_for),
                    ("shown", f"reproduced on the real libraries: {meaning.observed}" if meaning.test else ""),
                    *_test_rows(meaning.test, meaning.not_reproduced),
                    ("source", "; ".join(meaning.sources)),
                    ("fix", f"{short}; {fix}" if short else fix),
                ],
            )
        case Entry():
            return (
                meaning.id,
                meaning.title,
                [
                    ("effect", _EFFECTS[meaning.severity]),
                    ("gate", meaning.gate),
                    ("reason", meaning.why),
                    ("fix", meaning.fix),
                    *_test_rows(meaning.reproduction, meaning.not_reproduced),
                ],
            )
        case Transition():
            # Only the API server can refuse such a change, because it knows the object before the change.
            rows = [
                ("effect", "refuses the change"),
                ("gates", "API server"),
                ("fix", meaning.fix),
                ("test", meaning.reproduction),
            ]
            return meaning.rule, meaning.title, rows
        case FieldFacts():
            unset = "" if meaning.default else "none: required" if meaning.is_required else "unset"
            return (
                meaning.path,
                f"field of {meaning.kind}",
                [
                    ("type", meaning.type),
                    ("default", meaning.default or unset),
                    ("unit", meaning.unit),
                    ("bounds", meaning.bounds),
                    ("pattern", meaning.pattern),
                    ("means", meaning.meaning),
                    ("device", meaning.device),
                    ("rules", ", ".join(rule.id for rule in _rules_reading(meaning))),
                    ("fields", ", ".join(meaning.children)),
                ],
            )
        case Word():
            failure = next((failure for failure in FailureClass if failure == meaning.failure), None)
            policies: list[tuple[str, str]] = []
            if failure is not None:
                policy, code = POLICY[failure], EXIT_CODES.get(failure)
                policies = [
                    ("exit", "" if code is None else f"code {code} of the container"),
                    ("seen", policy.evidence),
                    ("retry", policy.retry.value),
                    ("fix", policy.advice),
                ]
            return meaning.text, meaning.kind, [("means", meaning.meaning), *policies]


def _test_rows(test: str, not_reproduced: str) -> list[tuple[str, str]]:
    if not test:
        return [("shown", f"there is no reproduction: {not_reproduced}")]
    return [("test", test), ("rerun", f"make environment && .venv/bin/pytest {test}")]


def _rules_reading(field: FieldFacts) -> list[Rule]:
    """Return the rules that read this field or a field that contains it."""
    path = field.path.replace("[]", "")
    rules = RULES if field.kind == JOB_KIND else ()
    return [rule for rule in rules if any(path == read or path.startswith(f"{read}.") for read in rule.reads)]


def explained_document(asked: str, meanings: Sequence[Explained]) -> dict[str, Any]:
    """Return the explanations as plain data, with the labels of the text as keys."""
    explanations = []
    for meaning in meanings:
        name, what, rows = _rows(meaning)
        explanations.append({"name": name, "is": what, **{label: text for label, text in rows if text}})
    return {"word": asked, "meanings": explanations}


def overview_text() -> str:
    """List all rules and all other findings, by topic."""
    lines: list[str] = []
    for topic in dict.fromkeys(rule.topic for rule in RULES):
        of_topic = [rule for rule in RULES if rule.topic == topic]
        lines += [topic.replace("_", " "), *(f"  {rule.severity:8}{rule.id:40}{rule.title}" for rule in of_topic), ""]
    for topic, entries in topics().items():
        lines += [topic.lower(), *(f"  {entry.severity:8}{entry.id:40}{entry.title}" for entry in entries), ""]
    counts = Counter((rule.severity, rule.evidence) for rule in RULES)
    shares = ", ".join(f"{number} {severity}s {evidence}" for (severity, evidence), number in sorted(counts.items()))
    others = sum(map(len, topics().values()))
    return "\n".join([*lines, f"{len(RULES)} rules: {shares}; {others} findings of other gates.", ""])


def overview_document() -> dict[str, Any]:
    """Return all findings as plain data."""
    rules = [{"id": rule.id, "topic": rule.topic, "severity": rule.severity, "title": rule.title} for rule in RULES]
    others = [
        {"id": entry.id, "topic": topic.lower(), "severity": entry.severity, "title": entry.title}
        for topic, entries in topics().items()
        for entry in entries
    ]
    return {"findings": [*rules, *others]}
