"""Which checkpoints are removed, and which never."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_job.layout import checkpoint_name, checkpoint_step
from finetune_trainer.checkpoint.manifest import MANIFEST
from finetune_trainer.checkpoint.retention import checkpoint_directories, outdated, remove_leftovers
from finetune_trainer.files import TEMPORARY_MARK
from tests.support.power_cut import PowerCuts, is_temporary
from tests.unit.finetune_trainer.checkpoint.saved_models import manifest_of, write


def test_old_checkpoints_go_but_never_below_two_valid(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step, keep=2)
    assert [checkpoint_step(path.name) for path in checkpoint_directories(tmp_path)] == [4, 3]
    (tmp_path / checkpoint_name(4) / MANIFEST).write_text("{}")
    write(tmp_path, 5, keep=2)
    assert [checkpoint_step(path.name) for path in checkpoint_directories(tmp_path)] == [5, 4, 3]
    assert (tmp_path / "latest").read_text() == f"{checkpoint_name(5)}\n"


def test_the_best_checkpoint_stays_while_a_kept_one_names_it(tmp_path: Path) -> None:
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5)):
        write(tmp_path, step, best_step=best)
    # A run that has to resume from 4, because 5 was damaged, may still export 2.
    assert [checkpoint_step(path.name) for path in checkpoint_directories(tmp_path)] == [5, 4, 2]
    write(tmp_path, 6, best_step=5)
    assert [checkpoint_step(path.name) for path in checkpoint_directories(tmp_path)] == [6, 5]


def test_an_old_checkpoint_loses_its_name_before_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    cuts = PowerCuts(tmp_path, monkeypatch)
    write(tmp_path, 3)
    assert [checkpoint_step(path.name) for path in checkpoint_directories(tmp_path)] == [3, 2]
    assert cuts.removed
    assert [path for path in cuts.removed if not is_temporary(path, tmp_path)] == []


def test_links_and_files_with_the_names_of_checkpoints_are_removed_and_not_followed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for directory in (root, elsewhere):
        directory.mkdir()
    (elsewhere / "kept").touch()
    (root / checkpoint_name(1)).touch()
    for name in (checkpoint_name(2), checkpoint_name(4), f"planted{TEMPORARY_MARK}x"):
        (root / name).symlink_to(elsewhere)
    remove_leftovers(root)
    for step in (3, 4):
        write(root, step, keep=2)
    assert sorted(path.name for path in root.iterdir()) == ["latest", checkpoint_name(3), checkpoint_name(4)]
    assert [path.name for path in elsewhere.iterdir()] == ["kept"]


@given(st.dictionaries(st.integers(0, 50), st.none() | st.integers(0, 50), max_size=12), st.integers(0, 5), st.data())
def test_pruning_keeps_the_newest_valid_ones_and_the_best(best: dict[int, int | None], keep: int, data: st.DataObject) -> None:
    damaged = data.draw(st.sets(st.sampled_from(sorted(best)))) if best else set()
    found = {step: None if step in damaged else manifest_of(step, best_step) for step, best_step in best.items()}
    removed = set(outdated(found, keep))
    valid = sorted(set(best) - damaged)
    newest = valid[-max(keep, 2) :]
    assert not removed & set(newest)
    assert not removed & {best[step] for step in newest}
    if len(newest) < max(keep, 2):
        assert not removed
    else:
        assert removed == {step for step in best if step < newest[0]} - {best[step] for step in newest}
