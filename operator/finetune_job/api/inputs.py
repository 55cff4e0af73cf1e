"""`spec.model`, `spec.data` and `spec.fetch`: what a job reads, and the credentials for sources outside the cluster."""

import re
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from finetune_job.api.base import HUB_NAME_PATTERN, ApiModel, DecimalString, Revision, SecretName, Source
from finetune_job.api.enumerations import Dtype
from finetune_job.api.json_values import MAX_JSON_VALUES, check_json_values


class Attention(StrEnum):
    """Attention implementations that keep packed documents apart on every device."""

    SDPA = "sdpa"
    """torch's scaled dot product, with a mask that keeps packed documents apart."""
    EAGER = "eager"
    """Products and softmax one after the other, for models whose attention has no other form."""
    VARLEN = "varlen"
    """torch's attention for documents of different lengths (`torch.nn.attention.varlen`): it needs no mask, and computes no
    scores between documents. On a GPU of compute capability 8.0 or later, in 16 bits; a CPU computes one document at a time."""


class AddedToken(ApiModel):
    """A token that the base model's tokenizer does not have."""

    content: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """Text of the token, such as <|tool|>, which is never split."""
    special: bool = False
    """Whether the token is not text, so `decode(..., skip_special_tokens=True)` leaves it out."""
    stop: bool = False
    """Whether generation stops at the token, as at the end of a turn: `eos_token_id` of generation_config.json has its id."""


class ModelSpec(ApiModel):
    """The base model, and how it is loaded."""

    source: Source
    """Directory with config.json, safetensors weights and the tokenizer: `pvc://<claim>/<path>`, `hf://<org>/<name>` or
    `s3://<bucket>/<prefix>`. The latter two are copied to the workspace first."""
    revision: Revision | None = None
    """Commit of an `hf://` source; required there and not allowed elsewhere."""
    hub_name: Annotated[str, StringConstraints(pattern=HUB_NAME_PATTERN, max_length=193)] | None = None
    """Name on the Hub, `<org>/<name>`, of a model that is read from a claim or bucket. Adapter configuration and model card then
    name it as the base, so that `AutoPeftModel.from_pretrained` finds it. Unset: the adapter names the `_name_or_path` of the
    base's config.json, if that is a name on the Hub, else the source. Not for `hf://` sources."""
    dtype: Dtype | None = None
    """Element type in which the base model is held. Unset: the type of its stored weights according to config.json."""
    attention: Attention | None = None
    """Attention implementation. Unset: varlen on a GPU if preflight finds that it can compute the model's attention, else
    sdpa."""
    max_positions: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Longest record in tokens for a model with rotary positions, which can be computed beyond the length that it has learnt.
    Other models ignore it. Unset: the length in config.json, stretched by its rotary scaling."""
    added_tokens: Annotated[list[AddedToken], Field(min_length=1, max_length=256)] | None = None
    """Tokens to add to the tokenizer, each with a row of its own in the embeddings, which begins as the mean of the rows of all
    known tokens and is trained. Preflight writes the base model with these rows to the workspace; adapter and merged model come
    with the tokenizer. Unset: the tokenizer stays as it is."""
    allow_remote_code: bool = False
    """Whether Python code in the model directory may run. The profile must allow it too."""


class DataFormat(StrEnum):
    """The content of one record."""

    CHAT = "Chat"
    PROMPT_COMPLETION = "PromptCompletion"
    TEXT = "Text"


class OnInvalidRecord(StrEnum):
    """What happens if records cannot be used, such as a line that is not JSON."""

    FAIL = "Fail"
    """The job is refused."""
    SKIP = "Skip"
    """They are left out and listed, if they are at most one in twenty of their source."""


class LossOn(StrEnum):
    """The tokens that are supervised."""

    ASSISTANT = "Assistant"
    """Every turn of the assistant in a chat, with the token that ends it."""
    COMPLETION = "Completion"
    """The completion; in a chat the last turn, which must be the assistant's."""
    ALL = "All"


FieldName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
"""A key of records, or a column of tables."""
SplitName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=64)]
"""Name of a split, as in file names, such as `train`."""


class MappingPreset(StrEnum):
    """Published forms of records."""

    ALPACA = "Alpaca"
    """Keys `instruction`, `input` and `output`, and optionally `system` and `history`."""
    SHARE_GPT = "ShareGPT"
    """Key `conversations`, whose turns have `from` and `value`, and optionally `system`."""


class TextUnit(StrEnum):
    """The unit of a .txt file that is one record."""

    PARAGRAPH = "Paragraph"
    """The text between blank lines."""
    LINE = "Line"


