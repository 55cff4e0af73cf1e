"""What every write of the executor carries, so that it meets the object that was seen and no other."""

from __future__ import annotations

import asyncio
from typing import Any

from finetune_operator.decide.actions import Actions, Delete
from tests.unit.finetune_operator.cluster.test_execute import ALL, scene


def sent(actions: Actions) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Bodies of the status writes, and the arguments of the deletes."""
    patches: list[dict[str, Any]] = []
    deletes: list[dict[str, Any]] = []

    async def scenario() -> None:
        stage = scene()
        gathered = await stage.gathered()
        patch, delete = stage.api.patch, stage.api.delete

        async def noting_patch(kind: Any, namespace: str, name: str, body: Any, **more: Any) -> Any:
            if kind.name == "FineTuneJob":
                patches.append({**body, **more})
            return await patch(kind, namespace, name, body, **more)

        async def noting_delete(kind: Any, namespace: str, name: str, **more: Any) -> Any:
            deletes.append({"kind": kind.name, "name": name, **more})
            return await delete(kind, namespace, name, **more)

        stage.api.patch, stage.api.delete = noting_patch, noting_delete  # type: ignore[method-assign]
        await stage.executor.execute(gathered, actions)

    asyncio.run(scenario())
    return patches, deletes


def test_a_status_write_names_the_version_and_the_uid_of_the_job_that_was_seen() -> None:
    """A job that was made again under its name has another UID: its status is not what was decided for the first one."""
    (patch,), _ = sent(ALL)
    assert patch["metadata"]["uid"] == "job-uid"
    assert patch["metadata"]["resourceVersion"] == "1"
    assert patch["subresource"] == "status"


def test_a_delete_names_the_uid_and_whether_it_is_forced() -> None:
    pod = Delete("Pod", "tune-train-0-0", "pod-uid", force=True)
    _, deletes = sent(Actions(deletes=(*ALL.deletes, pod)))
    assert deletes == [
        {"kind": "Job", "name": "tune-train-0", "uid": "tune-train-0-uid", "force": False},
        {"kind": "Pod", "name": "tune-train-0-0", "uid": "pod-uid", "force": True},
    ]
