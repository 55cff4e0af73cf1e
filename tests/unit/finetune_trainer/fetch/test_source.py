"""Names that a source may list, and those that would leave the directory."""

import pytest

from finetune_trainer.fetch.source import RemoteFile, listing_problem, path_problem


@pytest.mark.parametrize("path", ["", "/a", "a/../b", "..", "./a", "a//b", "a/", "a\0b", "a\\b", "x" * 256])
def test_paths_that_leave_the_target_are_problems(path):
    assert path_problem(path) is not None
    assert path_problem("a/b-1_2.json") is None


def test_files_that_cannot_share_a_directory_are_problems():
    def listed(*paths: str) -> str | None:
        return listing_problem([RemoteFile(path, 1, "v", path) for path in paths])

    assert listed("a", "b/c", "b/d") is None
    assert "twice" in listed("a", "b", "a")
    assert "directory of" in listed("a", "a/b")
