"""`spec.model`, `spec.data` and `spec.fetch`: what a job reads, and the credentials for sources outside the cluster."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from finetune_job.api.base import HUB_NAME_PATTERN, ApiModel, DecimalString, Revision, SecretName, Source
from finetune_job.api.enumerations import Dtype


class Attention(StrEnum):
    """Attention implementations that keep packed documents apart on every device."""

    SDPA = "sdpa"
    """torch's scaled dot product, with a mask that keeps packed documents apart."""
    EAGER = "eager"
    """Products and softmax one after the other: of models whose attention has no other form."""
    VARLEN = "varlen"
    """torch's attention of documents of different lengths (`torch.nn.attention.varlen`): no mask, and no pair of tokens of two
    documents is computed. On a GPU of compute capability 8.0 or later, in 16 bits; a CPU computes one document at a time."""


class AddedToken(ApiModel):
    """A token that the base model's tokenizer does not have."""

    content: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """Its text, which is never split: such as <|tool|>."""
    special: bool = False
    """Whether it stands for something else than text, so that `decode(..., skip_special_tokens=True)` leaves it out."""
    stop: bool = False
    """Whether generation stops at it, as at the end of a turn: its id is in `eos_token_id` of generation_config.json."""


class ModelSpec(ApiModel):
    """Which base model, and how it is loaded."""

    source: Source
    """Directory with config.json, safetensors weights and the tokenizer: `pvc://<claim>/<path>`, `hf://<org>/<name>` or
    `s3://<bucket>/<prefix>`. The latter two are copied to the workspace first."""
    revision: Revision | None = None
    """Commit of an `hf://` source; required there and not allowed elsewhere."""
    hub_name: Annotated[str, StringConstraints(pattern=HUB_NAME_PATTERN, max_length=193)] | None = None
    """`<org>/<name>` by which the Hub has what a claim or bucket holds. Adapter configuration and model card then name it as the
    base, so that `AutoPeftModel.from_pretrained` finds it. Unset: the adapter names what the base's config.json has as
    `_name_or_path`, if that is such a name, else the source. Not for `hf://` sources."""
    dtype: Dtype | None = None
    """Element type in which the base model is held. Unset: the type its weights are stored in, as config.json says."""
    attention: Attention | None = None
    """Attention implementation. Unset: on a GPU varlen if the model's attention can be computed so, which preflight measures;
    else sdpa."""
    max_positions: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Longest record, in tokens, of a model whose positions are rotary: they can be computed beyond what the model has learnt.
    Other models do not look at it. Unset: as config.json says, stretched by its rotary scaling."""
    added_tokens: Annotated[list[AddedToken], Field(min_length=1, max_length=256)] | None = None
    """Tokens to add to the tokenizer, each with a row of its own in the embeddings, which begins as the mean of the rows of all
    known tokens and is trained. Preflight writes the base model with these rows to the workspace; adapter and merged model come
    with the tokenizer. Unset: the tokenizer stays as it is."""
    allow_remote_code: bool = False
    """Whether Python code in the model directory may run. The profile must allow it too."""


class DataFormat(StrEnum):
    """What one record holds."""

    CHAT = "Chat"
    PROMPT_COMPLETION = "PromptCompletion"
    TEXT = "Text"


class LossOn(StrEnum):
    """Which tokens are supervised."""

    ASSISTANT = "Assistant"
    """Every turn of the assistant in a chat, with the token that ends it."""
    COMPLETION = "Completion"
    """The completion; in a chat the last turn, which must be the assistant's."""
    ALL = "All"


FieldName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
"""A key of records, or a column of tables."""
SplitName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=64)]
"""A split as the names of files have it, such as `train`."""


class MappingPreset(StrEnum):
    """Published forms of records."""

    ALPACA = "Alpaca"
    """Keys `instruction`, `input` and `output`."""
    SHARE_GPT = "ShareGPT"
    """Key `conversations`, whose turns have `from` and `value`."""


class TextUnit(StrEnum):
    """What is one record of a .txt file."""

    PARAGRAPH = "Paragraph"
    """What is between blank lines."""
    LINE = "Line"


