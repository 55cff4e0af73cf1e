"""Conditions of nodes: read as they are, whatever stands there, and left alone without the right."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from structlog.testing import capture_logs

from finetune_operator.client.answers import ApiError
from finetune_operator.client.kinds import NODES
from finetune_operator.decide.seen.observed import NodeConditionView, NodeView
from finetune_operator.passes.live_reads import read_nodes
from tests.unit.finetune_operator.fakes import FakeApi

MOMENT = "2026-01-02T03:04:05Z"
XID = {"type": "GpuXidError", "status": "True", "reason": "Xid79", "message": "off the bus", "lastTransitionTime": MOMENT}
SEEN = NodeConditionView("GpuXidError", "True", "Xid79", "off the bus", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))


def read(api: Any, *names: str) -> tuple[NodeView, ...]:
    return asyncio.run(read_nodes(api, names))


@pytest.mark.parametrize(
    ("status", "conditions"),
    [
        ({"conditions": [XID]}, (SEEN,)),
        ({"conditions": [XID | {"message": "m" * 10_000, "lastTransitionTime": "today"}]}, None),
        ({"conditions": [7]}, (NodeConditionView("", "", "", "", None),)),
        ({"conditions": "none"}, ()),
        ("none", ()),
        (None, ()),
    ],
)
def test_whatever_a_node_contains_is_read(status: Any, conditions: tuple[NodeConditionView, ...] | None) -> None:
    api = FakeApi()
    api.put(NODES, {"metadata": {"name": "node-a"}, "status": status})
    (node,) = read(api, "node-a")
    if conditions is None:
        (one,) = node.conditions
        assert (one.message, one.since) == ("m" * 512, None)
    else:
        assert node == NodeView("node-a", conditions)


def test_a_node_that_is_gone_has_no_conditions() -> None:
    assert read(FakeApi(), "node-a") == (NodeView("node-a", ()),)


@pytest.mark.parametrize(("code", "says_fix"), [(403, True), (500, False)])
def test_without_an_answer_the_failure_keeps_its_class_and_the_log_says_why(code: int, says_fix: bool) -> None:
    api = FakeApi()
    api.fail["get"] = [ApiError("GET", code, "", "no")]
    with capture_logs() as logs:
        assert read(api, "node-a", "node-b") == ()
    (entry,) = logs
    assert (entry["log_level"], entry["node"]) == ("warning", "node-a")
    assert ("rbac.readNodes=true" in entry.get("fix", "")) is says_fix
    assert [name for _, _, name in api.calls] == ["node-a"]
