"""The tokenizer and its chat template."""

from __future__ import annotations

from finetune_job.catalogue.entry import Entry

_REFUSED = "tests/unit/trainer_preflight/test_refused.py"
_MARKERS = "tests/unit/trainer_preflight/test_chat_markers.py"
_TEMPLATE = "tests/unit/trainer_preflight/test_chat_template.py"

ENTRIES = (
    Entry(
        "tokenizer-unusable",
        "error",
        "The tokenizer of the model does not load",
        "Without it no record becomes tokens.",
        "Copy tokenizer.json and tokenizer_config.json of the model into the directory of its config.json",
        f"{_REFUSED}::test_a_missing_tokenizer_is_refused",
    ),
    Entry(
        "tokenizer-without-end",
        "error",
        "The tokenizer has no end-of-sequence token",
        "The model could never learn to stop.",
        "Set eos_token in tokenizer_config.json",
        f"{_REFUSED}::test_a_tokenizer_without_an_end_token_is_refused",
    ),
    Entry(
        "stop-token-unknown",
        "warning",
        "Texts end with a token at which generation does not stop",
        "A server that loads the model would generate on after the end of a text.",
        "Add the token to eos_token_id in generation_config.json of the model",
        f"{_MARKERS}::test_a_text_has_to_end_where_generation_stops",
    ),
    Entry(
        "chat-template-unusable",
        "error",
        "The chat template cannot be rendered or trained on",
        "Records of format Chat become text through the template.",
        "Set spec.data.chatTemplate to a template that renders a plain chat",
        f"{_TEMPLATE}::test_a_written_template_that_cannot_be_trained_on_is_an_error_of_that_field",
    ),
    Entry(
        "chat-template-doubles-begin",
        "error",
        "Every chat begins with two begin tokens",
        "The template writes one and the tokenizer adds another; the model has never seen that.",
        "Write the begin token once in the template",
        f"{_TEMPLATE}::test_a_begin_token_that_the_template_writes_twice_is_an_error",
    ),
    Entry(
        "chat-template-without-begin",
        "warning",
        "Chats begin without the begin token that the tokenizer puts before texts",
        "No chat begins like the texts that the model has learnt from.",
        "Begin the template with {{ bos_token }}",
        f"{_TEMPLATE}::test_a_begin_token_that_the_tokenizer_writes_and_the_template_does_not_is_a_warning",
    ),
    Entry(
        "chat-template-dated",
        "warning",
        "The chat template writes the current date",
        "Data that are prepared on another day are not the same.",
        "Remove strftime_now from the template",
        f"{_TEMPLATE}::test_a_template_that_writes_the_date_is_a_warning",
    ),
    Entry(
        "chat-stop-token-unknown",
        "warning",
        "Turns end with a token at which generation does not stop",
        "A server that loads the model would generate on after the end of a turn.",
        "Add the token to eos_token_id in generation_config.json of the model",
        f"{_TEMPLATE}::test_a_stop_token_at_which_no_server_stops_is_a_warning_until_the_model_names_it",
    ),
    Entry(
        "chat-marker-split",
        "warning",
        "The chat template writes a marker that is not a token",
        "The tokenizer splits it into pieces of plain text, which users can write, too.",
        "Add the marker to the tokenizer and train its row, or use a template with tokens that exist",
        f"{_MARKERS}::test_a_marker_that_is_no_token_is_a_warning",
    ),
    Entry(
        "chat-answer-not-asked-for",
        "warning",
        "The chat template ignores add_generation_prompt",
        "The model has to learn to write the header of the assistant's turn itself.",
        "Write the header at the end of the template if add_generation_prompt is set",
        f"{_MARKERS}::test_a_template_that_never_asks_for_an_answer_is_a_warning_where_that_matters",
    ),
    Entry(
        "chat-roles-unmarked",
        "warning",
        "The chat template writes the same text before questions and before answers",
        "A model cannot tell who speaks.",
        "Write the role of each turn in the template",
        f"{_MARKERS}::test_turns_without_roles_are_a_warning",
    ),
    Entry(
        "chat-asks-otherwise",
        "warning",
        "The chat template asks for an answer in a form that it never writes",
        "What is learnt is not what a server asks for, and thoughts are dropped.",
        "Set a spec.data.chatTemplate that writes the same header in both places and keeps the thoughts",
        f"{_MARKERS}::test_an_answer_that_never_begins_as_it_is_asked_for_is_a_warning",
    ),
    Entry(
        "chat-generation-misplaced",
        "error",
        "The generation blocks of the chat template do not hold exactly what the assistant says",
        "The model would learn to ask, or would not learn the answers.",
        "Put {% generation %} before the assistant's text and {% endgeneration %} after the token that ends its turn",
        f"{_MARKERS}::test_generation_blocks_hold_what_the_assistant_says_and_the_token_that_ends_it",
    ),
)
