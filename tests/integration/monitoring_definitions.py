"""Definitions of the Prometheus operator's kinds, as far as the chart uses them.

Written from the field documentation of monitoring.coreos.com/v1. A server that has them refuses every field and type that the
Prometheus operator's own definitions refuse, and fields that the chart does not use.
"""

from typing import Any

Schema = dict[str, Any]
GROUP = "monitoring.coreos.com"
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
DURATION: Schema = {"type": "string", "pattern": r"^(0|([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)$"}


def choice(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def fields(*required: str, **properties: Schema) -> Schema:
    found: Schema = {"type": "object", "properties": properties}
    return found | ({"required": list(required)} if required else {})


RELABELING = fields(
    sourceLabels=many(TEXT),
    targetLabel=TEXT,
    regex=TEXT,
    replacement=TEXT,
    action=choice("replace", "keep", "drop", "hashmod", "labelmap", "labeldrop", "labelkeep"),
)
SELECTOR = fields(matchLabels=TEXTS)
ENDPOINT = {
    "port": TEXT,
    "interval": DURATION,
    "scheme": choice("http", "https"),
    "honorLabels": FLAG,
    "relabelings": many(RELABELING),
    "metricRelabelings": many(RELABELING),
    "tlsConfig": fields(ca=fields(secret=fields("key", name=TEXT, key=TEXT)), serverName=TEXT),
}
RULE = fields(
    "expr",
    record=TEXT,
    alert=TEXT,
    expr={"x-kubernetes-int-or-string": True},
    **{"for": DURATION},
    labels=TEXTS,
    annotations=TEXTS,
)
SPECS = {
    "ServiceMonitor": fields(
        "selector", "endpoints", selector=SELECTOR, endpoints=many(fields(**ENDPOINT, bearerTokenFile=TEXT))
    ),
    "PodMonitor": fields(
        "selector",
        selector=SELECTOR,
        namespaceSelector=fields(any=FLAG, matchNames=many(TEXT)),
        podMetricsEndpoints=many(fields(**ENDPOINT)),
    ),
    "PrometheusRule": fields(groups=many(fields("name", name={"type": "string", "minLength": 1}, rules=many(RULE)))),
}


def definitions() -> list[Schema]:
    """CustomResourceDefinitions of the three kinds."""
    return [
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{kind.lower()}s.{GROUP}"},
            "spec": {
                "group": GROUP,
                "scope": "Namespaced",
                "names": {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower()},
                "versions": [
                    {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": fields("spec", spec=spec)}}
                ],
            },
        }
        for kind, spec in SPECS.items()
    ]
