"""Reasons why the schema refuses a field, in words that people read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import StringConstraints, TypeAdapter, ValidationError

from finetune_cli.corrections.wrong_field import WrongField
from finetune_job.api.base import DESTINATION_PATTERN, HUB_NAME_PATTERN, SOURCE_PATTERN
from finetune_job.methods import METHODS
from finetune_job.rules.method_configuration.lora import REFUSED_INITS

REFUSED_WORDS = frozenset({*map(str, REFUSED_INITS), *(str(kind) for kind, method in METHODS.items() if method.refused)})
"""Values that the schema has so that a rule can say why they are refused: nobody is advised to write them."""
_MOST_LISTED = 12
_FIRST_LISTED = 5
_ADDRESS = "is not an address: pvc://<claim>/<path> is a path on a volume, s3://<bucket>/<prefix> a bucket, "
_FORMS = {
    SOURCE_PATTERN: f"{_ADDRESS}hf://<org>/<name> a repository",
    DESTINATION_PATTERN: f"{_ADDRESS}hf://<org>/<model> a repository, oci://<registry>/<repository>:<tag> an image registry",
    HUB_NAME_PATTERN: "is not the name of a repository, which has two parts: <org>/<name>",
}
"""Reasons for texts that do not match, by pattern."""


def reason_of(wrong: WrongField) -> str:
    """Say why the schema refuses a field."""
    match wrong.kind:
        case "extra_forbidden":
            return "there is no such field"
        case "missing":
            return "is required"
        case "enum" | "literal_error":
            return f"is not one of {listed(accepted_words(wrong), last='and')}"
        case "value_error":
            return str(wrong.context.get("error")).partition("; ")[0]
        case "string_pattern_mismatch":
            form = _form(wrong)
            return form if wrong.value != "" else f"is empty: it {form}" if form.startswith("may") else "is empty"
        case _:
            return wrong.message.removeprefix("Input ")


def accepted_words(wrong: WrongField) -> list[str]:
    """Words of an enumeration that may be written."""
    return [word for word in re.findall(r"'([^']*)'", str(wrong.context.get("expected"))) if word not in REFUSED_WORDS]


def listed(words: Sequence[str], *, last: str) -> str:
    """List words in quotes, the first of many. last: the word before the number of the others."""
    quoted = [f"'{word}'" for word in words]
    if len(words) > _MOST_LISTED:
        return f"{', '.join(quoted[:_FIRST_LISTED])} {last} {len(words) - _FIRST_LISTED} others"
    *first, end = quoted
    return f"{', '.join(first)} or {end}" if first else end


def is_form(pattern: str, text: str) -> bool:
    """Whether a text matches a pattern of the schema, by what matches it there."""
    try:
        TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)]).validate_python(text)
    except ValidationError:
        return False
    return True


def _form(wrong: WrongField) -> str:
    pattern = str(wrong.context.get("pattern"))
    if pattern in _FORMS:
        return _FORMS[pattern]
    if "Gi" in pattern:
        return "is not a size as this field takes it"
    if wrong.place[-1] == "revision":
        return (
            "is not a commit: branches and tags move, so a revision has the 40 digits of a commit, which the repository's page "
            "shows"
        )
    if not is_form(pattern, "a-1"):
        return "is not written in the form that this field takes"
    letters = "letters" if is_form(pattern, "A-1") else "lower-case letters"
    return f"may have {letters}, digits and dashes, and begins and ends with a letter or digit"
