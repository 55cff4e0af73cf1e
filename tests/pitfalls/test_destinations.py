"""Where results go: what writing them does to inputs, to other models and to credentials, where nothing refuses the
destination."""

import base64
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.plan.digest import plan_sha256
from finetune_job.plan.run_plan import RunPlan
from finetune_operator.children.credentials import fetch_credentials, publish_credentials
from finetune_trainer.context import RunContext
from finetune_trainer.credentials import Credentials
from finetune_trainer.data.read import record_files
from finetune_trainer.errors import DestinationRefusedError
from finetune_trainer.inspection.model_files import inspect_model_files
from finetune_trainer.network.retry import RetryPolicy
from finetune_trainer.publish import http as publish_http
from finetune_trainer.publish import s3 as publish_s3
from finetune_trainer.release.write import write_release_files
from finetune_trainer.roles import fetch as fetch_role
from finetune_trainer.roles.fetch import fetch
from finetune_trainer.roles.publish import publish
from tests.pitfalls.manifests import plans
from tests.support.hub import Hub, running_hub
from tests.support.memory_s3 import MemoryS3
from tests.unit.finetune_job.rules.manifests import judged, manifest
from tests.unit.finetune_trainer.release.example import IMAGE, Example, example

QUICK = RetryPolicy(attempts=2, first_seconds=0.01, longest_seconds=0.02)
DESTINATION = "output.destination"
TOKEN = "hf_secret_of_the_test"
NOBODY = Credentials(Path("/no/such/directory"))


def finished(claims: Path, changes: dict[str, Any], plan: RunPlan, **profile: Any) -> Example:
    """A run of this plan whose results are complete: of the refused job as if nothing had refused it, or of the fixed one."""
    address = plan.publish.destination if plan.publish else f"pvc://{plan.output.claim}/{plan.output.path}"
    made = example(claims, {**changes, DESTINATION: address}, **profile)
    write_release_files(made.context.output, made.results())
    return made


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_results_replace_the_models_own_files(tmp_path: Path):
    changes = {DESTINATION: "pvc://models/base"}
    found = []
    for name, plan in zip(("wrong", "right"), plans("output-inside-input", changes), strict=True):
        before = example(tmp_path / name, changes).context.base_model
        (before / "SHA256SUMS").write_text("of the model\n")
        kept = content(before)
        made = finished(tmp_path / name, changes, plan)
        after = content(made.context.base_model)
        found.append({path for path in kept if after[path] != kept[path]})
    assert found == [{"README.md", "SHA256SUMS"}, set()]


