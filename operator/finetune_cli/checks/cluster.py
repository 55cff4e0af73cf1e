"""Judges, from facts about a cluster, whether it meets the preconditions for running FineTuneJobs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from finetune_cli.exit_codes import ExitCode
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.names import API_VERSION

MINIMUM_VERSION = (1, 34)
"""Lowest major and minor version of Kubernetes that the chart accepts."""
_DEFINITIONS = ("finetunejobs", "finetuneprofiles")


@dataclass(frozen=True)
class UnknownFact:
    """A fact that could not be read."""

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
    """Result of the network probe: which connections succeeded from one pod to another under two NetworkPolicies."""

    ingress_denied: bool
    """True if the connection denied by the listening pod's ingress policy indeed failed."""
    egress_denied: bool
    """True if the connection denied by the asking pod's egress policy indeed failed."""
    allowed_reached: bool
    """True if the connection that both policies allow succeeded."""
    node_denied: bool
    """True if the connection to the kubelet on the asking pod's own node failed; no policy allows it."""
    resolved: bool
    """True if a name in the cluster was resolved; the policies allow traffic to the profile's DNS servers."""


@dataclass(frozen=True)
class ClusterFacts:
    """The facts about a cluster from which the preconditions are judged."""

    namespace: str
    profile_name: str
    server_version: str | UnknownFact
    """Version of the API server, for example v1.36.3."""
    served: Sequence[str] | UnknownFact
    """Plural names of the resources served in the API version that this program uses; empty if that version is not served."""
    operators: Sequence[OperatorDeployment] | UnknownFact
    profile: FineTuneProfileSpec | UnknownFact | None
    """The profile; None if there is none of that name."""
    namespace_labels: Mapping[str, str] | UnknownFact | None
    """Labels of the namespace; None if the profile does not select namespaces by label."""
    may_create_jobs: bool | UnknownFact
    storage_classes: Sequence[StorageClass] | UnknownFact
    network: NetworkProbe | UnknownFact | None
    """Result of the network probe; None if no probe was requested."""


class CheckId(StrEnum):
    """Identifiers of the checks."""

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
    """The cluster's network enforces NetworkPolicies in both directions, and denies nothing else; only with `--probe`."""
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
    """The result of one check."""

    id: CheckId
    outcome: CheckOutcome
    message: str
    fix: str = ""


def judge(facts: ClusterFacts) -> list[Check]:
    """Judge every precondition, in the order in which failures should be repaired."""
    return [
        _version(facts.server_version),
        _definitions(facts.served),
        _operator(facts.operators),
        _profile(facts.profile_name, facts.namespace, facts.profile, facts.namespace_labels),
        _judged(
            CheckId.PERMISSION,
            facts.may_create_jobs,
            f"you may create FineTuneJobs in {facts.namespace}",
            f"you may not create FineTuneJobs in {facts.namespace}",
            "ask for the ClusterRole edit in the namespace, or for a Role with `create` on finetunejobs",
        ),
        _storage(facts.profile, facts.storage_classes),
        *_network(facts.network),
    ]


def exit_code(checks: Sequence[Check]) -> ExitCode:
    """Return REFUSED if a check failed, else FAILED if any outcome is unknown, else DONE."""
    outcomes = {check.outcome for check in checks}
    if CheckOutcome.FAILED in outcomes:
        return ExitCode.REFUSED
    return ExitCode.FAILED if CheckOutcome.UNKNOWN in outcomes else ExitCode.DONE


def _judged(name: CheckId, passed: bool | UnknownFact, right: str, wrong: str, fix: str, *, fix_unknown: str = "") -> Check:
    """Make a check from a fact. fix_unknown: what to do if the fact could not be read."""
    if isinstance(passed, UnknownFact):
        return Check(name, CheckOutcome.UNKNOWN, passed.reason, fix_unknown)
    return Check(name, CheckOutcome.PASSED, right) if passed else Check(name, CheckOutcome.FAILED, wrong, fix)


def _version(version: str | UnknownFact) -> Check:
    if isinstance(version, UnknownFact):
        return Check(CheckId.KUBERNETES_VERSION, CheckOutcome.UNKNOWN, version.reason)
    parts = re.match(r"v?(\d+)\.(\d+)", version)
    if parts is None:
        reason = f"the API server reports the version {version[:64]!r}"
        return Check(CheckId.KUBERNETES_VERSION, CheckOutcome.UNKNOWN, reason)
    least = ".".join(map(str, MINIMUM_VERSION))
    return _judged(
        CheckId.KUBERNETES_VERSION,
        (int(parts[1]), int(parts[2])) >= MINIMUM_VERSION,
        f"the API server is {parts[0]}",
        f"the API server is {parts[0]}, which is older than {least}",
        f"upgrade the cluster to Kubernetes {least} or later",
    )


def _definitions(served: Sequence[str] | UnknownFact) -> Check:
    missing = [] if isinstance(served, UnknownFact) else [name for name in _DEFINITIONS if name not in served]
    return _judged(
        CheckId.DEFINITIONS,
        served if isinstance(served, UnknownFact) else not missing,
        f"{API_VERSION} is served",
        f"the API server does not serve {', '.join(missing)} of {API_VERSION}",
        "install or upgrade the chart",
    )


