"""What was fetched, written beside the target as the last thing before the target takes its name."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from finetune_job.plan.transfers import FetchItem
from finetune_trainer.files import file_sha256, write_durably


class FetchedFile(BaseModel):
    """One file that is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str
    """Below the target."""
    size: int
    sha256: str
    version: str
    """Git object or ETag at the source."""


class FetchManifest(BaseModel):
    """A source at the time when it was fetched."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: str
    revision: str | None
    files: tuple[FetchedFile, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


def manifest_path(target: Path) -> Path:
    """Beside the target, not in it: the target holds what the source held, nothing else."""
    return target.with_name(f"{target.name}.fetched.json")


def write_manifest(target: Path, manifest: FetchManifest) -> None:
    """Replace the manifest of a target."""
    write_durably(manifest_path(target), manifest.model_dump_json(indent=2).encode())


def read_manifest(target: Path) -> FetchManifest | None:
    """The manifest of a target; None where there is none or it is damaged."""
    try:
        return FetchManifest.model_validate_json(manifest_path(target).read_bytes())
    except (OSError, ValidationError):
        return None


def proven(target: Path, item: FetchItem) -> FetchManifest | None:
    """The manifest of a target that holds, byte for byte, what was fetched for this item and nothing else; otherwise None."""
    manifest = read_manifest(target)
    if manifest is None or (manifest.source, manifest.revision) != (item.source, item.revision):
        return None
    found = {str(path.relative_to(target)): path for path in target.rglob("*") if path.is_symlink() or not path.is_dir()}
    if set(found) != {file.path for file in manifest.files}:
        return None
    for file in manifest.files:
        path = found[file.path]
        if path.is_symlink() or path.stat().st_size != file.size or file_sha256(path) != file.sha256:
            return None
    return manifest
