"""Writes README.md, the model card, from the facts of the run: front matter for the Hub, then text for people.

Names that users choose are written as code spans and YAML scalars, so that no name is taken for markup. The template has the
filters `code` for text and `cell` for tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from finetune_job.api.base import HUB_NAME_PATTERN, HubPath, parse_source
from finetune_job.names import MANAGED_BY
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.markdown import block, code, one_line
from finetune_trainer.release.commands import address, base_address, copy_command, hub_repository, serve_adapter, serve_merged
from finetune_trainer.release.facts import RunFacts, count_text, table_points
from finetune_trainer.release.files import ADAPTER, CHECKSUMS, MERGED, PROVENANCE, VERIFICATION_PAGE
from finetune_trainer.release.licence import OTHER_LICENCE


@cache
def _template() -> Template:
    environment = Environment(  # noqa: S701 - Markdown, in which HTML's escapes would be visible
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "code": code,
        # A pipe ends a cell even inside a code span, so escape it. Renderers remove the backslash only in tables.
        "cell": lambda text: code(text).replace("|", "\\|"),
        "block": lambda text, language: "\n".join(block(text, language)),
        "repr": repr,
        "count": count_text,
        "loss": lambda value: "" if value is None else f"{value:.4f}",
    }
    environment.globals |= {
        "CHECKSUMS": CHECKSUMS,
        "PROVENANCE": PROVENANCE,
        "VERIFICATION_PAGE": VERIFICATION_PAGE,
        "MANAGED_BY": MANAGED_BY,
    }
    return environment.get_template("card.md.j2")


def model_card(facts: RunFacts) -> str:
    """Return the card for all results that are published together."""
    return _card(facts, is_adapter=not facts.layout.has_merged, is_short=False)


def adapter_card(facts: RunFacts) -> str:
    """Return a short card for the adapter's own directory, with what the Hub and PEFT look for there."""
    return _card(facts, is_adapter=True, is_short=True)


def _card(facts: RunFacts, *, is_adapter: bool, is_short: bool) -> str:
    history, serving, added = facts.history, facts.serving, facts.added
    front = yaml.safe_dump(front_matter(facts, is_adapter=is_adapter), sort_keys=False, allow_unicode=True, width=1 << 20)
    held_out = history.values("eval_loss")
    evaluations = [("base model", *held_out[0])] if held_out and held_out[0][0] == 0 else []
    if trained := [(step, loss) for step, loss in held_out if step > 0]:
        evaluations += [("best", *min(trained, key=lambda entry: entry[1])), ("last", *trained[-1])]
    stops = [number for token, number in zip(added.tokens, added.ids, strict=True) if token.stop] if added is not None else []
    return _template().render(
        front=front.rstrip("\n"),
        facts=facts,
        plan=facts.plan,
        layout=facts.layout,
        is_short=is_short,
        base=base_address(facts),
        merged=address(facts, MERGED),
        adapter=address(facts, ADAPTER),
        merged_repository=hub_repository(facts, MERGED),
        adapter_repository=hub_repository(facts, ADAPTER),
        # Loaders fetch from the Hub themselves, so no command for copying is needed.
        copied=copy_command(facts) if hub_repository(facts, MERGED) is None else None,
        served_merged=serve_merged(facts),
        served=serve_adapter(facts, " \\\n  "),
        reasons="; ".join(one_line(reason) for reason in serving.reasons) if serving is not None else "",
        # A merged model has the stop tokens in its generation_config.json, so only users of an adapter must set them.
        stops=stops if facts.layout.has_adapter else [],
        settings=chosen_settings(facts.plan),
        last_step=history.points[-1].step if history.points else facts.trained_step,
        points=table_points(history.points),
        evaluations=evaluations,
    )


def front_matter(facts: RunFacts, *, is_adapter: bool) -> dict[str, Any]:
    """Return the front matter for the Hub.

    It contains only names that exist on the Hub, because the Hub refuses unknown models, data sets and licences.
    """
    plan, licence = facts.plan, facts.licence
    fields: dict[str, Any] = {}
    if re.match(HUB_NAME_PATTERN, plan.model.name):
        fields["base_model"] = plan.model.name
        fields["base_model_relation"] = "adapter" if is_adapter else "finetune"
    fields["library_name"] = "peft" if is_adapter else "transformers"
    fields["pipeline_tag"] = "text-generation"
    if licence.identifier:
        fields["license"] = licence.identifier
        if licence.identifier == OTHER_LICENCE:
            named = (("license_name", licence.name), ("license_link", licence.link))
            fields |= {key: value for key, value in named if value}
    held_out = [plan.data.validation] if plan.data.validation is not None else []
    locations = [parse_source(source.source) for source in (*plan.data.train, *held_out)]
    datasets = {location.repository for location in locations if isinstance(location, HubPath) and location.is_dataset}
    if datasets:
        fields["datasets"] = sorted(datasets)
    fields["tags"] = [MANAGED_BY, plan.method.type.value.lower()]
    return fields


def chosen_settings(plan: RunPlan) -> list[tuple[str, str]]:
    """List the settings of method, data and training, by their names in the plan."""
    chosen: dict[str, Any] = {"method": plan.method.type.value}
    if plan.method.lora is not None:
        chosen |= _without_unset(plan.method.lora.model_dump(mode="json"))
    if plan.method.adapter is not None:
        chosen |= _without_unset(plan.method.adapter.settings)
    if plan.method.quantization is not None:
        quantization = _without_unset(plan.method.quantization.model_dump(mode="json"))
        chosen |= {f"quantization.{name}": value for name, value in quantization.items()}
    chosen |= plan.data.model_dump(mode="json", include={"format", "loss_on", "max_sequence_length", "packing"})
    not_shown = {"micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing"}
    not_shown |= {"trackers", "step_timeout_seconds", "compile"}
    chosen |= _without_unset(plan.training.model_dump(mode="json", exclude=not_shown))
    return [(name, _value(value)) for name, value in chosen.items()]


def _without_unset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the settings that are unset, empty or switched off; keep zeros."""
    return {name: value for name, value in values.items() if value is not None and value is not False and value not in ({}, [])}


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
