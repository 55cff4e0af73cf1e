"""What cases share on disk: base models and prepared data, made once, and the claims of one run."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
from transformers.utils import logging as transformers_logging

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.plan.digest import plan_sha256
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan
from finetune_trainer.added_tokens import AddedTokens
from finetune_trainer.context import RunContext
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import TRAIN, VALIDATION, SplitArrays
from finetune_trainer.preflight.added_tokens import add_tokens
from tests.support.tiny_model import VOCABULARY, fused, prepared_split
from tests.sweep import added, expected
from tests.sweep.architectures import ARCHITECTURES, DTYPES, write_base
from tests.sweep.case import MODEL_CLAIM, Case
from tests.sweep.peft_settings import vocabulary

IDENTITY = JobIdentity(namespace="default", name="sweep", uid="0123456789abcdef")


def make_material(root: Path) -> None:
    """All base models and all forms of the data."""
    transformers_logging.disable_progress_bar()
    for architecture in ARCHITECTURES:
        for dtype in DTYPES:
            write_base(root / MODEL_CLAIM / f"{architecture}-{dtype}", architecture, dtype)
    write_data(root)


def write_data(root: Path) -> None:
    """Prepared data, with and without packing, held-out records and added tokens."""
    for num_added in sorted({0, *map(len, added.TOKENS.values())}):
        for documents in (1, 3):
            for has_validation in (False, True):
                splits = {TRAIN: _split(expected.TRAIN, documents, num_added)}
                if has_validation:
                    splits[VALIDATION] = _split(expected.HELD_OUT, documents, num_added)
                write_prepared(
                    root / "prepared" / _data_name(documents > 1, has_validation, num_added),
                    splits,
                    {"pad_token_id": 256, "splits": sorted(splits)},
                )


def _split(drawn: tuple[int, int], most_documents: int, num_added: int) -> SplitArrays:
    split = prepared_split(*drawn, most_documents)
    tokens = [expected.with_added(int(token), num_added) for token in split.tokens]
    return dataclasses.replace(split, tokens=np.array(tokens))


def plan_of(case: Case) -> RunPlan:
    """The plan of a manifest. Raises pydantic.ValidationError where the schema refuses it, and whatever `resolve` raises.

    With attention by bounds LoRA is computed as on a GPU, too.
    """
    plan = resolve(IDENTITY, FineTuneJobSpec.model_validate(case.spec()), None)
    return fused(plan) if case.of("attention") == "varlen" else plan


def claims_of(case: Case, plan: RunPlan, material: Path, claims: Path) -> RunContext:
    """Claims with model, prepared data and an empty workspace, ready for the train role."""
    context = RunContext(plan, plan_sha256(plan), claims, 0)
    context.workspace.root.mkdir(parents=True)
    (claims / MODEL_CLAIM).symlink_to(material / MODEL_CLAIM)
    name = _data_name(case.packs, case.of("validation") == "some", len(case.added))
    context.workspace.prepared.symlink_to(material / "prepared" / name)
    return context


def make_base(case: Case, context: RunContext) -> None:
    """Let preflight write the base with the case's tokens, if it adds any; or a person, to see what happens behind a refusal."""
    if not context.plan.model.added_tokens or not add_tokens(context)[0]:
        return
    added.write_base(context.source_model, context.workspace.base_with_tokens, case.added)
    (embedding, head), is_tied = vocabulary(case)
    ids = added.ids_of(case.added)
    record = AddedTokens(
        tokens=context.plan.model.added_tokens,
        ids=tuple(ids),
        num_rows=max(VOCABULARY, 1 + ids[-1]),
        has_more_rows=ids[-1] >= VOCABULARY,
        embedding=embedding,
        head=head,
        separate_head=None if is_tied else head,
    )
    context.workspace.added_tokens.write_text(record.model_dump_json())


def copy_base(made: RunContext, target: RunContext) -> None:
    """What preflight has made for one run, for another one of the same plan."""
    if made.workspace.added_tokens.exists():
        shutil.copytree(made.workspace.base_with_tokens, target.workspace.base_with_tokens)
        shutil.copy(made.workspace.added_tokens, target.workspace.added_tokens)


def _data_name(packs: bool, has_validation: bool, num_added: int) -> str:
    kinds = f"{'packed' if packs else 'apart'}-{'validated' if has_validation else 'alone'}"
    return f"{kinds}-{num_added}" if num_added else kinds
