"""A name holds what was there before or the whole of what is new, and only files are read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from finetune_trainer.files import (
    OutsideError,
    SpecialFileError,
    append_to_own,
    copy_within,
    file_sha256,
    link_root,
    links_outside,
    open_beneath,
    open_regular,
    open_within,
    read_own,
    sha256_beneath,
    write_durably,
)

ABC_SHA256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_write_replaces_the_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"a longer content of before")
    write_durably(path, b"abc")
    assert path.read_bytes() == b"abc"
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]
    assert file_sha256(path) == ABC_SHA256


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 47, 48])
def test_a_digest_is_of_all_bytes_however_many_blocks_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("finetune_trainer.files.HASHED_AT_ONCE", 16)
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(size)))
    assert file_sha256(path) == hashlib.sha256(bytes(range(size))).hexdigest()
    assert sha256_beneath(tmp_path, "weights") == hashlib.sha256(bytes(range(size))).hexdigest()


def test_large_files_are_hashed_in_blocks_that_outlast_a_wait_for_pythons_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sys.getswitchinterval() is 5 ms; no machine hashes 16 MiB in less."""
    sizes: list[int] = []

    class Recorded:
        def update(self, block: memoryview) -> None:
            sizes.append(len(block))

        def hexdigest(self) -> str:
            return ""

    monkeypatch.setattr(hashlib, "sha256", Recorded)
    with (path := tmp_path / "weights").open("wb") as file:
        file.truncate((40 << 20) + 1)
    file_sha256(path)
    assert sizes == [16 << 20, 16 << 20, (8 << 20) + 1]


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [make_pipe, make_loop, Path.mkdir])
def test_special_files_are_refused_without_waiting(tmp_path: Path, make) -> None:
    path = tmp_path / "weights"
    make(path)
    with pytest.raises(SpecialFileError, match="not a file"):
        open_regular(path)


def test_a_missing_file_is_the_file_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_sha256(tmp_path / "absent")


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    """A claim with a model and a file that several share, a secret beside it, and links of all kinds in the model."""
    (tmp_path / "secret").write_text("secret")
    claim = tmp_path / "claim"
    model = claim / "models" / "tiny"
    (model / "additional_chat_templates").mkdir(parents=True)
    (claim / "shared.json").write_text("shared")
    (model / "own.json").write_text("own")
    links = {
        "inside.json": "../../shared.json",
        "absolute.json": str(claim / "shared.json"),
        "twice.json": "inside.json",
        "outside.json": "../../../secret",
        "absolutely-outside.json": str(tmp_path / "secret"),
        "outside-twice.json": "outside.json",
        "directory": str(tmp_path),
        "additional_chat_templates/a.jinja": "../../../../secret",
    }
    for name, target in links.items():
        (model / name).symlink_to(target)
    return claim


def test_links_of_a_model_lead_to_its_claim_and_nowhere_else(claim: Path, tmp_path: Path) -> None:
    model, target = claim / "models" / "tiny", tmp_path / "copy"
    for name, content in {"own": "own", "inside": "shared", "absolute": "shared", "twice": "shared"}.items():
        copy_within(model / f"{name}.json", claim, target)
        assert target.read_text() == content
        target.unlink()
    outside = ["absolutely-outside.json", "directory", "outside-twice.json", "outside.json", "additional_chat_templates/a.jinja"]
    for name in (*outside, "directory/secret"):
        with pytest.raises(OutsideError, match=f"is a link to {tmp_path}"):
            copy_within(model / name, claim, target)
        assert not target.exists()
    assert [Path(error.filename) for error in links_outside(model, claim)] == [model / name for name in outside]
    # Of a directory whose claim nobody names, it alone is trusted.
    assert link_root(model) == model
    assert str(next(links_outside(model, link_root(model)))).startswith("[Errno 18] is a link to")
    assert {Path(error.filename).name for error in links_outside(model, model)} >= {"inside.json", "absolute.json", "twice.json"}


def test_a_model_that_is_itself_a_link_out_of_its_claim_is_noticed(claim: Path, tmp_path: Path) -> None:
    (claim / "current").symlink_to("models/tiny")
    (claim / "away").symlink_to(tmp_path)
    assert claim / "current" not in [Path(error.filename) for error in links_outside(claim / "current", claim)]
    assert Path(next(links_outside(claim / "away", claim)).filename) == claim / "away"


def test_a_snapshot_of_a_cache_leads_to_the_blobs_of_its_repository(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / "0123abcd"
    for directory in (snapshot, repository / "blobs", tmp_path / "hub" / "models--org--other"):
        directory.mkdir(parents=True)
    (repository / "blobs" / "00ff").write_text("{}")
    (tmp_path / "hub" / "models--org--other" / "config.json").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/00ff")
    (tmp_path / "claim").symlink_to(snapshot)
    for directory, claim in ((snapshot, None), (snapshot, snapshot), (tmp_path / "claim", tmp_path / "claim")):
        assert link_root(directory, claim) == repository
        assert list(links_outside(directory, link_root(directory, claim))) == []
        with open_within(directory / "config.json", link_root(directory, claim)) as file:
            assert file.read() == b"{}"
    # A claim that holds the whole cache has all of it; a name alone makes no cache.
    assert link_root(snapshot, tmp_path / "hub") == tmp_path / "hub"
    (tmp_path / "snapshots" / "x").mkdir(parents=True)
    assert link_root(tmp_path / "snapshots" / "x") == tmp_path / "snapshots" / "x"
    (snapshot / "tokenizer.json").symlink_to("../../../models--org--other/config.json")
    (error,) = links_outside(snapshot, link_root(snapshot))
    assert error.filename == str(snapshot / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("models/tiny/inside.json", SpecialFileError, "not a file"),
        ("models/tiny/directory/secret", OutsideError, "directory on its path is a link"),
        ("../secret", OutsideError, "leads out of"),
        ("models/../../secret", OutsideError, "leads out of"),
        ("/etc/passwd", OutsideError, "leads out of"),
        ("", OutsideError, "leads out of"),
        ("models/tiny", SpecialFileError, "not a file"),
        ("shared.json/x", OutsideError, "no directory"),
        ("absent", FileNotFoundError, "No such file"),
    ],
)
def test_no_part_of_the_path_of_an_own_file_is_a_link(claim: Path, name: str, error: type[OSError], words: str) -> None:
    with open_beneath(claim, "models/tiny/own.json") as file:
        assert file.read() == b"own"
    open_descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(error, match=words):
        open_beneath(claim, name)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_descriptors


def test_an_own_file_is_no_link_and_no_longer_than_it_can_be(claim: Path) -> None:
    assert read_own(claim / "shared.json") == b"shared"
    with pytest.raises(OSError, match="larger than 5 bytes, the most"):
        read_own(claim / "shared.json", 5)
    with pytest.raises(SpecialFileError):
        read_own(claim / "models" / "tiny" / "inside.json")


def test_nothing_is_appended_through_a_link_or_waits_for_a_pipe(claim: Path) -> None:
    log = claim / "log"
    for _ in range(2):
        with os.fdopen(append_to_own(log), "ab") as file:
            file.write(b"x")
    assert log.read_bytes() == b"xx"
    make_pipe(claim / "pipe")
    os.close(append_to_own(claim / "pipe"))
    with pytest.raises(OSError, match="symbolic links"):
        append_to_own(claim / "models" / "tiny" / "inside.json")
    assert (claim / "shared.json").read_text() == "shared"
