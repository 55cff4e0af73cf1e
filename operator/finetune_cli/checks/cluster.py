"""Preconditions of a cluster for FineTuneJobs, judged from facts about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from finetune_cli.exit_codes import ExitCode
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.names import API_VERSION

MINIMUM_VERSION = (1, 34)
"""Kubernetes' major and minor version, as the chart demands it."""
_DEFINITIONS = ("finetunejobs", "finetuneprofiles")


@dataclass(frozen=True)
class UnknownFact:
    """Something that could not be found out."""

    reason: str


@dataclass(frozen=True)
class OperatorDeployment:
    """A Deployment of the operator."""

    namespace: str
    name: str
    ready_replicas: int


@dataclass(frozen=True)
class StorageClass:
    """A storage class of the cluster."""

    name: str
    is_default: bool


@dataclass(frozen=True)
class NetworkProbe:
    """Ports of another pod, and DNS, that one pod could reach before two NetworkPolicies and under them."""

    reached_before: bool
    """Whether every port of the other pod was reached without a policy."""
    resolved_before: bool
    """Whether a name of the cluster was resolved without a policy."""
    ingress_denied: bool = False
    """A port that the policy of the other pod does not let in."""
    egress_denied: bool = False
    """A port that the policy of the asking pod does not let out."""
    allowed_reached: bool = False
    """A port that both policies allow."""
    node_denied: bool = False
    """The kubelet of the asking pod's own node, which no policy allows."""
    resolved: bool = False
    """A name, from the DNS servers that the profile names."""


@dataclass(frozen=True)
class ClusterFacts:
    """Facts about the cluster."""

    namespace: str
    profile_name: str
    server_version: str | UnknownFact
    """Version of the API server, as in v1.36.3."""
    served: Sequence[str] | UnknownFact
    """Plural names that the API server serves in the version of these programs; empty if it does not know the group."""
    operators: Sequence[OperatorDeployment] | UnknownFact
    profile: FineTuneProfileSpec | UnknownFact | None
    """The profile; None if there is none of that name."""
    namespace_labels: Mapping[str, str] | UnknownFact | None
    """Labels of the namespace; None if the profile does not ask for them."""
    may_create_jobs: bool | UnknownFact
    storage_classes: Sequence[StorageClass] | UnknownFact
    network: NetworkProbe | UnknownFact | None
    """Result of the probe; None if it was not asked for."""


class CheckId(StrEnum):
    """The checks."""

    KUBERNETES_VERSION = "kubernetes-version"
    """The API server is of a version that the chart supports."""
    DEFINITIONS = "definitions"
    """The API server serves FineTuneJobs and FineTuneProfiles in the version that these programs use."""
    OPERATOR = "operator"
    """A pod of the operator is ready."""
    PROFILE = "profile"
    """The FineTuneProfile exists, and jobs in the namespace may use it."""
    PERMISSION = "permission"
    """You may create FineTuneJobs in the namespace."""
    STORAGE_CLASS = "storage-class"
    """Workspace claims get a storage class: the one that the profile names, or the cluster's default."""
    NETWORK_POLICIES = "network-policies"
    """The cluster's network enforces NetworkPolicies in both directions, and no more than them; only with `--probe`."""
    NODE_ISOLATION = "node-isolation"
    """A pod does not reach the kubelet of the node it runs on; only with `--probe`."""
    DNS = "dns"
    """Pods resolve names under the policies of a run; only with `--probe`."""


