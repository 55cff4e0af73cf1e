"""The rules of pods as an nftables ruleset for the network namespace of a node."""

from collections.abc import Iterable, Sequence

from tools.cluster.policy_rules import ANYWHERE, Flow, PodRules, Ports

TABLE = "finetune-policies"
"""Of the family ip."""


def removal() -> str:
    """Input of `nft -f` that removes the table, whether it is there or not."""
    return f"table ip {TABLE}\ndelete table ip {TABLE}\n"


def ruleset(rules: Sequence[PodRules]) -> str:
    """Input of `nft -f` that replaces all rules at once.

    A packet between pods of one node is seen because the kernel gives bridged packets to the forward hook, one to the node itself
    in the input hook, both after translation of Service addresses. A node reaches its own pods always, as Kubernetes demands.
    """
    egress = {one.address: one.egress for one in rules if one.egress is not None}
    ingress = {one.address: one.ingress for one in rules if one.ingress is not None}
    return "\n".join(
        [
            f"{removal()}table ip {TABLE} {{",
            *_chain("forward", "type filter hook forward priority filter", _ESTABLISHED, "jump egress", "jump ingress"),
            *_chain("input", "type filter hook input priority filter", _ESTABLISHED, "jump egress"),
            *_chain("egress", *_dispatch("saddr", "egress", egress)),
            *_chain("ingress", *_dispatch("daddr", "ingress", ingress)),
            *(line for address, flows in egress.items() for line in _pod_chain("egress", address, "daddr", flows)),
            *(line for address, flows in ingress.items() for line in _pod_chain("ingress", address, "saddr", flows)),
            "}\n",
        ]
    )


_ESTABLISHED = "ct state established,related accept"


def _chain(name: str, *lines: str) -> list[str]:
    return [f"  chain {name} {{", *(f"    {line};" for line in lines), "  }"]


def _dispatch(field: str, direction: str, addresses: Iterable[str]) -> list[str]:
    elements = ", ".join(f"{address} : jump {direction}-{address}" for address in addresses)
    return [f"ip {field} vmap {{ {elements} }}"] if elements else []


def _pod_chain(direction: str, address: str, field: str, flows: Iterable[Flow]) -> list[str]:
    allowed = [f"{_peers(field, flow)}{match}return" for flow in flows for match in _ports(flow.ports)]
    return _chain(f"{direction}-{address}", *allowed, "drop")


def _peers(field: str, flow: Flow) -> str:
    included = "" if flow.peers == (ANYWHERE,) else f"ip {field} {_set(flow.peers)} "
    return included + (f"ip {field} != {_set(flow.excluded)} " if flow.excluded else "")


def _ports(ports: Iterable[Ports]) -> list[str]:
    """A match for each protocol; one that matches everything if there are no ports."""
    by_protocol: dict[str, list[str]] = {}
    for one in ports:
        by_protocol.setdefault(one.protocol, []).append(f"{one.first}-{one.last}" if one.last > one.first else f"{one.first}")
    return [f"{protocol} dport {_set(numbers)} " for protocol, numbers in by_protocol.items()] or [""]


def _set(elements: Iterable[str]) -> str:
    return f"{{ {', '.join(dict.fromkeys(elements))} }}"
