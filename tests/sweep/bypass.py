"""The trainer without its own refusals, to see what would happen behind them."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from torch import nn

from finetune_trainer.model import wrap_plan


def _present(model: nn.Module, given: Collection[str] | None) -> tuple[str, ...]:
    """As other trainers take class names: those that the model has, be they none."""
    if given is None:
        return _layer_classes(model, None)
    return tuple(sorted(set(given) & {type(module).__name__ for module in model.modules()}))


_layer_classes = wrap_plan.layer_classes


@contextmanager
def without_own_refusals(is_wanted: bool) -> Iterator[None]:
    """Within: checks that refuse before a library would are left out."""
    with ExitStack() as stack:
        if is_wanted:
            stack.enter_context(patch("finetune_trainer.model.fsdp_versions.check_flat_units"))
            stack.enter_context(patch("finetune_trainer.model.sharded.check_trainable"))
            stack.enter_context(patch("finetune_trainer.model.wrap_plan.layer_classes", _present))
        yield
