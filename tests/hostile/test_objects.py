"""Forged objects through everything that the operator does with them in its one thread, without a cluster.

Through the API server, and all at once: tests/integration/test_hostile_objects.py.
"""

import json
import os
import time
from collections import Counter
from random import Random

from finetune_operator.cache.projection import CachedObject, project
from finetune_operator.cache.reader import Reader
from finetune_operator.client.kinds import BATCH_JOBS, CONFIG_MAPS, JOBS, PODS, SERVICES, Kind
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.observed import Observed, ProfileView
from tests.hostile.objects import Document, Forger, Target
from tests.support.builders import T0, a_profile
from tests.support.processor import slowness
from tests.support.source_seed import seed_of_the_sources

SEED = int(os.environ.get("HOSTILE_SEED", seed_of_the_sources()))
OBJECTS = 3000
PASS_SECONDS = 0.25
PROFILE = ProfileView("default", a_profile())
KINDS = (JOBS, PODS, PODS, BATCH_JOBS, CONFIG_MAPS, SERVICES)


def forged(forger: Forger, kind: Kind, number: int) -> Document:
    make = {"FineTuneJob": forger.job, "Pod": forger.pod, "Job": forger.batch_job, "ConfigMap": forger.config_map}
    document = make.get(kind.name, forger.service)(number)
    stored = {"uid": f"{number:036}", "namespace": "team", "resourceVersion": str(number + 1), "generation": 1}
    document["metadata"] |= stored | {"creationTimestamp": "2030-01-01T00:00:00Z"}
    if kind is PODS:
        document["status"] = forger.status_of_pod()
    return document


def judged(held: CachedObject) -> None:
    view = Reader().job(held).view
    reconcile(Observed(job=view, profile=PROFILE), T0)


def test_no_forged_object_raises_or_takes_longer_than_a_pass_may() -> None:
    random, seen = Random(SEED), Counter[str]()
    forger = Forger(random, (Target("own", "0" * 36), Target("other", "1" * 36)))
    slow = 0.0
    for number in range(OBJECTS):
        kind = random.choice(KINDS)
        document = forged(forger, kind, number)
        try:
            text = json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            seen["no JSON"] += 1
            continue
        start = time.process_time()
        try:
            held = project(kind, json.loads(text))
            if kind is JOBS:
                judged(held)
        except Exception as error:
            error.add_note(f"HOSTILE_SEED={SEED}, {number}: {text[:2000]!r}")
            raise
        taken = time.process_time() - start
        slow = max(slow, taken)
        if taken > PASS_SECONDS:
            assert taken < PASS_SECONDS * slowness(), f"HOSTILE_SEED={SEED}, {number}: {taken:.2f} s for {text[:500]!r}"
        seen[kind.name] += 1
        seen["unreadable"] += bool(held.unreadable)
    print(f"slowest {slow:.3f} s; {dict(seen)}")
    assert min(seen[name] for name in ("FineTuneJob", "Pod", "Job", "ConfigMap", "Service")) > OBJECTS / 20, seen
    assert seen["unreadable"] > OBJECTS / 50, seen