class DataMapping(ApiModel):
    """What the records call the parts of their format, if not as the format does."""

    preset: MappingPreset | None = None
    """Names of a published form; other fields that are set replace them. Alpaca: with PromptCompletion, or with Chat, which makes
    a question and its answer of each record. ShareGPT: with Chat."""
    messages: FieldName | None = None
    """Key of the turns of a chat. Unset: messages."""
    role: FieldName | None = None
    """Key of the role in a turn. Unset: role."""
    content: FieldName | None = None
    """Key of the text in a turn. Unset: content."""
    roles: Annotated[dict[FieldName, FieldName], Field(max_length=32)] | None = None
    """Role as the records call it -> role as the chat template knows it: system, user, assistant or tool. Roles that are not
    named here must have such a name already. Added to those of the preset."""
    system: FieldName | None = None
    """Key of a text that is the system turn of its chat. Unset: none."""
    system_turn: Annotated[str, StringConstraints(min_length=1, max_length=16_384)] | None = None
    """Text of a system turn for every chat that has none."""
    prompt: FieldName | None = None
    """Key of the prompt. With Chat: of the question, so that records of two texts become chats. Unset: prompt."""
    input: FieldName | None = None
    """Key of more text that belongs to the prompt, behind it; it may be empty. Unset: none."""
    completion: FieldName | None = None
    """Key of the completion. Unset: completion."""
    separator: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Text between prompt and input, and with PromptCompletion between them and the completion, as a part of the prompt.
    Unset: a line break."""
    text: FieldName | None = None
    """Key of the text. Unset: text."""
    text_unit: TextUnit | None = None
    """What is a record of a .txt file. Unset: Paragraph."""


class ValidationData(ApiModel):
    """Held-out records, never trained on. They must not be among the training records."""

    source: Source
    """File or directory of records in the same format."""
    revision: Revision | None = None
    """Commit of an `hf://` source; required there and not allowed elsewhere."""
    split: SplitName | None = None
    """As data.split. Unset: validation, or test if no file is of that split."""


class Dataset(ApiModel):
    """One of several training data sets."""

    source: Source
    """File or directory of records in the same format."""
    revision: Revision | None = None
    """Commit of an `hf://` source; required there and not allowed elsewhere."""
    weight: DecimalString = "1"
    """How often each record occurs in one pass, above 0 and up to 100: "2" twice, "0.5" every other record, evenly spread."""


class DataSpec(ApiModel):
    """The training records and how they become token sequences."""

    source: Source | None = None
    """File or directory of training records: JSON Lines (.jsonl), JSON (.json, a list of records), CSV (.csv), Parquet
    (.parquet), Arrow (.arrow, as datasets.save_to_disk writes it) or, with Text, .txt. Exactly one of source and datasets."""
    revision: Revision | None = None
    """Commit of an `hf://` source; required there and not allowed elsewhere."""
    datasets: Annotated[list[Dataset], Field(min_length=1, max_length=64)] | None = None
    """Several sources with weights. Exactly one of source and datasets."""
    split: SplitName | None = None
    """Which files of directories are trained on if their names tell splits apart, as in train-00000-of-00002.parquet or test/.
    Unset: train."""
    validation: ValidationData | None = None
    """Held-out records for the evaluation loss and the verification prompts.
    Unset: no evaluation, and verification takes training prompts."""
    format: DataFormat = DataFormat.PROMPT_COMPLETION
    """Chat: key `messages`, a list of objects with `role` and `content`, and optionally `tools`; or `prompt` and `completion`,
    lists of such objects. PromptCompletion: keys `prompt` and `completion`. Text: key `text`."""
    mapping: DataMapping | None = None
    """For records whose keys or roles have other names. Unset: the names of the format."""
    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=65_536)] | None = None
    """What renders a chat; only with Chat: a Jinja template, or the name of one of ours: ChatML, Gemma, Llama3, Mistral, Plain.
    Unset: the tokenizer's own."""
    max_sequence_length: Annotated[int, Field(ge=8, le=1_048_576)] = 2048
    """Longest sequence, in tokens. Longer records are dropped and counted, never cut."""
    packing: bool = True
    """Fill each sequence with whole records; their boundaries are kept, so that no record sees another."""
    loss_on: LossOn | None = None
    """Supervised tokens. Unset: Assistant for Chat, Completion for PromptCompletion, All for Text."""


class SecretKeyRef(ApiModel):
    """One key of a Secret of the job's namespace."""

    name: SecretName
    """Secret."""
    key: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$", max_length=253)] = "token"
    """Key in it."""


class SecretRef(ApiModel):
    """A Secret of the job's namespace."""

    name: SecretName
    """Secret."""


class FetchSpec(ApiModel):
    """What the fetch pod may show to a hub or an object store. No other pod sees these, and the operator never reads them."""

    hub_token_secret_ref: SecretKeyRef | None = None
    """Access token for `hf://` sources. Unset: public repositories only."""
    s3_secret_ref: SecretRef | None = None
    """Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and optionally AWS_SESSION_TOKEN, for `s3://` sources.
    Unset: public buckets only."""
