"""The namespaces that may use a profile, by their labels: a label selector as in Kubernetes."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from finetune_job.api.base import ApiModel
from finetune_job.api.pod_settings import LabelValue, NodeLabels, QualifiedName


class LabelRequirement(ApiModel):
    """A requirement that a label must meet."""

    key: QualifiedName
    """Key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """Operator. In, NotIn: the label has one of `values`, or none of them. NotIn also selects namespaces without the label."""
    values: Annotated[list[LabelValue], Field(max_length=64)] | None = None
    """Values of the label, for In and NotIn."""

    @model_validator(mode="after")
    def _has_the_values_that_it_needs(self) -> Self:
        needs_values = self.operator in ("In", "NotIn")
        if needs_values and not self.values:
            raise ValueError(f"operator {self.operator} compares with values; list them, or write Exists or DoesNotExist")
        if self.values and not needs_values:
            raise ValueError(f"operator {self.operator} has no values; remove them, or write In or NotIn")
        return self

    def is_met(self, labels: Mapping[str, str]) -> bool:
        """Whether a namespace's labels meet the requirement."""
        if self.operator in ("Exists", "DoesNotExist"):
            return (self.key in labels) is (self.operator == "Exists")
        return (labels.get(self.key) in (self.values or [])) is (self.operator == "In")


class NamespaceSelector(ApiModel):
    """Labels of a namespace. An empty selector selects every namespace."""

    match_labels: NodeLabels | None = None
    """Labels that the namespace must have, with these values."""
    match_expressions: Annotated[list[LabelRequirement], Field(max_length=16)] | None = None
    """Further requirements, all of which must be met."""

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether a namespace with these labels is selected."""
        has_labels = all(labels.get(key) == value for key, value in (self.match_labels or {}).items())
        return has_labels and all(requirement.is_met(labels) for requirement in self.match_expressions or ())
