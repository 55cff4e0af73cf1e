"""Several sources of training data where one is taken: what to write in `datasets` instead."""

from __future__ import annotations

from typing import Any

from finetune_cli.corrections.addresses import likely_addresses
from finetune_cli.corrections.reasons import is_form
from finetune_cli.corrections.wrong_field import Proposal, WrongField, nested_text, path_text
from finetune_job.api.base import SOURCE_PATTERN
from finetune_job.api.inputs import DataSpec
from finetune_job.rules.sources import NO_COMMIT

COMMIT_NOTE = "a revision: the commit that the repository's page shows"


def names_several_sources(wrong: WrongField) -> bool:
    """Whether `source` of the training data is a list of texts."""
    is_training_data = wrong.holder is DataSpec and wrong.place[-1] == "source" and isinstance(wrong.value, list)
    return is_training_data and bool(wrong.value) and all(isinstance(each, str) for each in wrong.value)


def data_sets(wrong: WrongField) -> Proposal:
    """In `datasets`, after those that are there already."""
    place, written = (*wrong.place[:-1], "datasets"), wrong.siblings.get("datasets")
    named = [_data_set(each) for each in wrong.value]
    sources, notes = [source for source, _ in named], dict.fromkeys(note for _, note in named if note)
    before = written if isinstance(written, list) else [] if written is None else [written]
    shown = ", ".join(nested_text(each) for each in sources)
    fix = f"add {shown} to {path_text(place)}" if before else f"write {path_text(place)}: [{shown}]"
    return Proposal(
        ", and ".join([fix, *notes]),
        wrong.place,
        None,
        is_certain=written is None and not notes,
        more=((place, [*before, *sources]),),
        message="is a list, not one address",
    )


def _data_set(text: str) -> tuple[dict[str, Any], str]:
    """An entry of `datasets`, and what else is to be done."""
    likely = () if is_form(SOURCE_PATTERN, text) else likely_addresses(text, "data")
    address = next((each for each in likely if is_form(SOURCE_PATTERN, each.text)), None)
    if address is None:
        return {"source": text}, ""
    if address.text.startswith("hf://"):
        return {"source": address.text, "revision": NO_COMMIT}, COMMIT_NOTE
    return {"source": address.text}, address.note
