"""The fetch role sees that there is room before it copies; transfers have tests of their own."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune_job.api.inputs import DataFormat
from finetune_trainer.context import RunContext
from finetune_trainer.errors import InvariantError, ModelError
from finetune_trainer.fetch.source import NoRoomError
from finetune_trainer.roles.fetch import fetch, wanted_sources
from tests.support.hub import Hub
from tests.unit.finetune_trainer.fetch.conftest import LOCAL, QUICK, context_of, hub, model_of

__all__ = ["context_of", "hub", "model_of"]

ModelOf = Callable[..., RunContext]
FILES = {"config.json": b"{}", "model.safetensors": b"x" * 1000}


def test_a_plan_that_fetches_nothing_is_a_mistake_of_ours(model_of: ModelOf) -> None:
    context = model_of(FILES)
    plan = context.plan.model_copy(update={"fetch": None})
    with pytest.raises(InvariantError, match="nothing to fetch"):
        fetch(dataclasses.replace(context, plan=plan), LOCAL, QUICK)


def test_nothing_is_copied_where_there_is_no_room(model_of: ModelOf, hub: Hub) -> None:
    context = model_of(FILES)
    with pytest.raises(NoRoomError, match="the sources need 1002 bytes more on the workspace, and 1001 bytes are free") as caught:
        fetch(context, LOCAL, QUICK, free_bytes=lambda _directory: 1001)
    assert "by at least 1 bytes" in caught.value.hint
    assert not context.base_model.exists()


def test_room_for_exactly_the_files_is_enough_and_a_second_run_copies_nothing(model_of: ModelOf) -> None:
    context = model_of(FILES)
    first = fetch(context, LOCAL, QUICK, free_bytes=lambda _directory: 1002)
    assert (first.facts["files"], first.facts["bytes"], first.facts["transferred_bytes"]) == ("2", "1002", "1002")
    assert (context.base_model / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    second = fetch(context, LOCAL, QUICK, free_bytes=lambda _directory: 0)
    assert (second.facts["files"], second.facts["transferred_bytes"]) == ("2", "0")


@pytest.mark.parametrize("found", ["a directory", "a file", "a link that leads nowhere"])
def test_what_somebody_put_in_the_place_of_a_source_is_replaced(model_of: ModelOf, tmp_path: Path, found: str) -> None:
    context = model_of(FILES)
    context.base_model.parent.mkdir(parents=True, exist_ok=True)
    if found == "a directory":
        (context.base_model / "inside").mkdir(parents=True)
    elif found == "a file":
        context.base_model.write_text("not a model")
    else:
        context.base_model.symlink_to(tmp_path / "nowhere")
    fetch(context, LOCAL, QUICK)
    assert sorted(path.name for path in context.base_model.iterdir()) == ["config.json", "model.safetensors"]
    assert not context.base_model.is_symlink()
    assert not (tmp_path / "nowhere").exists()


def test_a_model_without_safetensors_is_refused_by_its_field(model_of: ModelOf) -> None:
    context = model_of({"config.json": b"{}", "pytorch_model.bin": b"x"})
    with pytest.raises(ModelError, match=r"spec\.model\.source: .* holds no safetensors file; it holds .*pytorch_model\.bin"):
        fetch(context, LOCAL, QUICK)


def chats(context: RunContext, template: str | None = None) -> RunContext:
    data = context.plan.data.model_copy(update={"format": DataFormat.CHAT, "chat_template": template})
    return dataclasses.replace(context, plan=context.plan.model_copy(update={"data": data}))


def test_a_base_model_without_a_chat_template_is_refused_before_its_weights_are_copied(model_of: ModelOf, hub: Hub) -> None:
    config = {"added_tokens_decoder": {"3": {"content": "<|eot_id|>"}, "4": "broken"}}
    context = chats(model_of({**FILES, "tokenizer_config.json": json.dumps(config).encode()}))
    for _ in range(2):
        with pytest.raises(ModelError, match=r"spec\.model\.source: .* has no chat template") as caught:
            fetch(context, LOCAL, QUICK)
    assert "set spec.data.chatTemplate: Llama3" in caught.value.hint
    copied = [path.name for path in context.workspace.sources.rglob("*") if path.is_file() and "model" in path.name]
    assert copied == []
    assert fetch(chats(context, "{{ messages }}"), LOCAL, QUICK).facts["files"] == "3"


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": b'{"chat_template": "{{ messages }}"}'},
        {"tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ messages }}"},
        {"tokenizer_config.json": b"{}", "additional_chat_templates/tool_use.jinja": b"{{ messages }}"},
        {"tokenizer_config.json": b"{"},
        {},
    ],
)
def test_a_template_is_seen_in_each_of_its_places_and_what_is_not_understood_is_left_to_preflight(
    model_of: ModelOf, files: dict[str, bytes]
) -> None:
    assert fetch(chats(model_of({**FILES, **files})), LOCAL, QUICK).facts["files"] == str(2 + len(files))


def test_the_model_comes_first_with_the_field_that_names_it(model_of: ModelOf) -> None:
    context = model_of(FILES)
    plan: Any = context.plan.fetch
    first, *_ = wanted_sources(context, plan)
    assert (first.is_model, first.field, first.target) == (True, "spec.model.source", context.base_model)
    assert first.refusal is ModelError
