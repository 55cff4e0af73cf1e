"""Conditions of single nodes, read when a failure on them is to be explained. Nodes are not watched."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_operator.cluster.answers import ApiError
from finetune_operator.cluster.api import Api
from finetune_operator.cluster.kinds import NODES
from finetune_operator.cluster.raw_objects import Fields
from finetune_operator.decide.observed import NodeConditionView, NodeView
from finetune_operator.logs import logger

_log = logger(__name__)
LONGEST_TYPE, LONGEST_MESSAGE = 316, 512
_FIX = "install the chart with rbac.readNodes=true, or take gpu.faultConditions out of the profile"


async def read_nodes(api: Api, names: Sequence[str]) -> tuple[NodeView, ...]:
    """Read the nodes that exist and may be read. Raises ApiUnreachableError."""
    nodes: list[NodeView] = []
    for name in names:
        try:
            document = await api.get(NODES, None, name)
        except ApiError as error:
            fix = {"fix": _FIX} if error.code == 403 else {}
            _log.warning("the conditions of a node cannot be read", node=name, error=str(error), **fix)
            return tuple(nodes)
        conditions = Fields(document).at("status").items("conditions")
        nodes.append(NodeView(name, tuple(_condition(condition) for condition in conditions)))
    return tuple(nodes)


def _condition(fields: Fields) -> NodeConditionView:
    return NodeConditionView(
        type=fields.text("type", LONGEST_TYPE),
        status=fields.text("status", 16),
        reason=fields.text("reason", 128),
        message=fields.text("message", LONGEST_MESSAGE),
        since=fields.time("lastTransitionTime"),
    )
