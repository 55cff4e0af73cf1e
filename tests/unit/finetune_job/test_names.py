"""Names of children: valid, distinct and stable."""

import re

from hypothesis import given
from hypothesis import strategies as st

from finetune_job.names import Role, batch_job_name, master_address, plan_configmap_name, service_name, workspace_claim_name

job_names = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", fullmatch=True)
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


@given(job_names, st.sampled_from(Role), st.integers(0, 9999), st.integers(1, 4096))
def test_a_batch_job_leaves_room_for_the_index_of_its_pods(name: str, role: Role, attempt: int, nodes: int) -> None:
    child = batch_job_name(name, role, attempt, nodes)
    assert LABEL.fullmatch(child)
    assert len(f"{child}-{nodes - 1}") <= 63
    assert child.endswith(f"-{role}-{attempt}")


@given(job_names)
def test_other_children_are_labels(name: str) -> None:
    for child in (plan_configmap_name(name), service_name(name), workspace_claim_name(name)):
        assert LABEL.fullmatch(child)
        assert len(child) <= 63


def test_long_and_dotted_names_stay_distinct() -> None:
    names = ["a" * 60 + "b", "a" * 60 + "c", "a.b", "a-b"]
    assert len({service_name(name) for name in names}) == len(names)
    assert len({batch_job_name(name, Role.TRAIN, 0) for name in names}) == len(names)


def test_the_address_of_rank_zero() -> None:
    assert master_address("run", "team", 2, 4) == "run-train-2-0.run-gang.team.svc"
