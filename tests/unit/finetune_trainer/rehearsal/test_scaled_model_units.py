"""Units by size: those of the twin are of the same kinds as those of the model, or the report says which are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.model.wrap_plan import unit_names
from finetune_trainer.rehearsal.scaled_model import RehearsalPaths, make_scaled_model, trained_without_weights, unit_kinds
from tests.support.tiny_model import plan_of, tiny_spec
from tests.unit.finetune_trainer.rehearsal.large_model import write_headers

LAYERS = "base_model.model.model.layers"
NEAREST = "units by size that differ"


def units_of(root: Path, **fsdp: Any) -> tuple[set[str], set[str], list[str]]:
    """Kinds of units of a large model and of its twin, and what is said of them."""
    sharding = {"processesPerNode": 4, "fsdp": {"autoWrapPolicy": "SIZE_BASED_WRAP", **fsdp}}
    plan = plan_of(tiny_spec(parallelism=sharding))
    places = RehearsalPaths(root / "root")
    places.root.mkdir()
    directory = write_headers(root / "large")
    twin = make_scaled_model(plan, directory, places)
    before = unit_names(trained_without_weights(plan, directory), plan.parallelism.fsdp)
    after = unit_names(trained_without_weights(twin.plan, places.model), twin.plan.parallelism.fsdp)
    return unit_kinds(before), unit_kinds(after), [change.text() for change in twin.changes]


@pytest.mark.parametrize(
    ("fsdp", "unit"),
    [({}, "base_model.model.model"), ({"minNumParams": 15_000_000}, f"{LAYERS}.mlp")],
    ids=["default", "part-of-a-layer"],
)
def test_the_same_kinds_are_units(tmp_path: Path, fsdp: dict[str, Any], unit: str) -> None:
    wanted, found, said = units_of(tmp_path, **fsdp)
    assert unit in wanted, "the example shows nothing"
    assert found == wanted
    assert any(text.startswith("parallelism.fsdp.minNumParams: ") for text in said)
    assert not any(text.startswith(NEAREST) for text in said)


@pytest.mark.parametrize(
    ("minimum", "unit"),
    [(11_000_000, f"{LAYERS}.mlp.down_proj.base_layer"), (40_000_000, LAYERS)],
    ids=["projections-beyond-attention", "embeddings-beyond-layers"],
)
def test_what_no_size_of_the_twin_gives_is_said(tmp_path: Path, minimum: int, unit: str) -> None:
    """Modules of the model that are larger than others of it, and those of its twin are not."""
    wanted, found, said = units_of(tmp_path, minNumParams=minimum)
    assert unit in wanted
    assert wanted != found
    assert any(text.startswith(NEAREST) for text in said)
