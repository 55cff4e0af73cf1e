"""Reads a tokenizer from its files without transformers, whose import takes a second of processor time.

This tokenizer supports what tokenize.py, render_chat.py and template_probe.py need to look at the first records, where a second
matters. It follows tokenizer.json alone; anything else that a transformers tokenizer class changes shows only in preflight.
Templates run in the same sandbox as in preflight: transformers' template renderer is imported alone, without running the code of
its parent packages.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from finetune_trainer.files import CHAT_TEMPLATE_FILE, TEMPLATES, open_regular

if TYPE_CHECKING:
    from finetune_job.plan.run_plan import AddedTokenPlan

_CONFIG, _MAP, _BACKEND = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT, _TOOL_USE = "default", "tool_use"
_UTILS = "transformers.utils"
_PACKAGES = ("transformers", _UTILS)
RENDERER = f"{_UTILS}.chat_template_utils"


class TokenizerFilesError(ValueError):
    """The files do not contain a usable tokenizer."""


class FileTokenizer:
    """A tokenizer made of tokenizer.json and the special tokens and templates in the files next to it."""

    is_fast = True

    def __init__(self, directory: Path, added: Sequence[AddedTokenPlan] = ()) -> None:
        """added: the tokens that the job adds, which the files lack. Raises TokenizerFilesError, OSError."""
        from tokenizers import AddedToken, Tokenizer

        with open_regular(directory / _BACKEND) as file:
            content = file.read().decode(errors="replace")
        try:
            self.backend_tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing more specific
            raise TokenizerFilesError(f"{_BACKEND} is not a tokenizer ({str(error)[:300]})") from error
        self.backend_tokenizer.add_tokens([AddedToken(token.content, special=token.special, normalized=False) for token in added])
        config = {**_object(directory / _MAP), **_object(directory / _CONFIG)}
        self.special_tokens_map = {name: text for name in _TOKENS if (text := _content(config.get(name)))}
        self.added_tokens_decoder: Mapping[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        self._templates = _templates(directory, config)

    def __getattr__(self, name: str) -> Any:
        """Return the text or the id of a special token, such as `eos_token` or `eos_token_id`."""
        token = name.removesuffix("_id")
        if token not in _TOKENS:
            raise AttributeError(name)
        text = self.special_tokens_map.get(token)
        return text if token == name or text is None else self.convert_tokens_to_ids(text)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        token_id: int | None = self.backend_tokenizer.token_to_id(token)
        return token_id

    def get_chat_template(self, written: str | None, tools: Sequence[Any] | None) -> str:
        """Choose a template as transformers does. Raises ValueError if there is none."""
        if written is not None:
            return written
        wanted = _TOOL_USE if tools and _TOOL_USE in self._templates else _DEFAULT
        if wanted not in self._templates:
            raise ValueError("no chat template")
        return self._templates[wanted]

    def vocabulary(self) -> Mapping[str, int]:
        """All tokens: text -> id."""
        vocabulary: Mapping[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=False))

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}


def _object(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            content = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A template in its own file takes precedence over tokenizer_config.json."""
    written = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(written, str):
        templates[_DEFAULT] = written
    elif isinstance(written, list):
        for entry in written:
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
                templates[entry["name"]] = entry["template"]
    for name, path in (
        (_DEFAULT, directory / CHAT_TEMPLATE_FILE),
        *((path.stem, path) for path in (directory / TEMPLATES).glob("*.jinja")),
    ):
        try:
            with open_regular(path) as file:
                templates[name] = file.read().decode(errors="replace")
        except OSError:
            continue
    return templates


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """The part of transformers' loggers that the renderer calls."""

    def warning_once(self, message: str) -> None:
        self.warning(message)


def keep_rest_of_transformers_out() -> None:
    """Make imports of transformers' modules skip the code of its packages. Does nothing if transformers is already imported."""
    if _PACKAGES[0] in sys.modules:
        return
    spec = importlib.util.find_spec(_PACKAGES[0])
    if spec is None or spec.origin is None:
        return
    root = Path(spec.origin).parent.parent
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package


def import_renderer() -> None:
    """Import transformers' renderer without the heavy modules that it would import.

    The skipped modules are numpy (no record contains its scalars), the Hub's client and progress bars (which transformers'
    loggers load), and the search for installed packages. All of these can still be imported later. Raises ModuleNotFoundError.
    """
    numbers, loggers, packages = (ModuleType(name) for name in ("numpy", f"{_UTILS}.logging", f"{_UTILS}.import_utils"))
    vars(numbers)["generic"] = type("generic", (), {})
    vars(loggers)["get_logger"] = lambda name: _Logger(logging.getLogger(name), {})
    # Tensors and images matter only for tools that are Python functions, and records contain none.
    vars(packages).update(is_jinja_available=lambda: True, is_torch_available=lambda: False, is_vision_available=lambda: False)
    absent = {module.__name__: module for module in (numbers, loggers, packages) if module.__name__ not in sys.modules}
    sys.modules.update(absent)
    try:
        import_module(RENDERER)
    finally:
        for name in absent:
            del sys.modules[name]
