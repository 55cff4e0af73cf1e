"""Which attempt a container runs, and how long one that was started again waits for its number."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from finetune_trainer.processes.container import take_attempt, wait_until_told


def test_each_container_of_a_pod_takes_the_next_attempt(tmp_path: Path) -> None:
    marker, shared = tmp_path / "marker", tmp_path / "shm"
    shared.mkdir()
    assert [take_attempt(3, marker, shared) for _ in range(4)] == [3, 4, 5, 6]
    assert marker.read_text() == "6"


def test_what_the_container_before_left_in_shared_memory_goes(tmp_path: Path) -> None:
    marker, shared, outside = tmp_path / "marker", tmp_path / "shm", tmp_path / "outside"
    (shared / "torch" / "deep").mkdir(parents=True)
    (shared / "torch" / "deep" / "segment").write_bytes(b"x")
    (shared / "nccl-1").write_bytes(b"x")
    outside.mkdir()
    (outside / "kept").write_bytes(b"x")
    (shared / "link").symlink_to(outside)
    take_attempt(0, marker, shared)
    assert len(list(shared.iterdir())) == 3, "the first container has nothing to take away"
    take_attempt(0, marker, shared)
    assert list(shared.iterdir()) == []
    assert (outside / "kept").exists()
    take_attempt(0, marker, tmp_path / "nowhere")


def test_what_cannot_be_taken_away_of_shared_memory_ends_no_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    (shared / "another containers").write_bytes(b"x")

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(f"{path}: another user's")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert [take_attempt(0, tmp_path / "marker", shared) for _ in range(2)] == [0, 1]


def test_a_marker_that_is_not_whole_or_cannot_be_written_ends_the_container(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.write_text("")
    with pytest.raises(ValueError, match="invalid literal"):
        take_attempt(0, marker, tmp_path)
    with pytest.raises(OSError, match="nowhere"):
        take_attempt(0, tmp_path / "nowhere" / "marker", tmp_path)


def test_a_container_begins_as_soon_as_the_file_names_its_attempt(tmp_path: Path) -> None:
    told, stopped = tmp_path / "number", threading.Event()
    told.write_text("3")
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(wait_until_told(told, 4, stopped, 30.0)))
    waiting.start()
    for content in ("", "34", "x"):
        told.write_text(content)
        time.sleep(0.15)
    told.unlink()
    time.sleep(0.15)
    assert found == []
    # As the kubelet does it: the whole directory is another from one moment to the next.
    (tmp_path / "new").write_text("4\n")
    (tmp_path / "new").replace(told)
    waiting.join(5.0)
    assert found == [True]


def test_a_container_that_is_not_told_gives_up_and_one_that_is_stopped_does_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    assert wait_until_told(tmp_path / "number", 4, threading.Event(), 0.3) is False
    assert 0.3 <= time.monotonic() - started < 5.0
    stopped = threading.Event()
    stopped.set()
    assert wait_until_told(tmp_path / "number", 4, stopped, 60.0) is False
