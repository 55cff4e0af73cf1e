"""Takes out of objects and logs what must not leave a cluster: values of variables and Secrets, and what looks like a token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "(redacted)"
_DROPPED_ANNOTATIONS = ("kubectl.kubernetes.io/last-applied-configuration",)
_VALUES = frozenset({"value", "valueFrom"})
_SECRET_DATA = frozenset({"data", "stringData", "binaryData"})
_TOKENS = re.compile(
    r"""hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|sk-[A-Za-z0-9_-]{16,}|glpat-[A-Za-z0-9_-]{16,}
    |dckr_pat_[A-Za-z0-9_-]{16,}|npm_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?
    |-----BEGIN[ A-Z]*PRIVATE[ ]KEY-----.*?(?:-----END[ A-Z]*PRIVATE[ ]KEY-----|$)""",
    re.VERBOSE | re.DOTALL,
)
_CREDENTIALS_IN_URL = re.compile(r"((?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,30}://)[^/\s@]+@", re.IGNORECASE)
_NAMES = "password|passwd|secret|token|authorization|api[_-]?key|access[_-]?key|account[_-]?key"
_NAMED = re.compile(
    rf"""((?:{_NAMES})[a-z0-9_.-]{{0,100}}["']?\s*[=:]\s*["']?(?:bearer\s+|basic\s+)?)[^\s"',;&]{{4,}}""", re.IGNORECASE
)
_QUOTED = re.compile(
    rf"""((?:{_NAMES})[a-z0-9_.-]{{0,100}}["']?\s*[=:]\s*)("[^"\n]{{1,500}}"|'[^'\n]{{1,500}}')""", re.IGNORECASE
)
"""A value that may hold spaces."""
_OPTION = re.compile(rf"(--[a-z0-9-]{{0,40}}(?:{_NAMES})(?![a-z])\s+)(?!-)\S{{4,}}|(\bbearer\s+)[\w.~+/=-]{{8,}}", re.IGNORECASE)
_SECRET_KEY = re.compile(rf"(?:.{{0,250}}[._/-])?(?:{_NAMES})", re.IGNORECASE)
"""Of a mapping, such as annotations; not the name of a Secret, as in `secretRef`."""
_SIGNED = re.compile(r"((?:X-Amz-(?:Signature|Credential|Security-Token)|sig|signature)=)[^&\s\"']+", re.IGNORECASE)


def redacted_text(text: str) -> str:
    """The text without tokens, keys, passwords and signatures, as far as their form tells them.

    Logs are strangers' texts: no expression may look further than a bound from each place where it could begin.
    """
    text = _TOKENS.sub(REDACTED, text)
    text = _CREDENTIALS_IN_URL.sub(rf"\1{REDACTED}@", text)
    text = _SIGNED.sub(rf"\1{REDACTED}", text)
    text = _QUOTED.sub(rf'\1"{REDACTED}"', text)
    text = _OPTION.sub(rf"\1\2{REDACTED}", text)
    return _NAMED.sub(rf"\1{REDACTED}", text)


def redacted(content: Any, *, is_secret: bool = False) -> Any:
    """An object of the API server without values of variables, Secret data, managed fields and the copy of what was applied."""
    if isinstance(content, Mapping):
        is_secret = is_secret or content.get("kind") == "Secret"
        return {str(key): _member(str(key), each, is_secret) for key, each in content.items() if key != "managedFields"}
    if isinstance(content, list):
        return [redacted(each, is_secret=is_secret) for each in content]
    return redacted_text(content) if isinstance(content, str) else content


def _member(key: str, content: Any, is_secret: bool) -> Any:
    if is_secret and key in _SECRET_DATA and isinstance(content, Mapping):
        return dict.fromkeys(map(str, content), REDACTED)
    if key in ("env", "envFrom") and isinstance(content, list):
        return [_variable(each) for each in content]
    if isinstance(content, str) and content and _SECRET_KEY.fullmatch(key):
        return REDACTED
    if key == "annotations" and isinstance(content, Mapping):
        content = {name: each for name, each in content.items() if name not in _DROPPED_ANNOTATIONS}
    return redacted(content, is_secret=is_secret)


def _variable(content: Any) -> Any:
    if not isinstance(content, Mapping):
        return REDACTED
    return {str(key): REDACTED if key in _VALUES else redacted(each) for key, each in content.items()}
