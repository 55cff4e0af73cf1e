"""`finetune validate`: files in, a verdict for each document out, as text, JSON and YAML."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks.validate import DocumentOutcome, validate
from finetune_cli.exit_codes import ExitCode
from tests.support.cases import table
from tests.unit.finetune_cli.manifests import ACCEPTED, CLAIM, PROFILE, REFUSED, WARNED, edited, findings


def run(*arguments: str, stdin: str = ""):
    return CliRunner().invoke(app, list(arguments), input=stdin)


REFUSED_TEXT = """\
FineTuneJob tuned: refused

  error: wrap-class-name-blank
    field:  spec.parallelism.fsdp.transformerLayerClsToWrap
    value:  [""]
    reason: a blank name matches no class: it is silently skipped, and a list of blank names wraps
            no layer at all
    fix:    leave the field out, or name the classes, as in [LlamaDecoderLayer]
"""

ACCEPTED_TEXT = """\
FineTuneJob tuned: accepted
  2 ranks; on GPUs if the profile names one, which is not known here (--profile), or if this machine has them

  Not set in the manifest, so chosen:
    model.hubName  """


def test_text_of_a_refused_job():
    result = run("validate", "-f", "-", stdin=REFUSED)
    assert result.output == REFUSED_TEXT
    assert result.exit_code == ExitCode.REFUSED == 1


def test_text_of_an_accepted_job_shows_what_was_chosen():
    result = run("validate", "-f", "-", stdin=ACCEPTED)
    assert result.exit_code == ExitCode.DONE == 0
    assert result.output.startswith(ACCEPTED_TEXT)
    lines = [line.split() for line in result.output.splitlines()]
    assert ["training.microBatchSize", "unset"] in [line[:2] for line in lines]
    assert ["method.lora.targetModules", '["all-linear"]'] in [line[:2] for line in lines]


def test_warnings_are_shown_and_accepted():
    result = run("validate", "-f", "-", stdin=WARNED)
    assert result.exit_code == 0
    assert "warning: no-effect-use-orig-params" in result.output


@pytest.mark.parametrize(("name", "code"), [("tuned", 1), ("other", 0)])
def test_results_on_the_claim_that_goes_with_this_job_are_refused(name, code):
    own = ACCEPTED.replace("claimName: workspace", "{volumeClaimTemplate: {storage: 10Gi}, retain: Delete}")
    own = own.replace("workspace:\n    {", "workspace: {").replace("pvc://out/tuned", "pvc://tuned-workspace/results")
    result = run("validate", "-f", "-", stdin=own.replace("name: tuned", f"name: {name}"))
    assert result.exit_code == code
    assert ("error: output-deleted-with-job" in result.output) == bool(code)


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_programs_can_read_the_answer(form, read):
    result = run("validate", "-f", "-", "-o", form, stdin=REFUSED)
    answer = read(result.output)
    assert result.exit_code == 1
    assert answer["accepted"] is False
    (document,) = answer["documents"]
    assert document["outcome"] == "refused"
    assert document["findings"][0]["changes"] == [{"field": "spec.parallelism.fsdp.transformerLayerClsToWrap", "value": None}]
    accepted = read(run("validate", "-f", "-", "-o", form, stdin=ACCEPTED).output)["documents"][0]
    assert accepted["plan"]["training"]["micro_batch_size"] == 8
    assert {"field": "spec.data.lossOn", "value": "Completion", "reason": "the prompt is given, not learnt"} in accepted[
        "choices"
    ]


WITH_GPU = PROFILE + "  gpu: {memory: 48Gi}\n"


def test_the_answer_names_the_device():
    on_cpu = run("validate", "-f", "-", stdin=f"{PROFILE}---\n{ACCEPTED}").output
    assert "FineTuneJob tuned: accepted\n  2 ranks on CPU: profile default names no GPU\n" in on_cpu
    on_gpu = run("validate", "-f", "-", stdin=f"{WITH_GPU}---\n{ACCEPTED}").output
    assert "FineTuneJob tuned: accepted\n  2 ranks, each on one nvidia.com/gpu of 48Gi (profile default)\n" in on_gpu


@pytest.mark.parametrize(("name", "is_large"), table(__file__, "test_a_large_model_without_a_gpu_is_warned_of"))
def test_a_large_model_without_a_gpu_is_warned_of(name, is_large):
    job = edited("spec.model.source", f"pvc://models/{name}")
    found = findings(f"{PROFILE}---\n{job}")
    assert set(found) == ({"spec.profile"} if is_large else set())
    if is_large:
        value, message, fix = found["spec.profile"]
        assert value == "default"
        assert message.startswith("2 ranks on CPU: profile default names no GPU, and the model has about ")
        assert "gpu: {resourceName: nvidia.com/gpu, memory: 80Gi}" in fix
        assert validate(f"{PROFILE}---\n{job}").exit_code == 0
        warning = [each for verdict in validate(f"{PROFILE}---\n{job}").verdicts for each in verdict.findings]
        assert [each.rule for each in warning] == ["large-model-on-cpu"]
    assert findings(f"{WITH_GPU}---\n{job}") == {}


def test_a_large_model_is_known_by_its_name_on_the_hub():
    job = edited("spec.model.hubName", "meta-llama/Llama-3.1-70B")
    (_, message, _) = findings(f"{PROFILE}---\n{job}")["spec.profile"]
    assert "the model has about 70 billion parameters" in message


def test_a_file_is_read(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(ACCEPTED)
    assert run("validate", "-f", str(path)).exit_code == 0
    missing = run("validate", "-f", str(tmp_path / "none.yaml"))
    assert missing.exit_code == ExitCode.UNUSABLE == 2
    assert missing.output.endswith(
        "none.yaml cannot be read (No such file or directory); give a file in UTF-8, or - for standard input\n"
    )
    path.write_bytes(b"\xff\xfe\x00")
    assert run("validate", "-f", str(path)).exit_code == 2


def test_files_are_named_behind_the_command_or_behind_f(tmp_path):
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(ACCEPTED)
    first, second = (str(tmp_path / name) for name in ("a.yaml", "b.yaml"))
    assert run("validate", first).stdout == run("validate", "-f", first).stdout
    both = run("validate", first, "-f", second)
    assert both.exit_code == 0
    assert [line for line in both.stdout.splitlines() if line.endswith("accepted")] == [
        f"{first}: FineTuneJob tuned: accepted",
        f"{second}: FineTuneJob tuned: accepted",
    ]
    for command in ("validate", "estimate", "data"):
        nothing = run(command)
        assert nothing.exit_code == 2
        assert nothing.output == "no manifest is given; name a FILE, or - for standard input\n"
    assert run("data", first, "-f", second).output == f"{first} and -f {second} are two manifests; give one of them\n"


def test_several_documents_have_several_verdicts():
    report = validate(f"{CLAIM}---\n{ACCEPTED}---\n{REFUSED}---\n{PROFILE}")
    assert [verdict.outcome for verdict in report.verdicts] == [
        DocumentOutcome.SKIPPED,
        DocumentOutcome.ACCEPTED,
        DocumentOutcome.REFUSED,
        DocumentOutcome.ACCEPTED,
    ]
    assert report.exit_code is ExitCode.REFUSED
    assert validate(f"{ACCEPTED}---\n---\n{ACCEPTED}").exit_code is ExitCode.DONE
    assert validate(f"{REFUSED}---\nkind: FineTuneJob\n").exit_code is ExitCode.UNUSABLE


def test_the_profile_is_judged_with(tmp_path):
    remote = edited("spec.model.allowRemoteCode", True)
    assert validate(remote).exit_code is ExitCode.DONE
    assert "spec.model.allowRemoteCode" in findings(remote, PROFILE)
    assert "spec.model.allowRemoteCode" in findings(f"{PROFILE}---\n{remote}")
    path = tmp_path / "profile.yaml"
    path.write_text(PROFILE)
    assert run("validate", "-f", "-", "--profile", str(path), stdin=remote).exit_code == 1
    path.write_text(PROFILE.replace("trainerImage", "trainerImages"))
    assert run("validate", "-f", "-", "--profile", str(path), stdin=remote).exit_code == 2


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ("", "file", "holds no document"),
        ("# nothing\n---\n", "file", "holds no document"),
        ("a: [1, 2\nb: 3\n", "line", "expected"),
        ("a: 1\n\tb: 2\n", "line 2", "found"),
        ("a: \x00\n", "file", "characters are not allowed"),
        ("just text", "document", "is not an object"),
        ("[1, 2]", "document", "is not an object"),
        ("a: 1\n", "kind", "is required"),
        ("kind:\n", "kind", "is required"),
        ("kind: List\nitems: []\n", "kind", "is not FineTuneJob"),
        (CLAIM, "kind", "is not FineTuneJob"),
        (ACCEPTED.replace("kind: FineTuneJob", "kind: PyTorchJob"), "kind", "is not FineTuneJob"),
        ("kind: FineTuneJob\nkind: FineTuneJob\n", "kind", "the key is given twice"),
        (ACCEPTED.replace("    maxSteps: 10\n", "    maxSteps: 10\n    maxSteps: 20\n"), "maxSteps", "the key is given twice"),
        ("1: one\n", "line 1", "keys must be text"),
        ("a: &a [*a]\n", "line", "recursive"),
        ("a: " + "[" * 100 + "]" * 100, "line 1", "nested deeper"),
        ("a: " + "[" * 50_000, "", ""),
        ("a: !!python/object/apply:os.system [ls]\n", "line", "could not determine a constructor"),
    ],
)
def test_unusable_input_is_told_in_one_finding(text, field, reason):
    report = validate(text)
    (verdict,) = report.verdicts
    (finding,) = verdict.findings
    assert verdict.outcome is DocumentOutcome.UNUSABLE
    assert report.exit_code is ExitCode.UNUSABLE
    assert (finding.rule, finding.severity) == ("invalid-field", "error")
    assert finding.field.startswith(field)
    assert reason in finding.message
    assert finding.fix


def listed(*texts: str, kind: str = "List") -> str:
    """As `kubectl get --output yaml` writes several objects."""
    return yaml.safe_dump({"apiVersion": "v1", "kind": kind, "items": [yaml.safe_load(text) for text in texts]})


@pytest.mark.parametrize(
    "text", [listed(ACCEPTED, CLAIM, REFUSED), f"{ACCEPTED}---\n{listed(CLAIM, REFUSED, kind='FineTuneJobList')}"]
)
def test_the_objects_of_a_list_are_judged_like_documents(text):
    report = validate(text)
    assert [verdict.outcome for verdict in report.verdicts] == [
        DocumentOutcome.ACCEPTED,
        DocumentOutcome.SKIPPED,
        DocumentOutcome.REFUSED,
    ]
    assert report.exit_code is ExitCode.REFUSED
    remote = edited("spec.model.allowRemoteCode", True)
    assert validate(listed(PROFILE, remote)).exit_code is ExitCode.REFUSED


def test_the_profile_is_found_beside_other_objects_and_is_one():
    remote = edited("spec.model.allowRemoteCode", True)
    for profile in (f"{CLAIM}---\n{PROFILE}", listed(PROFILE), PROFILE):
        assert validate(remote, profile).exit_code is ExitCode.REFUSED
    report = validate(remote, f"{PROFILE}---\n{PROFILE.replace('default', 'other')}")
    assert report.exit_code is ExitCode.UNUSABLE
    assert report.verdicts[0].findings[0].message == "holds 2 objects that could be the FineTuneProfile"


def test_unusable_input_exits_with_2_in_every_form():
    for form in ("text", "json", "yaml"):
        assert run("validate", "-f", "-", "-o", form, stdin="a: [").exit_code == 2


@pytest.mark.parametrize("name", ["quickstart", "quickstart-cluster", "hub", "publish"])
def test_the_examples_that_show_how_are_accepted_without_a_word(name):
    text = (Path(__file__).parents[4] / f"examples/{name}.yaml").read_text()
    ways_out = "  fetch: {allowedSources: ['hf://', 's3://']}\n  publish: {allowedDestinations: ['hf://', 's3://', 'oci://']}\n"
    for profile in (None, PROFILE + ways_out):
        report = validate(text, profile)
        assert report.exit_code is ExitCode.DONE
        assert [finding for verdict in report.verdicts for finding in verdict.findings] == []
        assert any(verdict.outcome is DocumentOutcome.ACCEPTED for verdict in report.verdicts)


def test_a_directory_and_repeated_files_are_judged_together(tmp_path):
    (tmp_path / "a.yaml").write_text(ACCEPTED)
    (tmp_path / "b.yml").write_text(REFUSED)
    (tmp_path / "profile.json").write_text(json.dumps(yaml.safe_load(PROFILE)))
    (tmp_path / "notes.md").write_text("no manifest")
    remote = tmp_path / "remote.txt"
    remote.write_text(edited("spec.model.allowRemoteCode", True))
    result = run("validate", "-f", str(tmp_path), "-f", str(remote), "-o", "json")
    assert result.exit_code == 1
    found = [(Path(each["file"]).name, each["outcome"]) for each in json.loads(result.output)["documents"]]
    assert found == [("a.yaml", "accepted"), ("b.yml", "refused"), ("profile.json", "accepted"), ("remote.txt", "refused")]
    assert "a.yaml: FineTuneJob tuned: accepted" in run("validate", "-f", str(tmp_path)).output
    (tmp_path / "empty").mkdir()
    assert run("validate", "-f", str(tmp_path / "empty")).exit_code == 2
