"""README.md: the model card, from the facts of the run. Front matter as the Hub reads it, then text for people.

Names that users choose are in code spans and YAML scalars, so that none of them is taken for markup.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from finetune_job.api.base import HUB_NAME_PATTERN, HubPath, parse_source
from finetune_job.names import MANAGED_BY
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.markdown import block, code, one_line
from finetune_trainer.release.card_sections import (
    added_tokens,
    evaluation,
    licence,
    provenance,
    settings,
    training,
    training_data,
    verification,
)
from finetune_trainer.release.commands import address, base_address, copy_command, hub_repository, serve_adapter, serve_merged
from finetune_trainer.release.facts import RunFacts
from finetune_trainer.release.files import ADAPTER, MERGED
from finetune_trainer.release.licence import OTHER_LICENCE

_SECTIONS: tuple[tuple[str, Callable[[RunFacts], list[str]]], ...] = (
    ("Added tokens", added_tokens),
    ("Training data", training_data),
    ("Settings", settings),
    ("Training", training),
    ("Evaluation", evaluation),
    ("Verification of the merge", verification),
    ("Provenance", provenance),
    ("Licence", licence),
)


def model_card(facts: RunFacts) -> str:
    """The card of everything that is published together."""
    lines = [
        *_front_matter(facts, is_adapter=not facts.layout.has_merged),
        f"# {code(facts.plan.job.name)}",
        "",
        *_what(facts),
        "",
    ]
    lines += ["## How to load it", "", *_loading(facts)]
    for title, section in _SECTIONS:
        if body := section(facts):
            lines += ["", f"## {title}", "", *body]
    return "\n".join(lines) + "\n"


def adapter_card(facts: RunFacts) -> str:
    """A short card for the adapter's own directory, with what the Hub and PEFT look for."""
    merged = hub_repository(facts, MERGED)
    where = "in the directory above" if merged is None else f"of {code(merged)}, which has it merged,"
    text = f"An adapter for {code(facts.plan.model.name)}, made by {facts.plan.method.type.value}. "
    lines = [*_front_matter(facts, is_adapter=True), f"# {code(facts.plan.job.name)}", ""]
    lines.append(f"{text}The model card {where} says all about it.")
    if merged is not None:
        lines += ["", "## How to load it", "", *_load_adapter(facts)]
    return "\n".join(lines) + "\n"


def front_matter(facts: RunFacts, *, is_adapter: bool) -> dict[str, Any]:
    """Front matter for the Hub. The Hub refuses models, data sets and licences that it does not know, so it contains only the
    Hub's names.
    """
    plan = facts.plan
    fields: dict[str, Any] = {}
    if re.match(HUB_NAME_PATTERN, plan.model.name):
        fields["base_model"] = plan.model.name
        fields["base_model_relation"] = "adapter" if is_adapter else "finetune"
    fields["library_name"] = "peft" if is_adapter else "transformers"
    fields["pipeline_tag"] = "text-generation"
    if facts.licence.identifier:
        fields["license"] = facts.licence.identifier
        if facts.licence.identifier == OTHER_LICENCE:
            fields |= {
                key: value for key, value in (("license_name", facts.licence.name), ("license_link", facts.licence.link)) if value
            }
    if datasets := _hub_datasets(plan):
        fields["datasets"] = datasets
    fields["tags"] = [MANAGED_BY, plan.method.type.value.lower()]
    return fields


def _front_matter(facts: RunFacts, *, is_adapter: bool) -> list[str]:
    document = yaml.safe_dump(front_matter(facts, is_adapter=is_adapter), sort_keys=False, allow_unicode=True, width=1 << 20)
    return ["---", document.rstrip("\n"), "---", ""]


def _hub_datasets(plan: RunPlan) -> list[str]:
    held_out = [plan.data.validation] if plan.data.validation is not None else []
    locations = [parse_source(source.source) for source in (*plan.data.train, *held_out)]
    return sorted({location.repository for location in locations if isinstance(location, HubPath) and location.is_dataset})


def _what(facts: RunFacts) -> list[str]:
    plan, layout = facts.plan, facts.layout
    base = code(plan.model.name) + (f" at {code(plan.model.revision)}" if plan.model.revision else "")
    if not plan.method.trains_adapter:
        return [f"{base}, fine-tuned whole."]
    if not layout.has_merged:
        return [f"An adapter for {base}, made by {plan.method.type.value}."]
    more = ""
    if layout.has_adapter:
        apart = hub_repository(facts, ADAPTER)
        more = " The adapter alone is here as well." if apart is None else f" The adapter alone is in {code(apart)}."
    return [f"{base}, fine-tuned by {plan.method.type.value} and merged: it needs no adapter to be loaded.{more}"]


def _loading(facts: RunFacts) -> list[str]:
    lines: list[str] = []
    if facts.layout.has_merged:
        lines += _load_merged(facts)
    if facts.layout.has_adapter:
        lines += ([""] if lines else []) + _load_adapter(facts)
    return lines


def _load_merged(facts: RunFacts) -> list[str]:
    where = address(facts, MERGED)
    script = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained({where!r}, dtype="auto")\n'
        f"tokenizer = AutoTokenizer.from_pretrained({where!r})\n"
    )
    return [
        "The merged model:",
        "",
        *_pulling(facts),
        *block(script, "python"),
        "",
        "With vLLM:",
        "",
        *block(serve_merged(facts), "sh"),
    ]


def _load_adapter(facts: RunFacts) -> list[str]:
    where, base = address(facts, ADAPTER), base_address(facts)
    knows_base = base == facts.plan.model.name
    if knows_base:  # the adapter's configuration names it, with its revision
        script = (
            "from peft import AutoPeftModelForCausalLM\n"
            "from transformers import AutoTokenizer\n\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained({where!r}, dtype="auto")\n'
            f"tokenizer = AutoTokenizer.from_pretrained({where!r})\n"
        )
    else:
        script = (
            "from peft import PeftModel\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'base = AutoModelForCausalLM.from_pretrained({base!r}, dtype="auto")\n'
            f"{_resized(facts)}"
            f"model = PeftModel.from_pretrained(base, {where!r})\n"
            f"tokenizer = AutoTokenizer.from_pretrained({where!r})\n"
        )
    return [
        "The adapter:" if knows_base else f"The adapter, with a copy of {code(facts.plan.model.name)} in `{base}`:",
        "",
        *([] if facts.layout.has_merged else _pulling(facts)),
        *block(script, "python"),
        "",
        *_serving(facts),
    ]


def _resized(facts: RunFacts) -> str:
    """AutoPeftModel learns from the adapter's tokenizer that the base needs more rows; PeftModel does not."""
    added = facts.added
    return f"base.resize_token_embeddings({added.num_rows})\n" if added is not None and added.has_more_rows else ""


def _serving(facts: RunFacts) -> list[str]:
    report = facts.serving
    if report is None:
        return []
    command = serve_adapter(facts, " \\\n  ")
    if command is None:
        reasons = "; ".join(one_line(reason) for reason in report.reasons)
        return [f"vLLM does not serve the adapter as it is: {code(reasons)}."]
    notes = [f"* {note}" for note in report.notes]
    copy = "" if hub_repository(facts, ADAPTER) is not None else ", from a local copy of these files"
    return [f"With vLLM{copy}:", "", *block(command, "sh"), *(["", *notes] if notes else [])]


def _pulling(facts: RunFacts) -> list[str]:
    command = None if hub_repository(facts, MERGED) is not None else copy_command(facts)
    return [] if command is None else [*block(command, "sh"), ""]
