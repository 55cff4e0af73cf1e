"""The base of every API model and the value types that several of them share.

Every command imports these modules. To start fast, models are built on first use (`defer_build`), a default that is a model comes
from `model_construct()`, which builds nothing, and annotations are not strings, which pydantic would have to compile.
"""

import re
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, StringConstraints, model_validator
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """The base of all API models: camelCase in manifests, snake_case in Python; unknown fields are errors; immutable."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, strict=False, defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_is_unset(cls, content: Any) -> Any:
        """Replace a null by the schema's default, if there is one, as the API server does (`fetch:` with nothing below it)."""
        if not isinstance(content, dict) or None not in content.values():
            return content
        defaulted = {info.alias for info in cls.model_fields.values() if not info.is_required() and info.default is not None}
        return {name: value for name, value in content.items() if value is not None or name not in defaulted}


DECIMAL_PATTERN = r"^[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?$"
"""The form of numbers with a fraction: strings, because floats do not survive every JSON round trip unchanged."""


LONGEST_DECIMAL = 24


def _decimal(text: Any) -> Any:
    """Refuse a string that is not a decimal number, with a clearer message than a pattern gives."""
    if isinstance(text, bool):
        raise ValueError('is a boolean; write a number as a string, such as "2e-4"')
    if isinstance(text, int | float):
        if text < 0:
            raise ValueError(f'{text} is below 0; write a number such as "0.05" or "2e-4"')
        raise ValueError(f'must be a string, because floats do not survive every JSON round trip; write "{text}" in quotes')
    if not isinstance(text, str) or len(text) > LONGEST_DECIMAL:
        return text
    try:
        value = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f'{text!r} is not a number; write it as in "0.05" or "2e-4"') from error
    if not value.is_finite():
        raise ValueError(f'{text!r} is not finite; write a finite number such as "2e-4"')
    if value < 0:
        raise ValueError(f'{text!r} is below 0; write a number such as "0.05" or "2e-4"')
    if re.fullmatch(DECIMAL_PATTERN.strip("^$"), text) is None:
        raise ValueError(
            f"{text!r} is not in the form of a number here: digits, perhaps a point, an exponent of at most two digits, "
            'no sign and no blanks; write it as in "0.05" or "2e-4"'
        )
    return text


# The constraints come first: after a validator they would not reach the JSON schema, and so not the CRD.
DecimalString = Annotated[str, StringConstraints(pattern=DECIMAL_PATTERN, max_length=LONGEST_DECIMAL), BeforeValidator(_decimal)]
"""A non-negative decimal number, written as a string."""

SIZE_PATTERN = r"^[1-9][0-9]{0,9}(B|KB|MB|GB|TB|Ki|Mi|Gi|Ti)?$"
SizeString = Annotated[str, StringConstraints(pattern=SIZE_PATTERN, max_length=16)]
"""A number of bytes: decimal units (KB, MB, GB, TB) or binary ones (Ki, Mi, Gi, Ti)."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def size_bytes(text: str) -> int:
    """Convert a `SizeString` to bytes."""
    match = re.fullmatch(r"([0-9]+)([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write it as in 5GB or 512Mi")
    return int(match[1]) * _UNITS[match[2]]


_SEGMENT = r"[A-Za-z0-9._-]+"
_CLAIM = rf"pvc://[a-z0-9]([a-z0-9-]{{0,61}}[a-z0-9])?(/{_SEGMENT})*/?"
_HUB = rf"hf://(datasets/)?{_SEGMENT}/{_SEGMENT}(/{_SEGMENT})*/?"
_BUCKET = r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._=-]+)*/?"
_MODEL = rf"hf://{_SEGMENT}/{_SEGMENT}/?"
_REGISTRY = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?"
_REPOSITORY = r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
_OCI = rf"oci://{_REGISTRY}/{_REPOSITORY}(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?"
HUB_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$"
"""The Hub's own rule for names of repositories."""
DESTINATION_PATTERN = f"^({_CLAIM}|{_MODEL}|{_BUCKET}|{_OCI})$"
SOURCE_PATTERN = f"^({_CLAIM}|{_HUB}|{_BUCKET})$"
HUB_DATASETS = "datasets/"
"""Prefix by which the Hub's own URLs distinguish a data set from a model."""


def _no_parent(text: str) -> str:
    if any(part in (".", "..") for part in text.rpartition("://")[2].split("/")):
        raise ValueError(f"{text!r} leaves its root; write a path without '.' and '..'")
    return text


