"""Token ids and masks, written out by hand."""

import pytest

from finetune_job.api.inputs import LossOn
from finetune_trainer.data.read import Record
from finetune_trainer.data.tokenize import TokenizedDocument, tokenize
from tests.unit.finetune_trainer.data.tokenizers_by_hand import merging_tokenizer, spacing_tokenizer, word_tokenizer

N, Y = False, True


def one(tokenizer, prompt, completion, loss_on=LossOn.COMPLETION):
    (document,) = tokenize(tokenizer, [Record(1, prompt, completion)], loss_on)
    return document


WORDS, STARTING, MERGING = word_tokenizer(), word_tokenizer(start=True), merging_tokenizer()
DOCUMENTS = {
    # tokenizer, prompt, completion, what the loss counts, ids, which of them are supervised
    "a prompt is not supervised": (WORDS, "a b ", "c d", LossOn.COMPLETION, [2, 3, 4, 5, 0], [N, N, Y, Y, Y]),
    "nothing precedes the first token": (WORDS, "a b ", "c d", LossOn.ALL, [2, 3, 4, 5, 0], [N, Y, Y, Y, Y]),
    "a text": (WORDS, "", "c d", LossOn.ALL, [4, 5, 0], [N, Y, Y]),
    "an empty prompt": (WORDS, "", "c d", LossOn.COMPLETION, [4, 5, 0], [N, Y, Y]),
    "a start token before a text": (STARTING, "", "c d", LossOn.ALL, [1, 4, 5, 0], [N, Y, Y, Y]),
    "a start token before an empty prompt": (STARTING, "", "c d", LossOn.COMPLETION, [1, 4, 5, 0], [N, Y, Y, Y]),
    "a start token before a prompt": (STARTING, "a ", "c", LossOn.COMPLETION, [1, 2, 4, 0], [N, N, Y, Y]),
    # It is neither doubled nor put after the prompt.
    "an end token of the tokenizer": (word_tokenizer(True, True), "a ", "c", LossOn.COMPLETION, [1, 2, 4, 0], [N, N, Y, Y]),
    "an end token in the record": (WORDS, "a ", "c </s>", LossOn.COMPLETION, [2, 4, 0], [N, Y, Y]),
    # "ab" is one token. The prompt has to be what a caller sends.
    "a seam within a token": (MERGING, "ca", "bd", LossOn.COMPLETION, [4, 2, 3, 5, 0], [N, N, Y, Y, Y]),
    "a token within the completion": (MERGING, "c", "abd", LossOn.COMPLETION, [4, 7, 5, 0], [N, Y, Y, Y]),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_record_becomes_these_tokens(name):
    tokenizer, prompt, completion, loss_on, ids, supervised = DOCUMENTS[name]
    assert one(tokenizer, prompt, completion, loss_on) == TokenizedDocument(ids, supervised)


def test_documents_come_in_the_order_of_the_records():
    records = [Record(line, "a ", word) for line, word in enumerate("bcde", start=1)]
    assert [document.input_ids[1] for document in tokenize(word_tokenizer(), records, LossOn.ALL)] == [3, 4, 5, 6]


@pytest.mark.parametrize("prepend_scheme", [None, "always", "first"])
@pytest.mark.parametrize(
    ("prompt", "completion"), [("q: ", "yes"), ("q: ", " yes"), ("q:", " yes"), ("q:", "yes"), ("q:\n", "yes")]
)
def test_a_tokenizer_that_puts_a_space_before_texts_puts_none_into_the_seam(prepend_scheme, prompt, completion):
    tokenizer = spacing_tokenizer(prepend_scheme)
    document = one(tokenizer, prompt, completion, LossOn.COMPLETION)
    assert tokenizer.decode(document.input_ids, skip_special_tokens=True) == prompt + completion
    asked = tokenizer(prompt)["input_ids"]
    assert (document.input_ids[: len(asked)], document.supervised.index(Y)) == (asked, len(asked))


@pytest.mark.parametrize("prompt", ["", "<s>q:"])
def test_a_begin_token_in_the_record_itself_is_not_doubled(prompt):
    tokenizer = spacing_tokenizer("first")
    document = one(tokenizer, prompt, "yes" if prompt else "<s>yes", LossOn.COMPLETION)
    assert document.input_ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(document.input_ids) == (prompt or "<s>") + "yes</s>"
    assert document.supervised == [N] * (3 if prompt else 1) + [Y, Y]
