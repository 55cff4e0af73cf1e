"""Who may do what: the API server's own answers, as docs/reference/rights.md has them."""

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from finetune_cli.checks.cluster import UnknownFact
from finetune_cli.cluster.client import ClusterClient
from finetune_cli.cluster.read_facts import read_facts
from tests.integration.command_rights import page_section
from tests.integration.conftest import CHART, RELEASE, SYSTEM, Installed
from tests.integration.kube import Kube, RefusedError
from tests.integration.workload import Workload
from tests.support.cases import table as rows
from tests.support.documented import doctor_roles
from tests.support.installed_chart import CLUSTER_NAME, as_account
from tools.cluster.errors import wait_until

pytestmark = pytest.mark.integration
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "rights.md"
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
IN_NAMESPACES, OF_THE_CLUSTER = (
    {resource: tuple(verbs.replace("all", " ".join(VERBS)).split()) for resource, verbs in rows(__file__, name).items()}
    for name in ("IN_NAMESPACES", "OF_THE_CLUSTER")
)
NEVER = {"secrets", "pods/exec", "pods/attach", "pods/portforward", "pods/ephemeralcontainers", "serviceaccounts/token"} | {
    name for name in OF_THE_CLUSTER if not name.startswith("finetuneprofiles.") and name != "namespaces"
}
"""Resources of which nobody here may do anything."""
HEAD = """# Rights

These tables show the answers of an API server (`kubectl auth can-i`) for the operator's ServiceAccount, for that of an operator
with `namespaces` set to one namespace, for a user and a viewer with a RoleBinding there to the chart's roles of these names, and
for an admin with a ClusterRoleBinding. All other values are the chart's defaults. A test verifies the tables.

"all" is get, list, watch, create, update, patch, delete and deletecollection. Rights to single objects by name are left out: the
operator may also read the ClusterRoles that own its profiles, change those profiles, and renew its Lease. The admission policies
([security.md](../explanation/security.md)) limit its rights further: it creates and deletes only objects that a FineTuneJob
controls.
"""
Subject = tuple[str, tuple[str, ...]]


def allowed(kube: Kube, subject: Subject, namespace: str, resources: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    user, groups = subject
    found = {}
    for resource, verbs in resources.items():
        name, _, subresource = resource.partition("/")
        plural, _, group = name.partition(".")
        asked = {"namespace": namespace, "group": group, "resource": plural, "subresource": subresource}
        found[resource] = [verb for verb in verbs if _is_allowed(kube, user, groups, {**asked, "verb": verb})]
    return found


def _is_allowed(kube: Kube, user: str, groups: tuple[str, ...], attributes: dict[str, str]) -> bool:
    spec = {"user": user, "groups": [*groups, "system:authenticated"], "resourceAttributes": attributes}
    answer = kube.create("SubjectAccessReview", "", {"spec": spec})
    return answer["status"]["allowed"] is True


def bind(kube: Kube, namespace: str, user: str, role: str) -> None:
    body = {
        "metadata": {"name": f"rights-of-{user}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": f"{CLUSTER_NAME}-{role}"},
        "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
    }
    kube.create("RoleBinding" if namespace else "ClusterRoleBinding", namespace, body)


@pytest.fixture
def subjects(installed: Installed, workload: Workload) -> Iterator[dict[str, Subject]]:
    """Holders of the roles, and the operators of this release and of one that serves the test's namespace alone."""
    kube, one = installed.kube, "one-namespace"
    place = ("--namespace", SYSTEM, "--set", f"namespaces={{{workload.namespace}}},fullnameOverride={one}")
    shown = ("--show-only", "templates/rbac.yaml")
    text = installed.cluster.helm("template", RELEASE, CHART, *place, *shown)
    documents = [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]
    installed.cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(documents))
    bind(kube, workload.namespace, "user", "user")
    bind(kube, workload.namespace, "viewer", "viewer")
    bind(kube, "", "admin", "admin")
    accounts = ("system:serviceaccounts", f"system:serviceaccounts:{SYSTEM}")
    found: dict[str, Subject] = {
        "operator": (f"system:serviceaccount:{SYSTEM}:{RELEASE}", accounts),
        "operator of one namespace": (f"system:serviceaccount:{SYSTEM}:{one}", accounts),
        "user": ("user", ()),
        "viewer": ("viewer", ()),
        "admin": ("admin", ()),
    }
    seen = {"finetunejobs.finetune.dev": ("list",)}
    for subject in found.values():
        wait_until(lambda who=subject: all(allowed(kube, who, workload.namespace, seen).values()), f"rights of {subject}", 60)
    yield found
    installed.cluster.kubectl("delete", "--ignore-not-found", "-f", "-", input=yaml.safe_dump_all(documents))
    kube.delete("ClusterRoleBinding", "", "rights-of-admin")


