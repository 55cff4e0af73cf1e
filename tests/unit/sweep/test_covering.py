"""The generator of the sweep's cases."""

from __future__ import annotations

import itertools

import pytest

from finetune_job.api.job import FineTuneJobSpec
from tests.sweep.case import UNSET, Case
from tests.sweep.covering import covering_array, distinct, pairs_of, pairs_to_cover, products, random_cases
from tests.sweep.dimensions import DIMENSIONS, USUAL, Dimension
from tests.sweep.streams import fixed_cases, random_stream, settings_of, with_settings

FEW = (
    Dimension("method", ("LoRA", "Full"), ("CPT",)),
    Dimension("architecture", ("llama", "gpt2")),
    Dimension("stored", ("bfloat16", "float32")),
    Dimension("ranks", ("2", "1")),
    Dimension("version", (UNSET, "1"), needs={"ranks": ("2",)}),
    Dimension("use_orig", (UNSET, "true", "false"), needs={"ranks": ("2",), "version": ("1",)}),
    Dimension("dropout", (UNSET, "0.1"), ("1",), needs={"method": ("LoRA",)}),
)


@pytest.mark.nightly
def test_every_pair_of_values_that_can_stand_together_is_covered() -> None:
    covered = set(itertools.chain.from_iterable(pairs_of(case.values) for case in covering_array(1)))
    assert pairs_to_cover() <= covered


def test_pairs_that_cannot_stand_together_are_not_asked_for() -> None:
    pairs = pairs_to_cover(FEW)
    assert (("ranks", "2"), ("use_orig", "true")) in pairs
    assert (("ranks", "1"), ("use_orig", "true")) not in pairs
    assert (("method", "Full"), ("dropout", "0.1")) not in pairs
    assert (("method", "CPT"), ("dropout", "1")) not in pairs


def test_the_same_seed_gives_the_same_cases_and_another_seed_others() -> None:
    def ids(seed: int) -> list[str]:
        return [case.id for case in covering_array(seed, FEW)]

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)
    streams = [[case.id for case in itertools.islice(random_cases(seed), 20)] for seed in (1, 1, 2)]
    assert streams[0] == streams[1] != streams[2]


def test_a_dimension_that_does_not_apply_is_absent() -> None:
    for case in itertools.islice(random_cases(3), 200):
        for dimension in DIMENSIONS:
            assert (dimension.name in case.values) == dimension.applies(case.values)


def test_an_array_has_at_most_one_mistake_beside_a_pair_that_asks_for_none() -> None:
    by_name = {dimension.name: dimension for dimension in FEW}
    for case in covering_array(4, FEW):
        assert sum(value in by_name[name].bad for name, value in case.values.items()) <= 1


def test_products_hold_every_combination_that_applies() -> None:
    cases = products([{"version": ("1", "2"), "use_orig": ("true", "false")}])
    assert {(case.of("version"), case.of("use_orig")) for case in cases} == {("1", "true"), ("1", "false")}
    assert all(case.of(name) == value for case in cases for name, value in USUAL.items())


@pytest.mark.nightly
def test_the_slices_of_ci_are_large_enough_and_disjoint() -> None:
    fixed = list(itertools.islice(fixed_cases(), 150))
    fresh = itertools.islice(random_stream(9, {case.id for case in fixed}), 150)
    assert len({case.id for case in (*fixed, *fresh)}) == 300


def test_cases_can_be_restricted_to_settings() -> None:
    wanted = [settings_of("added=ordinary,special"), settings_of("ranks=2")]
    found = list(with_settings(itertools.islice(random_cases(5), 200), wanted))
    assert {(case.of("added"), case.of("ranks")) for case in found} == {("ordinary", "2"), ("special", "2")}
    for wrong in ("nothing=1", "added=nothing", "added"):
        with pytest.raises(ValueError, match="is not one of"):
            settings_of(wrong)


def test_equal_manifests_have_one_id() -> None:
    (case,) = products([{"method": ("LoRA",)}])
    same = Case({**case.values, "ram": UNSET})
    assert same.id == case.id
    assert len(list(distinct([case, same]))) == 1


@pytest.mark.parametrize("case", list(itertools.islice(random_cases(5), 40)), ids=lambda case: case.id)
def test_the_schema_takes_what_a_case_writes(case: Case) -> None:
    """But for values that no user could find in the documentation, a case is a manifest that reaches the rules."""
    FineTuneJobSpec.model_validate(case.spec())
