"""Fields of a spec by their paths, as rows of tables name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from finetune_job.api.job import FineTuneJobSpec


@dataclass(frozen=True)
class SpecField:
    """Where a field is in the models, and its default."""

    attributes: tuple[str, ...]
    default: Any

    def read(self, spec: FineTuneJobSpec) -> Any:
        """The field's value; None where it or what it belongs to is unset."""
        value: Any = spec
        for name in self.attributes:
            value = None if value is None else getattr(value, name)
        return value


def spec_field(path: str) -> SpecField:
    """The field at a path under `spec`, such as `training.epochs`. Raises LookupError if there is none."""
    model: type[BaseModel] | None = FineTuneJobSpec
    attributes: list[str] = []
    default: Any = None
    for part in path.split("."):
        found = [] if model is None else [item for item in model.model_fields.items() if to_camel(item[0]) == part]
        if not found:
            raise LookupError(f"a spec has no field {path}")
        ((name, info),) = found
        attributes.append(name)
        default = info.default
        types = (info.annotation, *get_args(info.annotation))
        model = next((each for each in types if isinstance(each, type) and issubclass(each, BaseModel)), None)
    return SpecField(tuple(attributes), default)
