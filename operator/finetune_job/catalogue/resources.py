"""What a job needs around it: a manifest that can be read, storage, memory, trackers; and the rehearsal of the whole job."""

from __future__ import annotations

from finetune_job.catalogue.entry import EITHER, Entry, Gate
from finetune_job.finding import INVALID_FIELD

_REFUSED = "tests/unit/finetune_trainer/preflight/test_refused_jobs.py"
_VERDICTS = "tests/unit/finetune_trainer/rehearsal/test_run_verdicts.py"

RESOURCE_ENTRIES = (
    Entry(
        INVALID_FIELD,
        "error",
        "The input is not an object of this API",
        "The file is not YAML, is too large, or has a field or a value that the API does not have. The finding names the place.",
        "Write what the finding says at the place that it names; `kubectl explain finetunejob` describes every field",
        "tests/unit/finetune_cli/checks/test_validate.py::test_unusable_input_is_told_in_one_finding",
        gate=Gate.SCHEMA,
    ),
    Entry(
        "claim-not-mounted",
        "error",
        "A claim that the job names is not mounted in the pod",
        "The job could not read its inputs or write its results.",
        "Name a claim of the job's namespace",
        f"{_REFUSED}::test_claims_that_are_not_mounted_are_refused_both_at_once",
    ),
    Entry(
        "directory-not-writable",
        "error",
        "The job's user cannot write to a directory",
        "Checkpoints or results would fail to be written after hours of training.",
        "Give the profile an fsGroup that owns the volume, or name a claim that is not read-only",
        f"{_REFUSED}::test_a_workspace_that_cannot_be_written_is_refused",
    ),
    Entry(
        "claim-too-small",
        "error",
        "A claim does not have enough free space",
        "The run would end with a full disk at a checkpoint or at the merge.",
        "Enlarge the claim, or free space on it",
        f"{_REFUSED}::test_a_full_claim_is_refused_before_the_run",
    ),
    Entry(
        "output-exists",
        "error",
        "The destination already holds results",
        "Results of another job are never overwritten.",
        "Choose another destination, or move the old results away",
        f"{_REFUSED}::test_anothers_results_are_not_overwritten",
    ),
    Entry(
        "start-not-usable",
        "error",
        "Training cannot begin with the checkpoint that the job names",
        "`training.startFrom` takes the trained parameters of another job. Its checkpoint has to be whole, and to hold the same "
        "parameters: those of the same base model, method, rank and target modules.",
        "Name a whole checkpoint of a job with the same base model and method, or remove training.startFrom",
        "tests/unit/finetune_trainer/preflight/test_job_steps_start.py::test_a_checkpoint_that_cannot_be_started_from_is_refused",
    ),
    Entry(
        "large-model-on-cpu",
        "warning",
        "A large model is to be trained on CPU cores",
        "A profile without `gpu` runs training on the CPU. That is right for a small model and a mistake for a large one: the "
        "run would take weeks. `finetune validate` tells it by the name of the model, preflight by its tensors.",
        "Name a profile with GPUs",
        "tests/unit/finetune_cli/checks/test_validate.py::test_a_large_model_without_a_gpu_is_warned_of",
    ),
    Entry(
        "memory-estimate-exceeds-gpu",
        "error",
        "A rank needs more memory than its GPU has",
        "The estimate adds weights, adapters, gradients, optimizer state, activations and buffers. `finetune estimate` shows it.",
        "Make the change that the finding names, or use larger devices or a smaller model",
        "tests/unit/finetune_memory/test_describe_in_preflight.py::test_a_job_that_cannot_fit_is_refused_before_a_gpu_is_held",
    ),
    Entry(
        "memory-estimate-exceeds-pod",
        "warning",
        "A pod needs more host memory than its limit",
        "The kernel ends a process of the pod when its memory runs out.",
        "Increase resources.train.memory of the profile, or lower processesPerNode",
        "tests/unit/finetune_memory/test_verdict.py::test_a_pod_that_its_ranks_will_not_load_in_is_warned_of",
    ),
    Entry(
        "tracker-unknown",
        EITHER,
        "The trainer image has no experiment tracker of this name",
        "wandb and mlflow need their packages in the image; another tracker is an entry point of the group finetune.trackers. "
        "`finetune validate`, which does not know the image, warns of names that are not this product's own.",
        "Use a trainer image that offers it, or remove the name from spec.training.trackers",
        "tests/unit/finetune_trainer/observe/test_trackers.py::test_unknown_names_are_found_before_anything_starts",
    ),
    Entry(
        "rehearsal-failed",
        "error",
        "The job failed, or went wrong without an error, on a scaled-down model",
        "The rehearsal trains, resumes, saves, merges and verifies with the job's own settings on two CPU processes.",
        "Change the settings that the finding names, or set spec.preflight.rehearsal: Skip if only the small model is at fault",
        f"{_VERDICTS}::test_a_planted_fault_is_found_in_its_stage",
        gate=Gate.REHEARSAL,
    ),
    Entry(
        "rehearsal-not-done",
        "warning",
        "The job could not be rehearsed to the end",
        "No scaled-down model could be built, or time or memory of the preflight pod ran out. The job is accepted all the same, "
        "unless its profile requires a rehearsal.",
        "Nothing needs to change; set spec.preflight.rehearsal: Skip to do without the attempt",
        f"{_VERDICTS}::test_what_this_machine_lacks_says_nothing_about_the_job",
        gate=Gate.REHEARSAL,
    ),
)
