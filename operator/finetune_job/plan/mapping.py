"""`data.mapping` as a reader of records needs it: every name resolved. Light, since the processes that prepare data import it."""

from pydantic import BaseModel, ConfigDict

from finetune_job.api.inputs import DataFormat, DataMapping, MappingPreset, TextUnit

SEPARATOR = "\n"
PRESETS: dict[MappingPreset, DataMapping] = {
    MappingPreset.ALPACA: DataMapping(prompt="instruction", input="input", completion="output"),
    MappingPreset.SHARE_GPT: DataMapping(
        messages="conversations",
        role="from",
        content="value",
        system="system",
        roles={"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"},
    ),
}
"""What a preset stands for."""
OF_FORMAT: dict[DataFormat, tuple[str, ...]] = {
    DataFormat.CHAT: (
        "messages", "role", "content", "roles", "system", "system_turn", "prompt", "input", "completion", "separator",
    ),
    DataFormat.PROMPT_COMPLETION: ("prompt", "input", "completion", "separator"),
    DataFormat.TEXT: ("text", "text_unit"),
}  # fmt: skip
"""Fields of a mapping that mean something, by format."""
_PAIR = ("prompt", "input", "completion")


class MappingPlan(BaseModel):
    """Names in the records. The defaults are what the releases without a mapping did."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    messages: str = "messages"
    role: str = "role"
    content: str = "content"
    roles: dict[str, str] | None = None
    """None: roles keep their names, whatever these are."""
    system: str | None = None
    system_turn: str | None = None
    prompt: str = "prompt"
    input: str | None = None
    completion: str = "completion"
    separator: str = ""
    text: str = "text"
    text_unit: TextUnit = TextUnit.PARAGRAPH
    chat_of_pair: bool = False
    """A chat is made of prompt and completion."""


UNMAPPED = MappingPlan()


def mapped_fields(mapping: DataMapping) -> dict[str, object]:
    """What is set, by name of the field, the preset's included."""
    preset = PRESETS[mapping.preset].model_dump(exclude_none=True) if mapping.preset is not None else {}
    written = mapping.model_dump(exclude_none=True, exclude={"preset"})
    roles = {**preset.get("roles", {}), **written.get("roles", {})}
    return preset | written | ({"roles": roles} if roles else {})


def makes_chats_of_pairs(mapping: DataMapping | None, data_format: DataFormat) -> bool:
    """Whether each chat is a question and its answer, of two keys."""
    if mapping is None or data_format is not DataFormat.CHAT:
        return False
    return any(name in mapped_fields(mapping) for name in _PAIR)
