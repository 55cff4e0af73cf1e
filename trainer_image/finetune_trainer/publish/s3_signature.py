"""Signatures of requests to an object store.

Source: AWS Signature Version 4 with the Authorization header and a signed payload,
https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html. Signed here because the trainer's object store
library hides the ids of multipart uploads, without which no upload outlives its process.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import datetime
from urllib.parse import quote, urlsplit

from finetune_trainer.credentials import S3Keys

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"
_UNRESERVED = "-_.~"


def encoded_path(path: str) -> str:
    """A path as it is signed and sent: everything escaped but RFC 3986's unreserved characters and slashes."""
    return quote(path, safe=_UNRESERVED + "/")


def encoded_query(query: Mapping[str, str]) -> str:
    """A query as it is signed and sent: sorted, everything escaped but unreserved characters."""
    pairs = sorted((quote(name, safe=_UNRESERVED), quote(value, safe=_UNRESERVED)) for name, value in query.items())
    return "&".join(f"{name}={value}" for name, value in pairs)


def signed_headers(
    method: str, url: str, headers: Mapping[str, str], *, payload_sha256: str, keys: S3Keys, region: str, now: datetime
) -> dict[str, str]:
    """The headers to send, signed.

    url: encoded as above, its query included. headers: all of them are signed. payload_sha256: hexadecimal, which the store
    compares with the body. now: in UTC.
    """
    parts, time = urlsplit(url), now.strftime("%Y%m%dT%H%M%SZ")
    sent = {name.lower(): value.strip() for name, value in headers.items()}
    sent |= {"host": parts.netloc, "x-amz-content-sha256": payload_sha256, "x-amz-date": time}
    if keys.session_token is not None:
        sent["x-amz-security-token"] = keys.session_token
    names = ";".join(sorted(sent))
    canonical = "\n".join(
        [method, parts.path or "/", parts.query, *(f"{name}:{sent[name]}" for name in sorted(sent)), "", names, payload_sha256]
    )
    scope = f"{time[:8]}/{region}/s3/aws4_request"
    text = "\n".join([_ALGORITHM, time, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{keys.secret_access_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    return sent | {
        "authorization": f"{_ALGORITHM} Credential={keys.access_key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    }
