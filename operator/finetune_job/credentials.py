"""Files of credentials: what the kubelet mounts from a Secret, and under which names the trainer reads it.

One table for the operator, which builds the volumes, and the trainer, which reads the files. Credentials travel in no other way:
not in the plan, not in variables, not in arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CredentialFile:
    """One key of a Secret as a file below the credentials' mount point."""

    key: str
    """In the Secret, unless the user names another."""
    path: str
    required: bool = True


HUB_TOKEN = CredentialFile("token", "hub/token")
S3_ACCESS_KEY_ID = CredentialFile("AWS_ACCESS_KEY_ID", "s3/AWS_ACCESS_KEY_ID")
S3_SECRET_ACCESS_KEY = CredentialFile("AWS_SECRET_ACCESS_KEY", "s3/AWS_SECRET_ACCESS_KEY")
S3_SESSION_TOKEN = CredentialFile("AWS_SESSION_TOKEN", "s3/AWS_SESSION_TOKEN", required=False)
REGISTRY_LOGINS = CredentialFile(".dockerconfigjson", "registry/config.json")

S3_KEYS = (S3_ACCESS_KEY_ID, S3_SECRET_ACCESS_KEY, S3_SESSION_TOKEN)
