"""What must never happen, judged by the server's own record of every change and call, never by the operator's tables."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from finetune_job.names import LABEL_ATTEMPT, LABEL_JOB_UID, LABEL_ROLE
from finetune_operator.client.kinds import BATCH_JOBS, EVENTS, JOBS, PODS
from tests.simulation.api_server import ApiServer, Change, Document
from tests.simulation.controllers import is_over, is_true
from tests.simulation.nodes import Nodes
from tests.simulation.transport import Call

ATTEMPT_FIELDS = {
    "fetch": "fetchAttempt",
    "preflight": "preflightAttempt",
    "train": "attempt",
    "merge": "mergeAttempt",
    "publish": "publishAttempt",
}
STAGES = ("Fetched", "Prepared", "Trained", "Merged", "Published")
DEFAULT_MAX_RESTARTS = 3
DEFAULT_STARTUP_DEADLINE = 1800
WINDOW_SECONDS = 10.0
CALLS_PER_WINDOW = 150
"""Of the whole operator, besides `CALLS_PER_JOB` for each job: relists and restarts included."""
CALLS_PER_JOB = 60
CREATES_PER_WINDOW = 12
"""Tries to create one and the same object."""
STATUS_WRITES_PER_MINUTE = 30
REWORDINGS_PER_MINUTE = 6


@dataclass
class Life:
    """What is known of one FineTuneJob, by UID."""

    name: str
    created_jobs: dict[tuple[str, int], int] = field(default_factory=dict)
    """Role and attempt of every batch Job ever created for it, and how often."""
    status_writes: list[float] = field(default_factory=list)
    rewordings: list[float] = field(default_factory=list)
    """Times of writes that changed nothing but messages of conditions."""
    transitions: int = 0
    """Changes of a condition's status or reason."""
    outcome: Document | None = None
    """Status when it was decided how the job ends."""


