"""Where models and data come from: what the fetch role and the libraries make of sources that the rule book speaks against."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from transformers import LlamaConfig

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FetchSettings, FineTuneProfileSpec
from finetune_job.plan.digest import plan_sha256
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext
from finetune_trainer.context import RunContext
from finetune_trainer.credentials import Credentials
from finetune_trainer.errors import DataError, InvariantError, ModelError
from finetune_trainer.model.load import load_config
from finetune_trainer.network.retry import RetryPolicy
from finetune_trainer.roles.fetch import fetch
from tests.pitfalls.manifests import JOB, plans
from tests.support.hub import Hub, running_hub
from tests.unit.finetune_job.rules.manifests import manifest

QUICK = RetryPolicy(attempts=2, first_seconds=0.01, longest_seconds=0.02)
NO_CREDENTIALS = Credentials(Path("/no/such/directory"))
MODEL = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"of the model", "tokenizer.json": b"{}"}
RECORDS = {"train.jsonl": b'{"prompt": "a", "completion": "b"}\n'}
ALLOW = "model.allowRemoteCode"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    with running_hub() as running:
        yield running


def profile_of(hub: Hub) -> FineTuneProfileSpec:
    return FineTuneProfileSpec(
        trainer_image="trainer@sha256:0", fetch=FetchSettings(hub_endpoint=hub.address, allowed_sources=["hf://"])
    )


def fetched(plan: RunPlan, claims: Path) -> RunContext:
    """The claims of a job of this plan, with what the fetch role brings."""
    context = RunContext(plan, plan_sha256(plan), claims, 0)
    context.workspace.root.mkdir(parents=True, exist_ok=True)
    fetch(context, NO_CREDENTIALS, QUICK)
    return context


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def at(plan: RunPlan, commit: str) -> RunPlan:
    """The plan with the commit that only the user can know in the place of the fix's zeros."""
    assert plan.fetch is not None
    (item,) = plan.fetch.items
    assert set(item.revision or "") == {"0"}
    items = (item.model_copy(update={"revision": commit}),)
    return plan.model_copy(update={"fetch": plan.fetch.model_copy(update={"items": items})})


def test_without_a_commit_nothing_is_fetched(hub: Hub, tmp_path: Path):
    """A branch moves between two looks; the commit that was named stays what it was."""
    commit = hub.add("org/model", MODEL)
    api = HfApi(endpoint=hub.address, token=False)
    before = api.repo_info("org/model").sha
    hub.writes.commit(hub.repositories["models", "org/model"], MODEL | {"model.safetensors": b"newer"})
    assert api.repo_info("org/model").sha != before
    wrong, right = plans("hub-source-without-revision", {"model.source": "hf://org/model"}, profile_of(hub))
    with pytest.raises(InvariantError, match=r"hf://org/model has no revision"):
        fetched(wrong, tmp_path)
    with pytest.raises(ModelError, match=r"model org/model at 0{40} does not exist"):
        fetched(right, tmp_path)
    assert content(fetched(at(right, commit), tmp_path).base_model) == MODEL


def test_a_data_set_is_no_model(hub: Hub, tmp_path: Path):
    rule = "model-source-is-dataset"
    commit = hub.add("org/records", RECORDS, kind="datasets")
    wrong, _ = plans(rule, {"model.source": "hf://datasets/org/records", "model.revision": commit}, profile_of(hub))
    with pytest.raises(ModelError, match=r"holds no safetensors file; it holds train.jsonl"):
        fetched(wrong, tmp_path)
    commit = hub.add("org/model", MODEL)
    wrong, right = plans(rule, {"model.source": "hf://datasets/org/model", "model.revision": commit}, profile_of(hub))
    with pytest.raises(ModelError, match=r"dataset org/model at .*: access is refused"):
        fetched(wrong, tmp_path)
    assert content(fetched(right, tmp_path).base_model) == MODEL


def test_the_adapter_would_name_another_base(hub: Hub, tmp_path: Path):
    """What lies in a directory can be read, but an adapter names its base by a repository, whose top is another model."""
    inner = MODEL | {"model.safetensors": b"of the directory"}
    commit = hub.add("org/model", MODEL | {f"inner/{name}": value for name, value in inner.items()})
    changes = {"model.source": "hf://org/model/inner", "model.revision": commit}
    wrong, right = plans("model-source-inside-repository", changes, profile_of(hub))
    trained_on = content(fetched(wrong, tmp_path / "wrong").base_model)
    named = content(fetched(right, tmp_path / "right").base_model)
    assert (trained_on, named) == (inner, MODEL)
    assert wrong.model.name == right.model.name == "org/model"


def test_a_data_set_is_not_found_among_models(hub: Hub, tmp_path: Path):
    rule = "data-source-is-model"
    commit = hub.add("org/records", RECORDS, kind="datasets")
    wrong, right = plans(rule, {"data.source": "hf://org/records", "data.revision": commit}, profile_of(hub))
    with pytest.raises(DataError, match=r"model org/records at .*: access is refused") as caught:
        fetched(wrong, tmp_path)
    assert "hf://datasets/org/records" in caught.value.hint
    context = fetched(right, tmp_path)
    assert content(context.path(right.data.train[0].location)) == RECORDS


@pytest.mark.parametrize("path", ["train.jsonl", "records"])
def test_a_whole_model_is_no_records_and_a_part_of_one_may_be(hub: Hub, tmp_path: Path, path: str):
    """So the rule is silent where a path is named."""
    commit = hub.add("org/model", MODEL | RECORDS | {f"records/{name}": value for name, value in RECORDS.items()})
    wrong, _ = plans("data-source-is-model", {"data.source": "hf://org/model", "data.revision": commit}, profile_of(hub))
    assert "config.json" in content(fetched(wrong, tmp_path / "whole").path(wrong.data.train[0].location))
    spec = FineTuneJobSpec.model_validate(manifest({"data.source": f"hf://org/model/{path}", "data.revision": commit}))
    assert evaluate(RuleContext(spec, profile_of(hub))) == ()
    plan = resolve(JOB, spec, profile_of(hub))
    assert content(fetched(plan, tmp_path / "part").path(plan.data.train[0].location)) == RECORDS


def test_a_models_own_code_runs(tmp_path: Path):
    """Its configuration alone runs it, in the container and with all that is mounted there."""
    model, mark = tmp_path / "models/base", tmp_path / "written-by-the-model"
    model.mkdir(parents=True)
    code = f"open({str(mark)!r}, 'w').close()\nfrom transformers import LlamaConfig\nclass TheirConfig(LlamaConfig):\n    pass\n"
    (model / "configuration_theirs.py").write_text(code)
    written: dict[str, Any] = {"model_type": "llama", "auto_map": {"AutoConfig": "configuration_theirs.TheirConfig"}}
    (model / "config.json").write_text(json.dumps(written))
    wrong, right = plans("remote-code-not-allowed", {ALLOW: True}, FineTuneProfileSpec(trainer_image="trainer@sha256:0"))
    assert type(load_config(right, model)) is LlamaConfig
    assert not mark.exists()
    assert type(load_config(wrong, model)).__name__ == "TheirConfig"
    assert mark.exists()
