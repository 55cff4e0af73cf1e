"""Why a merged model could not be verified at all."""

from finetune_trainer.weights.errors import MergeError


class UnverifiableModelError(MergeError):
    """The model's class allows no verification in bounded memory; it is not that the merge is wrong."""
