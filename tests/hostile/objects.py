"""Objects that a tenant can create to hurt the operator: of every kind that it watches, with its labels, names and owners forged.

Everything follows from one random generator. What the API server itself refuses is part of it: a tenant does not know either.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from finetune_job.names import (
    ANNOTATION_PLAN_SHA256,
    API_VERSION,
    JOB_KIND,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_MANAGED_BY,
    LABEL_ROLE,
    MANAGED_BY,
    PLAN_KEY,
    Role,
)
from tests.hostile.manifests import PLAIN, job_of

Document = dict[str, Any]
INDEX = "batch.kubernetes.io/job-completion-index"
ROLES = (*map(str, Role), "", "Train", "nobody", "x" * 63)
NUMBERS = ("0", "1", "7", "00", "1_0", "0x1", "1e9", "9" * 63, "1.5", "", "63")
TEXTS = (
    "\u00b2",
    "9" * 5000,
    "-1",
    "\u0663",
    "1_000",
    "NaN",
    "0x10",
    "",
    " 1",
    "1\n",
    "\x00",
    "\u202e",
    "[" * 900,
    '{"a":' * 900,
)
LONG_TEXTS = ("x" * 60_000, "\U0001f4a5" * 9000, "[" * 20_000, '{"a":' * 9_000)
LONG_ONE_IN = 25
TIMES = ("2030-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "1970-01-01T00:00:00Z")
HUGE_ONE_IN = 120
"""One of so many objects is as large as the API server lets it be."""


@dataclass(frozen=True)
class Target:
    """A FineTuneJob that is there, and that objects claim to belong to."""

    name: str
    uid: str
    preflight_uid: str = ""
    """Of its first batch Job. A pod that this Job controls is read like one of the operator's own."""


@dataclass(frozen=True)
class Forger:
    """Makes objects. `targets`: jobs of the tenant's own and of other namespaces."""

    random: Random
    targets: tuple[Target, ...]

    def job(self, number: int) -> Document:
        """A FineTuneJob, most of them refused, some with what the free-form settings let through."""
        roll = self.random.random()
        if roll < 0.4:
            document = job_of(self.random)
            document = document if isinstance(document.get("spec"), dict) else {"spec": PLAIN}
        else:
            document = {"spec": {**PLAIN, "method": self.random.choice(_METHODS)(self.random)}}
        name = f"ftj-{number}" if roll < 0.9 else f"{'f' * (63 - len(str(number)))}{number}"
        metadata = {"name": name, "labels": self._labels(), "annotations": self._annotations(), "ownerReferences": self._owners()}
        return {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": metadata, "spec": document["spec"]}

    def pod(self, number: int) -> Document:
        """A pod that no scheduler looks at."""
        container: Document = {"name": self.random.choice(("trainer", "other")), "image": "registry.test/none:1"}
        spec: Document = {"containers": [container], "schedulerName": "nobody", "restartPolicy": "Never"}
        if self._one_in(HUGE_ONE_IN):
            container["args"] = ["x" * 1_000_000]
        return self._of("Pod", number, spec=spec)

    def batch_job(self, number: int) -> Document:
        """A Job that stays suspended, so that no pod of it comes."""
        template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "registry.test/none:1"}]}}
        spec: Document = {"suspend": True, "template": template, "backoffLimit": 0}
        if self._one_in(2):
            spec |= {"completionMode": "Indexed", "completions": 2, "parallelism": 2}
        return self._of("Job", number, "batch/v1", spec=spec)

    def config_map(self, number: int) -> Document:
        """A ConfigMap, at times with what claims to be a plan."""
        texts = ("", "{}", "[]", "null", "{" * 9000, '{"version":1}', json.dumps({"version": 1, "job": None}), "9" * 6000, "\x00")
        data = {self.random.choice((PLAN_KEY, "other")): self.random.choice(texts)}
        if self._one_in(HUGE_ONE_IN):
            data = {PLAN_KEY: self.random.choice("x[\U0001f4a5")[0] * 250_000 + "y" * 40_000}
        return self._of("ConfigMap", number, data=data, immutable=self._one_in(2))

    def service(self, number: int) -> Document:
        """A Service without an address."""
        return self._of("Service", number, spec={"clusterIP": "None", "selector": {LABEL_JOB: self._target().name}})

    def status_of_pod(self) -> Document:
        """What a kubelet may say of a pod: everything that a container can make it say."""
        message = self.random.choice(
            (
                *TEXTS[:10],
                "finetune-report:" + "{" * 3000,
                json.dumps({"role": "train", "outcome": [], "findings": {}}),
                "x" * 4096,
            )
        )
        code = self.random.choice((0, 1, 137, 255, -1, 2**31 - 1))
        ended = {"exitCode": code, "reason": self.random.choice(TEXTS[:8]), "message": message[:4096]}
        moments = {"startedAt": self.random.choice(TIMES), "finishedAt": self.random.choice(TIMES)}
        state = self.random.choice(
            ({"terminated": ended | moments}, {"waiting": {"reason": "\u00b2", "message": message[:4096]}})
        )
        container = {"name": "trainer", "image": "x", "imageID": "x", "ready": False, "restartCount": 2**31 - 1, "state": state}
        return {
            "phase": self.random.choice(("Pending", "Running", "Succeeded", "Failed", "Unknown")),
            "reason": self.random.choice(TEXTS[:8]),
            "conditions": [
                {"type": self.random.choice(("DisruptionTarget", "PodScheduled")), "status": "True", "reason": "x" * 900}
            ],
            "containerStatuses": [container] * self.random.choice((1, 1, 3)),
        }

    def _of(self, kind: str, number: int, api_version: str = "v1", **content: Any) -> Document:
        metadata: Document = {
            "name": self._name(kind, number),
            "labels": self._labels(),
            "annotations": self._annotations(),
            "ownerReferences": self._owners_of_a_pod() if kind == "Pod" else self._owners(),
        }
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}

    def _name(self, kind: str, number: int) -> str:
        """A name of its own, or one that a child of a job will need."""
        if self._one_in(10):
            role, attempt = self.random.choice(("preflight", "train", "merge")), self.random.choice((0, 1, 10**8))
            taken = {"ConfigMap": "-plan", "Service": "-gang", "Job": f"-{role}-{attempt}"}.get(kind, f"-train-0-{number}")
            return f"{self._target().name}{taken}"[:63]
        return f"{kind.lower()}-{number}"

    def _labels(self) -> Document:
        labels = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_JOB: self._target().name, LABEL_JOB_UID: self._target().uid}
        labels |= {
            LABEL_ROLE: self.random.choice(ROLES),
            LABEL_ATTEMPT: self.random.choice(NUMBERS),
            INDEX: self.random.choice(NUMBERS),
        }
        return {name: value for name, value in labels.items() if self.random.random() < 0.85}

    def _annotations(self) -> Document:
        names = (INDEX, ANNOTATION_PLAN_SHA256, "finetune.dev/other")
        texts = LONG_TEXTS if self._one_in(LONG_ONE_IN) else TEXTS
        found = {name: self.random.choice(texts) for name in names if self.random.random() < 0.4}
        if self._one_in(HUGE_ONE_IN):
            found["finetune.dev/huge"] = "x" * 150_000
        return found

    def _owners(self) -> list[Document]:
        """Never a job's own UID under another namespace alone: the garbage collector deletes such an object within seconds."""
        if self._one_in(2):
            return []
        target = self._target()
        owner = _controlled_by(API_VERSION, JOB_KIND, target.name, target.uid)
        changes: tuple[Document, ...] = (
            {}, {}, {}, {"kind": "Job", "apiVersion": "batch/v1"}, {"apiVersion": "finetune.dev/v9"}, {"controller": False},
            {"name": "x" * 250}, {"uid": "\u00b2" * 30}, {"uid": "x" * 5000}, {"kind": "\U0001f4a5"},
        )  # fmt: skip
        return [owner | self.random.choice(changes)]

    def _owners_of_a_pod(self) -> list[Document]:
        """Half of those that have one name the batch Job that controls a job's real pods."""
        target = self._target()
        if not target.preflight_uid or self._one_in(2):
            return self._owners()
        return [_controlled_by("batch/v1", "Job", f"{target.name}-preflight-0", target.preflight_uid)]

    def _target(self) -> Target:
        return self.random.choice(self.targets)

    def _one_in(self, number: int) -> bool:
        return self.random.randrange(number) == 0


