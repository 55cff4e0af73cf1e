"""The tests mirror the product: a module's test is found by its name.

`finetune_trainer/merge/plan.py` is tested by `tests/unit/finetune_trainer/merge/test_plan.py`, and by `test_plan_<aspect>.py` if
one file is not enough. COVERED_BY names the test of each module that has none by its name.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests/unit"
FOLDERS = (ROOT / "operator", ROOT / "trainer_image")
PACKAGES = ("finetune_job", "finetune_memory", "finetune_operator", "finetune_cli", "finetune_trainer")
SMALL_LINES = 60
"""Modules up to this long are tested by those that use them."""

COVERED_BY = {
    # Tables of data: one test goes through all of their rows.
    "finetune_job/catalogue/*": "finetune_job/catalogue/test_book.py",
    "finetune_job/chat_templates.py": "finetune_trainer/data/test_chat_templates_by_name.py",
    "finetune_job/plan/mapping.py": "finetune_trainer/data/test_forms_of_records.py",
    "finetune_job/peft_settings.py": "finetune_trainer/model/test_settings_table.py",
    # Rules: one table of manifests and verdicts for all topics, and the schema's expressions in the CRD.
    "finetune_job/rules/cel/*": "finetune_job/test_crd.py",
    "finetune_job/rules/*": "finetune_job/rules/test_book_verdicts.py",
    # Modules whose test has another name.
    "finetune_job/plan/method_plan.py": "finetune_job/plan/test_resolve_model.py",
    "finetune_trainer/verify/head_in_blocks.py": "finetune_trainer/verify/test_streaming.py",
    "finetune_trainer/added_tokens.py": "finetune_trainer/preflight/test_added_tokens.py",
    "finetune_cli/answers.py": "finetune_cli/commands/test_cluster_jobs.py",
    "finetune_cli/app.py": "finetune_cli/checks/test_estimate.py",
    "finetune_cli/local_verbs.py": "finetune_cli/commands/test_run.py",
    "finetune_cli/commands/local_logs.py": "finetune_cli/local/test_known_runs.py",
    "finetune_cli/cluster/errors.py": "finetune_cli/cluster/test_objects.py",
    "finetune_cli/cluster/probe_objects.py": "finetune_cli/cluster/test_network_probe.py",
    "finetune_cli/cluster/read_facts.py": "finetune_cli/cluster/test_client.py",
    "finetune_cli/cluster/reader_pod.py": "finetune_cli/commands/test_cluster_jobs.py",
    "finetune_cli/change_verbs.py": "finetune_cli/commands/test_change_jobs.py",
    "finetune_cli/cluster/results_pod.py": "finetune_cli/commands/test_download.py",
    "finetune_cli/cluster_verbs.py": "finetune_cli/commands/test_cluster_jobs.py",
    "finetune_cli/commands/cost.py": "finetune_cli/commands/test_cluster_jobs.py",
    "finetune_cli/commands/diagnose_job.py": "finetune_cli/commands/test_cluster_jobs.py",
    "finetune_cli/commands/inspect_jobs.py": "finetune_cli/commands/test_cluster_jobs.py",
    "finetune_cli/commands/logs.py": "finetune_cli/commands/test_cluster_jobs.py",
    "finetune_cli/jobs/stored_run.py": "finetune_cli/commands/test_cluster_jobs.py",
    "finetune_cli/jobs/documents.py": "finetune_cli/jobs/test_seen.py",
    "finetune_cli/jobs/patches.py": "finetune_cli/jobs/test_diagnosis.py",
    "finetune_cli/jobs/reproduction.py": "finetune_cli/commands/test_reproduce_job.py",
    "finetune_cli/jobs/usage.py": "finetune_cli/jobs/test_progress.py",
    "finetune_cli/local/audit_process.py": "finetune_cli/commands/test_audit.py",
    "finetune_cli/local/look.py": "finetune_cli/commands/test_data.py",
    "finetune_cli/render/audit.py": "finetune_cli/commands/test_audit.py",
    "finetune_cli/render/data.py": "finetune_cli/commands/test_data.py",
    "finetune_cli/corrections/*": "finetune_cli/test_manifest_corrections.py",
    "finetune_cli/generate_coming_from.py": "finetune_cli/test_generated_pages.py",
    "finetune_cli/generate_commands.py": "finetune_cli/test_generated_pages.py",
    "finetune_cli/generate_fields.py": "finetune_cli/test_generated_pages.py",
    "finetune_cli/generate_rules.py": "finetune_job/rules/test_book.py",
    "finetune_cli/render/job_status.py": "finetune_cli/commands/test_cluster_jobs.py",
    "finetune_cli/render/jobs.py": "finetune_cli/commands/test_cluster_jobs.py",
    "finetune_cli/render/explanations.py": "finetune_cli/commands/test_explain.py",
    "finetune_cli/render/estimate.py": "finetune_cli/checks/test_estimate.py",
    "finetune_cli/render/verdicts.py": "finetune_cli/checks/test_validate.py",
    "finetune_job/api/inputs.py": "finetune_job/api/test_job.py",
    "finetune_job/api/output.py": "finetune_job/api/test_job.py",
    "finetune_job/api/parallelism.py": "finetune_job/api/test_job.py",
    "finetune_job/api/status.py": "finetune_job/test_stored_status.py",
    "finetune_job/api/training.py": "finetune_job/api/test_job.py",
    "finetune_job/fields.py": "finetune_cli/commands/test_explain.py",
    "finetune_job/methods.py": "finetune_job/test_sharding.py",
    "finetune_job/reasons.py": "finetune_operator/decide/test_refused_and_held.py",
    "finetune_memory/packed_experts.py": "finetune_memory/test_estimate.py",
    "finetune_memory/layers.py": "finetune_memory/test_activations.py",
    "finetune_operator/cluster/summaries.py": "finetune_operator/test_job_metrics.py",
    "finetune_operator/usage_metrics.py": "finetune_operator/test_job_metrics.py",
    "finetune_operator/decide/actions.py": "finetune_operator/cluster/test_execute.py",
    "finetune_operator/decide/children_seen.py": "finetune_operator/decide/test_same_pod.py",
    "finetune_operator/decide/observed.py": "finetune_operator/decide/test_blocked_lost_nodes.py",
    "finetune_operator/decide/pass_result.py": "finetune_operator/decide/test_reconcile_effects.py",
    "finetune_operator/decide/role_stage.py": "finetune_operator/decide/test_attempts_restarts.py",
    "finetune_operator/decide/stopped.py": "finetune_operator/decide/test_preparation_stages_fetch.py",
    "finetune_trainer/checkpoint/save.py": "finetune_trainer/checkpoint/test_checkpoints.py",
    "finetune_trainer/data/file_parts.py": "finetune_trainer/data/test_workers_hostile.py",
    "finetune_trainer/data/findings.py": "finetune_trainer/data/test_prepare.py",
    "finetune_trainer/data/parse.py": "finetune_trainer/data/test_records.py",
    "finetune_trainer/data/source_files.py": "finetune_trainer/data/test_forms_of_records.py",
    "finetune_trainer/data/suggestions.py": "finetune_trainer/data/test_forms_of_records.py",
    "finetune_trainer/data/sentinels.py": "finetune_trainer/data/test_chat.py",
    "finetune_trainer/data/shard_writer.py": "finetune_trainer/data/test_shards.py",
    "finetune_trainer/data/sources.py": "finetune_trainer/data/test_prepare.py",
    "finetune_trainer/data/worker.py": "finetune_trainer/data/test_render_limit.py",
    "finetune_trainer/fetch/staging.py": "finetune_trainer/fetch/test_hub.py",
    "finetune_trainer/inspection/module_use.py": "finetune_trainer/preflight/test_bypassed.py",
    "finetune_trainer/inspection/report.py": "finetune_trainer/rehearsal/test_run_verdicts.py",
    "finetune_trainer/inspection/source_model.py": "finetune_trainer/roles/test_added_tokens.py",
    "finetune_trainer/inspection/special_files.py": "../hostile/test_model_files.py",
    "finetune_trainer/merge/adapter_changes.py": "finetune_trainer/merge/test_plan.py",
    "finetune_trainer/merge/adapter_settings.py": "finetune_trainer/merge/test_plan.py",
    "finetune_trainer/merge/changes.py": "finetune_trainer/merge/test_parameter_adapters.py",
    "finetune_trainer/merge/compute.py": "finetune_trainer/merge/test_merge_adapter_bits.py",
    "finetune_trainer/merge/factors.py": "finetune_trainer/merge/test_plan.py",
    "finetune_trainer/merge/lora.py": "finetune_trainer/merge/test_plan.py",
    "finetune_trainer/merge/resolve_changes.py": "finetune_trainer/merge/test_plan.py",
    "finetune_trainer/merge/steps/peft_layer.py": "finetune_trainer/merge/test_non_lora.py",
    "finetune_trainer/merge/steps/step.py": "finetune_trainer/merge/test_non_lora.py",
    "finetune_trainer/merge/stream.py": "finetune_trainer/merge/test_journal_interrupted_merge.py",
    "finetune_trainer/model/dtypes.py": "finetune_trainer/inspection/test_skeleton.py",
    "finetune_trainer/model/fsdp_versions.py": "finetune_trainer/model/test_sharded.py",
    "finetune_trainer/model/meta_device.py": "finetune_trainer/inspection/test_skeleton.py",
    "finetune_trainer/model/objective.py": "finetune_trainer/objective/test_next_token.py",
    "finetune_trainer/model/wrap_plan.py": "finetune_trainer/model/test_trained_parts.py",
    "finetune_trainer/network/hub_answers.py": "finetune_trainer/publish/test_hub.py",
    "finetune_trainer/preflight/attention.py": "finetune_trainer/model/test_variable_length.py",
    "finetune_trainer/preflight/checks.py": "finetune_trainer/preflight/test_refused_jobs.py",
    "finetune_trainer/preflight/places.py": "finetune_trainer/preflight/test_refused_jobs.py",
    "finetune_trainer/preflight/library_errors.py": "finetune_trainer/preflight/test_refused_jobs.py",
    "finetune_trainer/preflight/model_checks.py": "finetune_trainer/preflight/test_refused_jobs.py",
    "finetune_trainer/preflight/model_inspection.py": "finetune_trainer/preflight/test_task.py",
    "finetune_trainer/preflight/small_model.py": "finetune_trainer/preflight/test_architecture.py",
    "finetune_trainer/publish/destination.py": "finetune_trainer/publish/test_hub.py",
    "finetune_trainer/publish/hub_changes.py": "finetune_trainer/publish/test_hub.py",
    "finetune_trainer/publish/oci.py": "../integration/test_publish.py",
    "finetune_trainer/publish/s3_client.py": "finetune_trainer/publish/test_s3.py",
    "finetune_trainer/roles/audit.py": "finetune_trainer/inspection/test_audit.py",
    "finetune_trainer/small_models/fields.py": "finetune_trainer/rehearsal/test_scaled_model.py",
    "finetune_trainer/small_models/layers.py": "finetune_trainer/rehearsal/test_scaled_model.py",
    "finetune_trainer/small_models/search.py": "finetune_trainer/rehearsal/test_scaled_model.py",
    "finetune_trainer/small_models/shrink.py": "finetune_trainer/rehearsal/test_scaled_model.py",
    "finetune_trainer/small_models/sizes.py": "finetune_trainer/rehearsal/test_scaled_model.py",
    "finetune_trainer/release/commands.py": "finetune_trainer/report/test_page.py",
    "finetune_trainer/report/document.py": "finetune_trainer/report/test_page.py",
    "finetune_trainer/report/summary.py": "finetune_trainer/report/test_page.py",
    "finetune_trainer/verify/exact.py": "finetune_trainer/verify/test_verification.py",
    "finetune_trainer/verify/tensors.py": "finetune_trainer/verify/test_verification.py",
    "finetune_trainer/weights/errors.py": "finetune_trainer/merge/test_non_lora.py",
}
"""The covering test, under tests/unit, by the module or by a pattern of modules; the first entry that fits counts."""


@cache
def modules() -> dict[str, Path]:
    """The product's modules by their path under operator/ or trainer_image/."""
    return {
        str(path.relative_to(folder)): path
        for folder in FOLDERS
        for package in PACKAGES
        for path in sorted((folder / package).rglob("*.py"))
    }


