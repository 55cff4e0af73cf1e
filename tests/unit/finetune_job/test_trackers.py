"""Names of experiment trackers that are not this product's own."""

from typing import Any

import pytest

from finetune_cli.checks.fix import fix
from finetune_cli.checks.validate import validate
from finetune_job.trackers import foreign_trackers
from tests.unit.finetune_cli.manifests import ACCEPTED, edited

FIELD = "spec.training.trackers"


@pytest.mark.parametrize(
    ("names", "value", "meant", "is_proposal"),
    [
        (["Wandb"], "Wandb", ["wandb"], None),
        (["MLFLOW", "tensorboard"], "MLFLOW", ["mlflow", "tensorboard"], None),
        (["wandb", "Wandb"], "Wandb", ["wandb"], None),
        (["wanb"], "wanb", ["wandb"], True),
        (["weights-and-biases", "comet"], "weights-and-biases, comet", ["wandb", "comet"], True),
        (["comet"], "comet", None, None),
        (["clearml"], "clearml", None, None),
    ],
)
def test_a_foreign_name_is_warned_of_with_the_nearest_of_ours(
    names: list[str], value: str, meant: list[str] | None, is_proposal: bool | None
) -> None:
    finding = foreign_trackers(names)
    assert finding is not None
    assert (finding.rule, finding.severity, finding.field, finding.value) == ("tracker-unknown", "warning", FIELD, value)
    assert finding.message.startswith("the trackers of this product are tensorboard, wandb, mlflow; another one needs a package")
    changes: list[tuple[str, Any]] = [] if meant is None else [(FIELD, meant)]
    assert [(change.field, change.value) for change in finding.changes] == changes
    assert finding.is_proposal is is_proposal
    assert finding.fix == (
        "remove the name, or provide such a package" if meant is None else f"write {FIELD}: [{', '.join(meant)}]"
    )


@pytest.mark.parametrize("names", [[], ["wandb"], ["mlflow", "tensorboard"]])
def test_our_own_names_are_not(names: list[str]) -> None:
    assert foreign_trackers(names) is None


def test_validate_warns_and_makes_the_fix_that_is_certain() -> None:
    assert [each.rule for verdict in validate(ACCEPTED).verdicts for each in verdict.findings] == []
    job = edited(FIELD, ["Wandb"])
    (verdict,) = validate(job).verdicts
    assert (verdict.outcome, [each.rule for each in verdict.findings]) == ("accepted", ["tracker-unknown"])
    (fixed,) = fix([("job", job)])
    assert "wandb" in fixed.text
    assert validate(fixed.text).verdicts[0].findings == ()
    (unsure,) = fix([("job", edited(FIELD, ["wanb"]))])
    assert "wanb" in unsure.text
