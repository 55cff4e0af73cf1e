"""One release back: the code of an earlier release carries on with what a later one wrote.

    python -P tests/releases/roll_back.py TREE RECORDING...

TREE is a checkout of the earlier release. Prints for each stage of each recording how the job ended there, and which objects the
earlier release made although they existed. The exit code is 1 when a job did not end well.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

Document = dict[str, Any]


def carried_on(recorded: Document, stage: str) -> str:
    """What becomes of the job in the hands of the release whose tree is on the path."""
    from finetune_job.api.job import FineTuneJobSpec
    from finetune_job.api.profile import FineTuneProfileSpec
    from finetune_job.api.status import FineTuneJobStatus
    from finetune_operator.cache.projection import batch_job_view, pod_view
    from finetune_operator.decide.seen.children_seen import ConfigMapView
    from tests.support.builders import JobBuilder
    from tests.support.simulated_cluster import Children, SimulatedCluster

    snapshot = recorded["stages"][stage]
    # The API server prunes what the earlier definition does not know.
    spec = FineTuneJobSpec.model_validate(recorded["job"]["spec"], extra="ignore").model_dump(mode="json", by_alias=True)
    profile = FineTuneProfileSpec.model_validate(recorded["profile"], extra="ignore")
    cluster = SimulatedCluster(JobBuilder(recorded["job"] | {"spec": spec}, profile))
    cluster.now = datetime.fromisoformat(snapshot["now"])
    cluster.status = FineTuneJobStatus.model_validate(snapshot["status"])
    jobs = []
    for number in snapshot["jobs"]:
        state = recorded["states"][number]
        body = recorded["bodies"][f"Job/{state['metadata']['name']}"]
        jobs.append(batch_job_view(body | {"metadata": body["metadata"] | state["metadata"], "status": state["status"]}))
    plan = recorded["bodies"]["ConfigMap/tune-plan"]["data"]["plan.json"]
    cluster.children = Children(
        batch_jobs=tuple(jobs),
        pods=tuple(pod_view(recorded["states"][number]) for number in snapshot["pods"]),
        plan=ConfigMapView("tune-plan", "uid-plan", plan) if "ConfigMap/tune-plan" in snapshot["children"] else None,
        service_exists="Service/tune-gang" in snapshot["children"],
        claims=cluster.children.claims,
    )
    cluster.seen, cluster.uids = [cluster.children], 1000
    attempt = cluster.status.attempt
    cluster.settle()
    again = {f"{kind}/{name}" for kind, name in cluster.created} & set(snapshot["children"])
    said = [cluster.status.phase]
    said += [f"attempts of the gang: {cluster.status.attempt - attempt} more"] if cluster.status.attempt > attempt else []
    said += [f"made again: {', '.join(sorted(again))}"] if again else []
    return "; ".join(said)


def main(tree: Path, recordings: list[Path]) -> int:
    """Every stage of every recording, in the hands of the tree."""
    sys.path[:0] = [str(tree / "operator"), str(tree)]
    failed = 0
    for path in recordings:
        for scenario, recorded in json.loads(path.read_text()).items():
            for stage in sorted(recorded.get("stages", ())):
                try:
                    end = carried_on(recorded, stage)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is what the earlier release makes of the objects
                    end = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                failed += not end.startswith("Succeeded")
                print(f"{path.stem} {scenario} {stage}: {end}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), [Path(each) for each in sys.argv[2:]]))
