"""Chats in a word or two, the tokenizers of all manners of template, and what is supervised of such a chat."""

from finetune_job.api.inputs import LossOn
from finetune_trainer.data.records import Record
from finetune_trainer.data.tokenize import tokenize
from tests.unit.finetune_trainer.data.chat_templates import FAMILIES

MERGES = [("Ċ", "Ċ"), ("Ġ", "a"), ("a", "b")]
TOKENIZERS = {
    "bytes": {name: family.tokenizer() for name, family in FAMILIES.items()},
    # With tokens that may reach over the seam between a header and an answer.
    "merges": {name: family.tokenizer(merges=MERGES) for name, family in FAMILIES.items()},
}


def chat(*turns, tools=(), line=1):
    """Turns by their roles' first letters: ("u", "question")."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = tuple({"role": roles[role], "content": content} for role, content in turns)
    return Record(line, "", "", messages, tools)


def one(tokenizer, record, loss_on=LossOn.ASSISTANT, template=None):
    (made,) = tokenize(tokenizer, [record], loss_on, template)
    return made


def supervised(tokenizer, document):
    """The texts of the stretches that are supervised."""
    stretches, previous = [], False
    for token, is_supervised in zip(document.input_ids, document.supervised, strict=True):
        if is_supervised and not previous:
            stretches.append([])
        if is_supervised:
            stretches[-1].append(token)
        previous = is_supervised
    return [tokenizer.decode(stretch) for stretch in stretches]
