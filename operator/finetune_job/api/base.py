"""The base of every API model and the value types that several of them share."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, StringConstraints
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """camelCase outside, snake_case inside; unknown fields are errors; immutable once parsed."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=False,
        use_attribute_docstrings=True,
    )


class Dtype(StrEnum):
    """Element types, by the names torch gives them."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


DECIMAL_PATTERN = r"^[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?$"
"""Floats are not allowed in the spec (they do not survive every JSON round trip unchanged): numbers with a fraction are strings."""


def _decimal(text: Any) -> Any:
    """Says what is wrong in better words than a pattern can."""
    if isinstance(text, bool):
        raise ValueError('must be a number written as a string, such as "2e-4"; got a boolean')
    if isinstance(text, int | float):
        raise ValueError(f'must be a string, because floats do not survive every JSON round trip; write "{text}" in quotes')
    if not isinstance(text, str):
        return text
    try:
        value = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f'{text!r} is not a number; write it as in "0.05" or "2e-4"') from error
    if not value.is_finite():
        raise ValueError(f'{text!r} is not finite; write a finite number such as "2e-4"')
    return text


# The constraints stand first: behind a validator they would not reach the JSON schema, and so not the CRD.
DecimalString = Annotated[str, StringConstraints(pattern=DECIMAL_PATTERN, max_length=24), BeforeValidator(_decimal)]
"""A non-negative decimal number, written as a string."""

SIZE_PATTERN = r"^[1-9][0-9]{0,9}(B|KB|MB|GB|TB|Ki|Mi|Gi|Ti)?$"
SizeString = Annotated[str, StringConstraints(pattern=SIZE_PATTERN, max_length=16)]
"""A number of bytes: decimal units (KB, MB, GB, TB) or binary ones (Ki, Mi, Gi, Ti)."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def size_bytes(text: str) -> int:
    """Bytes of a `SizeString`."""
    match = re.fullmatch(r"([0-9]+)([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write it as in 5GB or 512Mi")
    return int(match[1]) * _UNITS[match[2]]


CLAIM_SOURCE_PATTERN = r"^pvc://[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(/[A-Za-z0-9._-]+)*/?$"


def _no_parent(text: str) -> str:
    if any(part in (".", "..") for part in text.removeprefix("pvc://").split("/")):
        raise ValueError(f"{text!r} leaves its claim; write a path without '.' and '..'")
    return text


ClaimSource = Annotated[str, StringConstraints(pattern=CLAIM_SOURCE_PATTERN, max_length=512), AfterValidator(_no_parent)]
"""A path on a PersistentVolumeClaim of the job's namespace: `pvc://<claim>/<path>`."""


class ClaimPath(BaseModel):
    """A parsed `ClaimSource`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    claim: str
    path: str = ""
    """Relative to the claim's root; empty for the root itself."""


def claim_path(source: str) -> ClaimPath:
    """Split `pvc://claim/path`."""
    claim, _, path = source.removeprefix("pvc://").partition("/")
    return ClaimPath(claim=claim, path=path.strip("/"))


ClaimName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", max_length=63)]
ModuleName = Annotated[str, StringConstraints(max_length=200)]
