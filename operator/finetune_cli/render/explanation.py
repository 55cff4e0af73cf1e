"""What `finetune explain` prints: rules, other findings, failure classes, exit codes, conditions and reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from finetune_cli.render.text import labelled
from finetune_job.catalogue.book import TOPICS
from finetune_job.catalogue.entry import Entry
from finetune_job.catalogue.words import Word
from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.rules.cel import Transition, conditions_of
from finetune_job.rules.rule import Rule
from finetune_operator.decide.restart_policy import POLICY

_EFFECTS = {"error": "refuses the job", "warning": "warns", "either": "refuses some jobs, and warns of others"}

_SPEAKS = {
    "ours": "",
    "accelerate": "; it tells of accelerate's path, and this trainer does it right",
    "Trainer": "; it tells of the path of transformers' Trainer, and this trainer does it right",
}


def rule_text(rule: Rule) -> str:
    """One rule, and how to see the failure that it speaks of."""
    effect = _EFFECTS[rule.severity]
    lines = [
        f"{rule.id}: {rule.title}",
        labelled("topic", rule.topic.replace("_", " ")),
        labelled("effect", effect + _SPEAKS[rule.speaks_of]),
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
        lines.append(labelled("shown", "read in the sources; there is no reproduction"))
    lines.append(labelled("source", "; ".join(rule.sources)))
    short = "; ".join(dict.fromkeys(condition.says for condition in conditions_of(rule)))
    made = "a finding names it for its manifest, and " + (
        "nobody but you can weigh it: finetune validate --fix leaves it"
        if rule.is_weighed
        else "finetune validate --fix -f FILE makes it"
    )
    lines.append(labelled("fix", f"{short}; {made}" if short else made))
    return "\n".join([*lines, ""])


def _gates(rule: Rule) -> list[str]:
    later = [f"preflight ({rule.in_preflight})"] if rule.in_preflight else []
    return [*(["API server"] if conditions_of(rule) else []), "finetune validate", "operator", *later]


def transition_text(transition: Transition) -> str:
    """What only the API server can refuse, because it knows the object before the change."""
    return "\n".join(
        [
            f"{transition.rule}: {transition.title}",
            labelled("effect", "refuses the change"),
            labelled("gates", "API server"),
            labelled("fix", transition.fix),
            "",
        ]
    )


def overview_text(rules: Sequence[Rule]) -> str:
    """All rules and all other findings, by topic."""
    lines: list[str] = []
    for topic in dict.fromkeys(rule.topic for rule in rules):
        of_topic = [rule for rule in rules if rule.topic == topic]
        lines += [topic.replace("_", " "), *(f"  {rule.severity:8}{rule.id:40}{rule.title}" for rule in of_topic), ""]
    for topic, entries in TOPICS.items():
        lines += [topic.lower(), *(f"  {entry.severity:8}{entry.id:40}{entry.title}" for entry in entries), ""]
    counts = Counter((rule.severity, rule.evidence) for rule in rules)
    said = ", ".join(f"{number} {severity}s {evidence}" for (severity, evidence), number in sorted(counts.items()))
    others = sum(map(len, TOPICS.values()))
    return "\n".join([*lines, f"{len(rules)} rules: {said}; {others} findings of other gates.", ""])


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
    """A word that is not a finding's id; of a failure class also what the operator does about it."""
    lines = [f"{word.text}: {word.kind}", labelled("means", word.meaning)]
    failure = next((each for each in FailureClass if each == word.failure), None)
    if failure is not None:
        policy, code = POLICY[failure], EXIT_CODES.get(failure)
        lines += [
            *([labelled("exit", f"code {code} of the container")] if code is not None else []),
            labelled("seen", policy.evidence),
            labelled("retry", policy.retry.value),
            *([labelled("fix", policy.advice)] if policy.advice else []),
        ]
    return "\n".join([*lines, ""])
