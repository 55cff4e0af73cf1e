"""Requests to the cluster of the current context, with plain documents in and out."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import urllib3
from kubernetes.client import ApiClient
from kubernetes.config import new_client_from_config
from kubernetes.config.config_exception import ConfigException

from finetune_cli.exit_codes import LocalError

_TIMEOUT_SECONDS = 30
_SHOWN = 300
"""Characters of an answer in a message."""


class RequestError(Exception):
    """A request that did not succeed. `status` is None if there was no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ClusterClient:
    """Raises LocalError if there is no usable kubeconfig."""

    def __init__(self, context: str | None = None) -> None:
        try:
            self._api: ApiClient = new_client_from_config(context=context)
        except (ConfigException, OSError, ValueError) as error:
            raise LocalError(f"no usable kubeconfig: {error}; set KUBECONFIG, or name another --context") from error
        # What does not answer is said once, and soon.
        self._api.rest_client.pool_manager.connection_pool_kw["retries"] = False

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send one request. Raises RequestError."""
        prepared = self._api.param_serialize(
            method=method,
            resource_path=path,
            header_params={"Accept": "application/json", **({"Content-Type": "application/json"} if body is not None else {})},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._api.call_api(*prepared, _request_timeout=_TIMEOUT_SECONDS)
            text = answer.read()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise RequestError(f"the API server did not answer: {error}") from error
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if not 200 <= answer.status < 300:
            _refuse(path, answer.status, content)
        if not isinstance(content, dict):
            raise RequestError(f"the answer to {path} is not a JSON object", answer.status)
        return content


def _refuse(path: str, status: int, content: object) -> NoReturn:
    said = content.get("message") if isinstance(content, dict) else None
    raise RequestError(f"the API server answered {status} to {path}" + (f": {str(said)[:_SHOWN]}" if said else ""), status)