def _operator(deployments: Sequence[OperatorDeployment] | UnknownFact) -> Check:
    known = [] if isinstance(deployments, UnknownFact) else deployments
    names = ", ".join(f"{deployment.namespace}/{deployment.name}" for deployment in known)
    return _judged(
        CheckId.OPERATOR,
        deployments if isinstance(deployments, UnknownFact) else any(deployment.ready_replicas > 0 for deployment in known),
        f"the operator is ready: {names}",
        f"no pod of the operator is ready: {names}" if names else "there is no Deployment of the operator",
        "see `kubectl describe` and the logs of its pods" if names else "install the chart",
        fix_unknown="ask somebody who may list Deployments of all namespaces",
    )


def _profile(
    name: str, namespace: str, profile: FineTuneProfileSpec | UnknownFact | None, labels: Mapping[str, str] | UnknownFact | None
) -> Check:
    allowed, instead = f"jobs in {namespace} may use the FineTuneProfile {name}", "or name another profile with --profile"
    if not isinstance(profile, FineTuneProfileSpec):
        return _judged(
            CheckId.PROFILE,
            profile or False,
            "",
            f"there is no FineTuneProfile {name}",
            f"add profiles.{name} to the values of the chart, {instead}",
            fix_unknown="ask for a role with `get` on the FineTuneProfile: the chart makes one for each profile",
        )
    refused = f"the FineTuneProfile {name} does not allow jobs in {namespace}"
    if profile.namespace_selector is None or not profile.allows_namespace(namespace):
        fix = f"add {namespace} to its allowedNamespaces, {instead}"
        return _judged(CheckId.PROFILE, profile.allows_namespace(namespace), allowed, refused, fix)
    return _judged(
        CheckId.PROFILE,
        labels if isinstance(labels, UnknownFact) else profile.namespace_selector.selects(labels or {}),
        f"{allowed}, because the namespace's labels match",
        f"{refused}: its labels do not match namespaceSelector",
        f"ask the platform team to label {namespace}, {instead}",
        fix_unknown=f"ask somebody who may `get` the Namespace {namespace}: the profile selects namespaces by labels",
    )


def _storage(profile: FineTuneProfileSpec | UnknownFact | None, classes: Sequence[StorageClass] | UnknownFact) -> Check:
    known = [] if isinstance(classes, UnknownFact) else classes
    wanted = profile.storage_class_name if isinstance(profile, FineTuneProfileSpec) else None
    if wanted is not None:
        return _judged(
            CheckId.STORAGE_CLASS,
            classes if isinstance(classes, UnknownFact) else any(each.name == wanted for each in known),
            f"the storage class {wanted} of the profile exists",
            f"the profile names the storage class {wanted}, which does not exist",
            "create it, or correct storageClassName of the profile",
        )
    default = next((each.name for each in known if each.is_default), None)
    return _judged(
        CheckId.STORAGE_CLASS,
        classes if isinstance(classes, UnknownFact) else default is not None,
        f"workspace claims get the default storage class {default}",
        "the cluster has no default storage class, and the profile names none: workspace claims of templates stay pending",
        "set storageClassName of the profile, or mark a storage class as the default",
    )


def _network(probe: NetworkProbe | UnknownFact | None) -> Iterator[Check]:
    if probe is None:
        return
    if isinstance(probe, UnknownFact):
        yield Check(CheckId.NETWORK_POLICIES, CheckOutcome.UNKNOWN, probe.reason)
        return
    sides = [side for side, denied in (("to", probe.ingress_denied), ("from", probe.egress_denied)) if not denied]
    if sides:
        yield Check(
            CheckId.NETWORK_POLICIES,
            CheckOutcome.FAILED,
            f"the cluster's network does not enforce NetworkPolicies: denied connections {' and '.join(sides)} a pod are made, "
            "so runs are open to all pods",
            "use a network plugin that enforces NetworkPolicies in both directions, such as Calico or Cilium",
        )
    else:
        yield _judged(
            CheckId.NETWORK_POLICIES,
            probe.allowed_reached,
            "the cluster's network enforces NetworkPolicies in both directions",
            "the cluster's network denies a connection that NetworkPolicies allow: ranks could not reach each other",
            "look for other policies in the namespace and the cluster, and read the log of the network plugin",
        )
        yield _judged(
            CheckId.NODE_ISOLATION,
            probe.node_denied,
            "pods do not reach the node they run on",
            "a pod reaches the kubelet of the node it runs on, although its policy does not allow it",
            "let the network plugin apply policies to connections from pods to their own node",
        )
    yield _judged(
        CheckId.DNS,
        probe.resolved,
        "pods resolve names under the policies of a run",
        "under the policies of a run, pods cannot resolve names: ranks would not find each other",
        "name the cluster's DNS servers in network.dns of the profile; if no pod resolves names, repair the cluster's DNS",
    )
