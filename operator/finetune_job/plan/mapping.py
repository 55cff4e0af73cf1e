"""`data.mapping` with every name resolved, for readers of records. Data preparation processes import this, so it loads fast."""

from pydantic import BaseModel, ConfigDict

from finetune_job.api.inputs import DataFormat, DataMapping, MappingPreset, TextUnit

SEPARATOR = "\n"
PRESETS: dict[MappingPreset, DataMapping] = {
    MappingPreset.ALPACA: DataMapping(
        prompt="instruction", input="input", completion="output", system="system", history="history"
    ),
    MappingPreset.SHARE_GPT: DataMapping(
        messages="conversations",
        role="from",
        content="value",
        system="system",
        roles={"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"},
    ),
}
"""Preset -> the mapping that it stands for."""
OF_FORMAT: dict[DataFormat, tuple[str, ...]] = {
    DataFormat.CHAT: (
        "messages", "role", "content", "roles", "system", "system_turn", "prompt", "input", "completion", "separator", "history",
        "ignored",
    ),
    DataFormat.PROMPT_COMPLETION: ("prompt", "input", "completion", "separator", "ignored"),
    DataFormat.TEXT: ("text", "text_unit", "ignored"),
}  # fmt: skip
"""Format -> the mapping fields that apply to it."""
OPTIONAL_KEYS = ("system", "history")
"""Fields that name optional keys of a record. A preset may set them even for a format to which they do not apply."""
_PAIR = ("prompt", "input", "completion")


class MappingPlan(BaseModel):
    """Names of keys and roles in the records. The defaults are the fixed names that releases without a mapping used."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    messages: str = "messages"
    role: str = "role"
    content: str = "content"
    roles: dict[str, str] | None = None
    """Role in the records -> role for the chat template; None if roles are not renamed."""
    system: str | None = None
    system_turn: str | None = None
    prompt: str = "prompt"
    input: str | None = None
    completion: str = "completion"
    separator: str = ""
    history: str | None = None
    text: str = "text"
    text_unit: TextUnit = TextUnit.PARAGRAPH
    chat_of_pair: bool = False
    """Whether each chat is built from a prompt and a completion."""
    ignored: tuple[str, ...] = ()
    """Keys of records, turns and parts that the job ignores."""


UNMAPPED = MappingPlan()


def mapped_fields(mapping: DataMapping) -> dict[str, object]:
    """Return all fields that the mapping or its preset sets, by name."""
    preset = PRESETS[mapping.preset].model_dump(exclude_none=True) if mapping.preset is not None else {}
    written = mapping.model_dump(exclude_none=True, exclude={"preset"})
    roles = {**preset.get("roles", {}), **written.get("roles", {})}
    return preset | written | ({"roles": roles} if roles else {})


def makes_chats_of_pairs(mapping: DataMapping | None, data_format: DataFormat) -> bool:
    """Whether each chat is built from a question and an answer that are stored under two keys."""
    if mapping is None or data_format is not DataFormat.CHAT:
        return False
    return any(name in mapped_fields(mapping) for name in _PAIR)
