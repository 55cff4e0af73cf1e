"""What the kill programs kill: seeds of the sources, and no small run without what is saved while training runs."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.kill import __main__ as kill
from tests.kill import base, merge, publish, publish_hub
from tests.kill.cases import CASES, drawn_order
from tests.kill.run import Outcome
from tests.support import source_seed

ASYNCHRONOUS = {"Full, FSDP2, async, best", "Full, FSDP1, async"}
RUNS_IN_CI = 3


def given_seed(*arguments: str) -> int:
    parser = ArgumentParser()
    source_seed.add_seed(parser)
    return int(parser.parse_args(arguments).seed)


def test_each_change_of_the_sources_draws_another_seed_and_the_same_tree_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_seed, "ROOT", tmp_path)
    source = tmp_path / "trainer_image" / "one.py"
    source.parent.mkdir()
    source.write_text("a = 1\n", encoding="utf-8")
    before = given_seed()
    assert given_seed() == before
    source.write_text("a = 2\n", encoding="utf-8")
    assert given_seed() != before
    assert given_seed("--seed", "7") == 7


@pytest.mark.parametrize("seed", range(40))
def test_the_first_runs_of_any_seed_kill_a_run_that_saves_while_it_trains_and_is_not_started_by_torchrun(seed: int) -> None:
    order = drawn_order(seed)
    assert sorted(case.name for case in order) == sorted(case.name for case in CASES)
    forked = [case.name for number, case in enumerate(order[:RUNS_IN_CI]) if number % kill.REAL_EVERY]
    assert ASYNCHRONOUS & set(forked)
    assert drawn_order(seed) == order


def test_seeds_take_turns_with_the_cases() -> None:
    drawn = [[case.name for case in drawn_order(seed)[:RUNS_IN_CI]] for seed in range(60)]
    assert {name for names in drawn for name in names} == {case.name for case in CASES}
    assert {names[1] for names in drawn} == ASYNCHRONOUS


def test_runs_are_of_the_cases_that_the_seed_drew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = []

    def disturbed(base: Any, directory: Path, random: Any, **_more: Any) -> Outcome:
        killed.append((base, random.random()))
        return Outcome(base, is_real=False, signal="SIGKILL")

    monkeypatch.setattr(kill, "undisturbed", lambda case, directory: case.name)
    monkeypatch.setattr(kill, "disturbed", disturbed)
    arguments = ["--runs", str(RUNS_IN_CI), "--signal", "SIGKILL", "--parallel", "1"]
    assert kill.main([*arguments, "--seed", "5"]) == 0
    first = list(killed)
    assert [name for name, _ in first] == [case.name for case in drawn_order(5)[:RUNS_IN_CI]]
    assert f"seed 5: {first[0][0]}" in capsys.readouterr().out
    killed.clear()
    assert kill.main([*arguments, "--seed", "6"]) == 0
    assert not {moment for _, moment in first} & {moment for _, moment in killed}
    killed.clear()
    monkeypatch.setattr(source_seed, "seed_of_the_sources", lambda: 5)
    assert kill.main(arguments) == 0
    assert killed == first


def test_merges_and_publications_are_killed_by_the_seed_of_the_sources_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds: list[int] = []

    @contextmanager
    def one_kind(*_arguments: Any) -> Iterator[list[Any]]:
        yield [None]

    monkeypatch.setattr(source_seed, "seed_of_the_sources", lambda: 4711)
    monkeypatch.setattr(merge, "run", lambda _kills, seed, _directory: seeds.append(seed) or [])
    monkeypatch.setattr(publish, "kinds", one_kind)
    monkeypatch.setattr(publish, "_run_kind", lambda _kind, _directory, seed, _kills: seeds.append(seed) or True)
    monkeypatch.setattr(publish_hub, "run", lambda _runs, seed, _first: seeds.append(seed) or [])
    for program in (merge, publish, publish_hub):
        assert program.main([]) == 0
        assert program.main(["--seed", "3"]) == 0
        assert capsys.readouterr().out.count("seed 4711\n") == 1
    assert seeds == [4711, 3] * 3


RECORD, WEIGHTS = "added-tokens.json", "base-with-added-tokens/model.safetensors"
WHOLE = {RECORD: b"whole", WEIGHTS: b"all"}


@pytest.mark.parametrize(
    ("left", "code", "problem"),
    [
        (WHOLE, 0, ""),
        ({RECORD: b"whole", WEIGHTS: b"a"}, 1, "left a record of another one"),
        ({WEIGHTS: b"all"}, 0, "says that it is there, and it is not"),
        ({}, 1, "ended with 1, and was not hit"),
        (
            {**WHOLE, "base-with-added-tokens.tmp-1/config.json": b""},
            0,
            "left next to the base: ['base-with-added-tokens.tmp-1']",
        ),
    ],
)
def test_a_base_that_is_not_the_undisturbed_one_is_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: dict[str, bytes], code: int, problem: str
) -> None:
    """Whatever a killed process leaves, and the last one, which nothing kills."""
    (case,) = [case for case in CASES if case.name == "LoRA, added tokens, FSDP2"]
    context = case.context(tmp_path / "claims")

    def made(*_arguments: Any) -> int:
        for name, content in left.items():
            path = context.workspace.root / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        return code

    monkeypatch.setattr(base, "make_base", made)
    monkeypatch.setattr(base, "MOST_ATTEMPTS", 2)
    hits, _, found = base.make_base_with_kills(context, WHOLE, tmp_path, Random(0), deadly=True, most_kills=1)
    assert (hits, bool(found)) == (0, bool(problem))
    assert problem in found
