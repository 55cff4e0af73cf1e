"""Finds entries of a directory that cannot be read as files, or that are far too large for a file of that name.

Opening a pipe may block forever, and reading a device may never end, but libraries open anything with the right name. So entries
are checked first.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_trainer.errors import ModelError
from finetune_trainer.files import TEMPLATES, links_outside

UNUSABLE_FILE = "model-file-unusable"
"""Id of the rule about entries that must not be opened."""
MAX_TEMPLATE_BYTES = 4 << 20
MAX_BYTES: Mapping[str, int] = {
    "config.json": 16 << 20,
    "generation_config.json": 1 << 20,
    "adapter_config.json": 16 << 20,
    "tokenizer_config.json": 64 << 20,
    "special_tokens_map.json": 64 << 20,
    "added_tokens.json": 64 << 20,
    "tokenizer.json": 512 << 20,
    "vocab.json": 512 << 20,
    "merges.txt": 512 << 20,
    "chat_template.jinja": MAX_TEMPLATE_BYTES,
    "chat_template.json": MAX_TEMPLATE_BYTES,
    "tokenizer.model": 512 << 20,
    "model.safetensors.index.json": 256 << 20,
}
"""File name -> largest accepted size, which is about ten times that of the largest such file in use."""
_KINDS = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))
FIELD = "spec.model.source"
_FIX_LINK = "replace the link by the file itself, or put its target on the same claim"


def require_links_inside(directory: Path, root: Path) -> None:
    """Raise ModelError if a link of the base model leads out of `root`, since this pod would open the target. Raises OSError."""
    for error in links_outside(directory, root):
        raise ModelError(f"{FIELD}: {error.filename} {error.strerror}", _FIX_LINK)


def _finding(path: Path, directory: Path, reason: str, fix: str) -> Finding:
    shown = str(path.relative_to(directory)) if path != directory else path.name
    return make_finding(UNUSABLE_FILE, field=FIELD, value=shown, message=f"{shown} {reason}", fix=fix)


def check_entries(directory: Path, root: Path) -> list[Finding]:
    """Return a finding for each entry that no library may open, links out of `root` first. Raises OSError if listing fails."""
    findings = [
        _finding(Path(error.filename), directory, str(error.strerror), _FIX_LINK) for error in links_outside(directory, root)
    ]
    for path in (*sorted(directory.iterdir()), *sorted(directory.glob(f"{TEMPLATES}/*"))):
        reason = _reason(path)
        if reason:
            findings.append(_finding(path, directory, reason, "replace it with the file of the original model, or remove it"))
    return findings


def _reason(path: Path) -> str:
    is_file_name = path.name in MAX_BYTES or path.suffix == ".safetensors"
    try:
        status = path.stat()
    except OSError as error:
        return f"cannot be followed ({error.strerror})" if is_file_name else ""
    for is_kind, name in _KINDS:
        if is_kind(status.st_mode):
            return f"is {name}, not a file"
    if stat.S_ISDIR(status.st_mode):
        return "is a directory, not a file" if is_file_name else ""
    limit = MAX_BYTES.get(path.name, MAX_TEMPLATE_BYTES if path.parent.name == TEMPLATES else None)
    if limit is not None and status.st_size > limit:
        return f"has {status.st_size} bytes, and no such file is larger than {limit}"
    return ""
