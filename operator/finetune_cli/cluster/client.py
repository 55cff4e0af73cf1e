"""Sends requests to a context's cluster; bodies and answers are plain dicts. Only following a log may wait without a limit."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes.client import ApiClient
from kubernetes.config import list_kube_config_contexts, new_client_from_config
from kubernetes.config.config_exception import ConfigException

from finetune_cli.exit_codes import LocalError

_CONNECT_SECONDS = 10.0
_TIMEOUT_SECONDS = 30.0
_SHOWN = 300
"""Maximum number of characters of an answer that a message shows."""
_MOST_SAID = 2000
"""Maximum length of a refusal in a message; a policy's refusal begins with the names of the policy and its binding."""
_MOST_LINE_BYTES = 1 << 20
"""Maximum length of a line in a log; a longer one is split into several lines."""


class RequestError(Exception):
    """A request that did not succeed. `status` is None if there was no answer. `reason` and `details` come from the Status object
    in the answer; they are empty without one.
    """

    def __init__(
        self, message: str, status: int | None = None, reason: str = "", details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.details = details or {}


class ClusterClient:
    """A client for the cluster of a context. Raises LocalError if there is no usable kubeconfig."""

    def __init__(self, context: str | None = None) -> None:
        try:
            self._api: ApiClient = new_client_from_config(context=context)
            contexts, current = list_kube_config_contexts()
        except (ConfigException, OSError, ValueError, TypeError, KeyError) as error:
            raise LocalError(
                f"no usable kubeconfig: {str(error).rstrip('.')}; set KUBECONFIG, or name another --context; for runs of this "
                "machine give list, status, logs or reproduce --local"
            ) from error
        chosen = current if context is None else next((known for known in contexts if known.get("name") == context), {})
        self.namespace = str((chosen.get("context") or {}).get("namespace") or "default")
        """Namespace of the context."""
        self.server = str(self._api.configuration.host)
        """Address of the API server."""
        # A server that does not answer is reported at once, without retries.
        self._api.rest_client.pool_manager.connection_pool_kw["retries"] = False

    def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """Send one request. Raises RequestError."""
        answer = self._send(method, path, body, query, content_type=content_type, seconds=_TIMEOUT_SECONDS)
        content = _object(_read(answer))
        if content is None:
            raise RequestError(f"the answer to {path} is not a JSON object", answer.status)
        return content

    def lines(
        self, path: str, query: Mapping[str, str] | None = None, silence_seconds: float | None = _TIMEOUT_SECONDS
    ) -> Iterator[str]:
        """Yield the lines of a text answer as they arrive, without line endings.

        `silence_seconds`: longest time without data; None: no limit. Raises RequestError, also if the connection breaks.
        """
        answer = self._send("GET", path, None, query, content_type="", seconds=silence_seconds)
        rest = b""
        try:
            for chunk in answer.stream(1 << 16):
                *whole, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
                while len(rest) > _MOST_LINE_BYTES:
                    yield rest[:_MOST_LINE_BYTES].decode(errors="replace")
                    rest = rest[_MOST_LINE_BYTES:]
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise RequestError(f"the API server broke off its answer: {error}") from error
        finally:
            answer.close()
        if rest:
            yield rest.decode(errors="replace")

    def output_of(
        self, namespace: str, pod: str, container: str, command: list[str], silence_seconds: float = _TIMEOUT_SECONDS
    ) -> Iterator[bytes]:
        """Run a program in a pod, and yield its output as it arrives. `silence_seconds`: longest time without output.

        Raises RequestError, also if the connection breaks or the program fails.
        """
        # These imports load the classes of all Kubernetes kinds, which takes a second, and few commands need them.
        from kubernetes.client import CoreV1Api
        from kubernetes.client.exceptions import ApiException
        from kubernetes.stream import stream
        from kubernetes.stream.ws_client import ERROR_CHANNEL, STDERR_CHANNEL, STDOUT_CHANNEL
        from websocket import WebSocketBadStatusException, WebSocketException

        try:
            process = stream(
                CoreV1Api(self._api).connect_get_namespaced_pod_exec,
                pod,
                namespace,
                container=container,
                command=command,
                stdin=False,
                stdout=True,
                stderr=True,
                tty=False,
                binary=True,
                _preload_content=False,
                _request_timeout=_CONNECT_SECONDS,
            )
        except ApiException as error:
            # This error has no status; the exception that caused it has one.
            cause = error.__context__
            status = cause.status_code if isinstance(cause, WebSocketBadStatusException) else None
            why = f"the API server answered {status}" if status else str(cause)[:_SHOWN]
            raise RequestError(f"no program can be run in the pod {pod}: {why}", status) from error
        errors, heard = b"", time.monotonic()
        try:
            while process.is_open():
                process.update(timeout=silence_seconds)
                chunk, more = process.read_channel(STDOUT_CHANNEL), process.read_channel(STDERR_CHANNEL)
                errors = (errors + more)[-_SHOWN:]
                if chunk or more:
                    heard = time.monotonic()
                    yield from [chunk] if chunk else []
                elif time.monotonic() - heard >= silence_seconds:
                    raise RequestError(f"the program in the pod {pod} has printed nothing for {silence_seconds:g} s")
            # Read the output that arrived while another channel was being read.
            rest, more = process.read_channel(STDOUT_CHANNEL), process.read_channel(STDERR_CHANNEL)
            errors = (errors + more)[-_SHOWN:]
            yield from [rest] if rest else []
            ended = process.read_channel(ERROR_CHANNEL)
        except (WebSocketException, OSError) as error:
            raise RequestError(f"the connection to the pod {pod} broke off: {error}") from error
        finally:
            process.close()
        # Kubernetes reports how the program ended in a Status object.
        end = _object(ended)
        if end is None:
            raise RequestError(f"the connection to the pod {pod} broke off")
        if end.get("status") != "Success":
            why = errors.decode(errors="replace").strip() or str(end.get("message"))[:_SHOWN]
            raise RequestError(f"the program in the pod {pod} failed: {why}", 400)

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        query: Mapping[str, str] | None,
        *,
        content_type: str,
        seconds: float | None,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request, and return a successful answer before its body is read. Raises RequestError."""
        _, url, headers, *_ = self._api.param_serialize(
            method=method,
            resource_path=path + (f"?{urlencode(query)}" if query else ""),
            header_params={"Accept": "application/json, */*", **({"Content-Type": content_type} if body is not None else {})},
            auth_settings=["BearerToken"],
        )
        try:
            answer: urllib3.BaseHTTPResponse = self._api.rest_client.pool_manager.request(
                method,
                url,
                headers=headers,
                body=None if body is None else json.dumps(body),
                preload_content=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=seconds),
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise RequestError(f"the API server did not answer: {error}") from error
        if 200 <= answer.status < 300:
            return answer
        content = _object(_read(answer)) or {}
        said, reason, details = content.get("message"), content.get("reason"), content.get("details")
        raise RequestError(
            f"the API server answered {answer.status} to {path}" + (f": {str(said)[:_MOST_SAID]}" if said else ""),
            answer.status,
            str(reason or ""),
            details if isinstance(details, dict) else {},
        )


def _object(text: bytes) -> dict[str, Any] | None:
    """Return a JSON object, or None for anything else."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _read(answer: urllib3.BaseHTTPResponse) -> bytes:
    try:
        return answer.data
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise RequestError(f"the API server did not answer: {error}") from error
