"""Servers whose certificate an authority of the company signed: the clients of object stores and destinations say whom to trust.

How the fetch role trusts it or does not: fetch/test_role_as_a_process.py.
"""

import threading
from collections.abc import Callable, Iterator

import pytest

from finetune_job.api.base import BucketPath
from finetune_trainer.errors import DataError
from finetune_trainer.fetch.bucket import BucketPrefix
from finetune_trainer.network.certificates import untrusted_certificate
from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.object_store import open_store
from finetune_trainer.network.retry import RetryPolicy, TransientError, pause_seconds
from finetune_trainer.publish.http import HttpClient
from tests.support.hub import running_hub
from tools.cluster.certificates import CertificateAuthority


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    authority = CertificateAuthority(tmp_path_factory.mktemp("authority") / "files")
    with running_hub(authority.server_context("127.0.0.1")) as hub:
        yield hub.address


def list_bucket(address: str) -> object:
    store = open_store(S3Service(address, "eu-1"), None, connections=1)
    return BucketPrefix(store, BucketPath(bucket="inputs", prefix="a"), "spec.data.source", DataError, signed=False).files()


def send(address: str) -> object:
    return HttpClient(threading.Event()).send("GET", f"{address}/v2/", {})


@pytest.mark.parametrize("ask", [list_bucket, send])
def test_a_certificate_that_is_not_trusted_ends_the_role_at_once_with_the_fix(
    ask: Callable[[str], object], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(TransientError, match=r"is not trusted \(.+\): .*spec\.caBundle of the FineTuneProfile") as refused:
        ask(address)
    assert pause_seconds(RetryPolicy(), 1, refused.value.retry_after_seconds, 0.0) is None


def test_other_failures_are_not_about_certificates() -> None:
    assert untrusted_certificate(ConnectionRefusedError("no one listens")) is None