@dataclass
class Invariants:
    """Complaints are collected, because an exception inside a request would be taken for a failed request."""

    server: ApiServer
    nodes: Nodes
    clock: Callable[[], float]
    lives: dict[str, Life] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    calls: deque[Call] = field(default_factory=deque)
    num_calls: int = 0
    place_of_job: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    """UID of a batch Job -> UID of its FineTuneJob, role, attempt, as they were at its creation."""
    job_of_pod: dict[str, str] = field(default_factory=dict)
    counted_faults: bool = False
    """Whether anything has happened that may be counted against a job."""

    # Changes.

    def saw(self, change: Change) -> None:
        """A change of the server."""
        if change.kind == JOBS and change.after is not None:
            self._job(change)
        elif change.kind == BATCH_JOBS and change.before is None and change.after is not None:
            self._batch_job(change.after, by_operator=change.by_operator)
        elif change.kind == PODS and change.before is None and change.after is not None:
            self._pod(change.after)
        elif change.by_operator and change.before is None and change.after is not None and change.kind != EVENTS:
            self._no_creates_after_the_end(change.kind.name, change.after)

    def _job(self, change: Change) -> None:
        after = change.after
        uid = after["metadata"]["uid"]
        life = self.lives.setdefault(uid, Life(after["metadata"]["name"]))
        before_status = ((change.before or {}).get("status")) or {}
        status = after.get("status") or {}
        if before_status == status:
            return
        self._expect(change.by_operator, "nobody but the operator writes status")
        now = self.clock()
        life.status_writes.append(now)
        recent = [one for one in life.status_writes if now - one < 60.0]
        self._expect(len(recent) <= STATUS_WRITES_PER_MINUTE, f"{life.name}: {len(recent)} status writes within a minute")
        if _without_words(before_status) == _without_words(status):
            life.rewordings.append(now)
            recent = [one for one in life.rewordings if now - one < 60.0]
            self._expect(len(recent) <= REWORDINGS_PER_MINUTE, f"{life.name}: {len(recent)} writes of mere words within a minute")
        self._progress_of_status(life, before_status, status, after["spec"])
        self._end_is_final(uid, before_status, status, after["spec"])

    def _progress_of_status(self, life: Life, before: Document, after: Document, spec: Document) -> None:
        for role, name in ATTEMPT_FIELDS.items():
            old, new = before.get(name, 0), after.get(name, 0)
            self._expect(old <= new <= old + 1, f"{life.name}: the attempt of {role} went from {old} to {new}")
            if role == "train" and new == old:
                same = before.get("gangNodes") == after.get("gangNodes")
                self._expect(same, f"{life.name}: the gang of attempt {new} got another size")
            if new > old:
                is_settled = (role, old) in life.created_jobs or not self._was_recorded(after, role, old)
                self._expect(is_settled, f"{life.name}: attempt {old} of {role} is recorded and was never created")
        if before.get("startTime"):
            self._expect(after.get("startTime") == before["startTime"], f"{life.name}: the start is written once")
        # If somebody deletes every trace of a plan before the status tells of anything that came of it, another may be frozen.
        has_trace = bool(before.get("attempts")) or any(before.get(name) for name in ATTEMPT_FIELDS.values())
        if before.get("plan") and has_trace:
            self._expect(
                (after.get("plan") or {}).get("hash") == before["plan"]["hash"], f"{life.name}: the plan changed after the start"
            )
        for stage in STAGES:
            if _state(before, stage) == "True" and has_trace:
                self._expect(_state(after, stage) == "True", f"{life.name}: {stage} was True and is not any more")
        limit = (spec.get("run") or {}).get("maxRestarts", DEFAULT_MAX_RESTARTS)
        counters = {"train": after.get("restarts") or {}, **(after.get("roleRestarts") or {})}
        for role, counter in counters.items():
            counted = counter.get("counted", 0)
            self._expect(counted <= limit, f"{life.name}: {counted} counted restarts of {role}, and {limit} are allowed")
            if not self.counted_faults:
                self._expect(counted == 0, f"{life.name}: a restart of {role} is counted, and nothing failed by its own fault")
        seen = [(item.get("role", "train"), item["number"]) for item in after.get("attempts") or ()]
        self._expect(len(seen) == len(set(seen)), f"{life.name}: an attempt is recorded twice: {seen}")
        for place in seen:
            self._expect(place in life.created_jobs, f"{life.name}: attempt {place} is recorded and was never created")
        for item in after.get("attempts") or ():
            if item.get("counted"):
                self._expect(
                    self.counted_faults, f"{life.name}: attempt {item['number']} is shown as counted without a fault of its own"
                )
        old_conditions = {item["type"]: (item["status"], item["reason"]) for item in before.get("conditions") or ()}
        for item in after.get("conditions") or ():
            life.transitions += old_conditions.get(item["type"]) != (item["status"], item["reason"])

    def _was_recorded(self, status: Document, role: str, number: int) -> bool:
        return any(item.get("role", "train") == role and item["number"] == number for item in status.get("attempts") or ())

    def _end_is_final(self, uid: str, before: Document, after: Document, spec: Document) -> None:
        life = self.lives[uid]
        if life.outcome is not None:
            self._expect(
                _essence(life.outcome, "Succeeded") == _essence(after, "Succeeded"),
                f"{life.name}: the outcome changed after the end",
            )
            for name in ATTEMPT_FIELDS.values():
                self._expect(life.outcome.get(name, 0) == after.get(name, 0), f"{life.name}: a new attempt after the end")
        elif _state(after, "Succeeded") in ("True", "False") or _state(after, "Finished") == "True":
            life.outcome = after
            self._outcome_is_allowed(life, after, spec)
        if _state(before, "Finished") != "True" and _state(after, "Finished") == "True":
            alive = [name for name, job_uid in self._alive() if self.place_of_job[job_uid][0] == uid]
            self._expect(not alive, f"{life.name}: Finished while these can run: {alive}")
        if _state(before, "Finished") == "True":
            self._expect(
                _essence(before, "Finished") == _essence(after, "Finished"), f"{life.name}: Finished changed after the end"
            )
            self._expect(before.get("completionTime") == after.get("completionTime"), f"{life.name}: the end moved")

    def _outcome_is_allowed(self, life: Life, status: Document, spec: Document) -> None:
        """Who ended it may end it: after training only a cancellation and a verdict on the weights."""
        is_cancelled = bool((spec.get("run") or {}).get("cancel"))
        reason = next((item["reason"] for item in status["conditions"] if item["type"] == "Succeeded"), "")
        if _state(status, "Succeeded") != "True" and _state(status, "Trained") == "True":
            allowed = {"VerificationFailed"} | ({"Cancelled"} if is_cancelled else set())
            self._expect(reason in allowed, f"{life.name}: trained, and ended with {reason}")
        self._expect(reason != "Cancelled" or is_cancelled, f"{life.name}: cancelled by nobody")
        if reason == "StartupDeadlineExceeded":
            limit = (spec.get("run") or {}).get("startupDeadlineSeconds", DEFAULT_STARTUP_DEADLINE)
            self._expect(self._longest_start(life) >= limit, f"{life.name}: given up before its Job had {limit} s to start")

    def _longest_start(self, life: Life) -> float:
        """Seconds since a Job of this life was started, by a Job controller that had no reason to hold it back."""
        uids = {uid for uid, one in self.lives.items() if one is life}
        jobs = [job for job in self.server.all(BATCH_JOBS) if self.place_of_job.get(job["metadata"]["uid"], ("",))[0] in uids]
        starts = [(job.get("status") or {}).get("startTime") for job in jobs]
        return max(((self.server.now() - datetime.fromisoformat(one)).total_seconds() for one in starts if one), default=0.0)

    def _no_creates_after_the_end(self, kind: str, document: Document) -> None:
        for owner in document["metadata"].get("ownerReferences") or ():
            life = self.lives.get(owner["uid"])
            if life is not None and life.outcome is not None:
                self.complaints.append(f"{life.name}: {kind} {document['metadata']['name']} is created after the end")

    def _batch_job(self, job: Document, *, by_operator: bool) -> None:
        if not by_operator:
            return
        metadata = job["metadata"]
        labels = metadata["labels"]
        uid, role, attempt = labels[LABEL_JOB_UID], labels[LABEL_ROLE], int(labels[LABEL_ATTEMPT])
        self._no_creates_after_the_end("Job", job)
        self.place_of_job[metadata["uid"]] = (uid, role, attempt)
        life = self.lives.setdefault(uid, Life(labels.get("finetune.dev/job", "?")))
        life.created_jobs[role, attempt] = life.created_jobs.get((role, attempt), 0) + 1
        owner = self.server.by_uid(JOBS, uid)
        if owner is None:
            return
        status = owner.get("status") or {}
        self._expect(bool(status.get("startTime")), f"{life.name}: Job {metadata['name']} is created before the plan is frozen")
        current = status.get(ATTEMPT_FIELDS[role], 0)
        self._expect(current == attempt, f"{life.name}: Job {metadata['name']} is created while {role} is at attempt {current}")
        if role == "train":
            ranks = owner["spec"]["parallelism"]
            fewest = ranks["elastic"]["minNodes"] if ranks.get("elastic") else ranks["nodes"]
            pods, said = job["spec"]["completions"], status.get("gangNodes") or ranks["nodes"]
            self._expect(
                fewest <= pods <= ranks["nodes"] and pods == said == job["spec"]["parallelism"],
                f"{life.name}: Job {metadata['name']} has {pods} pods; {fewest} to {ranks['nodes']} are allowed, status: {said}",
            )
        done = {"fetch": "Fetched", "preflight": "Prepared", "train": "Trained", "merge": "Merged", "publish": "Published"}[role]
        self._expect(_state(status, done) != "True", f"{life.name}: Job {metadata['name']} is created although {done} is True")
        for other in self.server.all(BATCH_JOBS):
            place = self.place_of_job.get(other["metadata"]["uid"])
            if place is not None and place[:2] == (uid, role) and other["metadata"]["uid"] != metadata["uid"]:
                self.complaints.append(f"{life.name}: Job {metadata['name']} is created while {other['metadata']['name']} exists")
        if role == "train" and _state(status, "Prepared") != "True":
            gated = job["spec"].get("suspend") and is_gated(job)
            self._expect(gated, f"{life.name}: Job {metadata['name']} is created without a gate before Prepared is True")
            return
        alive = [name for name, job_uid in self._alive() if self.place_of_job[job_uid][0] == uid]
        self._expect(not alive, f"{life.name}: Job {metadata['name']} is created while these can run: {alive}")

    def _pod(self, pod: Document) -> None:
        owner = pod["metadata"]["ownerReferences"][0]["uid"]
        self.job_of_pod[pod["metadata"]["uid"]] = owner
        if owner not in self.place_of_job:
            return
        uid, role, _ = self.place_of_job[owner]
        job = self.server.by_uid(JOBS, uid)
        if job is not None and role == "train":
            prepared = _state(job.get("status") or {}, "Prepared") == "True"
            self._expect(prepared, f"{pod['metadata']['name']} starts before Prepared is True")
        others = {
            f"{name} of attempt {self.place_of_job[job_uid][2]}"
            for name, job_uid in self._alive()
            if job_uid != owner and self.place_of_job[job_uid][:2] == (uid, role)
        }
        self._expect(not others, f"two live gangs: {pod['metadata']['name']} starts while {sorted(others)} can run")

    def _alive(self) -> list[tuple[str, str]]:
        """Pods that can run, with the UID of their Job: by the API, or in truth on a node that does not answer."""
        found = {}
        for pod in self.server.all(PODS):
            uid = pod["metadata"]["uid"]
            if not is_over(pod) and self.job_of_pod.get(uid) in self.place_of_job:
                found[uid] = pod["metadata"]["name"]
        for uid, node in self.nodes.processes.items():
            if self.job_of_pod.get(uid) in self.place_of_job:
                found.setdefault(uid, f"a process on {node}")
        return [(name, self.job_of_pod[uid]) for uid, name in found.items()]

    # Calls.

    def called(self, call: Call) -> None:
        """A request of the operator."""
        self.num_calls += 1
        self.calls.append(call)
        while call.at - self.calls[0].at > WINDOW_SECONDS:
            self.calls.popleft()
        limit = CALLS_PER_WINDOW + CALLS_PER_JOB * len(self.server.all(JOBS))
        self._expect(len(self.calls) <= limit, f"spin: {len(self.calls)} calls in {WINDOW_SECONDS:g} s, the last one {call.verb}")
        if call.verb == "POST" and call.kind is not None and call.kind != EVENTS:
            name = ((call.body or {}).get("metadata") or {}).get("name")
            same = sum(
                1
                for one in self.calls
                if one.verb == "POST" and one.kind == call.kind and ((one.body or {}).get("metadata") or {}).get("name") == name
            )
            self._expect(
                same <= CREATES_PER_WINDOW, f"spin: {same} tries to create {call.kind.name} {name} in {WINDOW_SECONDS:g} s"
            )
        if call.verb == "DELETE" and call.kind in (BATCH_JOBS, PODS):
            options = call.body or {}
            self._expect(bool((options.get("preconditions") or {}).get("uid")), f"{call.name} is deleted without a precondition")
            if call.kind == BATCH_JOBS:
                self._expect(options.get("propagationPolicy") == "Foreground", f"{call.name} is deleted without its pods")

    def _expect(self, holds: bool, complaint: str) -> None:
        if not holds:
            self.complaints.append(complaint)


