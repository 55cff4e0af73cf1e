"""Handles a base whose config.json ties the output head to the embeddings, while its files hold other values of the head.

transformers loads these values, and so does the trainer (model/load.py). A program that loads an adapter has config.json alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.methods import METHODS
from finetune_trainer.model.load import stated_config, ties_head
from finetune_trainer.preflight.model_inspection import ModelInspection


def check_rows_of_two_heads(seen: ModelInspection) -> Iterable[Finding]:
    """Refuses trained rows of the embeddings: PEFT would use them in the head as well once it loads the adapter."""
    if not any(isinstance(module, TrainableTokensLayer) for module in seen.trained.model.modules()):
        return ()
    if ties_head(seen.base.config) or not ties_head(stated_config(seen.plan, seen.directory)):
        return ()
    method = seen.plan.method
    setting = "trainableTokenIndices" if method.lora is not None else "tokenIndices"
    return (
        make_finding(
            "token-rows-with-two-heads",
            field=f"spec.{METHODS[method.type].family.value}.{setting}",
            value="tie_word_embeddings: true",
            message="config.json says that the output head shares the values of the embeddings, and the files hold others: "
            "transformers loads these, and PEFT takes the trained rows for rows of the head, too, when it loads the adapter",
            fix=f"set tie_word_embeddings: false in config.json of the base, or remove {setting}",
        ),
    )