class DataMapping(ApiModel):
    """Names that the records have for the parts of their format, if they differ from the format's."""

    preset: MappingPreset | None = None
    """Published form whose names are used; other fields that are set override these. Alpaca: with PromptCompletion, or with Chat,
    where each record becomes a question and its answer. ShareGPT: with Chat."""
    messages: FieldName | None = None
    """Key of the turns of a chat. Unset: messages."""
    role: FieldName | None = None
    """Key of the role in a turn. Unset: role."""
    content: FieldName | None = None
    """Key of the text in a turn. Unset: content."""
    roles: Annotated[dict[FieldName, FieldName], Field(max_length=32)] | None = None
    """Role as the records call it -> role as the chat template knows it: system, user, assistant or tool. Roles that are not
    named here must have such a name already. These entries are added to those of the preset."""
    system: FieldName | None = None
    """Key of a text that is the system turn of its chat. Unset: none."""
    system_turn: Annotated[str, StringConstraints(min_length=1, max_length=16_384)] | None = None
    """Text of a system turn for every chat that has none."""
    prompt: FieldName | None = None
    """Key of the prompt; with Chat, key of the question, so records of two texts become chats. Unset: prompt."""
    input: FieldName | None = None
    """Key of more text that follows the prompt and belongs to it; it may be empty. Unset: none."""
    completion: FieldName | None = None
    """Key of the completion. Unset: completion."""
    history: FieldName | None = None
    """Key of earlier turns that come before the prompt, with Chat: a list of pairs of question and answer, or of turns.
    Unset: none."""
    separator: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Text between prompt and input. With PromptCompletion it also comes before the completion, as the end of the prompt."""
    text: FieldName | None = None
    """Key of the text. Unset: text."""
    text_unit: TextUnit | None = None
    """Unit of a .txt file that is one record. Unset: Paragraph."""
    ignored: Annotated[list[FieldName], Field(max_length=64)] | None = None
    """Keys of records, turns and parts that have no meaning for this job. A record with any other key that would change what is
    learnt, such as a weight or a picture, is refused, and other unknown keys give a warning."""


class ValidationData(ApiModel):
    """Held-out records, never trained on. They must not be among the training records."""

    source: Source
    """File or directory of records in the same format."""
    revision: Revision | None = None
    """Commit of an `hf://` source; required there and not allowed elsewhere."""
    split: SplitName | None = None
    """Split of the files, as in data.split. Unset: validation, or test if no file is of that split."""


class Dataset(ApiModel):
    """One of several training data sets."""

    source: Source
    """File or directory of records in the same format."""
    revision: Revision | None = None
    """Commit of an `hf://` source; required there and not allowed elsewhere."""
    weight: DecimalString = "1"
    """Occurrences of each record in one pass, above 0 and up to 100: "2" is twice, "0.5" every other record, evenly spread."""


RESERVED_ARGUMENTS = frozenset({
    "messages", "conversations", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
    "return_assistant_tokens_mask", "bos_token", "eos_token", "pad_token", "unk_token",
})  # fmt: skip
"""Names under which a chat template gets what this product gives it."""
_ARGUMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


def _check_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    reserved = sorted(RESERVED_ARGUMENTS.intersection(arguments))
    if reserved:
        raise ValueError(f"{reserved[0]} has a value for each chat; remove it")
    return check_json_values(arguments, _ARGUMENT_NAME, "the name of a variable in Jinja")


TemplateArguments = Annotated[dict[str, Any], Field(max_length=MAX_JSON_VALUES), AfterValidator(_check_arguments)]
"""Variables of a chat template, by name."""


class DataSpec(ApiModel):
    """The training records and how they become token sequences."""

    source: Source | None = None
    """File or directory of training records: JSON Lines (.jsonl), JSON (.json, a list of records), CSV (.csv), Parquet
    (.parquet), Arrow (.arrow, as datasets.save_to_disk writes it) or, with Text, .txt. Set exactly one of source and datasets."""
    revision: Revision | None = None
    """Commit of an `hf://` source; required there and not allowed elsewhere."""
    datasets: Annotated[list[Dataset], Field(min_length=1, max_length=64)] | None = None
    """Several sources with weights. Set exactly one of source and datasets."""
    split: SplitName | None = None
    """Split of a directory's files that are trained on, if their names contain splits, as in train-00000-of-00002.parquet or
    test/. Unset: train."""
    validation: ValidationData | None = None
    """Held-out records for the evaluation loss and the verification prompts.
    Unset: no evaluation, and verification takes training prompts."""
    format: DataFormat = DataFormat.PROMPT_COMPLETION
    """Chat: key `messages`, a list of objects with `role` and `content`, and optionally `tools`; or `prompt` and `completion`,
    lists of such objects. PromptCompletion: keys `prompt` and `completion`. Text: key `text`."""
    mapping: DataMapping | None = None
    """Names of keys and roles in the records. Unset: the names of the format."""
    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=65_536)] | None = None
    """Template that renders a chat, only with Chat: a Jinja template, or the name of a built-in one: ChatML, Gemma, Llama3,
    Mistral, Plain. Unset: the tokenizer's own."""
    template_arguments: TemplateArguments | None = None
    """Variables of the chat template besides the messages, only with Chat, such as reasoning_effort: high. A record's own
    chat_template_kwargs override them."""
    max_sequence_length: Annotated[int, Field(ge=8, le=1_048_576)] = 2048
    """Longest sequence, in tokens. Longer records are dropped and counted, never cut."""
    packing: bool = True
    """Fill each sequence with whole records; their boundaries are kept, so no record sees another."""
    on_invalid_record: OnInvalidRecord = OnInvalidRecord.FAIL
    """Fail: a record that cannot be used refuses the job. Skip: such records are left out and listed, if they are at most 5 % of
    their source. A file that cannot be read to its end, and keys such as labels that ask for another training, refuse the job
    either way."""
    loss_on: LossOn | None = None
    """Supervised tokens. Unset: Assistant for Chat, Completion for PromptCompletion, All for Text."""


class SecretKeyRef(ApiModel):
    """One key of a Secret of the job's namespace."""

    name: SecretName
    """Name of the Secret."""
    key: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$", max_length=253)] = "token"
    """Key in the Secret."""


class SecretRef(ApiModel):
    """A Secret of the job's namespace."""

    name: SecretName
    """Name of the Secret."""


class FetchSpec(ApiModel):
    """Credentials of the fetch pod for a hub or an object store. No other pod sees these, and the operator never reads them."""

    hub_token_secret_ref: SecretKeyRef | None = None
    """Access token for `hf://` sources. Unset: public repositories only."""
    s3_secret_ref: SecretRef | None = None
    """Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and optionally AWS_SESSION_TOKEN, for `s3://` sources.
    Unset: public buckets only."""