def _state(status: Document, kind: str) -> str:
    return next((item["status"] for item in status.get("conditions") or () if item["type"] == kind), "")


def _essence(status: Document, kind: str) -> Any:
    return next(
        (
            (item["status"], item["reason"], item.get("message"))
            for item in status.get("conditions") or ()
            if item["type"] == kind
        ),
        None,
    )


def is_gated(job: Document) -> bool:
    """Whether Kueue may not admit a Job."""
    return bool((job["metadata"].get("annotations") or {}).get("kueue.x-k8s.io/admission-gated-by"))


def orphans(server: ApiServer, invariants: Invariants, released: set[str]) -> list[str]:
    """Children whose FineTuneJob is gone, and what runs of jobs that have ended.

    `released`: UIDs of those whose dependents a user orphaned on purpose.
    """
    found = []
    for kind in (BATCH_JOBS, PODS):
        for item in server.all(kind):
            uid = (item["metadata"].get("labels") or {}).get(LABEL_JOB_UID, "")
            batch_job = item["metadata"]["uid"] if kind == BATCH_JOBS else invariants.job_of_pod.get(item["metadata"]["uid"], "")
            if not uid or released & {uid, batch_job}:
                continue
            owner = server.by_uid(JOBS, uid)
            name = f"{kind.name} {item['metadata']['name']}"
            if owner is None:
                found.append(f"{name} is left of a job that is gone")
            elif is_true(owner, "Finished") and kind == PODS and not is_over(item):
                found.append(f"{name} runs although its job has ended")
    return found


def _without_words(status: Document) -> Document:
    conditions = [{**item, "message": ""} for item in status.get("conditions") or ()]
    return {**status, "conditions": conditions}