def is_large(path: Path) -> bool:
    return path.name != "__init__.py" and len(path.read_text(encoding="utf-8").splitlines()) > SMALL_LINES


def has_a_test_by_name(module: str) -> bool:
    folder, stem = (UNIT / module).parent, Path(module).stem.strip("_")
    return (folder / f"test_{stem}.py").exists() or any(folder.glob(f"test_{stem}_*.py"))


def large_modules_without_a_test_by_name() -> list[str]:
    return [module for module, path in modules().items() if is_large(path) and not has_a_test_by_name(module)]


def entry_of(module: str) -> str:
    return next((pattern for pattern in COVERED_BY if fnmatch(module, pattern)), "")


def test_every_large_module_has_a_test():
    assert [module for module in large_modules_without_a_test_by_name() if not entry_of(module)] == []


def test_every_entry_is_needed():
    needed = {entry_of(module) for module in large_modules_without_a_test_by_name()}
    assert sorted(set(COVERED_BY) - needed) == [], "these modules have a test by their name, are small, or do not exist"


@cache
def imported(path: Path) -> frozenset[Path]:
    """Modules of the product and the tests that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    files = [f"{name.replace('.', '/')}{ending}" for name in found for ending in (".py", "/__init__.py")]
    return frozenset(folder / file for file in files for folder in (*FOLDERS, ROOT) if (folder / file).is_file())


def reached(test: Path) -> set[Path]:
    """What a test imports, and what that imports."""
    found, waiting = set[Path](), [test]
    while waiting:
        new = imported(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def test_a_covering_test_reaches_its_modules():
    missed = {}
    for module in large_modules_without_a_test_by_name():
        test = UNIT / COVERED_BY[entry_of(module)]
        if not test.is_file() or modules()[module] not in reached(test):
            missed[module] = COVERED_BY[entry_of(module)]
    assert missed == {}


def test_no_two_classes_have_the_same_name():
    places = defaultdict(list)
    for module, path in modules().items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
