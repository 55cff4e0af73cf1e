"""Finds the base's name to record in an adapter. `AutoPeftModel.from_pretrained` uses this name. Does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

from finetune_job.api.base import HUB_NAME_PATTERN
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.headers import CONFIG_FILE, read_json

_FIELD = "spec.model.hubName"
_NAME = "_name_or_path"
"""Key under which transformers records where a saved model had been loaded from."""
GUESSED = "adapter-base-guessed"
_OF_A_RUN = re.compile(r"(outputs?|results|runs|saves|checkpoints|models|data|tmp)/.*|.*/checkpoint[-_]?\d+", re.IGNORECASE)
"""Matches relative paths that training programs write to. Such a path can look like a Hub name, which anyone could register."""


def base_name(planned: str, directory: Path) -> str:
    """Return the base's name for adapter_config.json. planned: the plan's `model.name`. directory: that of the base model."""
    return planned if _is_hub_name(planned) else _name_in_config(directory) or planned


def adapter_base_problem(planned: str, directory: Path) -> Finding | None:
    """Return a warning if the job does not give the base's Hub name, since config.json may name the model it was tuned from."""
    if _is_hub_name(planned):
        return None
    name = _name_in_config(directory)
    if name is None:
        message = (
            f"the adapter will name {planned} as its base, which no library can load: AutoPeftModel.from_pretrained fails, and "
            "the base has to be passed explicitly"
        )
        fix = f"set {_FIELD} to the name of the base on the Hub, <org>/<name>, if it has one"
        return make_finding("adapter-base-unnamed", field=_FIELD, value="unset", message=message, fix=fix)
    return make_finding(
        GUESSED,
        field=_FIELD,
        value="unset",
        message=f"the adapter will name {name} as its base, because {CONFIG_FILE} says that the model was loaded from there; if "
        "it was trained further since then, the adapter belongs to a different model from the one that it names",
        fix=f"set {_FIELD}: {name} if that is the base, or else the base's own name",
        changes={_FIELD: name},
        is_proposal=True,
    )


def _is_hub_name(name: str) -> bool:
    # re.match with $ would accept a trailing line break.
    return re.fullmatch(HUB_NAME_PATTERN, name) is not None


def _name_in_config(directory: Path) -> str | None:
    try:
        name = read_json(directory / CONFIG_FILE).get(_NAME)
    except (MergeError, OSError, UnicodeDecodeError):
        return None
    return name if isinstance(name, str) and _is_hub_name(name) and not _OF_A_RUN.fullmatch(name) else None