@pytest.mark.parametrize("source", ["pvc://data/train", "pvc://data"])
def test_the_next_run_would_read_results_as_records(tmp_path: Path, source: str):
    changes = {"data.source": source, DESTINATION: "pvc://data/train/tuned"}
    records = []
    for name, plan in zip(("wrong", "right"), plans("output-inside-input", changes), strict=True):
        (tmp_path / name / "data/train").mkdir(parents=True)
        (tmp_path / name / "data/train/a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
        made = finished(tmp_path / name, changes, plan).context
        records.append([path.name for path in record_files(made.path(made.plan.data.train[0].location))])
    assert records[1] == ["a.jsonl"]
    assert {"a.jsonl", "config.json", "provenance.json"} <= set(records[0])


def test_results_below_a_model_change_nothing_of_it(tmp_path: Path):
    """So no rule speaks of it: a model consists of what lies at the top of its directory or prefix."""
    changes = {DESTINATION: "pvc://models/base/tuned"}
    assert judged(manifest(changes)) == ()
    made = example(tmp_path, changes)
    before = inspect_model_files(made.context.base_model, "model")
    write_release_files(made.context.output, made.results())
    assert inspect_model_files(made.context.base_model, "model") == before
    assert {"README.md", "SHA256SUMS"} <= set(content(made.context.base_model / "tuned"))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryS3:
    """The bucket `ours`, for the publish role and the fetch role."""
    made = MemoryS3()
    for module in (publish_s3, fetch_role):
        monkeypatch.setattr(module, "open_store", lambda *_, **_more: made.client())
    monkeypatch.setattr(Credentials, "s3_session", lambda _: None)
    return made


BUCKET_MODEL = {"base/config.json": b"{}", "base/model.safetensors": b"weights", "base/README.md": b"# Base\n"}
BUCKET_DATA = {"set/a.jsonl": b'{"prompt": "a", "completion": "b"}\n'}


@pytest.mark.parametrize(
    ("source", "destination"),
    [({"model.source": "s3://ours/base"}, "s3://ours/base"), ({"data.source": "s3://ours/set/a.jsonl"}, "s3://ours")],
)
def test_a_prefix_that_holds_inputs_takes_no_results(store: MemoryS3, tmp_path: Path, source: dict[str, Any], destination: str):
    store.objects = BUCKET_MODEL | BUCKET_DATA
    changes = {**source, DESTINATION: destination}
    wrong, right = plans("output-overlaps-bucket-input", changes)
    with pytest.raises(DestinationRefusedError, match="holds what does not belong to this release"):
        publish(finished(tmp_path / "wrong", changes, wrong).context, NOBODY, QUICK)
    assert store.objects == BUCKET_MODEL | BUCKET_DATA
    made = finished(tmp_path / "right", changes, right).context
    publish(made, NOBODY, QUICK)
    assert len(store.objects) > len(BUCKET_MODEL | BUCKET_DATA)


def test_the_next_run_would_fetch_results_as_records(store: MemoryS3, tmp_path: Path):
    changes = {"data.source": "s3://ours/set", DESTINATION: "s3://ours/set/tuned"}
    records = []
    for name, plan in zip(("wrong", "right"), plans("output-overlaps-bucket-input", changes), strict=True):
        store.objects = dict(BUCKET_DATA)
        made = finished(tmp_path / name, changes, plan).context
        publish(made, NOBODY, QUICK)
        fetch(made, NOBODY, QUICK)
        records.append(set(content(made.path(made.plan.data.train[0].location))))
    assert records[1] == {"a.jsonl"}
    assert {"a.jsonl", "tuned/merged/config.json", "tuned/provenance.json"} <= records[0]


@pytest.mark.parametrize("prefix", ["s3://ours/base", "s3://ours"])
def test_results_below_a_models_prefix_are_no_part_of_it(store: MemoryS3, tmp_path: Path, prefix: str):
    below = prefix.removeprefix("s3://ours").lstrip("/")
    files = {name.removeprefix("base/"): value for name, value in BUCKET_MODEL.items()}
    store.objects = {f"{below}/{name}".lstrip("/"): value for name, value in files.items()}
    changes = {"model.source": prefix, DESTINATION: f"{prefix}/tuned"}
    assert judged(manifest(changes)) == ()
    made = example(tmp_path, changes)
    write_release_files(made.context.output, made.results())
    publish(made.context, NOBODY, QUICK)
    fetch(made.context, NOBODY, QUICK)
    assert content(made.context.base_model) == files


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with running_hub() as running:
        running.writes.tokens = {TOKEN}
        yield running


def mounted(sources: list[dict[str, Any]], directory: Path, value: str) -> Credentials:
    """What the kubelet makes of the pod's credentials where each key of each Secret holds this value."""
    directory.mkdir()
    for source in sources:
        for item in source["secret"]["items"]:
            (directory / item["path"]).parent.mkdir(parents=True, exist_ok=True)
            (directory / item["path"]).write_text(value)
    return Credentials(directory)


def at(made: Example, hub: Hub) -> Example:
    """The same run, for which the hub of the test is the one that no profile names."""
    assert made.context.plan.publish is not None
    publishing = made.context.plan.publish.model_copy(update={"hub_endpoint": hub.address})
    context = dataclasses.replace(made.context, plan=made.context.plan.model_copy(update={"publish": publishing}))
    return Example(context)


def test_the_hub_takes_nothing_without_a_token(hub: Hub, tmp_path: Path):
    changes = {DESTINATION: "hf://team/tuned"}
    found = plans("hub-destination-without-token", changes, FineTuneProfileSpec(trainer_image=IMAGE))
    for name, plan in zip(("wrong", "right"), found, strict=True):
        assert plan.publish is not None
        made = at(finished(tmp_path / name, changes, plan), hub)
        credentials = mounted(publish_credentials(plan.publish), tmp_path / f"{name}-credentials", TOKEN)
        if name == "wrong":
            with pytest.raises(DestinationRefusedError, match="HTTP status 401"):
                publish(made.context, credentials, QUICK)
            assert hub.repositories == {}
        else:
            publish(made.context, credentials, QUICK)
            assert "SHA256SUMS" in hub.repositories["models", "team/tuned"].files


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_model_is_not_replaced_by_what_is_made_from_it(hub: Hub, tmp_path: Path, is_ours: bool):
    """Another's model is never replaced, which shows after the training; a result of this operator is."""
    settings = {"hubEndpoint": hub.address}
    profile = FineTuneProfileSpec.model_validate({"trainerImage": IMAGE, "fetch": settings, "publish": settings})
    writer = mounted([{"secret": {"items": [{"path": "hub/token"}]}}], tmp_path / "credentials", TOKEN)
    if is_ours:
        first = example(tmp_path / "first", {DESTINATION: "hf://Team/Model"}, name="first", publish=settings)
        write_release_files(first.context.output, first.results())
        publish(first.context, writer, QUICK)
    else:
        hub.add("Team/Model", {"config.json": b"{}", "model.safetensors": b"weights"})
    before = hub.repositories["models", "Team/Model"]
    files, commit = before.files, before.commit
    changes = {"model.source": "hf://Team/Model", "model.revision": commit, DESTINATION: "hf://Team/Model"}
    wrong, right = plans("output-replaces-model", changes, profile)
    publish(finished(tmp_path / "right", changes, right, fetch=settings, publish=settings).context, writer, QUICK)
    assert hub.repositories["models", "Team/Model"].files == files
    assert "SHA256SUMS" in hub.repositories["models", "Team/Model-tuned"].files
    made = finished(tmp_path / "wrong", changes, wrong, fetch=settings, publish=settings).context
    if is_ours:
        publish(made, writer, QUICK)
        assert hub.repositories["models", "Team/Model"].files != files
    else:
        with pytest.raises(DestinationRefusedError, match="which no run of this operator put there"):
            publish(made, writer, QUICK)
        assert hub.repositories["models", "Team/Model"].files == files


def test_a_hubs_token_can_be_read_on_the_way(hub: Hub, tmp_path: Path):
    changes = {DESTINATION: "hf://team/tuned", "output.secretRef": {"name": "writer"}}
    settings = {"hubEndpoint": hub.address}
    profile = FineTuneProfileSpec.model_validate({"trainerImage": IMAGE, "publish": settings})
    wrong, right = plans("credentials-without-tls", changes, profile)
    assert wrong.publish is not None
    credentials = mounted(publish_credentials(wrong.publish), tmp_path / "credentials", TOKEN)
    publish(finished(tmp_path / "wrong", changes, wrong, publish=settings).context, credentials, QUICK)
    assert hub.address.startswith("http://")
    assert f"Bearer {TOKEN}" in {request.headers["Authorization"] for request in hub.requests}
    assert right.publish is None


def test_the_token_that_reads_can_be_read_on_the_way(hub: Hub, tmp_path: Path):
    commit = hub.add("team/base", {"config.json": b"{}", "model.safetensors": b"weights"})
    changes = {"model.source": "hf://team/base", "model.revision": commit, "fetch.hubTokenSecretRef": {"name": "reader"}}
    profile = FineTuneProfileSpec.model_validate({"trainerImage": IMAGE, "fetch": {"hubEndpoint": hub.address}})
    shown = []
    for name, plan in zip(("wrong", "right"), plans("credentials-without-tls", changes, profile), strict=True):
        assert plan.fetch is not None
        hub.requests.clear()
        context = RunContext(plan, plan_sha256(plan), tmp_path / name, 0)
        context.workspace.root.mkdir(parents=True)
        fetch(context, mounted(fetch_credentials(plan.fetch), tmp_path / f"{name}-credentials", TOKEN), QUICK)
        shown.append({request.headers["Authorization"] for request in hub.requests})
    assert shown == [{f"Bearer {TOKEN}"}, {None}]


def test_a_registrys_password_can_be_read_on_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen: list[httpx2.Request] = []

    def registry(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(401, headers={"WWW-Authenticate": "Basic"})

    client = httpx2.Client
    transport = httpx2.MockTransport(registry)
    monkeypatch.setattr(publish_http.httpx2, "Client", lambda **options: client(transport=transport, **options))
    changes = {DESTINATION: "oci://registry.test:5000/team/tuned", "output.secretRef": {"name": "writer"}}
    settings = {"plainHttpRegistries": ["registry.test:5000"]}
    profile = FineTuneProfileSpec.model_validate({"trainerImage": IMAGE, "publish": settings})
    wrong, right = plans("credentials-without-tls", changes, profile)
    assert wrong.publish is not None
    login = json.dumps({"auths": {"registry.test:5000": {"username": "writer", "password": "pass-word"}}})
    credentials = mounted(publish_credentials(wrong.publish), tmp_path / "credentials", login)
    with pytest.raises(DestinationRefusedError):
        publish(finished(tmp_path / "wrong", changes, wrong, publish=settings).context, credentials, QUICK)
    (shown,) = [request for request in seen if "Authorization" in request.headers][:1]
    assert shown.url.scheme == "http"
    assert base64.b64decode(shown.headers["Authorization"].removeprefix("Basic ")) == b"writer:pass-word"
    assert right.publish is None
