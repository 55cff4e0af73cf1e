"""What the two test nodes share and what each has of its own, without a node."""

from pathlib import Path

import pytest

from tools.cluster import cgroups
from tools.cluster.cgroups import processes_of_pod
from tools.cluster.image_directory import link_images, node_root
from tools.cluster.images import ImageStore
from tools.cluster.network import ALL_PODS_RANGE, NodeNetwork

LAYER = "io.containerd.snapshotter.v1.overlayfs/snapshots/1/fs/file"
BLOB = "io.containerd.content.v1.content/blobs/sha256/abc"
DATABASES = ("io.containerd.metadata.v1.bolt/meta.db", "io.containerd.snapshotter.v1.overlayfs/metadata.db")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "first"
    for name in (LAYER, BLOB, *DATABASES, "io.containerd.grpc.v1.cri/containers/running/status"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_images_are_the_very_same_files(source: Path, tmp_path: Path) -> None:
    link_images(source, tmp_path / "second")
    for name in (LAYER, BLOB):
        assert (source / name).samefile(tmp_path / "second" / name)


def test_databases_are_each_nodes_own(source: Path, tmp_path: Path) -> None:
    link_images(source, tmp_path / "second")
    for name in DATABASES:
        (tmp_path / "second" / name).write_text("changed")
        assert (source / name).read_text() == name


def test_containers_of_the_first_node_are_not_taken_over(source: Path, tmp_path: Path) -> None:
    link_images(source, tmp_path / "second")
    assert not (tmp_path / "second/io.containerd.grpc.v1.cri").exists()


def test_what_a_killed_run_left_is_replaced(source: Path, tmp_path: Path) -> None:
    left = tmp_path / "second/io.containerd.content.v1.content/blobs/sha256/left"
    left.parent.mkdir(parents=True)
    left.touch()
    link_images(source, tmp_path / "second")
    assert not left.exists()
    assert (source / BLOB).read_text() == BLOB


def test_nodes_share_no_name_address_or_directory() -> None:
    first, second = NodeNetwork(1), NodeNetwork(2)
    for attribute in ("name", "namespace", "veth", "address", "pod_range"):
        assert getattr(first, attribute) != getattr(second, attribute)
    assert node_root(first) != node_root(second)
    assert len(second.veth) <= 15, "the kernel's limit of an interface's name"
    assert second.pod_range.startswith(ALL_PODS_RANGE.removesuffix(".0.0/16"))


def test_the_processes_of_a_pod_are_found_on_whichever_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "CGROUP_ROOT", tmp_path)
    for node, uid, container, pid in (("node-1", "u1", "c1", 11), ("node-2", "u2", "c2", 22), ("node-2", "u2", "c3", 33)):
        directory = tmp_path / "memory" / f"finetune-test-{node}/kubepods/burstable/pod{uid}/{container}"
        directory.mkdir(parents=True)
        (directory / "cgroup.procs").write_text(f"{pid}\n")
    assert processes_of_pod("u2") == {22, 33}
    assert processes_of_pod("u1") == {11}
    assert processes_of_pod("u") == set()


@pytest.mark.parametrize("images", [("kept:1",), ("kept:1", "taken:1")])
def test_a_name_is_taken_away_where_it_is_there(images: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    left = set(images)

    def ctr(*arguments: object) -> str:
        if arguments[-2] == "rm":
            left.remove(str(arguments[-1]))
            return ""
        return "\n".join(["REF TYPE DIGEST", *(f"{name} type digest" for name in sorted(left))])

    monkeypatch.setattr("tools.cluster.images.run_command", ctr)
    ImageStore(Path("socket")).untag("taken:1")
    assert left == {"kept:1"}
