"""A verdict is kept for a rehearsal that would be the same, and for no other; a file that is not whole is as good as none."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.inspection.report import RehearsalReport, Verdict
from finetune_trainer.rehearsal import verdicts
from finetune_trainer.rehearsal.verdicts import find_verdict, keep_verdict, not_done_finding, rehearsal_key
from tests.support.tiny_model import plan_of, run_context, tiny_spec

PASSED = RehearsalReport(verdict=Verdict.PASSED, seconds=9.0, parameters=7)
LARGE = 33_000_000
"""Bytes of weights: more than those of a model that is tried as it is."""
KEY = "a" * 64


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text(f'"{name}"')
    return directory


def key(model: Path, spec: dict[str, Any] | None = None, digest: str = "d", weight_bytes: int = 100) -> str:
    return rehearsal_key(plan_of(spec or tiny_spec()), model, digest, weight_bytes)


@pytest.mark.parametrize(
    "changed",
    [
        {"method": {"type": "LoRA", "lora": {"r": 5}}},
        {"method": {"type": "DoRA"}},
        {"training": {"learningRate": "3e-4"}},
        {"training": {"seed": 7}},
        {"parallelism": {"processesPerNode": 4}},
        {"parallelism": {"processesPerNode": 2, "fsdp": {"version": 1}}},
        {"merge": {"enabled": False}},
        {"model": {"dtype": "bfloat16"}},
        {"data": {"packing": False}},
        {"checkpoint": {"everySteps": 3}},
    ],
    ids=str,
)
def test_every_setting_is_part_of_the_key(model: Path, changed: dict[str, Any]) -> None:
    assert key(model, tiny_spec(**changed)) != key(model)


def test_places_and_names_are_not_part_of_the_key(model: Path) -> None:
    plan = plan_of(tiny_spec())
    elsewhere = plan.model_copy(
        update={
            "job": plan.job.model_copy(update={"name": "another", "uid": "another"}),
            "workspace": plan.workspace.model_copy(update={"path": "another"}),
            "output": plan.output.model_copy(update={"path": "another"}),
        }
    )
    assert rehearsal_key(elsewhere, model, "d", 100) == rehearsal_key(plan, model, "d", 100)


def test_the_architecture_is_part_of_the_key(model: Path) -> None:
    assert key(model, digest="e") != key(model)


@pytest.mark.parametrize(("weight_bytes", "counts"), [(32_000_000, True), (LARGE, False)])
def test_weights_count_where_the_model_is_tried_as_it_is(model: Path, weight_bytes: int, counts: bool) -> None:
    before = key(model, weight_bytes=weight_bytes)
    (model / "model.safetensors").write_text("others")
    assert (key(model, weight_bytes=weight_bytes) != before) is counts


@pytest.mark.parametrize("weight_bytes", [100, LARGE])
def test_files_next_to_the_weights_are_part_of_the_key(model: Path, weight_bytes: int) -> None:
    before = key(model, weight_bytes=weight_bytes)
    (model / "tokenizer.json").write_text("another")
    assert key(model, weight_bytes=weight_bytes) != before


def test_files_that_cannot_be_read_leave_the_job_without_a_key(model: Path) -> None:
    """Any file next to the weights may be such a one, and nothing needs it: the job is rehearsed as ever."""
    (model / "extra.json").symlink_to("/proc/self/mem")
    assert key(model) == ""


def test_a_file_of_a_terabyte_is_not_read_for_the_key(model: Path) -> None:
    with (model / "extra.json").open("wb") as file:
        file.truncate(1 << 40)
    began = time.process_time()
    assert key(model) == ""
    assert time.process_time() - began < 5


def test_libraries_and_code_are_part_of_the_key(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        name, version = "torch", "1.0"

    def keys() -> str:
        verdicts._software.cache_clear()
        return key(model)

    before = keys()
    assert keys() == before
    with monkeypatch.context() as changed:
        changed.setattr(verdicts, "distributions", lambda: [Distribution])
        other = keys()
        changed.setattr(Distribution, "version", "1.1")
        assert len({before, other, keys()}) == 3
    with monkeypatch.context() as changed:
        changed.setattr(verdicts.platform, "python_version", lambda: "3.0")
        assert keys() != before
    (tmp_path / "module.py").write_text("one = 1")
    with monkeypatch.context() as changed:
        changed.setattr(verdicts.finetune_trainer, "__path__", [str(tmp_path)])
        other = keys()
        (tmp_path / "module.py").write_text("one = 2")
        assert len({before, other, keys()}) == 3
    verdicts._software.cache_clear()


def test_code_of_a_model_may_do_anything_and_has_no_key(model: Path, tmp_path: Path) -> None:
    assert key(model, tiny_spec(model={"allowRemoteCode": True})) == ""
    context = run_context(tmp_path / "run", tiny_spec())
    keep_verdict(context, "", PASSED)
    assert find_verdict(context, "") is None


def kept_file(context: Any) -> Path:
    return Path(context.claims_root / context.plan.workspace.claim / "rehearsals" / f"{KEY}.json")


def test_what_passed_is_found_again_with_its_time(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec())
    assert find_verdict(context, KEY) is None
    keep_verdict(context, KEY, PASSED)
    found = find_verdict(context, KEY)
    assert found is not None
    assert (found.verdict, found.parameters, found.seconds) == (Verdict.PASSED, 7, 0.0)
    assert found.kept_since == json.loads(kept_file(context).read_bytes())["since"]
    assert find_verdict(context, "b" * 64) is None


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.NOT_DONE, Verdict.SKIPPED])
def test_only_what_passed_is_kept(tmp_path: Path, verdict: Verdict) -> None:
    context = run_context(tmp_path, tiny_spec())
    keep_verdict(context, KEY, RehearsalReport(verdict=verdict))
    assert not kept_file(context).exists()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def changed(**values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\x80\x04garbage"),
        lambda path: path.write_text(path.read_text()[:-9]),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text(path.read_text() + " " * (1 << 18)),
        changed(key="b" * 64),
        changed(since="yesterday"),
        changed(more=1),
        changed(report={"verdict": "Failed"}),
        changed(report={"verdict": "Passed", "unknown": 1}),
        changed(
            report={"verdict": "Passed", "findings": [not_done_finding("made up", Path("/nowhere")).model_dump(mode="json")]}
        ),
        fifo,
        directory,
    ],
)
def test_a_damaged_file_is_none(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    context = run_context(tmp_path, tiny_spec())
    keep_verdict(context, KEY, PASSED)
    assert find_verdict(context, KEY) is not None
    damage(kept_file(context))
    assert find_verdict(context, KEY) is None


def test_a_directory_that_is_a_link_gets_nothing(tmp_path: Path) -> None:
    context = run_context(tmp_path / "run", tiny_spec())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    kept_file(context).parent.symlink_to(elsewhere, target_is_directory=True)
    keep_verdict(context, KEY, PASSED)
    assert list(elsewhere.iterdir()) == []


def test_the_oldest_make_room_and_other_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "MOST_KEPT", 2)
    context = run_context(tmp_path, tiny_spec())
    names = [letter * 64 for letter in "abc"]
    keep_verdict(context, names[0], PASSED)
    mine = kept_file(context).with_name("mine.json")
    mine.write_text("mine")
    os.utime(mine, (0, 0))
    for age, name in enumerate(names):
        keep_verdict(context, name, PASSED)
        os.utime(kept_file(context).with_name(f"{name}.json"), (1000 + age,) * 2)
    assert sorted(path.name for path in mine.parent.iterdir()) == [f"{name}.json" for name in names[1:]] + ["mine.json"]


def test_a_place_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec())
    kept_file(context).parent.write_text("a file")
    keep_verdict(context, KEY, PASSED)
    assert find_verdict(context, KEY) is None
