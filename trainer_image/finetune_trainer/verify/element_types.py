"""The gate of a merge, from the element types that its base and its result are stored in and run in.

Called by the merge role and the command line. A model runs in the type that its config.json names, whatever its files hold:
transformers and those who serve it look there first.
"""

from __future__ import annotations

from pathlib import Path

from finetune_trainer.model.load import stored_dtype
from finetune_trainer.verify.gate import GATES, Gate, coarsest
from finetune_trainer.weights.headers import CONFIG_FILE, read_json


def gate_of(base: Path, merged: str | None) -> Gate:
    """The gate of a merge into the model in `base`; merged: the element type that was asked for, None: the base's own.

    Raises ValueError for another one than the gates are known for, ModelError for a base that is none.
    """
    return GATES[judged_dtype(base, merged)]


def judged_dtype(base: Path, merged: str | None) -> str:
    """The element type that this gate is of. Raises as `gate_of` does."""
    stored = str(stored_dtype(base)).removeprefix("torch.")
    config = read_json(base / CONFIG_FILE)
    named = config.get("dtype") or config.get("torch_dtype")
    return coarsest(stored, *([named] if named in GATES else []), *([merged] if merged else []))
