"""The base model as code: its task, what its architecture can do, and its tokens."""

from __future__ import annotations

from finetune_job.catalogue.entry import EITHER, Entry

_REFUSED = "tests/unit/trainer_preflight/test_refused.py"
_TASK = "tests/unit/trainer_preflight/test_task.py"
_ARCHITECTURES = "tests/unit/trainer_preflight/test_architectures.py"
_FIT = "tests/unit/trainer_preflight/test_fit.py"

ENTRIES = (
    Entry(
        "model-holds-adapter",
        "error",
        "The model's directory also holds an adapter",
        "transformers would load the adapter and the base model that it names, instead of this model.",
        "Merge the adapter, or remove its files",
        f"{_TASK}::test_an_adapter_beside_the_weights_is_refused",
    ),
    Entry(
        "model-of-another-task",
        "error",
        "The model is not a causal language model",
        "As a language model it would lose its head, and what was learnt with it. The libraries load it without an error.",
        "Use a decoder whose class in config.json ends with ForCausalLM or LMHeadModel",
        f"{_TASK}::test_a_model_of_another_task_is_refused_by_its_class",
    ),
    Entry(
        "model-of-more-than-text",
        "warning",
        "The model takes more than text, and only its text part is trained",
        "The parts for images or sound stay as they are.",
        "Train on text alone, or use the text model that belongs to it",
        f"{_TASK}::test_of_a_model_of_images_and_text_it_is_said_that_text_alone_is_trained",
    ),
    Entry(
        "special-token-beyond-vocabulary",
        "warning",
        "config.json names a special token for which the embedding has no row",
        "Programs that generate text with the model would fail on this token, or never stop.",
        "Write the tokenizer's own id in config.json, or null if the tokenizer has none",
        f"{_TASK}::test_a_special_token_beyond_the_embedding_is_said",
    ),
    Entry(
        "model-not-causal",
        "error",
        "What the model predicts depends on later tokens",
        "It would learn to copy the token that it is to predict. This is measured on a small model of the same architecture.",
        "Use a causal language model; an encoder needs is_decoder: true to be one",
        f"{_TASK}::test_a_model_that_looks_ahead_is_refused_whatever_its_class_is_called",
    ),
    Entry(
        "model-not-accepted",
        "error",
        "The libraries cannot build the model that config.json describes",
        "Every rank would fail in the same way when it loads the model.",
        "Check config.json and its architecture against the libraries of the trainer image",
        f"{_REFUSED}::test_a_missing_or_foreign_configuration_is_refused",
    ),
    Entry(
        "model-settings-conflict",
        "error",
        "The settings of the method cannot work with this model",
        "PEFT, FSDP or this trainer refuses to attach, train or shard the adapters of this model.",
        "Change the setting that the message names",
        f"{_REFUSED}::test_settings_that_peft_refuses_for_this_model_are_refused",
    ),
    Entry(
        "attention-not-supported",
        "error",
        "transformers has no such attention implementation for this architecture",
        "The model could not be built with it.",
        "Set spec.model.attention: eager",
        f"{_ARCHITECTURES}::test_attention_that_the_architecture_lacks_is_refused",
    ),
    Entry(
        "compile-without-compiler",
        "error",
        "torch.compile needs a compiler that the trainer image does not have",
        "The first training step would fail.",
        "Set spec.training.compile: false, or use a trainer image with a compiler",
        f"{_REFUSED}::test_compiling_without_a_compiler_is_refused",
    ),
    Entry(
        "activation-checkpointing-not-supported",
        "error",
        "The architecture cannot compute its layers again in the backward pass",
        "transformers refuses activation checkpointing for this class of models.",
        "Set spec.training.activationCheckpointing: None",
        f"{_ARCHITECTURES}::test_activation_checkpointing_is_refused_where_the_architecture_has_none",
    ),
    Entry(
        "packing-with-recurrent-layers",
        "error",
        "Packing cannot keep records apart in a model with recurrent layers",
        "The state of a recurrent layer would run on from one record of a sequence into the next.",
        "Set spec.data.packing: false",
        f"{_REFUSED}::test_packing_is_refused_where_a_state_would_run_on_from_record_to_record",
    ),
    Entry(
        "packing-leaks",
        "error",
        "A packed record sees the record before it",
        "The model's code does not restart its attention mask at a new record. This is measured on a small model.",
        "Set spec.data.packing: false",
        f"{_ARCHITECTURES}::test_packing_is_refused_where_a_document_sees_the_one_before",
    ),
    Entry(
        "tokenizer-beyond-vocabulary",
        EITHER,
        "The tokenizer has more tokens than the model's embedding has rows",
        "A record with such a token would fail in the forward pass. It is an error if the data use one, otherwise a warning.",
        "Use the tokenizer of this model, or resize the model's embeddings and save it",
        f"{_FIT}::test_tokens_that_the_embedding_does_not_have_are_an_error_where_the_data_uses_them",
    ),
    Entry(
        "document-beyond-positions",
        "error",
        "A record is longer than the model's positions",
        "Beyond max_position_embeddings a model has learnt nothing, or its code fails.",
        "Set spec.data.maxSequenceLength to the model's number of positions or less",
        f"{_FIT}::test_a_record_beyond_the_models_positions_is_an_error",
    ),
    Entry(
        "sequence-beyond-positions",
        "error",
        "A sequence is longer than the attention biases that the model's code makes",
        "The code of this architecture (MPT) fails with longer sequences, packed or not.",
        "Set spec.data.maxSequenceLength to the model's max_seq_len or less",
        f"{_FIT}::test_rows_that_packing_fills_beyond_what_the_code_computes_are_an_error",
    ),
)
