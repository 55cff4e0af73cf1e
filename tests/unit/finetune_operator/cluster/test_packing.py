"""What is packed comes back as it was, and a plan and a job take little room."""

from __future__ import annotations

import json
import zlib
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from finetune_job.plan.digest import canonical_json
from finetune_operator.cluster.packing import FASTEST, packed, unpacked
from finetune_operator.cluster.raw_objects import write_json
from tests.support.builders import a_job

TEXTS = ("", "{}", "\u0000\ud800 \u202e", "x" * 1_000_000, json.dumps({"version": 1}), "[" * 5000)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_any_text_that_claims_to_be_a_plan_comes_back(text: str) -> None:
    content, size = packed({"plan": text})
    assert unpacked(content) == {"plan": text}
    assert size == len(json.dumps({"plan": text}, separators=(",", ":"), ensure_ascii="\ud800" in text).encode())


@given(st.dictionaries(st.text(max_size=9), st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=9)))
def test_any_object_comes_back(value: dict[str, Any]) -> None:
    assert unpacked(packed(value)[0]) == value


def test_the_plan_of_a_job_of_its_own_takes_a_tenth_of_its_size() -> None:
    """Names and a digest of its own are all that is kept of it but a few settings."""
    random = Random(7)
    name, image = (f"{random.getrandbits(128):032x}" for _ in range(2))
    profile = {"trainerImage": f"registry.example/trainer@sha256:{image}"}
    job = a_job().named(name).spec("training.learningRate", "3e-5").with_profile(**profile)
    content, size = packed({"plan": canonical_json(job.plan())})
    assert size > 4000
    assert len(content) < size / 10


def test_a_job_that_has_ended_takes_half_of_what_it_would_take_alone() -> None:
    choices = [{"field": one.field, "value": json.dumps(one.value), "reason": one.reason} for one in a_job().plan().choices]
    condition = {"status": "True", "reason": "Completed", "lastTransitionTime": "2026-03-04T05:06:07Z", "observedGeneration": 1}
    said = {"Validated": "", "Prepared": "The real data fits.", "Trained": "4 of 4 steps.", "Succeeded": "", "Finished": ""}
    conditions = [{"type": kind, "message": message, **condition} for kind, message in said.items()]
    job = a_job().named("of-its-own").document | {"status": {"plan": {"choices": choices}, "conditions": conditions}}
    content, size = packed(job)
    assert size > 2500
    assert unpacked(content) == job
    assert len(content) < len(zlib.compress(write_json(job), FASTEST)) / 2