def table(found: Mapping[str, Mapping[str, list[str]]]) -> list[str]:
    """A column for each subject, a row for each resource of which anybody may do anything, and the others below."""
    lines = ["| resource | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    resources = next(iter(found.values()))
    nobodys = [resource for resource in resources if not any(each[resource] for each in found.values())]
    for resource in resources:
        if resource not in nobodys:
            cells = [" ".join(each[resource]).replace(" ".join(VERBS), "all") or "-" for each in found.values()]
            lines.append(f"| {resource} | " + " | ".join(cells) + " |")
    return [*lines, "", textwrap.fill("None of them may do anything with " + ", ".join(nobodys) + ".", 130), ""]


def test_doctor_needs_the_rights_that_are_documented_and_no_fewer(
    installed: Installed, workload: Workload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All but those of its two pods, which no node here would run: tests/e2e has them."""
    kube, (cluster_role, _) = installed.kube, doctor_roles(workload.namespace)
    kube.create("ServiceAccount", workload.namespace, {"metadata": {"name": "doctor"}})
    kubeconfig = as_account(installed.cluster, "doctor", workload.namespace, tmp_path)
    # The client reads KUBECONFIG when it is imported.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    subject = {"kind": "ServiceAccount", "name": "doctor", "namespace": workload.namespace}
    facts_of = {
        "apps": lambda facts: facts.operators,
        "finetune.dev": lambda facts: facts.profile,
        "storage.k8s.io": lambda facts: facts.storage_classes,
    }
    rules = cluster_role["rules"]
    assert {rule["apiGroups"][0] for rule in rules} == set(facts_of)
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "doctor-of-rights"}
    kube.create("ClusterRole", "", {"metadata": {"name": "doctor-of-rights"}, "rules": rules})
    binding = {"metadata": {"name": "doctor-of-rights"}, "roleRef": reference, "subjects": [subject]}
    kube.create("ClusterRoleBinding", "", binding)

    def unknown() -> set[str]:
        facts = read_facts(ClusterClient(), workload.namespace, "default", None)
        return {group for group, fact in facts_of.items() if isinstance(fact(facts), UnknownFact)}

    try:
        wait_until(lambda: unknown() == set(), "the rights to be known", 60)
        for rule in rules:
            others = [one for one in rules if one is not rule]
            kube.patch("ClusterRole", "", "doctor-of-rights", {"rules": others})
            wait_until(lambda missing=set(rule["apiGroups"]): unknown() == missing, f"doctor to miss {rule}", 60)
    finally:
        kube.delete("ClusterRoleBinding", "", "doctor-of-rights")
        kube.delete("ClusterRole", "", "doctor-of-rights")


def test_groups_see_profiles_if_the_chart_names_them(installed: Installed) -> None:
    """A role in a namespace shows no object of the cluster."""

    def verbs() -> list[str]:
        profiles = {"finetuneprofiles.finetune.dev": OF_THE_CLUSTER["finetuneprofiles.finetune.dev"]}
        return allowed(installed.kube, ("somebody", ("tuners",)), "", profiles)["finetuneprofiles.finetune.dev"]

    assert verbs() == []
    settings = ("--set", "userRoles.profileReaders={tuners}", "--show-only", "templates/user-roles.yaml")
    text = installed.cluster.helm("template", RELEASE, CHART, "--namespace", SYSTEM, *settings)
    found = [one for one in yaml.load_all(text, yaml.CSafeLoader) if one["metadata"]["name"].endswith("-profile-reader")]
    assert [one["kind"] for one in found] == ["ClusterRole", "ClusterRoleBinding"]
    documents = yaml.safe_dump_all(found)
    installed.cluster.kubectl("apply", "-f", "-", input=documents)
    try:
        wait_until(lambda: verbs() == ["get", "list", "watch"], "the rights to be known", 60)
    finally:
        installed.cluster.kubectl("delete", "-f", "-", input=documents)


def test_everybody_may_do_what_the_page_says(
    installed: Installed, workload: Workload, subjects: dict[str, Subject], tmp_path: Path
) -> None:
    installed.kube.create("Namespace", "", {"metadata": {"name": "rights-elsewhere"}})
    places = {
        "In a served namespace": (workload.namespace, IN_NAMESPACES),
        "In another namespace": ("rights-elsewhere", IN_NAMESPACES),
        "In all namespaces at once": ("", IN_NAMESPACES),
        "In the cluster": ("", OF_THE_CLUSTER),
    }
    found = {
        place: {who: allowed(installed.kube, subject, *asked) for who, subject in subjects.items()}
        for place, asked in places.items()
    }
    installed.kube.delete("Namespace", "", "rights-elsewhere")
    answers = [
        (who, resource, verb)
        for by_subject in found.values()
        for who, by_resource in by_subject.items()
        for resource, verbs in by_resource.items()
        for verb in verbs
    ]
    assert [answer for answer in answers if answer[1] in NEVER] == []
    status = {(who, verb) for who, resource, verb in answers if resource.endswith(".finetune.dev/status")}
    assert status == {("operator", "patch"), ("operator of one namespace", "patch")}
    assert {(who, verb) for who, resource, verb in answers if resource == "namespaces"} == {
        ("operator", "get"),
        ("operator of one namespace", "get"),
    }
    # A Role gives the right to the Namespace itself, and to no other.
    one, groups = subjects["operator of one namespace"]
    alone = installed.kube.acting_as(one, groups)
    assert alone.get("Namespace", "", workload.namespace) is not None
    with pytest.raises(RefusedError, match="403"):
        alone.get("Namespace", "", "kube-system")
    text = "\n".join(
        [HEAD, *(line for place, each in found.items() for line in (f"## {place}", "", *table(each))), page_section()]
    )
    found_here = tmp_path / PAGE.name
    found_here.write_text(text)
    assert PAGE.read_text() == text, f"correct the roles, or copy {found_here} to {PAGE}"
