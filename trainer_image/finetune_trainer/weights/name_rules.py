"""Rules by which transformers maps names in files to names in the model, applied as by its loader.

The loader, transformers.core_model_loading (5.23), applies all renamings in order, then at most one rule of another kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Renaming:
    r"""Replaces the first match of one of `sources` (regular expressions) in a name by `target`; `\1` is the first group."""

    sources: tuple[str, ...]
    target: str
    scopes: tuple[str, ...] = ()
    """Prefixes of the names to which the rule applies, the longest first. Empty: the rule applies to all names."""


@dataclass(frozen=True)
class ExpertStack:
    """Stacks the matrices of single experts into one parameter (experts, rows, columns); several sources are joined by rows.

    sources: regular expressions in which `*.` stands for the expert's number.
    """

    sources: tuple[str, ...]
    target: str
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unreadable:
    """Marks parameters (`targets`) that transformers computes from stored `sources` in a way not reversible part by part."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operation: str
    scopes: tuple[str, ...] = ()
    joins_rows: bool = False
    """Whether the only target is the sources, joined by rows in order. Such a target can be read, but not merged into."""


NameRule = Renaming | ExpertStack | Unreadable


@dataclass(frozen=True)
class RuleMatch:
    """The match of a rule in a name: the text around it, and what it matched."""

    before: str
    after: str
    source: int
    expert: int
    group: str

    def with_target(self, target: str) -> str:
        return self.before + target.replace("\\1", self.group) + self.after


@lru_cache(maxsize=1024)
def _pattern(sources: tuple[str, ...], counts_experts: bool) -> re.Pattern[str]:
    """Return a pattern with an alternative for each source, the longest first. A final letter or digit must end a word."""
    branches = []
    for number, source in sorted(enumerate(sources), key=lambda item: -len(item[1])):
        body = source.replace("*.", rf"(?P<expert{number}>\d+)\." if counts_experts else r".*\.")
        boundary = r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", body) else ""
        branches.append(f"(?P<source{number}>{body}{boundary})")
    return re.compile("|".join(branches))


def match_rule(rule: NameRule, name: str) -> RuleMatch | None:
    """Return the match of the rule in a name, or None."""
    scope = next((scope for scope in rule.scopes if name.startswith(scope)), None)
    if rule.scopes and scope is None:
        return None
    rest = name[len(scope or "") :]
    pattern = _pattern(rule.sources, isinstance(rule, ExpertStack))
    match = pattern.search(rest)
    if match is None:
        return None
    groups = match.groupdict()
    source = next(number for number in range(len(rule.sources)) if groups[f"source{number}"] is not None)
    expert = int(groups[f"expert{source}"]) if isinstance(rule, ExpertStack) else 0
    # This is the first group inside the matching alternative, the \1 of a target.
    inner = pattern.groupindex[f"source{source}"] + 1
    group = (match.group(inner) or "") if inner <= pattern.groups else ""
    # transformers replaces the first occurrence of the matched text, which with a lookbehind may precede the match.
    before, _, after = rest.partition(match.group(0))
    return RuleMatch((scope or "") + before, after, source, expert, group)
