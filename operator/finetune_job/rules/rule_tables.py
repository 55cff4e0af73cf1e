"""Rules that their rows define: ranges of numbers, and settings that have no effect in combination with other settings.

The schema cannot express ranges as minimum and maximum, because fractional numbers are strings in a spec. Instead, a row also
yields the CEL condition by which the API server rejects the same values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator
from pydantic.alias_generators import to_camel

from finetune_job.api.inputs import SecretKeyRef, SecretRef
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.rules.rule import Problem


@dataclass(frozen=True)
class SpecField:
    """The position of a field in the pydantic models, and its default."""

    attributes: tuple[str, ...]
    default: Any

    def read(self, spec: FineTuneJobSpec) -> Any:
        """Return the value of this field in `spec`; None if the field or its parent is unset."""
        value: Any = spec
        for name in self.attributes:
            value = None if value is None else getattr(value, name)
        return value


@cache
def spec_field(path: str) -> SpecField:
    """Return the field at a path under `spec`, such as `training.epochs`. Raises LookupError if no field has this path."""
    model: type[BaseModel] | None = FineTuneJobSpec
    attributes: list[str] = []
    default: Any = None
    for part in path.split("."):
        fields = [] if model is None else [item for item in model.model_fields.items() if to_camel(item[0]) == part]
        if not fields:
            raise LookupError(f"a spec has no field {path}")
        ((name, info),) = fields
        attributes.append(name)
        default = info.default
        types = (info.annotation, *get_args(info.annotation))
        model = next((candidate for candidate in types if isinstance(candidate, type) and issubclass(candidate, BaseModel)), None)
    return SpecField(tuple(attributes), default)


_COMPARISONS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "<": ("below", operator.lt),
    "<=": ("at most", operator.le),
    ">": ("more than", operator.gt),
    ">=": ("at least", operator.ge),
}


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number, as pairs of comparison and limit.

    Rules and the API server both parse the number as a double, the type in which all programs compute with it.
    """

    limits: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, written: dict[str, float]) -> Bounds:
        """Parse bounds in the form that rows use: `{ ">" = 0.0, "<=" = 1.0 }`. Raises ValueError."""
        if not written.keys() <= _COMPARISONS.keys():
            raise ValueError(f"a bound is one of {', '.join(_COMPARISONS)}")
        return cls(tuple(written.items()))

    def hold(self, written: str) -> bool:
        """Whether a number is within the bounds."""
        return all(_COMPARISONS[sign][1](float(written), limit) for sign, limit in self.limits)

    def cel(self, number: str) -> str:
        """Return the bounds as a CEL condition. number: a CEL expression for the string in the spec."""
        return " && ".join(f"double({number}) {sign} {limit!r}" for sign, limit in self.limits)

    def __str__(self) -> str:
        return " and ".join(f"{_COMPARISONS[sign][0]} {limit:g}" for sign, limit in self.limits)


class Range(BaseModel, frozen=True, extra="forbid"):
    """The range for all numbers that a rule reads."""

    within: Annotated[Bounds, BeforeValidator(Bounds.parse)]
    refused_outside: Annotated[Bounds, BeforeValidator(Bounds.parse)] = Bounds(())
    """Another rule refuses values outside these bounds, so this rule, which only warns, ignores them."""
    write: str
    """The value to write instead, worded to follow "write"."""

    @property
    def says(self) -> str:
        """The message of the API server, worded to follow the name of the field."""
        return f"must be {self.within}; write {self.write}"

    def problem(self, spec: FineTuneJobSpec, fields: tuple[str, ...]) -> Problem | None:
        """Return a problem if values are outside the range. It reports the first such field."""
        written = {path: spec_field(path).read(spec) for path in fields}
        wrong = {
            path: value
            for path, value in written.items()
            if value is not None and not self.within.hold(value) and self.refused_outside.hold(value)
        }
        if not wrong:
            return None
        path, value = next(iter(wrong.items()))
        return Problem(value, fix=f"write {self.write}, or remove {path}", field=path, changes=dict.fromkeys(wrong))


class NoEffect(BaseModel, frozen=True, extra="forbid"):
    """Fields that have no effect under some condition."""

    fields: tuple[str, ...]
    """Paths under `spec`. A field that equals its default counts as unset, because the API server fills in defaults."""
    why: str
    """Why the fields have no effect, worded to follow "NoEffect: "."""
    instead: str = ""
    """A change that would give the fields an effect, worded to precede ", or remove"; empty if there is none."""

    def problem(self, spec: FineTuneJobSpec) -> Problem | None:
        """Return a problem if any of the fields is set. Called only if the rule's condition holds."""
        written = {path: spec_field(path).read(spec) for path in self.fields}
        unread = {path: value for path, value in written.items() if value not in (None, spec_field(path).default)}
        if not unread:
            return None
        path, value = next(iter(unread.items()))
        remove = f"remove {', '.join(unread)}"
        return Problem(
            value=value.name if isinstance(value, SecretRef | SecretKeyRef) else value,
            message=f"NoEffect: {self.why}",
            fix=f"{self.instead}, or {remove}" if self.instead else remove,
            field=path,
            changes=dict.fromkeys(unread),
        )
