"""From manifest to frozen plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from finetune_job.api.status import Attempt
from finetune_job.names import PLAN_KEY
from finetune_job.plan.digest import canonical_json, plan_sha256, text_sha256
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.children_seen import LiveChildren, LiveJob, LivePod
from finetune_operator.decide.seen.observed import NamespaceView, ProfileView
from tests.support.builders import T0, ObservedBuilder, a_job, a_profile, observing
from tests.support.cases import table
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written


def test_the_freeze_is_one_status_write_and_one_event_and_the_first_children_follow_it_in_the_same_pass() -> None:
    job = a_job()
    actions = reconcile(observing(job).build(), T0)
    status = written(actions)
    assert status.start_time == "2026-01-01T12:00:00Z"
    assert status.plan.hash == plan_sha256(job.plan())
    assert status.plan.trainer_image == job.profile.trainer_image
    chosen = {choice.field: (choice.value, choice.reason) for choice in status.plan.choices}
    assert chosen["spec.training.learningRate"] == ('"2e-4"', "usual for this method")
    assert len(chosen) == len(job.plan().choices)
    assert condition(actions, ConditionType.VALIDATED) == ("True", Reason.ACCEPTED)
    assert created(actions) == ["NetworkPolicy/tune-run", "ConfigMap/tune-plan", "Job/tune-preflight-0"]
    assert actions.deletes == ()
    assert [event.reason for event in actions.events] == [Reason.ACCEPTED]
    assert condition(actions, ConditionType.FETCHED) == ("True", Reason.SKIPPED)
    assert status.observed_generation == 1
    assert [one.type for one in status.conditions] == list(ConditionType), "every condition is there from the first write"


def test_the_config_map_holds_the_bytes_of_the_digest() -> None:
    job = a_job()
    actions = reconcile(observing(job).frozen().build(), T0)
    assert created(actions) == ["NetworkPolicy/tune-run", "ConfigMap/tune-plan", "Job/tune-preflight-0"]
    assert actions.status is None or actions.status.plan == observing(job).frozen().status.plan
    text = actions.creates[1].body["data"][PLAN_KEY]
    assert (text, text_sha256(text)) == (canonical_json(job.plan()), plan_sha256(job.plan()))


def test_an_operator_that_died_after_storing_the_plan_continues_with_preflight() -> None:
    frozen = observing(a_job()).frozen()
    stored = replace(frozen, plan_json=canonical_json(a_job().plan()))
    actions = reconcile(stored.build(), T0)
    assert condition(actions, ConditionType.PREPARED) == ("Unknown", Reason.WAITING_FOR_PODS)
    assert created(actions) == ["Job/tune-preflight-0"]


def test_a_profile_edited_between_freeze_and_first_child_freezes_the_newer_plan() -> None:
    job = a_job()
    edited = a_profile(serviceAccountName="other")
    actions = reconcile(observing(job).frozen().but(profile=ProfileView("default", edited)).build(), T0)
    expected = plan_sha256(replace(job, profile=edited).plan())
    status = written(actions)
    assert status.plan.hash == expected
    assert status.start_time == "2026-01-01T11:50:00Z", "the start is written once"
    assert text_sha256(actions.creates[1].body["data"][PLAN_KEY]) == expected


def test_a_plan_of_an_earlier_freeze_is_removed_before_the_newer_one_is_stored() -> None:
    job = a_job()
    stale = observing(job).frozen().but(plan_json=canonical_json(job.nodes(2).plan()))
    actions = reconcile(stale.build(), T0)
    assert (deleted(actions), created(actions)) == (["ConfigMap/tune-plan"], [])
    assert actions.requeue_after_seconds is not None


@pytest.mark.parametrize(
    "what",
    [
        lambda seen: seen.with_status(preflight_attempt=1),
        lambda seen: seen.with_status(attempts=[Attempt(number=0)]),
        lambda seen: seen.condition(ConditionType.TRAINED, True, Reason.COMPLETED),
        lambda seen: seen.batch_job(),
        lambda seen: seen.but(live=LiveChildren(batch_jobs=(LiveJob("tune-preflight-0", "uid"),))),
        lambda seen: seen.but(live=LiveChildren(running_pods=(LivePod("tune-preflight-0-x", "uid"),))),
    ],
)
def test_once_anything_came_of_a_plan_its_loss_is_a_loss(what: Callable[[ObservedBuilder], ObservedBuilder]) -> None:
    actions = reconcile(what(observing(a_job()).frozen()).build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.PLAN_LOST)
    assert (created(actions), deleted(actions)) == ([], [])


def test_a_manifest_that_no_rule_accepts_is_stalled_with_findings() -> None:
    job = a_job().nodes(5)  # 48 sequences do not divide by 5 ranks
    actions = reconcile(observing(job).build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.REFUSED)
    assert condition(actions, ConditionType.VALIDATED) == ("False", Reason.REFUSED)
    status = written(actions)
    assert status.phase == "Stalled"
    assert status.start_time == ""
    assert "spec.training.globalBatchSize" in [finding.field for finding in status.findings if finding.severity == "error"]
    assert actions.creates == ()
    (finding,) = [one for one in status.findings if one.severity == "error"]
    assert finding.source.startswith("reproduced by tests/pitfalls/")
    assert message(actions, ConditionType.STALLED).startswith(f"{finding.rule}: {finding.field}: ")
    assert [event.reason for event in actions.events] == [Reason.REFUSED, Reason.FINDING]
    assert actions.events[1].type == "Warning"
    assert actions.events[1].message.startswith("global-batch-not-divisible: spec.training.globalBatchSize: ")


def test_each_finding_is_news_once_for_each_generation() -> None:
    job = a_job().nodes(5).spec("parallelism.fsdp.useOrigParams", True)
    seen = observing(job)
    first = reconcile(seen.build(), T0)
    assert {(one.rule, one.severity) for one in first.news} == {
        ("global-batch-not-divisible", "error"),
        ("no-effect-use-orig-params", "warning"),
    }
    assert [event.type for event in first.events if event.reason is Reason.FINDING] == ["Warning", "Normal"]
    judged = replace(seen, status=written(first)).build()
    assert reconcile(judged, T0).news == ()
    edited = replace(judged, job=replace(judged.job, generation=2))
    assert reconcile(edited, T0).news == first.news
    # A profile that has changed is judged again under the same generation: only what it adds is news.
    smaller = written(first).model_copy(update={"findings": written(first).findings[:1]})
    assert [one.rule for one in reconcile(replace(seen, status=smaller).build(), T0).news] == ["no-effect-use-orig-params"]


def test_a_pass_that_judges_nothing_has_no_news() -> None:
    warned = observing(a_job().spec("parallelism.fsdp.useOrigParams", True)).started()
    observed = warned.build()
    finding = written(reconcile(observing(a_job().spec("parallelism.fsdp.useOrigParams", True)).build(), T0)).findings
    status = observed.job.status.model_copy(update={"findings": finding})
    later = replace(observed, job=replace(observed.job, status=status, generation=7))
    assert reconcile(later, T0).news == ()


def test_a_refusal_is_announced_once() -> None:
    seen = observing(a_job().nodes(5))
    actions = reconcile(seen.build(), T0)
    again = reconcile(replace(seen, status=written(actions)).build(), T0)
    assert (again.status, again.events) == (None, ())


def test_a_corrected_manifest_continues() -> None:
    refused = written(reconcile(observing(a_job().nodes(5)).build(), T0))
    actions = reconcile(replace(observing(a_job().nodes(4)), status=refused).build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("False", Reason.HEALTHY)
    assert written(actions).start_time
    assert [finding for finding in written(actions).findings if finding.severity == "error"] == []


def test_a_manifest_that_does_not_parse_is_stalled() -> None:
    observed = observing(a_job()).build()
    broken = replace(observed, job=replace(observed.job, spec=None, spec_error="spec.model: missing"))
    actions = reconcile(broken, T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.INVALID_SPEC)
    assert "spec.model: missing" in message(actions, ConditionType.STALLED)
    assert [(one.rule, one.severity) for one in written(actions).findings] == [("invalid-field", "error")]
    assert "spec.model: missing" in written(actions).findings[0].message


def test_a_missing_profile_and_a_broken_one_are_distinguished() -> None:
    for profile, reason in (
        (ProfileView("h100"), Reason.PROFILE_NOT_FOUND),
        (ProfileView("h100", error="trainerImage: missing"), Reason.PROFILE_INVALID),
    ):
        actions = reconcile(observing(a_job()).but(profile=profile).build(), T0)
        assert condition(actions, ConditionType.STALLED) == ("True", reason)
        assert "h100" in message(actions, ConditionType.STALLED)
    # The same words as in the profile's own status.
    assert message(actions, ConditionType.STALLED) == ("spec.profile: FineTuneProfile 'h100' is not valid: trainerImage: missing")


@pytest.mark.parametrize(
    ("allowed", "accepted"),
    [(None, True), (["team"], True), (["other", "team"], True), (["te*"], True), ([], False), (["team-*"], False)],
)
def test_a_profile_is_for_the_namespaces_that_it_names(allowed: list[str] | None, accepted: bool) -> None:
    actions = reconcile(observing(a_job().with_profile(allowedNamespaces=allowed)).build(), T0)
    if accepted:
        assert condition(actions, ConditionType.VALIDATED)[0] == "True"
    else:
        assert condition(actions, ConditionType.STALLED) == ("True", Reason.PROFILE_NOT_ALLOWED)
        said = message(actions, ConditionType.STALLED)
        assert "FineTuneProfile 'default' does not allow namespace 'team' (allowedNamespaces)" in said
        assert created(actions) == []


SELECTORS: list[tuple[dict[str, Any], bool]] = table(__file__, "SELECTORS")


def test_a_profile_is_for_the_namespaces_that_its_selector_selects() -> None:
    seen = NamespaceView({"gpu": "yes", "tier": "", "kubernetes.io/metadata.name": "team"})
    for selector, accepted in SELECTORS:
        actions = reconcile(observing(a_job().with_profile(namespaceSelector=selector)).but(namespace=seen).build(), T0)
        if accepted:
            assert condition(actions, ConditionType.VALIDATED)[0] == "True", selector
        else:
            assert condition(actions, ConditionType.STALLED) == ("True", Reason.PROFILE_NOT_ALLOWED), selector
            assert "does not allow namespace 'team', whose labels do not match its namespaceSelector" in message(
                actions, ConditionType.STALLED
            )
            assert (created(actions), actions.requeue_after_seconds) == ([], 30)


def test_names_and_labels_of_a_namespace_must_both_be_right_and_unknown_labels_are_wrong() -> None:
    selector = {"matchLabels": {"gpu": "yes"}}
    good, unread = NamespaceView({"gpu": "yes"}), NamespaceView(error="it has no permission to get namespaces: forbidden")
    for allowed, namespace, said in (
        (["other"], good, "(allowedNamespaces)"),
        (["team"], unread, "the operator cannot read Namespace 'team': it has no permission to get namespaces: forbidden."),
        (None, None, "the operator cannot read Namespace 'team'"),
    ):
        job = a_job().with_profile(namespaceSelector=selector, allowedNamespaces=allowed)
        actions = reconcile(observing(job).but(namespace=namespace).build(), T0)
        assert condition(actions, ConditionType.STALLED) == ("True", Reason.PROFILE_NOT_ALLOWED)
        assert said in message(actions, ConditionType.STALLED)
        assert created(actions) == []


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        ({"key": "gpu", "operator": "In"}, "operator In compares with values"),
        ({"key": "gpu", "operator": "NotIn", "values": []}, "operator NotIn compares with values"),
        ({"key": "gpu", "operator": "Exists", "values": ["yes"]}, "operator Exists has no values"),
        ({"key": "a b", "operator": "Exists"}, "key"),
    ],
)
def test_a_selector_that_kubernetes_would_not_take_is_refused(requirement: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        a_profile(namespaceSelector={"matchExpressions": [requirement]})


def test_a_missing_claim_is_named_with_its_field_and_looked_for_again() -> None:
    actions = reconcile(observing(a_job()).but(missing_claims=frozenset({"data"})).build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.CLAIM_NOT_FOUND)
    assert "spec.data.source" in message(actions, ConditionType.STALLED)
    assert actions.requeue_after_seconds == 30


@pytest.mark.parametrize(
    ("name", "claim"), [("tune", "tune-workspace"), ("tune", "scratch"), ("tune.two", "tune-two-807d9771-workspace")]
)
def test_results_are_not_put_on_a_claim_that_is_deleted_with_the_job(name: str, claim: str) -> None:
    job = a_job().named(name).spec("output.destination", f"pvc://{claim}/results")
    own = job.spec("workspace", {"volumeClaimTemplate": {"storage": "10Gi"}, "retain": "Delete"})
    actions = reconcile(observing(own).build(), T0)
    if claim == "scratch":
        assert condition(actions, ConditionType.VALIDATED) == ("True", Reason.ACCEPTED)
    else:
        assert condition(actions, ConditionType.STALLED) == ("True", Reason.REFUSED)
        assert message(actions, ConditionType.STALLED).startswith("output-deleted-with-job: spec.workspace.retain: ")
        assert actions.creates == ()
    kept = own.spec("workspace.retain", "Keep")
    assert condition(reconcile(observing(kept).build(), T0), ConditionType.VALIDATED) == ("True", Reason.ACCEPTED)


def test_a_foreign_object_under_a_childs_name_stalls_the_job() -> None:
    actions = reconcile(observing(a_job()).frozen().but(conflicts=("ConfigMap/tune-plan",)).build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.CONFLICT)
    assert actions.creates == ()
