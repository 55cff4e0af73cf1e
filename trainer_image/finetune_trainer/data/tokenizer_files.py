"""A tokenizer as its files have it, without transformers, which takes a second of processor time to import: as much as
tokenize.py, render_chat.py and template_probe.py ask of one, and transformers' renderer of chat templates alone.

For looking at the first records, where a second counts. Text becomes the tokens that tokenizer.json says; what a tokenizer class
of transformers changes beyond that shows in preflight alone. Templates run in the very sandbox in which training runs them: the
packages above its module are put in place without running their own code.
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
    """The files do not make a tokenizer."""


class FileTokenizer:
    """tokenizer.json, with the special tokens and templates of the files beside it."""

    is_fast = True

    def __init__(self, directory: Path, added: Sequence[AddedTokenPlan] = ()) -> None:
        """added: tokens of the job that the files do not have. Raises TokenizerFilesError, OSError."""
        from tokenizers import AddedToken, Tokenizer

        with open_regular(directory / _BACKEND) as file:
            content = file.read().decode(errors="replace")
        try:
            self.backend_tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing more telling
            raise TokenizerFilesError(f"{_BACKEND} is not a tokenizer ({str(error)[:300]})") from error
        self.backend_tokenizer.add_tokens([AddedToken(each.content, special=each.special, normalized=False) for each in added])
        config = {**_object(directory / _MAP), **_object(directory / _CONFIG)}
        self.special_tokens_map = {name: text for name in _TOKENS if (text := _content(config.get(name)))}
        self.added_tokens_decoder: Mapping[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        self._templates = _templates(directory, config)

    def __getattr__(self, name: str) -> Any:
        """`eos_token` and `eos_token_id` of each special token."""
        token = name.removesuffix("_id")
        if token not in _TOKENS:
            raise AttributeError(name)
        text = self.special_tokens_map.get(token)
        return text if token == name or text is None else self.convert_tokens_to_ids(text)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        found: int | None = self.backend_tokenizer.token_to_id(token)
        return found

    def get_chat_template(self, written: str | None, tools: Sequence[Any] | None) -> str:
        """As transformers chooses it. Raises ValueError if there is none."""
        if written is not None:
            return written
        wanted = _TOOL_USE if tools and _TOOL_USE in self._templates else _DEFAULT
        if wanted not in self._templates:
            raise ValueError("no chat template")
        return self._templates[wanted]

    def vocabulary(self) -> Mapping[str, int]:
        """Ids by text, of all tokens."""
        found: Mapping[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return found

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
    """By name; a file of its own stands before what tokenizer_config.json says."""
    written = config.get("chat_template")
    found: dict[str, str] = {}
    if isinstance(written, str):
        found[_DEFAULT] = written
    elif isinstance(written, list):
        for each in written:
            if isinstance(each, dict) and isinstance(each.get("name"), str) and isinstance(each.get("template"), str):
                found[each["name"]] = each["template"]
    for name, path in (
        (_DEFAULT, directory / CHAT_TEMPLATE_FILE),
        *((path.stem, path) for path in (directory / TEMPLATES).glob("*.jinja")),
    ):
        try:
            with open_regular(path) as file:
                found[name] = file.read().decode(errors="replace")
        except OSError:
            continue
    return found


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """As much of transformers' loggers as the renderer calls."""

    def warning_once(self, message: str) -> None:
        self.warning(message)


def keep_rest_of_transformers_out() -> None:
    """From here on only modules that are named can be imported of transformers. Does nothing if it is imported already."""
    if _PACKAGES[0] in sys.modules:
        return
    found = importlib.util.find_spec(_PACKAGES[0])
    if found is None or found.origin is None:
        return
    root = Path(found.origin).parent.parent
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package


def import_renderer() -> None:
    """Import the renderer alone: without numpy, whose scalars no record holds, without the Hub's client and progress bars, which
    the loggers of transformers load, and without what looks for installed packages. All stay importable. Raises
    ModuleNotFoundError.
    """
    numbers, loggers, packages = (ModuleType(name) for name in ("numpy", f"{_UTILS}.logging", f"{_UTILS}.import_utils"))
    vars(numbers)["generic"] = type("generic", (), {})
    vars(loggers)["get_logger"] = lambda name: _Logger(logging.getLogger(name), {})
    # Tensors and images have their place in functions that a template calls as tools, of which records have none.
    vars(packages).update(is_jinja_available=lambda: True, is_torch_available=lambda: False, is_vision_available=lambda: False)
    absent = {module.__name__: module for module in (numbers, loggers, packages) if module.__name__ not in sys.modules}
    sys.modules.update(absent)
    try:
        import_module(RENDERER)
    finally:
        for name in absent:
            del sys.modules[name]
