"""Which files of a source are taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from finetune_trainer.data.read import KNOWN_EXTENSIONS
from finetune_trainer.fetch.remote import RemoteFile
from finetune_trainer.licence_files import LICENCE_NAMES

MODEL_SUFFIXES = frozenset({".safetensors", ".json", ".txt", ".model", ".tiktoken", ".jinja", ".md"})
"""Weights, settings, tokenizers, chat templates, the model card. Weights in formats that can carry code are never taken."""
CHAT_TEMPLATES = "additional_chat_templates"
"""Directory in which transformers looks for templates beside the first one."""
CODE_SUFFIX = ".py"
OTHER_LAYOUT = "consolidated"
"""Beginning of the name of weights that some repositories hold a second time, in the layout of their author's own software."""


def model_files(files: Sequence[RemoteFile], *, allow_remote_code: bool) -> list[RemoteFile]:
    """What a model needs. Directories are left out but for chat templates and, where allowed, code."""
    taken = [file for file in files if _belongs_to_model(PurePosixPath(file.path), allow_remote_code)]
    if any(_is_weight(file) and not _has_other_layout(file) for file in taken):
        taken = [file for file in taken if not (_is_weight(file) and _has_other_layout(file))]
    return taken


def has_weights(files: Sequence[RemoteFile]) -> bool:
    """Whether there are weights among the files."""
    return any(_is_weight(file) for file in files)


def data_files(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The files that are read as records."""
    return [file for file in files if file.path.lower().endswith(KNOWN_EXTENSIONS) and not _is_hidden(file.path)]


def _belongs_to_model(path: PurePosixPath, allow_remote_code: bool) -> bool:
    if _is_hidden(str(path)):
        return False
    if path.suffix == CODE_SUFFIX:
        return allow_remote_code
    if len(path.parts) > 1:
        return path.parts[0] == CHAT_TEMPLATES and path.suffix == ".jinja"
    return path.suffix.lower() in MODEL_SUFFIXES or path.name.upper().startswith(LICENCE_NAMES)


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _is_weight(file: RemoteFile) -> bool:
    return file.path.endswith(".safetensors")


def _has_other_layout(file: RemoteFile) -> bool:
    return file.path.startswith(OTHER_LAYOUT)
