"""Can what this run will train be merged into this base? Asked of the merge's own planner, with the tensors that will be saved.

Without it, an adapter that cannot be merged exactly (on tied embeddings, say) would be found out after the GPUs were paid for.
"""

from __future__ import annotations

from pathlib import Path

from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.rule import Finding
from finetune_trainer.merge.errors import MergeError
from finetune_trainer.merge.headers import ADAPTER_FILE, CONFIG_FILE, TensorHeader, read_checkpoint, read_json
from finetune_trainer.merge.plan import merge_plan
from finetune_trainer.preflight.model_structure import ModelStructure


def check_merge(plan: RunPlan, directory: Path, structure: ModelStructure) -> Finding | None:
    """None where the merge is possible, or is not asked for. Reads headers only."""
    if not plan.merge.enabled or structure.adapter_settings is None:
        return None
    # The planner looks at names and shapes; the adapter's element type does not decide whether it can be merged.
    adapter = {name: TensorHeader(name, "F32", shape, Path(ADAPTER_FILE), 0) for name, shape in structure.saved_tensors.items()}
    try:
        merge_plan(
            base=read_checkpoint(directory).tensors,
            base_config=read_json(directory / CONFIG_FILE),
            adapter=adapter,
            adapter_config=structure.adapter_settings,
            dtype=plan.merge.dtype.value if plan.merge.dtype else None,
            max_shard_bytes=plan.merge.max_shard_bytes,
        )
    except MergeError as error:
        return Finding(
            rule="merge-impossible",
            severity="error",
            field="spec.merge.enabled",
            value="true",
            message=str(error),
            fix="change the adapter settings as said, or set spec.merge.enabled: false and publish the adapter alone",
        )
    return None
