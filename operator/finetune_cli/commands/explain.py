"""`finetune explain`: what a word stands for that the product prints, and how each kind of word is told."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

from finetune_cli.exit_codes import ExitCode
from finetune_cli.render.verdicts import labelled
from finetune_job.api.documentation import Word, member_docs, words
from finetune_job.catalogue.book import ENTRIES, TOPICS, entry_by_id
from finetune_job.catalogue.entry import Entry
from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.names import Role
from finetune_job.rules.book import RULES, rule_by_id
from finetune_job.rules.cel import conditions_of
from finetune_job.rules.cel.condition import TRANSITIONS, Transition
from finetune_job.rules.rule import Rule
from finetune_operator.decide.restart_policy import POLICY

MAX_SUGGESTIONS = 3
"""Most suggestions for an unknown word."""
_EFFECTS = {"error": "refuses the job", "warning": "warns", "either": "refuses some jobs, and warns of others"}
_APPLIES_TO = {
    "ours": "",
    "accelerate": "; it tells of accelerate's path, and this trainer does it right",
    "Trainer": "; it tells of the path of transformers' Trainer, and this trainer does it right",
}


def overview() -> str:
    """All findings, by topic."""
    return overview_text(RULES)


def explain(asked: str) -> str:
    """Text about everything that the word stands for; empty if it stands for nothing.

    asked: the id of a finding, a failure class with or without the role that it is reported of (`train/NonFinite`), an exit code,
    a condition or a reason; in any case, with `-`, `_` or blanks in ids.
    """
    role, slash, rest = asked.strip().partition("/")
    word = rest if slash and role in set(Role) else asked.strip()
    return "\n".join([*_finding_texts(_as_id(word)), *(word_text(each) for each in _words() if _same(each.text, word))])


def nearest(asked: str) -> list[str]:
    """The known words that are most like an unknown one."""
    ids = [*(rule.id for rule in RULES), *(entry.id for entry in ENTRIES), *(each.rule for each in TRANSITIONS)]
    known = {text.casefold(): text for text in [*ids, *(each.text for each in _words())] if not text.isdigit()}
    found = [
        near
        for form in (_as_id(asked), asked.strip().casefold())
        for near in difflib.get_close_matches(form, known, n=MAX_SUGGESTIONS)
    ]
    return [known[near] for near in dict.fromkeys(found)][:MAX_SUGGESTIONS]


def _finding_texts(identifier: str) -> list[str]:
    rule, entry = rule_by_id(identifier), entry_by_id(identifier)
    return [
        *([rule_text(rule)] if rule is not None else []),
        *([entry_text(entry)] if entry is not None else []),
        *(transition_text(each) for each in TRANSITIONS if each.rule == identifier),
    ]


def _words() -> tuple[Word, ...]:
    meanings = member_docs(ExitCode)
    return (*words(), *(Word(str(code.value), "exit code of finetune", meanings[str(code.value)]) for code in ExitCode))


def _as_id(word: str) -> str:
    return word.strip().lower().replace("_", "-").replace(" ", "-")


def _same(text: str, asked: str) -> bool:
    return text.casefold() == asked.casefold()


def rule_text(rule: Rule) -> str:
    """One rule, and how to see the failure that it speaks of."""
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
        lines.append(labelled("shown", "read in the sources; there is no reproduction"))
    lines.append(labelled("source", "; ".join(rule.sources)))
    short = "; ".join(dict.fromkeys(condition.says for condition in conditions_of(rule)))
    made = "a finding names it for its manifest, and " + (
        "nobody but you can weigh it: finetune validate --fix leaves it"
        if rule.needs_human
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
