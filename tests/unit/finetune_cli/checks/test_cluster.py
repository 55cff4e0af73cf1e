"""What is said of a cluster, fact by fact."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_cli.checks.cluster import (
    MINIMUM_VERSION,
    Check,
    ClusterFacts,
    NetworkProbe,
    OperatorDeployment,
    StorageClass,
    UnknownFact,
    exit_code,
    judge,
)
from finetune_job.api.namespace_selector import NamespaceSelector
from finetune_job.api.profile import FineTuneProfileSpec
from tests.support.cases import table

PROFILE = FineTuneProfileSpec(trainer_image="registry.example/trainer:1")
BY_LABEL = PROFILE.model_copy(update={"namespace_selector": NamespaceSelector(match_labels={"gpu": "yes"})})
ISOLATING = NetworkProbe(ingress_denied=True, egress_denied=True, allowed_reached=True, node_denied=True, resolved=True)
HEALTHY = ClusterFacts(
    namespace="team",
    profile_name="default",
    server_version="v1.36.3",
    served=["finetunejobs", "finetunejobs/status", "finetuneprofiles"],
    operators=[OperatorDeployment("finetune-system", "finetune", 1)],
    profile=PROFILE,
    namespace_labels=None,
    may_create_jobs=True,
    storage_classes=[StorageClass("fast", False), StorageClass("shared", True)],
    network=ISOLATING,
)
NO_ANSWER = UnknownFact("the API server answered 403")


def by_id(facts: ClusterFacts) -> dict[str, Check]:
    return {check.id: check for check in judge(facts)}


def test_a_cluster_with_everything() -> None:
    checks = judge(HEALTHY)
    assert [(check.id, check.outcome.value, check.fix) for check in checks] == [
        (name, "passed", "")
        for name in (
            "kubernetes-version",
            "definitions",
            "operator",
            "profile",
            "permission",
            "storage-class",
            "network-policies",
            "node-isolation",
            "dns",
        )
    ]
    assert exit_code(checks) == 0


def test_the_oldest_version_is_that_of_the_chart() -> None:
    chart = yaml.safe_load((Path(__file__).parents[4] / "charts/finetune-operator/Chart.yaml").read_text())
    assert chart["kubeVersion"].startswith(f">={MINIMUM_VERSION[0]}.{MINIMUM_VERSION[1]}.")


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"server_version": "v1.33.9-gke.1"}, "kubernetes-version", "v1.33"),
        ({"served": []}, "definitions", "finetunejobs, finetuneprofiles"),
        ({"served": ["finetunejobs"]}, "definitions", "not serve finetuneprofiles"),
        ({"operators": []}, "operator", "no Deployment"),
        ({"operators": [OperatorDeployment("system", "ours", 0)]}, "operator", "system/ours"),
        ({"profile": None}, "profile", "no FineTuneProfile default"),
        ({"profile": PROFILE.model_copy(update={"allowed_namespaces": ["research-*"]})}, "profile", "jobs in team"),
        ({"profile": BY_LABEL, "namespace_labels": {"gpu": "no"}}, "profile", "labels do not match namespaceSelector"),
        ({"may_create_jobs": False}, "permission", "may not create"),
        ({"storage_classes": [StorageClass("fast", False)]}, "storage-class", "no default"),
        ({"profile": PROFILE.model_copy(update={"storage_class_name": "gone"})}, "storage-class", "gone"),
        ({"network": replace(ISOLATING, ingress_denied=False)}, "network-policies", "denied connections to a pod"),
        ({"network": replace(ISOLATING, egress_denied=False)}, "network-policies", "denied connections from a pod"),
        ({"network": replace(ISOLATING, allowed_reached=False)}, "network-policies", "that NetworkPolicies allow"),
        ({"network": replace(ISOLATING, node_denied=False)}, "node-isolation", "the node it runs on"),
        ({"network": replace(ISOLATING, resolved=False)}, "dns", "under the policies"),
    ],
)
def test_what_fails_names_the_cause_and_a_fix(change: dict[str, Any], name: str, message: str) -> None:
    facts = replace(HEALTHY, **change)
    failed = [check for check in judge(facts) if check.outcome.value != "passed"]
    assert [(check.id, check.outcome.value) for check in failed] == [(name, "failed")]
    assert message in failed[0].message
    assert failed[0].fix
    assert exit_code(judge(facts)) == 1


@pytest.mark.parametrize(("field", "names"), table(__file__, "test_what_cannot_be_read_is_not_called_right"))
def test_what_cannot_be_read_is_not_called_right(field: str, names: list[str]) -> None:
    checks = judge(replace(HEALTHY, **{field: NO_ANSWER}))
    assert [check.id for check in checks if check.outcome.value == "unknown"] == names
    assert exit_code(checks) == 3
    assert exit_code([*checks, *judge(replace(HEALTHY, served=[]))]) == 1


def test_labels_of_the_namespace_are_judged_if_the_profile_asks_for_them() -> None:
    labelled = replace(HEALTHY, profile=BY_LABEL, namespace_labels={"gpu": "yes"})
    assert by_id(labelled)["profile"].outcome.value == "passed"
    unread = by_id(replace(labelled, namespace_labels=NO_ANSWER))["profile"]
    assert unread.outcome.value == "unknown"
    assert "may `get` the Namespace team" in unread.fix
    elsewhere = BY_LABEL.model_copy(update={"allowed_namespaces": ["other"]})
    assert by_id(replace(labelled, profile=elsewhere))["profile"].outcome.value == "failed"


def test_a_version_of_an_unknown_form_proves_nothing() -> None:
    assert by_id(replace(HEALTHY, server_version="main"))["kubernetes-version"].outcome.value == "unknown"


def test_a_network_that_enforces_nothing_is_said_once() -> None:
    checks = by_id(replace(HEALTHY, network=replace(ISOLATING, ingress_denied=False, egress_denied=False)))
    assert "denied connections to and from a pod" in checks["network-policies"].message
    assert [name for name, check in checks.items() if check.outcome.value != "passed"] == ["network-policies"]


def test_without_the_probe_nothing_is_said_of_the_network() -> None:
    assert not {"network-policies", "node-isolation", "dns"} & set(by_id(replace(HEALTHY, network=None)))


def test_the_storage_class_of_a_profile_needs_no_default() -> None:
    facts = replace(
        HEALTHY, profile=PROFILE.model_copy(update={"storage_class_name": "fast"}), storage_classes=[StorageClass("fast", False)]
    )
    assert exit_code(judge(facts)) == 0
