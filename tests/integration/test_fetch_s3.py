"""The fetch role against a real S3 server."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from finetune_job.api.base import BucketPath
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FetchSettings, FineTuneProfileSpec
from finetune_job.failures import FailureClass
from finetune_job.plan.digest import plan_sha256
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity
from finetune_trainer.context import RunContext
from finetune_trainer.credentials import Credentials
from finetune_trainer.errors import DataError, TrainerError
from finetune_trainer.fetch.bucket import BucketPrefix
from finetune_trainer.network.retry import RetryPolicy
from finetune_trainer.roles.fetch import fetch
from tests.unit.finetune_job.rules.manifests import manifest
from tools.cluster.binaries import ensure_binaries
from tools.s3 import REGION, SECRET_KEY, S3Server, running_s3

QUICK = RetryPolicy(attempts=2, first_seconds=0.01)
LOCAL = Credentials(Path("/no/such/directory"))
WEIGHTS = hashlib.shake_256(b"weights").digest(40_000_000)
"""Several ranges long."""
OBJECTS = {
    "base/config.json": b"{}",
    "base/model.safetensors": WEIGHTS,
    "base/pytorch_model.bin": b"p",
    "base-evil/config.json": b"evil",
    "sets/train.jsonl": b"{}\n",
}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_s3(ensure_binaries().versitygw, tmp_path_factory.mktemp("s3")) as server:
        server.upload("inputs", OBJECTS)
        yield server


@pytest.fixture
def signed(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in (s3.environment() | {"NO_PROXY": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)
    return s3


def context_of(s3: S3Server, directory: Path, **changes: Any) -> RunContext:
    settings = FetchSettings(s3_endpoint=s3.address, s3_region=REGION)
    sources = {"model.source": "s3://inputs/base", "data.source": "s3://inputs/sets/train.jsonl"}
    spec = FineTuneJobSpec.model_validate(manifest(sources | changes))
    profile = FineTuneProfileSpec(trainer_image="trainer@sha256:0", fetch=settings)
    plan = resolve(JobIdentity(namespace="team", name="tuned", uid="0123456789"), spec, profile)
    context = RunContext(plan, plan_sha256(plan), directory / "claims", 0)
    context.workspace.root.mkdir(parents=True)
    return context


def test_model_and_data_arrive_byte_for_byte(signed: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = context_of(signed, tmp_path)
    caplog.set_level("INFO")
    report = fetch(context, LOCAL, QUICK)
    assert {path.name: path.read_bytes() for path in context.base_model.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": WEIGHTS,
    }
    train = context.path(context.plan.data.train[0].location)
    assert {path.name: path.read_bytes() for path in train.iterdir()} == {"train.jsonl": b"{}\n"}
    assert int(report.facts["transferred_bytes"]) == len(WEIGHTS) + len(b"{}") + len(b"{}\n")
    assert fetch(context, LOCAL, QUICK).facts["transferred_bytes"] == "0"
    kept = [path.read_bytes() for path in context.workspace.sources.glob("*.json")]
    assert not any(SECRET_KEY.encode() in text for text in [*kept, caplog.text.encode(), report.model_dump_json().encode()])


@pytest.mark.parametrize("wrong", [{"AWS_SECRET_ACCESS_KEY": "wrong"}, {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}])
def test_refused_keys_name_the_field(
    signed: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str]
) -> None:
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainerError) as caught:
        fetch(context_of(signed, tmp_path), LOCAL, QUICK)
    assert caught.value.failure is FailureClass.USER_MODEL
    assert "spec.model.source" in str(caught.value)
    assert "spec.fetch.s3SecretRef" in caught.value.hint


@pytest.mark.parametrize("source", ["s3://inputs/sets/missing.jsonl", "s3://no-such-bucket/train.jsonl"])
def test_what_is_not_there_is_named(signed: S3Server, tmp_path: Path, source: str) -> None:
    with pytest.raises(TrainerError) as caught:
        fetch(context_of(signed, tmp_path, **{"data.source": source}), LOCAL, QUICK)
    assert caught.value.failure is FailureClass.USER_DATA
    assert source in str(caught.value)


def test_a_listing_of_more_than_one_page_is_whole(signed: S3Server) -> None:
    number = 1_100
    signed.make_bucket("many")
    client = signed.client()
    with ThreadPoolExecutor(8) as executor:
        list(executor.map(lambda each: client.put_object(Bucket="many", Key=f"part/{each:05}.jsonl", Body=b"x"), range(number)))
    files = BucketPrefix(client, BucketPath(bucket="many", prefix="part"), "spec.data.source", DataError, signed=True).files()
    assert sorted(file.path for file in files) == [f"{each:05}.jsonl" for each in range(number)]
