"""Can what this run will train be merged into this base, and the merge be verified? Asked of the merge's own planner, with the
tensors that will be saved.

Without it, an adapter that cannot be merged exactly (on tied embeddings, say) would be found out after the GPUs were paid for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from finetune_job.api.output import MergeBase
from finetune_job.catalogue.book import make_finding
from finetune_job.rules.rule import Finding
from finetune_trainer.merge.adapter_settings import AdapterHeaders
from finetune_trainer.merge.plan import merge_plan
from finetune_trainer.merge.quantized_base import packed_in_training, quantized_tensors
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.verify.hollow import is_made_from_base_weights
from finetune_trainer.verify.logits import FROM_BASE_WEIGHTS, require_whole
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.headers import ADAPTER_FILE, CONFIG_FILE, TensorHeader, read_checkpoint, read_json
from finetune_trainer.weights.read_model import read_stored_model


def check_merge(seen: ModelInspection) -> Iterator[Finding]:
    """At most one finding; none if the merge is possible, or is not asked for. Reads headers only."""
    plan, directory, structure = seen.plan, seen.directory, seen.known_structure
    if not plan.merge.enabled or structure.adapter_settings is None:
        return
    # The planner looks at names and shapes; the adapter's element type does not decide whether it can be merged.
    shapes = structure.saved_tensors | structure.fixed_tensors
    adapter = {name: TensorHeader(name, "F32", shape, Path(ADAPTER_FILE), 0) for name, shape in shapes.items()}
    settings = json.loads(json.dumps(structure.adapter_settings))
    try:
        base, config = read_checkpoint(directory), read_json(directory / CONFIG_FILE)
        model = read_stored_model(base, config)
        packed = packed_in_training(plan, directory) if plan.merge.base is MergeBase.DEQUANTIZED else None
        merge_plan(
            base=base.tensors,
            base_config=config,
            model=model,
            adapters=[AdapterHeaders(adapter, settings)],
            dtype=plan.merge.dtype.value if plan.merge.dtype else None,
            max_shard_bytes=plan.merge.max_shard_bytes,
            quantized=quantized_tensors(directory, model, packed) if packed else {},
        )
        # The merge leaves alone what it cannot read, its verification computes with all.
        model.require_readable()
        if is_made_from_base_weights(settings):
            require_whole(directory, sum(base.file_bytes.values()), FROM_BASE_WEIGHTS)
    except MergeError as error:
        yield make_finding(
            "merge-impossible",
            field="spec.merge.enabled",
            value="true",
            message=str(error),
            fix="change the adapter settings as said, or set spec.merge.enabled: false and publish the adapter alone",
        )
