"""Reads the facts that `checks.cluster` judges. A fact that cannot be read becomes an UnknownFact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

from finetune_cli.checks.cluster import ClusterFacts, NetworkProbe, OperatorDeployment, StorageClass, UnknownFact
from finetune_cli.cluster.client import ClusterClient, RequestError
from finetune_cli.jobs.profiles import read_profile
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.names import API_VERSION, GROUP

_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_Fact = TypeVar("_Fact")


def read_facts(
    client: ClusterClient,
    namespace: str,
    profile_name: str,
    probe: Callable[[FineTuneProfileSpec | None], NetworkProbe | UnknownFact] | None,
) -> ClusterFacts:
    """Read all facts. `probe` is called last, with the profile if it can be read."""
    profile = _fact(lambda: _profile(client, profile_name))
    asks_for_labels = isinstance(profile, FineTuneProfileSpec) and profile.namespace_selector is not None
    return ClusterFacts(
        namespace=namespace,
        profile_name=profile_name,
        server_version=_fact(lambda: str(client.request("GET", "/version")["gitVersion"])),
        served=_fact(lambda: _served(client)),
        operators=_fact(lambda: _operators(client)),
        profile=profile,
        namespace_labels=_fact(lambda: _labels(client, namespace)) if asks_for_labels else None,
        may_create_jobs=_fact(lambda: _may_create_jobs(client, namespace)),
        storage_classes=_fact(lambda: _storage_classes(client)),
        network=None if probe is None else probe(profile if isinstance(profile, FineTuneProfileSpec) else None),
    )


def _fact(read: Callable[[], _Fact]) -> _Fact | UnknownFact:
    try:
        return read()
    except RequestError as error:
        return UnknownFact(str(error))
    except (KeyError, TypeError, AttributeError) as error:
        return UnknownFact(f"the API server gave an answer of an unknown form: {type(error).__name__}: {error}")


def _served(client: ClusterClient) -> list[str]:
    try:
        return [resource["name"] for resource in client.request("GET", f"/apis/{API_VERSION}")["resources"]]
    except RequestError as error:
        if error.status == 404:
            return []
        raise


def _operators(client: ClusterClient) -> list[OperatorDeployment]:
    selector = quote("app.kubernetes.io/name=finetune-operator")
    listed = client.request("GET", f"/apis/apps/v1/deployments?labelSelector={selector}")["items"]
    return [
        OperatorDeployment(
            item["metadata"]["namespace"], item["metadata"]["name"], int(item.get("status", {}).get("readyReplicas") or 0)
        )
        for item in listed
    ]


def _profile(client: ClusterClient, name: str) -> FineTuneProfileSpec | UnknownFact | None:
    try:
        spec = client.request("GET", f"/apis/{API_VERSION}/finetuneprofiles/{quote(name, safe='')}")["spec"]
    except RequestError as error:
        if error.status == 404:
            return None
        raise
    parsed = read_profile(spec)
    if isinstance(parsed, str):
        return UnknownFact(f"this release of `finetune` cannot read the FineTuneProfile {name}: {parsed}")
    return parsed


def _labels(client: ClusterClient, namespace: str) -> dict[str, str]:
    return dict(client.request("GET", f"/api/v1/namespaces/{quote(namespace, safe='')}")["metadata"].get("labels") or {})


def _may_create_jobs(client: ClusterClient, namespace: str) -> bool:
    attributes = {"namespace": namespace, "group": GROUP, "resource": "finetunejobs", "verb": "create"}
    review: dict[str, Any] = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = client.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return answer["status"]["allowed"] is True


def _storage_classes(client: ClusterClient) -> list[StorageClass]:
    listed = client.request("GET", "/apis/storage.k8s.io/v1/storageclasses")["items"]
    return [
        StorageClass(item["metadata"]["name"], (item["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true")
        for item in listed
    ]
