"""The pure parts of publishing, and what it remembers and reads."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from finetune_trainer.credentials import S3Keys
from finetune_trainer.errors import CheckpointError
from finetune_trainer.publish.model_pack import build_artifact, media_type
from finetune_trainer.publish.registry import Challenge, parse_challenges
from finetune_trainer.publish.resumable import UploadJournal, VerifyingReader, read_verified
from finetune_trainer.publish.s3 import MOST_PARTS, part_size
from finetune_trainer.publish.s3_signature import EMPTY_SHA256, encoded_path, encoded_query, signed_headers
from finetune_trainer.release.checksums import read_release
from tests.support.finished_run import finished_run

EXAMPLE_KEYS = S3Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
"""Of the examples in Amazon's documentation."""


@pytest.mark.parametrize(
    ("path", "headers", "signature"),
    [
        ("/test.txt", {"Range": "bytes=0-9"}, "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"),
        ("?lifecycle=", {}, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("?max-keys=2&prefix=J", {}, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)
def test_signatures_are_those_of_amazons_examples(path, headers, signature):
    """https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html"""
    url = f"https://examplebucket.s3.amazonaws.com{path}"
    now = datetime(2013, 5, 24, tzinfo=UTC)
    sent = signed_headers("GET", url, headers, payload_sha256=EMPTY_SHA256, keys=EXAMPLE_KEYS, region="us-east-1", now=now)
    assert sent["authorization"].endswith(f"Signature={signature}")


def test_keys_and_queries_are_escaped_as_they_are_signed():
    assert encoded_path("a b/ü=+~.json") == "a%20b/%C3%BC%3D%2B~.json"
    assert encoded_query({"uploadId": "a/b=", "partNumber": "1"}) == "partNumber=1&uploadId=a%2Fb%3D"


@pytest.mark.parametrize("size", [1, 16 << 20, 5 * 10**9, 160 * 10**9, 168 * 10**9, 5 * 10**12])
def test_no_file_has_more_parts_than_an_object_may_have(size):
    part = part_size(size, 16 << 20)
    assert part >= 16 << 20
    assert -(-size // part) <= MOST_PARTS


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("Basic", [Challenge("basic", {})]),
        ('Basic realm="x, Bearer y"', [Challenge("basic", {"realm": "x, Bearer y"})]),
        (
            'Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a/b:pull,push"',
            [
                Challenge(
                    "bearer",
                    {"realm": "https://auth.example/token", "service": "registry.example", "scope": "repository:a/b:pull,push"},
                )
            ],
        ),
        (
            'Negotiate, bearer realm="r", Basic realm="b"',
            [Challenge("bearer", {"realm": "r"}), Challenge("basic", {"realm": "b"})],
        ),
        ("", []),
    ],
)
def test_ways_into_a_registry(header, found):
    assert parse_challenges(header) == found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model-00001-of-00002.safetensors", "weight.v1.raw"),
        ("adapter/adapter_model.safetensors", "weight.v1.raw"),
        ("config.json", "weight.config.v1.raw"),
        ("merges.txt", "weight.config.v1.raw"),
        ("chat_template.jinja", "weight.config.v1.raw"),
        ("README.md", "doc.v1.raw"),
        ("LICENSE.txt", "doc.v1.raw"),
        ("SHA256SUMS", "doc.v1.raw"),
        ("provenance.json", "doc.v1.raw"),
        ("modeling.py", "code.v1.raw"),
    ],
)
def test_layers_have_the_media_types_of_the_specification(name, kind):
    assert media_type(name) == f"application/vnd.cncf.model.{kind}"


def test_equal_releases_are_equal_artifacts(tmp_path):
    def artifact(name, **changes):
        return build_artifact(read_release(finished_run(tmp_path / name, "oci://a.example/b:v1", **changes)))

    first = artifact("one")
    assert artifact("two") == first
    assert artifact("three", seed="other").digest != first.digest
    manifest, config = json.loads(first.manifest), json.loads(first.config)
    assert (manifest["schemaVersion"], manifest["mediaType"]) == (2, "application/vnd.oci.image.manifest.v1+json")
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    assert [layer["digest"] for layer in manifest["layers"]] == config["modelfs"]["diffIds"]
    assert manifest["layers"][-1]["annotations"] == {"org.cncf.model.filepath": "SHA256SUMS"}
    assert manifest["annotations"]["dev.finetune.job"] == "team/tuned"


def test_the_journal_survives_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = UploadJournal(path)
    journal.remember("a", "1")
    journal.remember("a", "2")
    with path.open("ab") as file:
        file.write(b'{"name": "b", "val')
    journal.remember("c", "3")
    journal.remember("d", "4")
    journal.remember("d", "")
    again = UploadJournal(path)
    assert [again.recall(name) for name in "abcd"] == ["2", None, "3", None]
    assert path.stat().st_mode & 0o777 == 0o600
    again.forget()
    assert not path.exists()


def test_a_file_is_sent_only_as_it_was_released(tmp_path):
    [*_, file] = read_release(finished_run(tmp_path, "s3://bucket/x")).files
    content = file.local.read_bytes()
    assert read_verified(file) == content
    with VerifyingReader(file) as reader:
        reader.skip_to(3)
        assert reader.read(len(content)) == content[3:]
        reader.prove()
    for other, why in ((content[:-1], "bytes"), (content + b"x", "bytes"), (content[:-1] + b"?", "sha256")):
        file.local.write_bytes(other)
        with pytest.raises(CheckpointError, match=why):
            read_verified(file)
