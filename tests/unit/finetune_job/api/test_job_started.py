"""A job that has started continues though this release would not take its manifest any more."""

import copy
from typing import Any

import pytest

from finetune_job.api.job import spec_of_started_job
from finetune_operator.cache.projection import project
from finetune_operator.cache.reader import Reader
from finetune_operator.client.kinds import JOBS
from tests.support.builders import a_job


def spec(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = copy.deepcopy(a_job().document["spec"])
    return content | changes


TOO_LONG = {"type": "LoRA", "lora": {"r": 8, "rankPattern": {"q" * 5000: 4, "v_proj": 2}}}


def test_what_cannot_be_read_is_left_out_and_the_rest_is_read() -> None:
    content = spec(method=TOO_LONG, novelty=1, run={"suspend": True, "queueName": "No Queue"})
    content["data"] |= {"format": "Unheard"}
    before = copy.deepcopy(content)
    read = spec_of_started_job(content)
    assert read is not None
    assert (read.run.suspend, read.run.queue_name) == (True, None)
    assert (read.model.source, read.data.source, read.workspace.claim_name) == (
        *("pvc://models/base", "pvc://data/train.jsonl", "scratch"),
    )
    assert content == before, "what the cache holds is not changed"


def test_several_wrong_items_of_a_list_are_left_out() -> None:
    content = spec()
    content["method"] = {"type": "LoRA", "lora": {"targetModules": ["q" * 5000, "v_proj", "k" * 5000, "o" * 5000]}}
    read = spec_of_started_job(content)
    assert read is not None
    assert read.method.lora is not None
    assert read.method.lora.target_modules == ["v_proj"]


@pytest.mark.parametrize("content", [None, [], "", {}, {"model": 5}])
def test_what_leaves_nothing_to_go_by_is_no_spec(content: Any) -> None:
    assert spec_of_started_job(content) is None


@pytest.mark.parametrize(("status", "is_read"), [({}, False), ({"startTime": "2026-01-01T12:00:00Z"}, True)])
def test_only_a_job_that_has_started_is_read_so(status: dict[str, Any], is_read: bool) -> None:
    metadata = {"name": "tune", "namespace": "team", "uid": "u", "resourceVersion": "1", "generation": 1}
    held = project(JOBS, {"metadata": metadata, "spec": spec(method=TOO_LONG), "status": status})
    job = Reader().job(held).view
    assert (job.spec is not None) is is_read
    assert "rankPattern" in job.spec_error
