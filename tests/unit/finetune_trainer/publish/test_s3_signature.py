"""Requests are signed as Amazon's documentation has it, session tokens included."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from finetune_trainer.credentials import S3Keys
from finetune_trainer.publish.s3_signature import EMPTY_SHA256, encoded_path, encoded_query, signed_headers

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


def test_a_session_token_is_sent_and_signed():
    """A store refuses temporary keys without it, and a token that is not signed could be exchanged on the way."""

    def sent(token):
        return signed_headers(
            "GET",
            "https://examplebucket.s3.amazonaws.com/test.txt",
            {},
            payload_sha256=EMPTY_SHA256,
            keys=S3Keys(EXAMPLE_KEYS.access_key_id, EXAMPLE_KEYS.secret_access_key, token),
            region="us-east-1",
            now=datetime(2013, 5, 24, tzinfo=UTC),
        )

    assert "x-amz-security-token" not in sent(None)
    assert "x-amz-security-token" not in sent(None)["authorization"]
    assert sent("first")["x-amz-security-token"] == "first"
    assert ";x-amz-security-token," in sent("first")["authorization"]
    signatures = {sent(token)["authorization"].rpartition("Signature=")[2] for token in (None, "first", "second")}
    assert len(signatures) == 3


def test_the_region_is_part_of_what_is_signed():
    url, now = "https://examplebucket.s3.amazonaws.com/test.txt", datetime(2013, 5, 24, tzinfo=UTC)
    signatures = set()
    for region in ("us-east-1", "eu-central-1"):
        sent = signed_headers("GET", url, {}, payload_sha256=EMPTY_SHA256, keys=EXAMPLE_KEYS, region=region, now=now)
        assert f"Credential=AKIAIOSFODNN7EXAMPLE/20130524/{region}/s3/aws4_request," in sent["authorization"]
        signatures.add(sent["authorization"].rpartition("Signature=")[2])
    assert len(signatures) == 2