def unreadable_job(name: str) -> Document:
    """A valid FineTuneJob whose identity cannot be read. It stays: no garbage collector knows the version of its owner."""
    metadata = {"name": name, "ownerReferences": [_controlled_by("finetune.dev/v9", JOB_KIND, "owner", "x" * 5000)]}
    return {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": metadata, "spec": PLAIN}


def _controlled_by(api_version: str, kind: str, name: str, uid: str) -> Document:
    return {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid, "controller": True}


def _deep(random: Random) -> Any:
    value: Any = 1
    for _ in range(random.choice((9, 70, 900))):
        value = [value]
    return value


_SET = "[\u0080-\uffff]"
_METHODS: tuple[Callable[[Random], Document], ...] = (
    lambda random: {"type": "LoRA", "lora": {"rankPattern": {f"(?i:{_SET * 90}){n}": 8 for n in range(random.choice((1, 150)))}}},
    lambda random: {"type": "LoRA", "lora": {"alphaPattern": {"(a+)+" * 60: 8}, "targetModules": ["q"]}},
    lambda random: {"type": "LoHa", "settings": {"targetModules": f"(?i:{_SET * random.choice((10, 800, 4000))})"}},
    lambda random: {"type": "LoHa", "settings": {"targetModules": "(" * random.choice((9, 4096, 300_000))}},
    lambda random: {"type": "LoHa", "settings": {"r": "9" * random.choice((20, 4000, 5000)), "alpha": "-" * 50 + "1"}},
    lambda random: {"type": "LoHa", "settings": {"layersToTransform": _deep(random)}},
    lambda random: {"type": "LoHa", "settings": {"k" * random.choice((60, 70_000)): 1, "R": random.choice((1e308, 2**63 - 1))}},
    lambda random: {"type": "OFT", "settings": {f"targetModule{n}": "x" * random.choice((9, 4000)) for n in range(60)}},
    lambda random: {"type": "LoHa", "settings": {"targetModules": [str(n) for n in range(random.choice((1000, 30_000)))]}},
    lambda random: {"type": "LoHa", "settings": {"rankPattern": {f"{n}{'[' * 40}": 0 for n in range(random.choice((9, 1000)))}}},
    lambda random: {"type": "LoRA"},
)
