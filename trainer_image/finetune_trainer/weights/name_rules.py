"""Rules by which transformers turns names in files into names in the model, applied as its loader applies them.

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
    """Beginnings of names to which it applies, the longest first; none: to all names."""


@dataclass(frozen=True)
class ExpertStack:
    """Matrices of single experts become one parameter (experts, rows, columns), those of several sources below each other.

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
    """Whether the one target is the sources below each other, in their order: it can be read, and not be merged into."""


NameRule = Renaming | ExpertStack | Unreadable


@dataclass(frozen=True)
class RuleMatch:
    """Where a rule matched a name."""

    before: str
    after: str
    source: int
    expert: int
    group: str

    def with_target(self, target: str) -> str:
        return self.before + target.replace("\\1", self.group) + self.after


@lru_cache(maxsize=1024)
def _pattern(sources: tuple[str, ...], counts_experts: bool) -> re.Pattern[str]:
    """One alternative for each source, the longest first; a source that ends in a letter or digit ends at a name's boundary."""
    branches = []
    for number, source in sorted(enumerate(sources), key=lambda item: -len(item[1])):
        body = source.replace("*.", rf"(?P<expert{number}>\d+)\." if counts_experts else r".*\.")
        boundary = r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", body) else ""
        branches.append(f"(?P<source{number}>{body}{boundary})")
    return re.compile("|".join(branches))


def match_rule(rule: NameRule, name: str) -> RuleMatch | None:
    """Where the rule applies to a name; None: it does not."""
    scope = next((scope for scope in rule.scopes if name.startswith(scope)), None)
    if rule.scopes and scope is None:
        return None
    rest = name[len(scope or "") :]
    pattern = _pattern(rule.sources, isinstance(rule, ExpertStack))
    found = pattern.search(rest)
    if found is None:
        return None
    groups = found.groupdict()
    source = next(number for number in range(len(rule.sources)) if groups[f"source{number}"] is not None)
    expert = int(groups[f"expert{source}"]) if isinstance(rule, ExpertStack) else 0
    # The group inside the alternative that matched, which a target calls \1.
    inner = pattern.groupindex[f"source{source}"] + 1
    group = (found.group(inner) or "") if inner <= pattern.groups else ""
    # The library replaces the first occurrence of the matched text, which a look-behind may place before the match.
    before, _, after = rest.partition(found.group(0))
    return RuleMatch((scope or "") + before, after, source, expert, group)
