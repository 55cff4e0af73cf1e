"""Signatures of releases, verified by openssl, which has no part in making them."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from finetune_trainer.errors import CheckpointError, DestinationRefusedError
from finetune_trainer.release.checksums import read_release
from finetune_trainer.release.files import Release
from finetune_trainer.release.sign import signed
from tests.support.finished_run import finished_run

P256 = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
VERIFY = (
    "base64 -d SHA256SUMS.sig > signature && openssl dgst -sha256 -verify {public} -signature signature SHA256SUMS "
    "&& sha256sum --quiet --check SHA256SUMS"
)


def make_key(path: Path, *options: str) -> str:
    subprocess.run(["openssl", "genpkey", *options, "-out", path], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", path, "-passin", "pass:x", "-pubout", "-out", f"{path}.pub"], check=True)
    return path.read_text()


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return read_release(finished_run(tmp_path / "run", "oci://registry.test/team/tuned:v1"))


def published(release: Release, folder: Path) -> Path:
    for file in (*release.files, release.manifest):
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with file.open() as content:
            target.write_bytes(content.read())
    return folder


def verified(folder: Path, public_key: Path) -> bool:
    done = subprocess.run(["sh", "-c", VERIFY.format(public=public_key)], cwd=folder, capture_output=True, check=False)
    return done.returncode == 0


def test_signature_proves_every_file_and_nothing_that_was_changed(release: Release, tmp_path: Path) -> None:
    key = make_key(tmp_path / "signing.key", *P256)
    (tmp_path / "pod").mkdir()
    folder = published(signed(release, key, tmp_path / "pod"), tmp_path / "published")
    assert verified(folder, tmp_path / "signing.key.pub")

    make_key(tmp_path / "other.key", *P256)
    assert not verified(folder, tmp_path / "other.key.pub")
    provenance = folder / "provenance.json"
    before = provenance.read_bytes()
    provenance.write_bytes(before.replace(b"v1", b"v2"))
    assert not verified(folder, tmp_path / "signing.key.pub")
    provenance.write_bytes(before)
    sums = (folder / "SHA256SUMS").read_text()
    (folder / "SHA256SUMS").write_text("".join(sums.splitlines(keepends=True)[1:]))
    assert not verified(folder, tmp_path / "signing.key.pub")


def test_equal_releases_have_equal_signatures(release: Release, tmp_path: Path) -> None:
    key = make_key(tmp_path / "signing.key", *P256)
    digests = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        digests.append(signed(release, key, tmp_path / name).files[-1].sha256)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384"), "is not a P-256 key"),
        (("-algorithm", "ED25519"), "is not a P-256 key"),
        ((*P256, "-aes256", "-pass", "pass:x"), "with an unencrypted private key"),
    ],
)
def test_other_keys_are_refused_without_a_word_of_theirs(
    options: tuple[str, ...], said: str, release: Release, tmp_path: Path
) -> None:
    key = make_key(tmp_path / "signing.key", *options)
    with pytest.raises(DestinationRefusedError, match=said) as refused:
        signed(release, key, tmp_path)
    assert refused.value.__cause__ is None
    assert "openssl genpkey" in refused.value.hint
    assert not {*key.splitlines()[1:-1]} & {*str(refused.value).split(), *refused.value.hint.split()}


def test_key_that_is_no_key_is_refused(release: Release, tmp_path: Path) -> None:
    with pytest.raises(DestinationRefusedError, match="is not a PEM file") as refused:
        signed(release, "secret words", tmp_path)
    assert "secret" not in str(refused.value).replace("signingKeySecret", "")


def test_list_that_changes_after_it_was_read_is_not_signed(release: Release, tmp_path: Path) -> None:
    key = make_key(tmp_path / "signing.key", *P256)
    changed = replace(release, manifest=replace(release.manifest, sha256="0" * 64))
    with pytest.raises(CheckpointError, match="changed while it was published"):
        signed(changed, key, tmp_path)
    assert not (tmp_path / "SHA256SUMS.sig").exists()
