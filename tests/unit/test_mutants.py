"""The sets of mutants fit the sources, and what does not fit or survives is told."""

from pathlib import Path

import pytest

from tests.mutants.__main__ import choose, report
from tests.mutants.run import Verdict, chosen_tests, relevant_tests
from tests.mutants.set import FOLDERS, ROOT, Mutant, outdated, read_set

MUTANT = Mutant("group/one", "health.py", "return 1", "return 2", "one is one")


def test_there_are_enough_mutants_of_every_part() -> None:
    mutants = read_set()
    assert len(mutants) >= 150
    parts = {mutant.file.split("/")[0] for mutant in mutants}
    assert {"decide", "children", "cluster", "worker.py", "workqueue.py", "watch.py", "health.py", "metrics.py"} <= parts


def test_there_are_enough_mutants_of_all_that_is_decided_without_effects() -> None:
    mutants = read_set(FOLDERS["decisions"])
    assert len(mutants) >= 250
    assert all(mutant.tests for mutant in mutants)
    counts = {
        part: sum(mutant.path.startswith(part) for mutant in mutants)
        for part in (
            *("operator/finetune_job/rules", "operator/finetune_job/plan", "operator/finetune_job/sharding.py"),
            *("operator/finetune_memory", "trainer_image/finetune_trainer"),
        )
    }
    assert min(counts.values()) >= 15, counts
    few = (
        *(f"operator/finetune_job/{each}" for each in ("api", "layout.py", "module_names.py", "added_rows.py")),
        "operator/finetune_cli/checks/estimate.py",
    )
    others = [mutant for mutant in mutants if mutant.path.startswith(few)]
    assert sum(counts.values()) + len(others) == len(mutants)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_mutant_fits_the_sources_and_can_be_compiled(name: str) -> None:
    """One that does not would end the nightly run before its first mutant."""
    mutants = read_set(FOLDERS[name])
    assert outdated(mutants) == []
    for mutant in mutants:
        compile(mutant.applied((ROOT / mutant.path).read_text(encoding="utf-8")), mutant.id, "exec")
        assert mutant.old != mutant.new, mutant.id


@pytest.mark.parametrize("source", ["return 3", "return 1 or return 1"])
def test_a_mutant_whose_text_is_gone_or_not_alone_is_an_error(tmp_path: Path, source: str) -> None:
    path = tmp_path / MUTANT.path
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    (problem,) = outdated([MUTANT], tmp_path)
    assert "group/one" in problem


def test_a_mutant_of_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    assert outdated([MUTANT], tmp_path) == ["group/one: there is no health.py"]


def test_tests_that_are_gone_are_an_error() -> None:
    (mutant,) = [each for each in read_set() if each.id == "api/delete-orphans"]
    gone = Mutant(mutant.id, mutant.file, mutant.old, mutant.new, mutant.breaks, tests=("tests/unit/test_gone.py",))
    assert outdated([gone]) == ["api/delete-orphans: there is no tests/unit/test_gone.py"]


def test_package_and_tests_of_a_file_are_those_of_its_mutants_that_name_none(tmp_path: Path) -> None:
    entries = "".join(
        f'[[mutant]]\nid = "{name}"\nfile = "x.py"\nold = "1"\nnew = "2"\nbreaks = "p"\n{more}'
        for name, more in (("a", ""), ("b", 'tests = ["tests/own.py"]\n'))
    )
    (tmp_path / "one.toml").write_text('package = "some/package"\ntests = ["tests/all.py"]\n' + entries, encoding="utf-8")
    assert [(each.path, chosen_tests(each)) for each in read_set(tmp_path)] == [
        ("some/package/x.py", ["tests/all.py"]),
        ("some/package/x.py", ["tests/own.py"]),
    ]
    assert chosen_tests(MUTANT) == relevant_tests("health.py")


def test_an_id_that_occurs_twice_is_an_error(tmp_path: Path) -> None:
    entry = '[[mutant]]\nid = "a"\nfile = "x"\nold = "1"\nnew = "2"\nbreaks = "p"\n'
    (tmp_path / "one.toml").write_text(entry + entry, encoding="utf-8")
    with pytest.raises(ValueError, match="occur twice: a"):
        read_set(tmp_path)


@pytest.mark.parametrize(("killed", "code"), [(95, 0), (94, 1)])
def test_fewer_than_the_floor_fail(killed: int, code: int) -> None:
    assert report([Verdict(MUTANT, number < killed, "", 0.0) for number in range(100)], 0.95) == code


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    mutants = read_set()
    assert choose(mutants, [], 5, 1) == choose(mutants, [], 5, 1) != choose(mutants, [], 5, 2)
    assert {mutant.id.split("/")[0] for mutant in choose(mutants, ["lease/"], 0, 0)} == {"lease"}


def test_relevant_tests_the_same_name_come_first() -> None:
    assert relevant_tests("cluster/lease.py")[0] == "tests/unit/finetune_operator/cluster/test_lease.py"
    assert all(
        path.startswith(("tests/unit/finetune_operator/decide", "tests/unit/finetune_operator/releases"))
        for path in relevant_tests("decide/stage.py")
    )