class CheckOutcome(StrEnum):
    """Outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Check:
    """One precondition."""

    id: CheckId
    outcome: CheckOutcome
    message: str
    fix: str = ""


def judge(facts: ClusterFacts) -> list[Check]:
    """Judge every precondition, in the order in which they are best repaired."""
    return [
        _version(facts.server_version),
        _definitions(facts.served),
        _operator(facts.operators),
        _profile(facts.profile_name, facts.namespace, facts.profile, facts.namespace_labels),
        _permission(facts.namespace, facts.may_create_jobs),
        _storage(facts.profile, facts.storage_classes),
        *_network(facts.network),
    ]


def exit_code(checks: Sequence[Check]) -> ExitCode:
    """DONE if all passed, REFUSED if one failed, FAILED if one could not be done."""
    outcomes = {check.outcome for check in checks}
    if CheckOutcome.FAILED in outcomes:
        return ExitCode.REFUSED
    return ExitCode.FAILED if CheckOutcome.UNKNOWN in outcomes else ExitCode.DONE


def _unknown(name: CheckId, fact: UnknownFact, fix: str = "") -> Check:
    return Check(name, CheckOutcome.UNKNOWN, fact.reason, fix)


def _judged(name: CheckId, passed: bool, right: str, wrong: str, fix: str) -> Check:
    return Check(name, CheckOutcome.PASSED, right) if passed else Check(name, CheckOutcome.FAILED, wrong, fix)


def _version(version: str | UnknownFact) -> Check:
    name = CheckId.KUBERNETES_VERSION
    if isinstance(version, UnknownFact):
        return _unknown(name, version)
    parts = re.match(r"v?(\d+)\.(\d+)", version)
    if parts is None:
        return _unknown(name, UnknownFact(f"the API server calls its version {version[:64]!r}"))
    least = ".".join(map(str, MINIMUM_VERSION))
    return _judged(
        name,
        (int(parts[1]), int(parts[2])) >= MINIMUM_VERSION,
        f"the API server is {parts[0]}",
        f"the API server is {parts[0]}, which is older than {least}",
        f"upgrade the cluster to Kubernetes {least} or later",
    )


def _definitions(definitions: Sequence[str] | UnknownFact) -> Check:
    name = CheckId.DEFINITIONS
    if isinstance(definitions, UnknownFact):
        return _unknown(name, definitions)
    missing = [one for one in _DEFINITIONS if one not in definitions]
    return _judged(
        name,
        not missing,
        f"{API_VERSION} is served",
        f"the API server does not serve {', '.join(missing)} of {API_VERSION}",
        "install or upgrade the chart",
    )


def _operator(deployments: Sequence[OperatorDeployment] | UnknownFact) -> Check:
    name = CheckId.OPERATOR
    if isinstance(deployments, UnknownFact):
        return _unknown(name, deployments, "ask somebody who may list Deployments of all namespaces")
    names = ", ".join(f"{one.namespace}/{one.name}" for one in deployments)
    return _judged(
        name,
        any(one.ready_replicas > 0 for one in deployments),
        f"the operator is ready: {names}",
        f"no pod of the operator is ready: {names}" if names else "there is no Deployment of the operator",
        "see `kubectl describe` and the logs of its pods" if names else "install the chart",
    )


def _profile(
    profile: str,
    namespace: str,
    found: FineTuneProfileSpec | UnknownFact | None,
    labels: Mapping[str, str] | UnknownFact | None,
) -> Check:
    name = CheckId.PROFILE
    if isinstance(found, UnknownFact):
        return _unknown(name, found, "ask for a role with `get` on the FineTuneProfile: the chart makes one for each profile")
    if found is None:
        return Check(
            name,
            CheckOutcome.FAILED,
            f"there is no FineTuneProfile {profile}",
            f"add profiles.{profile} to the values of the chart, or name another profile with --profile",
        )
    if found.namespace_selector is not None and found.allows_namespace(namespace):
        if isinstance(labels, UnknownFact):
            return _unknown(
                name, labels, f"ask somebody who may `get` the Namespace {namespace}: the profile asks for its labels"
            )
        return _judged(
            name,
            found.namespace_selector.selects(labels or {}),
            f"jobs in {namespace} may use the FineTuneProfile {profile}, by the labels of the namespace",
            f"the FineTuneProfile {profile} does not allow jobs in {namespace}: its labels are not those of namespaceSelector",
            f"ask the platform team to label {namespace}, or name another profile with --profile",
        )
    return _judged(
        name,
        found.allows_namespace(namespace),
        f"jobs in {namespace} may use the FineTuneProfile {profile}",
        f"the FineTuneProfile {profile} does not allow jobs in {namespace}",
        f"add {namespace} to its allowedNamespaces, or name another profile with --profile",
    )


def _permission(namespace: str, fact: bool | UnknownFact) -> Check:
    name = CheckId.PERMISSION
    if isinstance(fact, UnknownFact):
        return _unknown(name, fact)
    return _judged(
        name,
        fact,
        f"you may create FineTuneJobs in {namespace}",
        f"you may not create FineTuneJobs in {namespace}",
        "ask for the ClusterRole edit in the namespace, or for a Role with `create` on finetunejobs",
    )


def _storage(profile: FineTuneProfileSpec | UnknownFact | None, classes: Sequence[StorageClass] | UnknownFact) -> Check:
    name = CheckId.STORAGE_CLASS
    if isinstance(classes, UnknownFact):
        return _unknown(name, classes)
    wanted = profile.storage_class_name if isinstance(profile, FineTuneProfileSpec) else None
    if wanted is not None:
        return _judged(
            name,
            any(one.name == wanted for one in classes),
            f"the storage class {wanted} of the profile exists",
            f"the profile names the storage class {wanted}, which does not exist",
            "create it, or correct storageClassName of the profile",
        )
    default = next((one.name for one in classes if one.is_default), None)
    return _judged(
        name,
        default is not None,
        f"workspace claims get the default storage class {default}",
        "the cluster has no default storage class, and the profile names none: workspace claims made from a template stay "
        "pending",
        "set storageClassName of the profile, or mark a storage class as the default",
    )


def _network(probe: NetworkProbe | UnknownFact | None) -> Iterator[Check]:
    name = CheckId.NETWORK_POLICIES
    if probe is None:
        return
    if isinstance(probe, UnknownFact):
        yield _unknown(name, probe)
        return
    if not probe.reached_before:
        yield Check(
            name,
            CheckOutcome.UNKNOWN,
            "pods of the namespace do not reach each other even without the probe's policies",
            "look for NetworkPolicies of the namespace or of the cluster that select all pods: ranks could not reach each other",
        )
    elif not (probe.ingress_denied and probe.egress_denied):
        sides = [side for side, denied in (("to", probe.ingress_denied), ("from", probe.egress_denied)) if not denied]
        yield Check(
            name,
            CheckOutcome.FAILED,
            f"the cluster's network does not enforce NetworkPolicies: denied connections {' and '.join(sides)} a pod are made, "
            "so runs are open to all pods",
            "use a network plugin that enforces NetworkPolicies in both directions, such as Calico or Cilium",
        )
    else:
        yield _judged(
            name,
            probe.allowed_reached,
            "the cluster's network enforces NetworkPolicies in both directions",
            "the cluster's network denies a connection that NetworkPolicies allow: ranks could not reach each other",
            "look for further policies of the namespace or of the cluster, and at the log of the network plugin",
        )
        yield _judged(
            CheckId.NODE_ISOLATION,
            probe.node_denied,
            "pods do not reach the node they run on",
            "a pod reaches the kubelet of the node it runs on, although its policy does not allow it",
            "let the network plugin apply policies to connections from pods to their own node",
        )
    yield _dns(probe)


def _dns(probe: NetworkProbe) -> Check:
    name = CheckId.DNS
    if not probe.resolved_before:
        return Check(
            name,
            CheckOutcome.FAILED,
            "a pod of the namespace cannot resolve a name of the cluster, even without the probe's policies",
            "repair the cluster's DNS: ranks find each other by name",
        )
    return _judged(
        name,
        probe.resolved,
        "pods resolve names under the policies of a run",
        "under the policies of a run, pods cannot resolve names: ranks would not find each other",
        "name the cluster's DNS servers in network.dns of the profile",
    )
