"""Sources and destinations as people write them elsewhere -> as this API has them: paths, names of the Hub, links to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from finetune_job.api.base import HUB_DATASETS

Use = Literal["model", "data", "output"]
"""The use of an address."""
USUAL_CLAIM: dict[Use, str] = {"model": "models", "data": "data", "output": "models-out"}
_HUB_LINK = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(.+)")
_HUB_BRANCH = re.compile(r"/(?:tree|blob|resolve)/[^/]+")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{0,3}(.*)")
_OWN_SCHEMES = {
    "hf": "hf",
    "huggingface": "hf",
    "s3": "s3",
    "s3a": "s3",
    "s3n": "s3",
    "pvc": "pvc",
    "oci": "oci",
    "docker": "oci",
}
_DRIVE = re.compile(r"([A-Za-z]):/+(.+)")
"""A path of Windows."""
_SEGMENT = re.compile(r"[^A-Za-z0-9._-]+")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet|txt|arrow|gz|safetensors)$", re.IGNORECASE)
_LONGEST = 512
"""Characters of an address; of longer ones nothing is made."""


@dataclass(frozen=True)
class Address:
    """The address that was probably meant."""

    text: str
    """`pvc://data/x.jsonl`."""
    note: str = ""
    """A further step, to be written after "and"."""
    is_certain: bool = False
    """Whether only the spelling differs."""


def likely_addresses(written: str, use: Use) -> Iterator[Address]:
    """Yield likely addresses, the likeliest first; none for a text that says nothing."""
    text = written.strip().strip("\"'").replace("\\", "/")
    if not text or len(text) > _LONGEST:
        return
    if (link := _HUB_LINK.match(text)) is not None:
        yield Address("hf://" + _clean(_HUB_BRANCH.sub("", link[1], count=1)))
        return
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1].lower() in _OWN_SCHEMES:
        yield from _respelt(_OWN_SCHEMES[scheme[1].lower()], scheme[1], scheme[2], use)
        return
    if scheme is not None and scheme[1].lower() != "file":
        name = _clean(scheme[2].rpartition("/")[2]) or USUAL_CLAIM[use]
        yield Address(f"pvc://{USUAL_CLAIM[use]}/{name}", f"copy it to the claim {USUAL_CLAIM[use]} first")
        return
    if scheme is not None:
        text = f"/{scheme[2]}"
    drive = _DRIVE.match(text)
    if drive is not None:
        yield from _on_claim(f"/mnt/{drive[1].lower()}/{drive[2]}", use, ", which on Windows needs WSL,")
        return
    if use != "output" and _HUB_NAME.fullmatch(text) and not _FILE.search(text):
        yield Address(f"hf://{HUB_DATASETS if use == 'data' else ''}{text}")
    yield from _on_claim(text, use)


def slug(text: str, others: str = "") -> str:
    """A name of Kubernetes: lower case, digits and dashes, at most 63 characters. others: further characters that are kept."""
    return re.sub(rf"[^a-z0-9{re.escape(others)}]+", "-", text.lower())[:63].strip("-._")


def _clean(path: str) -> str:
    """The path with the characters that an address may have, and without a way out of its root."""
    parts = (_SEGMENT.sub("-", part).strip("-") for part in path.split("/"))
    return "/".join(part for part in parts if part not in ("", ".", ".."))


def _respelt(scheme: str, written: str, rest: str, use: Use) -> Iterator[Address]:
    root, _, path = rest.strip("/").partition("/")
    path = _clean(path)
    if scheme == "oci":
        yield Address(f"oci://{root.lower()}/{path.lower()}", is_certain=True)
        return
    if scheme == "hf":
        root = _clean(root)
        is_whole = bool(root and path)
        yield Address(f"hf://{root}/{path}" if is_whole else f"hf://your-organisation/{root or 'your-model'}")
        if is_whole and use == "output":
            yield Address("hf://" + "/".join(f"{root}/{path}".split("/")[:2]))
        return
    name = slug(root, "." if scheme == "s3" else "") or USUAL_CLAIM[use]
    is_spelling = name == root.lower() and path == rest.strip("/").partition("/")[2]
    yield Address(f"{scheme}://{name}/{path}".rstrip("/"), is_certain=is_spelling and (written != scheme or name == root))


def _on_claim(path: str, use: Use, where: str = "") -> Iterator[Address]:
    """A path of this machine: the claim is the directory around it. where: on which part of the machine a run is."""
    path = re.sub("/+", "/", path)
    directory, _, name = path.rstrip("/").rpartition("/")
    if not directory and path.startswith("/"):
        directory = "/"
    claim = slug(directory.rpartition("/")[2]) or USUAL_CLAIM[use]
    leaf = _clean(name)
    if not leaf:
        return
    renamed = f" (renamed: {name!r} has characters that an address cannot have)" if leaf != name else ""
    yield Address(f"pvc://{claim}/{leaf}", f"give `finetune run`{where} --claim {claim}={directory or '.'}{renamed}")
