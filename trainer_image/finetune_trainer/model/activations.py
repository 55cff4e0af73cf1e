"""Activation checkpointing per layer: all of a layer's activations computed again in backward, or only the cheap ones."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from finetune_job.api.training import ActivationCheckpointing
from finetune_trainer.model.kept_results import keeping_contexts


def checkpoint_activations(model: PreTrainedModel, kind: ActivationCheckpointing) -> None:
    """Let each layer keep no activations, or only the results of matrix products and attention. Call between PEFT and sharding."""
    if kind is ActivationCheckpointing.NONE:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if kind is ActivationCheckpointing.SELECTIVE:
        options["context_fn"] = keeping_contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # transformers asks for gradients of the embeddings' output where it knows of adapters. Only reentrant checkpoints need them,
    # and the first layer would compute products that nobody reads.
    model.disable_input_require_grads()
