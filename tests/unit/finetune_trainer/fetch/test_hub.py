"""The fetch role against a hub, with the real client: what arrives, what is asked for, and what happens when something fails."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from finetune_job.failures import FailureClass, Outcome
from finetune_trainer.context import RunContext
from finetune_trainer.credentials import Credentials
from finetune_trainer.errors import TrainerError
from finetune_trainer.fetch import hub as hub_module
from finetune_trainer.fetch.staging import read_manifest
from finetune_trainer.network.environment import go_online
from finetune_trainer.network.retry import RetryPolicy
from finetune_trainer.roles.fetch import fetch
from tests.support.hub import SIGNATURE, Fault
from tests.unit.finetune_trainer.fetch.conftest import LOCAL, QUICK

WEIGHTS = bytes(range(256)) * 64
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "tokenizer.json": b"{}",
    "LICENSE": b"terms",
    "additional_chat_templates/rag.jinja": b"{{ messages }}",
}
LEFT_OUT = {
    "pytorch_model.bin": b"pickle" * 200,
    "consolidated.safetensors": WEIGHTS * 2,
    "modeling.py": b"import os",
    ".gitattributes": b"*",
    "original/params.json": b"{}",
    "onnx/model.onnx": b"o" * 2000,
    "model.gguf": b"g" * 2000,
}


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def failure(context: RunContext, patience: RetryPolicy = QUICK) -> TrainerError:
    with pytest.raises(TrainerError) as caught:
        fetch(context, LOCAL, patience)
    return caught.value


def leftovers(context: RunContext) -> list[str]:
    return sorted(path.name for path in context.workspace.sources.iterdir() if ".tmp-" in path.name)


def test_a_model_arrives_whole_and_without_what_can_run_code(model_of, hub):
    context = model_of(MODEL | LEFT_OUT)
    report = fetch(context, LOCAL, QUICK)
    assert content(context.base_model) == MODEL
    assert not any(path.is_symlink() for path in context.base_model.rglob("*"))
    assert report.outcome is Outcome.SUCCEEDED
    assert report.facts["files"] == str(len(MODEL))
    size = sum(map(len, MODEL.values()))
    assert report.facts["bytes"] == report.facts["transferred_bytes"] == str(size)
    assert report.facts["model_revision"] == context.plan.model.revision
    assert set(hub.downloads()) == set(MODEL)
    assert leftovers(context) == []
    manifest = read_manifest(context.base_model)
    assert (manifest.source, manifest.revision) == ("hf://org/model", context.plan.model.revision)


def test_code_comes_along_where_the_plan_allows_it(model_of):
    context = model_of(MODEL | LEFT_OUT, **{"model.allowRemoteCode": True})
    fetch(context, LOCAL, QUICK)
    assert content(context.base_model) == MODEL | {"modeling.py": LEFT_OUT["modeling.py"]}


def test_a_second_run_transfers_nothing_and_asks_nothing(model_of, hub):
    context = model_of(MODEL)
    fetch(context, LOCAL, QUICK)
    before = len(hub.requests)
    report = fetch(context, LOCAL, QUICK)
    assert len(hub.requests) == before
    assert report.facts["transferred_bytes"] == "0"
    assert report.facts["files"] == str(len(MODEL))


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: (model / "config.json").write_bytes(b'{"model_type": "lIama"}'),
        lambda model: (model / "tokenizer.json").unlink(),
        lambda model: (model / "extra.json").write_bytes(b"{}"),
        lambda model: (model.parent / "model.fetched.json").write_bytes(b"{"),
        lambda model: (
            (model / "config.json").rename(model.parent / "elsewhere"),
            (model / "config.json").symlink_to(model.parent / "elsewhere"),
        ),
    ],
    ids=["changed", "missing", "foreign", "manifest", "link"],
)
def test_changed_files_are_fetched_again(model_of, damage):
    context = model_of(MODEL)
    fetch(context, LOCAL, QUICK)
    damage(context.base_model)
    fetch(context, LOCAL, QUICK)
    assert content(context.base_model) == MODEL
    assert not (context.base_model / "config.json").is_symlink()


def test_data_is_a_named_file_or_directory_and_nothing_else(context_of, hub):
    files = {
        "train/a.jsonl": b"a\n" * 900,
        "train/b.parquet": b"b",
        "train/notes.md": b"n",
        "other.jsonl": b"o",
        "held-out.csv": b"h",
    }
    commit = hub.add("org/set", files, kind="datasets")
    context = context_of(
        {
            "data.source": "hf://datasets/org/set/train",
            "data.revision": commit,
            "data.validation": {"source": "hf://datasets/org/set/held-out.csv", "revision": commit},
        }
    )
    fetch(context, LOCAL, QUICK)
    assert content(context.path(context.plan.data.train[0].location)) == {"a.jsonl": files["train/a.jsonl"], "b.parquet": b"b"}
    assert content(context.path(context.plan.data.validation.location)) == {"held-out.csv": b"h"}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(2, status=503),
        Fault(1, status=429, headers={"Retry-After": "0"}),
        Fault(2, cut_after=5000),
        Fault(1, cut_after=0),
        Fault(1, corrupt=True),
    ],
    ids=["503", "429", "cut", "cut at once", "wrong bytes"],
)
def test_what_passes_is_survived(model_of, hub, fault):
    context = model_of(MODEL)
    hub.fail("model-00001-of-00002.safetensors", fault)
    fetch(context, LOCAL, QUICK)
    assert fault.times == 0
    assert content(context.base_model) == MODEL


def test_an_interrupted_transfer_resumes_where_it_stopped(model_of, hub):
    context = model_of(MODEL)
    hub.fail("model-00001-of-00002.safetensors?Signature", Fault(1, cut_after=5000))
    fetch(context, LOCAL, QUICK)
    assert hub.sent["model-00001-of-00002.safetensors"] == len(WEIGHTS)
    ranges = [request.headers["Range"] for request in hub.requests if request.store and request.headers["Range"]]
    assert ranges == ["bytes=5000-"]


def test_a_server_that_knows_no_ranges_is_read_from_the_start(model_of, hub):
    context = model_of(MODEL)
    hub.fail("model-00001-of-00002.safetensors?Signature", Fault(1, cut_after=5000))
    hub.fail("model-00001-of-00002.safetensors?Signature", Fault(1, ignore_range=True))
    fetch(context, LOCAL, QUICK)
    assert content(context.base_model) == MODEL
    assert hub.sent["model-00001-of-00002.safetensors"] == 5000 + len(WEIGHTS)


def test_a_listing_that_fails_is_asked_for_again(model_of, hub):
    context = model_of(MODEL)
    hub.fail("/revision/", Fault(1, status=502))
    hub.fail("/tree/", Fault(1, status=429))
    fetch(context, LOCAL, QUICK)
    assert content(context.base_model) == MODEL


@pytest.mark.parametrize(
    ("part", "fault", "kind", "words"),
    [
        ("model-00001-of", Fault(100, status=503), FailureClass.SOURCE_UNAVAILABLE, ["model-00001-of-00002.safetensors", "503"]),
        ("model-00001-of-00002.safetensors?Signature", Fault(100, corrupt=True), FailureClass.SOURCE_UNAVAILABLE, ["sha256"]),
        ("config.json", Fault(100, corrupt=True), FailureClass.SOURCE_UNAVAILABLE, ["git-blob"]),
        (
            "/resolve/",
            Fault(100, status=403, headers={"X-Error-Code": "GatedRepo"}),
            FailureClass.USER_MODEL,
            ["spec.fetch.hubTokenSecretRef", "terms"],
        ),
    ],
    ids=["503", "wrong bytes", "wrong bytes of a small file", "gated"],
)
def test_lasting_failures_end_the_fetch(model_of, hub, part, fault, kind, words):
    context = model_of(MODEL)
    hub.fail(part, fault)
    error = failure(context)
    assert error.failure is kind
    for word in words:
        assert word in f"{error} {error.hint}"
    assert not context.base_model.exists()


@pytest.mark.parametrize(
    "headers",
    [{"Retry-After": "86400"}, {"Retry-After": "Fri, 31 Dec 2199 23:59:59 GMT"}, {"RateLimit": '"resolvers";r=0;t=86400'}],
    ids=["seconds", "date", "rate limit"],
)
def test_the_fetch_ends_if_a_server_asks_for_too_long_a_pause(model_of, hub, headers):
    context = model_of(MODEL)
    fault = Fault(100, status=429, headers=headers)
    hub.fail("config.json", fault)
    assert failure(context).failure is FailureClass.SOURCE_UNAVAILABLE
    assert fault.times == 99


def test_a_server_that_falls_silent_is_asked_again(model_of, hub, monkeypatch):
    monkeypatch.setattr(hub_module, "SILENCE_SECONDS", 0.5)
    context, released = model_of(MODEL), threading.Event()
    hub.fail("model-00001-of-00002.safetensors?Signature", Fault(1, before=lambda: released.wait(60), cut_after=0))
    try:
        fetch(context, LOCAL, QUICK)
    finally:
        released.set()
    assert content(context.base_model) == MODEL


@pytest.mark.parametrize(
    ("file", "path", "revision", "words"),
    [
        ("train.xlsx", "/train.xlsx", None, ["train.xlsx", ".parquet"]),
        ("a.jsonl", "", "0" * 40, ["spec.data.source", "org/set", "0" * 40, "404"]),
        ("a.jsonl", "/b.jsonl", None, ["b.jsonl"]),
    ],
    ids=["no known kind", "no such commit", "no such path"],
)
def test_data_that_cannot_be_fetched_is_named(context_of, hub, file, path, revision, words):
    commit = hub.add("org/set", {file: b"a"}, kind="datasets")
    error = failure(context_of({"data.source": f"hf://datasets/org/set{path}", "data.revision": revision or commit}))
    assert error.failure is FailureClass.USER_DATA
    for word in words:
        assert word in f"{error} {error.hint}"


def test_an_interrupted_fetch_keeps_complete_files(model_of, hub):
    context = model_of(MODEL)
    hub.fail("model-00002-of", Fault(4, status=503))
    assert failure(context).failure is FailureClass.SOURCE_UNAVAILABLE
    staging = context.workspace.sources / "model.tmp-fetch"
    whole = {line["path"] for line in map(json.loads, filter(None, (staging / "complete.jsonl").read_text().splitlines()))}
    assert "model-00001-of-00002.safetensors" in whole
    hub.sent.clear()
    (staging / "files/foreign.json").write_bytes(b"{}")
    (staging / "partial/foreign").write_bytes(b"{}")
    fetch(context, LOCAL, QUICK)
    assert content(context.base_model) == MODEL
    assert set(hub.sent) == set(MODEL) - whole
    assert leftovers(context) == []


def test_a_complete_file_that_was_changed_since_is_fetched_again(model_of, hub):
    context = model_of(MODEL)
    hub.fail("model-00002-of", Fault(4, status=503))
    failure(context)
    held = context.workspace.sources / "model.tmp-fetch/files/model-00001-of-00002.safetensors"
    held.write_bytes(WEIGHTS[:-1] + b"?")
    fetch(context, LOCAL, QUICK)
    assert content(context.base_model) == MODEL


@pytest.mark.parametrize(
    ("token", "words"), [(None, ["401", "spec.fetch.hubTokenSecretRef", "HF_TOKEN"]), ("hf_wrong", ["403", "may not read"])]
)
def test_refused_access_names_the_field(model_of, monkeypatch, token, words):
    context = model_of(MODEL, token="hf_right")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    error = failure(context)
    assert error.failure is FailureClass.USER_MODEL
    for word in ["spec.model.source", "org/model", *words]:
        assert word in f"{error} {error.hint}"


def test_another_commit_than_the_one_asked_for_is_refused(model_of, hub):
    context = model_of(MODEL)
    hub.repositories["models", "org/model"].announced_commit = "1" * 40
    error = failure(context)
    assert error.failure is FailureClass.SOURCE_UNAVAILABLE
    assert "1" * 40 in str(error)


@pytest.mark.parametrize("name", ["../../evil.json", "/etc/evil.json", "a/../../evil.json", "con\ttrol.json", "a//b.json"])
def test_a_name_that_leaves_the_target_is_refused(context_of, hub, name):
    commit = hub.add("org/set", {"a.jsonl": b"a", name: b"{}"}, kind="datasets")
    context = context_of({"data.source": "hf://datasets/org/set", "data.revision": commit})
    error = failure(context)
    assert error.failure is FailureClass.USER_DATA
    assert repr(name) in str(error)
    assert hub.downloads() == []


def test_links_in_leftovers_are_not_followed(model_of, tmp_path):
    context = model_of(MODEL)
    outside = tmp_path / "outside"
    outside.mkdir()
    files = context.workspace.sources / "model.tmp-fetch/files"
    files.mkdir(parents=True)
    (files / "additional_chat_templates").symlink_to(outside)
    (files / "config.json").symlink_to(outside / "config.json")
    fetch(context, LOCAL, QUICK)
    assert content(context.base_model) == MODEL
    assert list(outside.iterdir()) == []


def test_weights_in_pickles_only_are_refused(model_of):
    error = failure(model_of({"config.json": b"{}", "pytorch_model.bin": b"p" * 1000}))
    assert error.failure is FailureClass.USER_MODEL
    assert "pytorch_model.bin" in str(error)
    assert "safetensors" in str(error)


def test_room_is_checked_before_anything_is_copied(model_of, hub):
    context = model_of(MODEL)
    size = sum(map(len, MODEL.values()))
    with pytest.raises(TrainerError) as caught:
        fetch(context, LOCAL, QUICK, free_bytes=lambda _: size - 1)
    assert caught.value.failure is FailureClass.DISK_FULL
    assert str(size) in str(caught.value)
    assert str(size - 1) in str(caught.value)
    assert hub.downloads() == []
    assert fetch(context, LOCAL, QUICK, free_bytes=lambda _: size).outcome is Outcome.SUCCEEDED


def test_the_token_goes_to_the_hub_and_nowhere_else(model_of, hub, monkeypatch, caplog):
    token = "hf_AbCdEfGhIjKlMnOp"
    context = model_of(MODEL, token=token)
    monkeypatch.setenv("HF_TOKEN", token)
    go_online()
    caplog.set_level(logging.INFO)
    hub.fail("?Signature", Fault(2, status=503))
    hub.fail("?Signature", Fault(1, status=403))
    report = fetch(context, LOCAL, QUICK)
    assert {request.headers["Authorization"] for request in hub.requests if not request.store} == {f"Bearer {token}"}
    assert {request.headers["Authorization"] for request in hub.requests if request.store} == {None}
    written = b"".join(path.read_bytes() for path in context.claims_root.rglob("*") if path.is_file()).decode(errors="replace")
    for text in (caplog.text, report.model_dump_json(), context.plan.model_dump_json(), written):
        assert token not in text
        assert SIGNATURE not in text
    assert "HTTP status 503" in caplog.text


def test_the_token_comes_from_the_mounted_file_only(model_of, hub, monkeypatch, tmp_path):
    (tmp_path / "token").write_text("hf_left_behind")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    fetch(model_of(MODEL), Credentials(mounted), QUICK)
    assert {request.headers["Authorization"] for request in hub.requests} == {None}
    (mounted / "hub").mkdir()
    (mounted / "hub/token").write_text("hf_mounted\n")
    hub.requests.clear()
    fetch(model_of(MODEL | {"config.json": b"[]"}), Credentials(mounted), QUICK)
    assert {request.headers["Authorization"] for request in hub.requests if not request.store} == {"Bearer hf_mounted"}


def test_on_a_users_machine_the_token_of_an_earlier_login_is_used(model_of, hub, tmp_path):
    (tmp_path / "token").write_text("hf_of_the_login")
    fetch(model_of(MODEL), LOCAL, QUICK)
    assert {request.headers["Authorization"] for request in hub.requests if not request.store} == {"Bearer hf_of_the_login"}


def test_going_online_overrides_the_image(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    go_online()
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert "TRANSFORMERS_OFFLINE" not in os.environ


def test_the_report_fits_a_termination_message(model_of):
    envelope = fetch(model_of(MODEL), LOCAL, QUICK).envelope()
    assert json.loads(envelope)["facts"]["model_sha256"]