def _has_organisation(text: str) -> str:
    data_set = text.removeprefix(f"hf://{HUB_DATASETS}")
    if data_set != text and "/" not in data_set.rstrip("/"):
        raise ValueError(f"{text!r} names no data set; write hf://{HUB_DATASETS}<organisation>/<name>")
    return text


ClaimDirectory = Annotated[
    str, StringConstraints(pattern=f"^{_SEGMENT}(/{_SEGMENT})*$", max_length=512), AfterValidator(_no_parent)
]
"""Path of a directory, relative to the root of a claim that another field names."""
Source = Annotated[
    str, StringConstraints(pattern=SOURCE_PATTERN, max_length=512), AfterValidator(_no_parent), AfterValidator(_has_organisation)
]
"""Where something is read from: `pvc://<claim>/<path>`, `hf://<org>/<model>`, `hf://datasets/<org>/<name>/<path>`,
`s3://<bucket>/<prefix>`."""


def _is_model(text: str) -> str:
    if text.startswith(f"hf://{HUB_DATASETS}"):
        raise ValueError(f"{text!r} names a data set, and results are a model; write hf://<organisation>/<model>")
    return text


Destination = Annotated[
    str, StringConstraints(pattern=DESTINATION_PATTERN, max_length=512), AfterValidator(_no_parent), AfterValidator(_is_model)
]
"""Where results go: `pvc://<claim>/<path>`, `hf://<org>/<model>`, `s3://<bucket>/<prefix>`, `oci://<registry>/<repository>:<tag>`."""
DEFAULT_TAG = "latest"
"""Tag for an `oci://` destination that names none, as in container tools."""


class ClaimPath(BaseModel):
    """A parsed path on a PersistentVolumeClaim of the job's namespace: `pvc://<claim>/<path>`."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    claim: str
    path: str = ""
    """Path relative to the claim's root; empty for the root itself."""


class HubPath(BaseModel):
    """A parsed `hf://` source."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    repository: str
    """`<org>/<name>`."""
    is_dataset: bool
    path: str = ""
    """File or directory inside the repository; empty for all of it."""


class BucketPath(BaseModel):
    """A parsed `s3://` source."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    bucket: str
    prefix: str = ""
    """An object's key, or the prefix of several keys; empty for the whole bucket."""


_ADAPTER_SUFFIX, _LONGEST_HUB_NAME = "-adapter", 96


def adapter_repository(place: HubPath) -> HubPath:
    """Return the adapter's repository if the merged model goes to `place`: loaders expect each at the top of a repository."""
    organisation, _, name = place.repository.partition("/")
    kept = name[: _LONGEST_HUB_NAME - len(_ADAPTER_SUFFIX)].rstrip("-._")
    return HubPath(repository=f"{organisation}/{kept}{_ADAPTER_SUFFIX}", is_dataset=False)


@lru_cache(1024)
def parse_source(source: str) -> ClaimPath | HubPath | BucketPath:
    """Split a `Source`."""
    scheme, _, rest = source.partition("://")
    rest = rest.strip("/")
    if scheme == "hf":
        is_dataset = rest.startswith(HUB_DATASETS)
        organisation, name, *path = rest.removeprefix(HUB_DATASETS).split("/")
        return HubPath(repository=f"{organisation}/{name}", is_dataset=is_dataset, path="/".join(path))
    root, _, path_text = rest.partition("/")
    if scheme == "s3":
        return BucketPath(bucket=root, prefix=path_text)
    return ClaimPath(claim=root, path=path_text)


class RegistryPath(BaseModel):
    """A parsed `oci://` destination."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    registry: str
    """Host, with its port if one is given."""
    repository: str
    tag: str


def parse_destination(destination: str) -> ClaimPath | HubPath | BucketPath | RegistryPath:
    """Split a `Destination`."""
    if not destination.startswith("oci://"):
        return parse_source(destination)
    registry, _, rest = destination.removeprefix("oci://").partition("/")
    repository, _, tag = rest.partition(":")
    return RegistryPath(registry=registry, repository=repository, tag=tag or DEFAULT_TAG)


def claim_path(source: str) -> ClaimPath:
    """Split `pvc://claim/path`."""
    claim, _, path = source.removeprefix("pvc://").partition("/")
    return ClaimPath(claim=claim, path=path.strip("/"))


Revision = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$", max_length=40)]
"""A commit of a repository on the Hub: 40 hexadecimal digits. Branches and tags move, so they are not revisions."""
SecretName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", max_length=253)]
ClaimName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", max_length=63)]
ModuleName = Annotated[str, StringConstraints(max_length=200)]
PatternKey = Annotated[str, StringConstraints(max_length=512)]
"""A regular expression on the end of a module name. Only preflight compiles it: that can take minutes, whatever its length."""
