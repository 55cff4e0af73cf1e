"""What every part of a plan has in common, and how plans of other releases are read.

A plan outlives the program that froze it: an operator is upgraded, or rolled back, while jobs run. Therefore

* a field that a release adds has a default: what the releases before it did. A plan that lacks the field is read with that;
* nothing that stands in a plan is ever renamed, removed or given another meaning. `version` would have to change for that;
* the operator reads of a plan what it builds children from (`LaunchPlan`), and ignores every field that it does not know;
* a container reads the whole plan (`RunPlan`) and refuses one with fields that it does not know: it must not train something
  else than the plan says. The plan names the image, so that an upgrade of the operator does not put another one in its place.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PlanModel(BaseModel):
    """Immutable; unknown fields are errors for whoever reads the whole plan."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
