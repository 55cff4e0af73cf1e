"""Findings on data: the tokenizer and its chat template, files and records, and how they fill the batches."""

from __future__ import annotations

from finetune_job.catalogue.entry import EITHER, Entry

_REFUSED = "tests/unit/finetune_trainer/preflight/test_refused_jobs.py"
_MARKERS = "tests/unit/finetune_trainer/data/test_tokenizer_chat_markers.py"
_TEMPLATE = "tests/unit/finetune_trainer/data/test_tokenizer_chat_template.py"
_PREPARE = "tests/unit/finetune_trainer/data/test_prepare.py"
_FORMS = "tests/unit/finetune_trainer/data/test_forms_of_records.py"
_FIT = "tests/unit/finetune_trainer/preflight/test_fit.py"

CHAT_ENTRIES = (
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


RECORD_ENTRIES = (
    Entry(
        "data-file-missing",
        "error",
        "A data source does not exist, or holds no file of records",
        "There is nothing to train on.",
        "Put the file there, or correct the path",
        f"{_PREPARE}::test_a_missing_file_names_what_lies_beside",
    ),
    Entry(
        "data-file-unreadable",
        "error",
        "A data file cannot be read",
        "The pods run as the user and group of the profile, or the entry is not a file.",
        "Let the group of the pods (the profile's fsGroup) read the file",
        "tests/hostile/test_tokenizer_and_data_files.py::test_a_pipe_among_the_files_of_a_directory_is_named",
    ),
    Entry(
        "data-empty",
        "error",
        "A data source holds no record",
        "There is nothing to train on.",
        "Name a source with at least one record",
        f"{_PREPARE}::test_an_empty_file_is_an_error",
    ),
    Entry(
        "data-record-invalid",
        "error",
        "A record does not have the form of its format",
        "It could not be turned into tokens. The finding names file, line and key, and how many records are alike.",
        "Correct the records, or set spec.data.format to the format that they have",
        f"{_PREPARE}::test_mistakes_of_one_kind_are_one_finding_and_all_files_are_read",
    ),
    Entry(
        "chat-words-left-out",
        "warning",
        "The chat template leaves out part of a record",
        "What the template does not write is not learnt.",
        "Use a template that writes it, or remove it from the records",
        f"{_PREPARE}::test_what_the_template_leaves_out_is_a_warning_of_the_records_that_are_kept",
    ),
    Entry(
        "data-all-too-long",
        "error",
        "Every record is longer than maxSequenceLength",
        "Records beyond the limit are dropped, so nothing is left to train on.",
        "Increase spec.data.maxSequenceLength, or split long records",
        f"{_PREPARE}::test_records_that_are_all_too_long_are_an_error",
    ),
    Entry(
        "data-records-dropped",
        "warning",
        "Some records are longer than maxSequenceLength and are dropped",
        "The model does not see them; a cut record would teach it to stop in the middle of a sentence.",
        "Increase spec.data.maxSequenceLength, or split long records",
        f"{_PREPARE}::test_records_beyond_the_limit_are_dropped_and_counted",
    ),
    Entry(
        "data-unknown-tokens",
        EITHER,
        "The tokenizer does not know much of the text",
        "What it has no token for becomes its unknown token, which the model would learn to write. From half of all tokens on it "
        "is an error.",
        "Use a model whose tokenizer knows the language or script of the data",
        f"{_PREPARE}::test_text_that_the_tokenizer_does_not_know_is_told_of",
    ),
    Entry(
        "data-weight-without-records",
        "error",
        "The weight of a data set is so small that none of its records occurs",
        "The data set would have no effect.",
        "Increase the weight, or remove the data set",
        f"{_PREPARE}::test_a_weight_that_leaves_no_record_is_an_error",
    ),
    Entry(
        "data-held-out-in-training",
        "error",
        "Training records are held out for validation, too",
        "The held-out loss would look better than it is, and tell nothing of records that the model has not seen.",
        "Remove these records from the training data or from the held-out data, or name another source",
        f"{_PREPARE}::test_training_records_that_are_held_out_are_refused_with_their_number",
    ),
    Entry(
        "data-preference-pairs",
        "error",
        "The records are preferences",
        "They say which of two answers is better, or whether one is desired. This product teaches answers; half of a pair, or an "
        "answer that is not desired, teaches something else.",
        "Train on them with a tool for preferences, or say with spec.data.mapping which answers are learnt all the same",
        f"{_FORMS}::test_every_form_is_prepared_or_refused_with_a_fix_that_works",
    ),
    Entry(
        "data-split-missing",
        "error",
        "No file of a directory is of the split that is wanted",
        "The names of files tell splits apart, as in train-00000-of-00002.parquet or test/, and only one of them is read.",
        "Name a split that there is in spec.data.split or spec.data.validation.split",
        f"{_FORMS}::test_a_split_that_there_is_not_is_refused_with_those_that_there_are",
    ),
    Entry(
        "data-files-left-out",
        "warning",
        "Files that name no split are not read",
        "Other files of the directory name one, so it is not known to which these belong.",
        "Rename the files, or name them as a source of their own",
        f"{_FORMS}::test_a_directory_with_splits_is_read_one_split_at_a_time",
    ),
    Entry(
        "data-records-repeated",
        "warning",
        "Records of a source repeat an earlier one",
        "They are learnt as often as they occur.",
        "Remove the repetitions; set the weight of a data set to learn it more than once",
        f"{_PREPARE}::test_records_beyond_the_limit_are_dropped_and_counted",
    ),
    Entry(
        "fewer-sequences-than-batch",
        "error",
        "The data make fewer sequences than one step takes",
        "A step would count some of them twice.",
        "Lower spec.training.globalBatchSize, turn packing off, or add records",
        f"{_FIT}::test_fewer_sequences_than_a_step_name_every_way_out",
    ),
    Entry(
        "evaluations-beyond-the-end",
        "warning",
        "The run ends before early stopping or the choice of the best checkpoint can act",
        "With epochs, only the data say how many steps a run has.",
        "Lower spec.evaluation.everySteps",
        f"{_FIT}::test_evaluations_that_come_too_late_for_a_run_of_epochs",
    ),
)
