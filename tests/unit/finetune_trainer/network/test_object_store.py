"""What failures of an object store mean, and how requests are made."""

import pytest
from boto3.session import Session
from botocore.exceptions import ClientError, EndpointConnectionError, IncompleteReadError, NoCredentialsError

from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.object_store import FAILURES, open_store, refusal
from finetune_trainer.network.retry import TransientError
from tests.support.memory_s3 import BUCKET, MemoryS3


def answer(status: int, code: str = "", **headers: str) -> ClientError:
    said = {"Error": {"Code": code, "Message": "the string that was signed"}}
    return ClientError({**said, "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers}}, "PutObject")


@pytest.mark.parametrize(
    "error",
    [
        answer(503, "SlowDown"),
        answer(429),
        answer(400, "RequestTimeout"),
        answer(409, "ConditionalRequestConflict"),
        EndpointConnectionError(endpoint_url="https://store.example/?signed=1"),
        IncompleteReadError(actual_bytes=1, expected_bytes=2),
    ],
)
def test_transient_failures_are_retried_and_name_no_address(error):
    with pytest.raises(TransientError) as caught:
        refusal(error)
    assert not {"signed", "store.example"} & set(str(caught.value).replace("?", " ").split())


def test_the_pause_is_the_one_that_the_store_asks_for():
    with pytest.raises(TransientError) as caught:
        refusal(answer(503, **{"retry-after": "7"}))
    assert caught.value.retry_after_seconds == 7


@pytest.mark.parametrize(
    ("error", "shown", "is_full", "lacks_credentials"),
    [
        (answer(403, "SignatureDoesNotMatch"), "HTTP status 403, SignatureDoesNotMatch", False, False),
        (answer(404, "404"), "HTTP status 404", False, False),
        (answer(400, "no <word>"), "HTTP status 400", False, False),
        (answer(413), "HTTP status 413", True, False),
        (answer(503, "InsufficientStorage"), "HTTP status 503, InsufficientStorage", True, False),
        (NoCredentialsError(), "NoCredentialsError", False, True),
    ],
)
def test_a_final_answer_has_a_short_name(error, shown, is_full, lacks_credentials):
    refused = refusal(error)
    assert (str(refused), refused.is_full, refused.lacks_credentials) == (shown, is_full, lacks_credentials)


@pytest.mark.parametrize("size", ["many", ""])
def test_a_listing_that_cannot_be_read_is_no_answer(size):
    page = f"<L><Contents><Key>k</Key><Size>{size}</Size></Contents></L>".encode()
    store = MemoryS3(before=lambda _: (200, {}, page))
    with pytest.raises(FAILURES) as caught:
        store.client().list_objects_v2(Bucket=BUCKET)
    with pytest.raises(TransientError):
        refusal(caught.value)


def test_requests_name_the_bucket_in_the_path_and_are_signed_with_their_bodys_digest():
    seen = []
    session = Session(aws_access_key_id="id", aws_secret_access_key="secret", aws_session_token="token")
    client = open_store(S3Service("https://store.example", "here"), session, connections=1)

    def send(request, **_):
        seen.append(request)
        raise EndpointConnectionError(endpoint_url="x")

    client.meta.events.register("before-send.s3", send)
    with pytest.raises(FAILURES):
        client.put_object(Bucket=BUCKET, Key="a b/ü=+~.json", Body=b"")
    [request] = seen
    assert request.url == "https://store.example/ours/a%20b/%C3%BC%3D%2B~.json"
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert request.headers["X-Amz-Content-SHA256"] in (empty, empty.encode())
    assert "/here/s3/aws4_request" in str(request.headers["Authorization"])
    assert "x-amz-security-token" in str(request.headers["Authorization"])
