"""Turns a cluster's error answers into messages that say what is missing and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass

from finetune_cli.cluster.client import RequestError
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.jobs.plain import plain
from finetune_job.names import API_VERSION, GROUP

_SHOWN = 300
_POLICY = "ValidatingAdmissionPolicy"
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?"
    r"(?:/(?P<sub>[a-z]+))?$"
)


class ClusterError(LocalError):
    """A request to a cluster that failed. `status`: the HTTP status; None: there was no answer."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED, status: int | None = None) -> None:
        super().__init__(message, exit_code)
        self.status = status


@dataclass(frozen=True)
class Right:
    """A permission in the terms of RBAC."""

    verb: str
    resource: str
    """The resource with its subresource, as in `pods/log`."""
    group: str = ""
    namespace: str = ""
    """Namespace of the permission; empty: the whole cluster."""

    def __str__(self) -> str:
        resource = f"{self.resource}.{self.group}" if self.group else self.resource
        place = f"in the namespace {self.namespace}" if self.namespace else "in the whole cluster"
        return f"{self.verb} {resource} {place}"


def right_for(method: str, path: str) -> Right | None:
    """Return the permission that a request needs, or None if the path has an unknown form."""
    match = _PATH.match(path)
    if match is None:
        return None
    verb = "list" if method == "GET" and match["name"] is None else _VERBS.get(method, method.lower())
    sub = f"/{match['sub']}" if match["sub"] else ""
    return Right(verb, match["plural"] + sub, match["group"] or "", match["namespace"] or "")


def cluster_error(error: RequestError, method: str, path: str, server: str) -> ClusterError:
    """Return an error whose message says what happened and what to do."""
    message = plain(error, _SHOWN)
    match error.status:
        case None:
            return ClusterError(f"{server}: {message}; check that the cluster can be reached, or name another --context")
        case 401:
            return ClusterError(f"{server} does not know you: log in again, or name another --context", status=401)
        case 403 if _POLICY in str(error):
            # The policy's message names the field and the missing permission.
            _, _, denied = str(error).partition("denied request: ")
            return ClusterError(plain(denied, _SHOWN) or message, status=403)
        case 403:
            right = right_for(method, path)
            missing = f"you may not {right}" if right is not None else message
            return ClusterError(
                f"{missing}; ask for a Role that permits it (docs/reference/rights.md lists what each command needs)", status=403
            )
        case 404 if f"/{GROUP}/" in path and not error.details.get("name"):
            return ClusterError(
                f"{server} does not serve {API_VERSION}: install the chart, or name another --context", status=404
            )
        case 429 | 500 | 502 | 503 | 504:
            return ClusterError(f"{server}: {message}; the cluster is overloaded or starting, try again", status=error.status)
        case _:
            return ClusterError(message, status=error.status)
