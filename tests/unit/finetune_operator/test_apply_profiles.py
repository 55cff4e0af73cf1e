"""The profiles of a release: what is sent, when nothing is, and what is said of one that cannot be applied."""

import asyncio
import json
from typing import Any

import pytest

from finetune_operator import apply_profiles
from finetune_operator.apply_profiles import Profile, ProfileError, apply, read_profiles
from finetune_operator.client.answers import ApiError
from finetune_operator.client.kinds import CLUSTER_ROLES, PROFILES
from tests.unit.finetune_operator.fakes import FakeApi

LABELS = {"app.kubernetes.io/instance": "tuning", "app.kubernetes.io/managed-by": "Helm"}


def text(*names: str, **spec: Any) -> str:
    return json.dumps(
        [
            {"name": name, "owner": f"role-{name}", "labels": LABELS, "spec": {"trainerImage": "trainer:1", **spec}}
            for name in names
        ]
    )


def bring(server: Any, profiles: list[Profile]) -> None:
    asyncio.run(apply(server, profiles))


class Server(FakeApi):
    """Remembers what is applied, and how."""

    def __init__(self, *owners: str) -> None:
        super().__init__()
        self.applied: list[tuple[str, str, bool]] = []
        for owner in owners:
            self.put(CLUSTER_ROLES, {"metadata": {"name": owner}})

    async def apply(self, kind: Any, name: str, body: Any, field_manager: str, *, force: bool = False) -> Any:
        self._called("apply", kind, name)
        self.applied.append((name, field_manager, force))
        return self.put(kind, json.loads(json.dumps(body)))


def test_a_profile_goes_with_its_role_and_is_applied_once() -> None:
    server = Server("role-default")
    bring(server, read_profiles(text("default", maxActiveJobs=2)))
    assert server.applied == [("default", "finetune-operator-chart", False)]
    made = server.objects["FineTuneProfile", "", "default"]
    assert made["spec"] == {"trainerImage": "trainer:1", "maxActiveJobs": 2}
    assert made["metadata"]["labels"] == LABELS
    (owner,) = made["metadata"]["ownerReferences"]
    uid = server.objects["ClusterRole", "", "role-default"]["metadata"]["uid"]
    assert owner == {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "name": "role-default", "uid": uid}
    bring(server, read_profiles(text("default", maxActiveJobs=2)))
    assert len(server.applied) == 1
    bring(server, read_profiles(text("default", maxActiveJobs=3)))
    assert server.applied[1:] == [("default", "finetune-operator-chart", False)]


def test_a_reinstalled_release_gives_its_profile_the_new_owner() -> None:
    server = Server("role-default")
    bring(server, read_profiles(text("default")))
    server.put(CLUSTER_ROLES, {"metadata": {"name": "role-default", "uid": "another"}})
    bring(server, read_profiles(text("default")))
    assert len(server.applied) == 2
    (owner,) = server.objects["FineTuneProfile", "", "default"]["metadata"]["ownerReferences"]
    assert owner["uid"] == "another"


@pytest.mark.parametrize(
    ("labels", "annotations", "force"),
    [
        (LABELS, {}, True),
        (LABELS | {"app.kubernetes.io/instance": "other"}, {}, False),
        ({}, {}, False),
        (LABELS, {"finetune.dev/applied-digest": "of something else"}, False),
    ],
)
def test_only_what_this_release_made_by_a_hook_is_taken_by_force(
    labels: dict[str, str], annotations: dict[str, str], force: bool
) -> None:
    server = Server("role-default")
    server.put(PROFILES, {"metadata": {"name": "default", "labels": labels, "annotations": annotations}, "spec": {}})
    bring(server, read_profiles(text("default")))
    assert [entry[2] for entry in server.applied] == [force]


def test_a_refused_profile_does_not_keep_the_others_back() -> None:
    server = Server("role-a", "role-b", "role-c")
    conflict = 'conflict with "kubectl-edit": .spec.trainerImage'
    server.fail["apply"] = [ApiError("APPLY", 409, "Conflict", conflict), ApiError("APPLY", 422, "Invalid", "spec.gpu: wrong")]
    with pytest.raises(ProfileError) as refusal:
        bring(server, read_profiles(text("a", "b", "c")))
    assert [name for name, _, _ in server.applied] == ["c"]
    said = str(refusal.value)
    assert f"profile a stays as it is: {conflict}; give these fields the same values in profiles.a of the chart's values" in said
    assert "profile b stays as it is: spec.gpu: wrong; correct profiles.b of the chart's values" in said


def test_a_profile_without_its_role_is_not_made() -> None:
    server = Server()
    with pytest.raises(ProfileError, match=r"ClusterRole role-default does not exist; install the chart with rbac\.create=true"):
        bring(server, read_profiles(text("default")))
    assert not server.applied


def test_what_the_model_refuses_is_named_before_anything_is_sent() -> None:
    with pytest.raises(ProfileError, match=r"profile b: spec\.maxActiveJobs is 0: .* equal to 1; correct profiles\.b"):
        read_profiles(json.dumps([*json.loads(text("a")), *json.loads(text("b", maxActiveJobs=0))]))
    with pytest.raises(ProfileError, match=r"profile a: spec\.trainerImge is 'x'"):
        read_profiles(text("a", trainerImge="x"))


@pytest.mark.parametrize("error", [ProfileError("said"), ApiError("GET", 403, "Forbidden", "said")])
def test_the_program_says_why_and_fails(error: Exception, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    async def refuse(_profiles: Any) -> None:
        raise error

    file = tmp_path / "profiles.json"
    file.write_text(text("default"))
    monkeypatch.setattr(apply_profiles, "configure_logs", lambda _level: None)
    monkeypatch.setattr(apply_profiles, "_run", refuse)
    assert apply_profiles.main([str(file)]) == 1
    assert "said" in capsys.readouterr().out
