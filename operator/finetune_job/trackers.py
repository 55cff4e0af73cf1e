"""Names of experiment trackers: the built-in ones, and a warning for other names while the image is not known."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding

ALWAYS = "tensorboard"
WANDB, MLFLOW = "wandb", "mlflow"
OWN = (ALWAYS, WANDB, MLFLOW)
GROUP = "finetune.trackers"
"""Entry point group through which other packages offer trackers."""
FIELD = "spec.training.trackers"
_OTHER_NAMES = {"weights-and-biases": WANDB, "weights_and_biases": WANDB, "weightsandbiases": WANDB, "wb": WANDB}


def nearest_tracker(name: str, offered: Collection[str]) -> str | None:
    """Return the offered tracker that was most likely meant; None if no name is similar."""
    near = difflib.get_close_matches(_OTHER_NAMES.get(name.lower(), name.lower()), sorted(offered), n=1, cutoff=0.7)
    return near[0] if near else None


def foreign_trackers(names: Sequence[str]) -> Finding | None:
    """Return a warning for trackers that are not built in: only the image shows whether a package offers them."""
    foreign = [name for name in names if name not in OWN]
    if not foreign:
        return None
    near = {name: tracker for name in foreign if (tracker := nearest_tracker(name, OWN)) is not None}
    meant = list(dict.fromkeys(near.get(name, name) for name in names))
    return make_finding(
        "tracker-unknown",
        severity="warning",
        field=FIELD,
        value=", ".join(foreign),
        message=f"the trackers of this product are {', '.join(OWN)}; another one needs a package in the trainer image with an "
        f"entry point of its name in the group {GROUP}, and without it preflight refuses the job",
        fix=f"write {FIELD}: [{', '.join(meant)}]" if near else "remove the name, or provide such a package",
        changes={FIELD: meant} if near else None,
        is_proposal=any(name.lower() != tracker for name, tracker in near.items()),
    )
