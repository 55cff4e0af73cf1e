"""Token ids and masks, written out by hand."""

import pytest

from finetune_job.api.inputs import LossOn
from finetune_trainer.data.read import Record
from finetune_trainer.data.tokenize import TokenizedDocument, tokenize
from tests.unit.finetune_trainer.data.tokenizers_by_hand import merging_tokenizer, spacing_tokenizer, word_tokenizer

N, Y = False, True


def one(tokenizer, prompt, completion, loss_on):
    (document,) = tokenize(tokenizer, [Record(1, prompt, completion)], loss_on)
    return document


def test_the_completion_and_the_end_are_supervised_the_prompt_is_not():
    assert one(word_tokenizer(), "a b ", "c d", LossOn.COMPLETION) == TokenizedDocument([2, 3, 4, 5, 0], [N, N, Y, Y, Y])


def test_all_tokens_are_supervised_but_the_first_which_nothing_precedes():
    assert one(word_tokenizer(), "a b ", "c d", LossOn.ALL) == TokenizedDocument([2, 3, 4, 5, 0], [N, Y, Y, Y, Y])


def test_a_text_is_supervised_whole():
    assert one(word_tokenizer(), "", "c d", LossOn.ALL) == TokenizedDocument([4, 5, 0], [N, Y, Y])


def test_an_empty_prompt_leaves_only_the_first_token_out():
    assert one(word_tokenizer(), "", "c d", LossOn.COMPLETION) == TokenizedDocument([4, 5, 0], [N, Y, Y])


@pytest.mark.parametrize("loss_on", list(LossOn))
def test_a_start_token_that_the_tokenizer_adds_precedes_and_is_never_supervised(loss_on):
    assert one(word_tokenizer(start=True), "", "c d", loss_on) == TokenizedDocument([1, 4, 5, 0], [N, Y, Y, Y])


def test_a_start_token_stands_before_the_prompt_once():
    assert one(word_tokenizer(start=True), "a ", "c", LossOn.COMPLETION) == TokenizedDocument([1, 2, 4, 0], [N, N, Y, Y])


def test_an_end_token_that_the_tokenizer_adds_is_neither_doubled_nor_put_after_the_prompt():
    tokenizer = word_tokenizer(start=True, end=True)
    assert one(tokenizer, "a ", "c", LossOn.COMPLETION) == TokenizedDocument([1, 2, 4, 0], [N, N, Y, Y])


def test_an_end_token_in_the_record_itself_is_not_doubled():
    assert one(word_tokenizer(), "a ", "c </s>", LossOn.COMPLETION) == TokenizedDocument([2, 4, 0], [N, Y, Y])


def test_a_seam_within_a_token_is_tokenised_apart_so_that_the_prompt_is_what_a_caller_sends():
    assert merging_tokenizer()("ab")["input_ids"] == [7]
    assert one(merging_tokenizer(), "ca", "bd", LossOn.COMPLETION) == TokenizedDocument([4, 2, 3, 5, 0], [N, N, Y, Y, Y])


def test_a_token_within_the_completion_is_kept_whole():
    assert one(merging_tokenizer(), "c", "abd", LossOn.COMPLETION) == TokenizedDocument([4, 7, 5, 0], [N, Y, Y, Y])


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
