"""The process that writes a base with added tokens as a fork of the one that asks: starting it takes longer than its work."""

from finetune_trainer.added_tokens import BaseOrder
from finetune_trainer.processes.child import Child, fork_answering

ANSWER_BYTES = 1 << 20


def start_forked(order: BaseOrder) -> Child:
    """Start a fork in place of `finetune_trainer.preflight.added_tokens._start`."""
    from finetune_trainer.model.base_with_tokens import answer

    return fork_answering(lambda: answer(order), ANSWER_BYTES)
