"""The data set: files, records, and how they fill the batches."""

from __future__ import annotations

from finetune_job.catalogue.entry import Entry

_PREPARE = "tests/unit/trainer_data/test_prepare.py"
_FIT = "tests/unit/trainer_preflight/test_fit.py"

ENTRIES = (
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
        "data-weight-without-records",
        "error",
        "The weight of a data set is so small that none of its records occurs",
        "The data set would have no effect.",
        "Increase the weight, or remove the data set",
        f"{_PREPARE}::test_a_weight_that_leaves_no_record_is_an_error",
    ),
    Entry(
        "data-held-out-in-training",
        "warning",
        "Training records are held out for validation, too",
        "The held-out loss will look better than it is.",
        "Remove these records from the training data or from the held-out data",
        f"{_PREPARE}::test_training_records_that_are_held_out_are_a_warning_that_counts_them",
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
