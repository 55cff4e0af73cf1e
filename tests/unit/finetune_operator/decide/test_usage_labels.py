"""Labels of counters: as many as there is room for, and none that users invent."""

from __future__ import annotations

from finetune_operator.decide.usage_labels import JobLabels, bounded_labels, settled_labels

LABELS = JobLabels("team", "team", "LoRA", "gpus", "default", "H100")


def test_labels_beyond_the_limits_are_those_of_all_others_and_keep_what_administrators_wrote() -> None:
    priced = LABELS._replace(price="2.5")
    few = [priced._replace(team=str(number)) for number in range(31)]
    many = [*few, priced._replace(team="31")]
    others = JobLabels("team", "other", "other", "other", "other", "H100", "2.5")
    assert bounded_labels(priced, few, 999) == priced
    assert bounded_labels(priced, many, 999) == others
    assert bounded_labels(priced, few, 1000) == others, "the cluster has too many"
    assert bounded_labels(many[3], many, 5000) == many[3], "what is in use stays"
    assert bounded_labels(priced, [*many, others], 2000) == others
    assert bounded_labels(priced, many, 1999) == others
    assert bounded_labels(priced, many, 2000) == JobLabels(*["other"] * 6, price="")


def test_a_profile_that_has_not_accepted_the_job_is_no_label() -> None:
    priced = LABELS._replace(profile="any text", price="2.5")
    assert settled_labels(priced, has_profile=True) == priced
    assert settled_labels(priced, has_profile=False) == JobLabels("team", "team", "LoRA", "gpus", "other", "", "")
