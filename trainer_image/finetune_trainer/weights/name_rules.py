"""Rules with which transformers turns names in files into names in the model, applied as its loader applies them.

The loader is transformers.core_model_loading (5.23): all renamings in order, then at most one rule that computes something.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Renaming:
    r"""The first part of a name that matches one of `sources` (regular expressions) becomes `target`; `\1` is the first group."""

    sources: tuple[str, ...]
    target: str
    scopes: tuple[str, ...] = ()
    """Prefixes of names to which it applies, the longest first. Empty: it applies to all names."""


@dataclass(frozen=True)
class ExpertStack:
    """Matrices of single experts become one parameter (experts, rows, columns); those of several sources are stacked by rows.

    sources: regular expressions in which `*.` is the place of the expert's number.
    """

    sources: tuple[str, ...]
    target: str
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unreadable:
    """transformers computes the parameters `targets` from the stored `sources` in a way that cannot be undone part by part."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operation: str
    scopes: tuple[str, ...] = ()
    joins_rows: bool = False
    """Whether the one target is the sources stacked by rows, in order. Such a parameter can be read, but not merged into."""


NameRule = Renaming | ExpertStack | Unreadable


@dataclass(frozen=True)
class RuleMatch:
    """A match of a rule in a name."""

    before: str
    after: str
    source: int
    expert: int
    group: str

    def with_target(self, target: str) -> str:
        return self.before + target.replace("\\1", self.group) + self.after


@lru_cache(maxsize=1024)
def _pattern(sources: tuple[str, ...], counts_experts: bool) -> re.Pattern[str]:
    """One alternative for each source, the longest first. A source that ends in a letter or digit ends at a name's boundary."""
    branches = []
    for number, source in sorted(enumerate(sources), key=lambda item: -len(item[1])):
        body = source.replace("*.", rf"(?P<expert{number}>\d+)\." if counts_experts else r".*\.")
        boundary = r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", body) else ""
        branches.append(f"(?P<source{number}>{body}{boundary})")
    return re.compile("|".join(branches))


def match_rule(rule: NameRule, name: str) -> RuleMatch | None:
    """The match of the rule in a name, or None."""
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
    # The group inside the matching alternative, which a target calls \1.
    inner = pattern.groupindex[f"source{source}"] + 1
    group = (match.group(inner) or "") if inner <= pattern.groups else ""
    # The library replaces the first occurrence of the matched text, which a look-behind may place before the match.
    before, _, after = rest.partition(match.group(0))
    return RuleMatch((scope or "") + before, after, source, expert, group)
