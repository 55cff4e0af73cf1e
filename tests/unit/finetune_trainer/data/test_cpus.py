"""CPUs within the limits of a container."""

import os

import pytest

from finetune_trainer.data.cpus import available_cpus


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 6),
        ({"pods/one": "max 100000"}, 6),
        ({"pods/one": "200000 100000"}, 2),
        ({"pods/one": "150000 100000"}, 2),
        ({"pods/one": "5000 100000"}, 1),
        ({"pods/one": "400000 100000", "pods": "300000 100000"}, 3),
        ({"pods/one": "900000 100000"}, 6),
    ],
)
def test_the_smallest_limit_of_all_groups_around_holds(tmp_path, monkeypatch, limits, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    (tmp_path / "root" / "pods" / "one").mkdir(parents=True)
    for group, limit in limits.items():
        (tmp_path / "root" / group / "cpu.max").write_text(f"{limit}\n")
    (tmp_path / "own").write_text("0::/pods/one\n")
    assert available_cpus(tmp_path / "root", tmp_path / "own") == expected


def test_without_groups_the_affinity_decides(tmp_path):
    assert available_cpus(tmp_path, tmp_path / "none") == len(os.sched_getaffinity(0))
