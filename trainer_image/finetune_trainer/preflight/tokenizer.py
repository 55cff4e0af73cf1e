"""The tokenizer of the model directory, or why it cannot be used."""

from __future__ import annotations

from pathlib import Path

from finetune_job.rules.rule import Finding
from finetune_trainer.data.tokenize import Tokenizer


def load_tokenizer(directory: Path, allow_remote_code: bool) -> tuple[Tokenizer | None, list[Finding]]:
    """The tokenizer, or None with a finding. Nothing is fetched."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=allow_remote_code, local_files_only=True)
        tokenizer("probe")
    except Exception as error:  # noqa: BLE001 - a library meets a file of the user's: whatever it raises is about that file
        return None, [
            Finding(
                rule="tokenizer-unusable",
                severity="error",
                field="spec.model.source",
                value=directory.name,
                message=f"the tokenizer does not load ({type(error).__name__}: {error})",
                fix="copy tokenizer.json and tokenizer_config.json of the model beside its config.json",
            )
        ]
    if tokenizer.eos_token_id is None:
        return None, [
            Finding(
                rule="tokenizer-without-end",
                severity="error",
                field="spec.model.source",
                value=directory.name,
                message="the tokenizer has no end-of-sequence token, so the model could never learn to stop",
                fix="set eos_token in tokenizer_config.json",
            )
        ]
    return tokenizer, []
