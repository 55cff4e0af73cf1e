"""What is told of a job's records, files and places before anything heavy is imported, and what `finetune data` shows."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks.validate import validate
from finetune_cli.commands.data import FirstRecords, look_at
from finetune_cli.exit_codes import LocalError
from finetune_cli.local.claims import LOCAL_UID
from finetune_cli.local.look import Look
from finetune_cli.render.data import look_text
from finetune_job.layout import WorkspaceLayout
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity
from finetune_trainer.roles.look import look as look_of_trainer
from tests.support.cases import table
from tests.support.processor import FIRST_ANSWER_SECONDS, run_timed, slowness
from tests.unit.finetune_cli.commands import failing_look
from tests.unit.finetune_memory.configs import CONFIGS
from tests.unit.finetune_trainer.data.record_files import write as write_table
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer

ROOT = Path(__file__).parents[4]
HEAVY = ("torch", "numpy")
"""What takes a tenth of a second and more to import."""


def chat(answer: str) -> dict:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}


CHAT = chat("a")
MANIFEST = {
    "apiVersion": "finetune.dev/v1alpha1",
    "kind": "FineTuneJob",
    "metadata": {"name": "tuned"},
    "spec": {
        "model": {"source": "pvc://models/base"},
        "data": {"source": "pvc://data/train.jsonl", "format": "Chat", "chatTemplate": "ChatML"},
        "training": {"maxSteps": 10},
        "output": {"destination": "pvc://out/tuned"},
        "workspace": {"claimName": "workspace"},
    },
}


@pytest.fixture
def claims(tmp_path):
    base = tmp_path / "claims/models/base"
    byte_tokenizer(["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>").save_pretrained(base)
    (base / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    header = b'{"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (base / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    write(
        tmp_path / "claims/data/train.jsonl", [CHAT, {"messages": [CHAT["messages"][0], {**CHAT["messages"][1], "content": "b"}]}]
    )
    return tmp_path / "claims"


def write(path: Path, records: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def manifest(**data) -> str:
    return yaml.safe_dump({**MANIFEST, "spec": {**MANIFEST["spec"], "data": {**MANIFEST["spec"]["data"], **data}}})


def look(claims: Path, *, shown: int = 1, limit: int = 1000, **data) -> Look:
    seen = look_at(manifest(**data), claims, {}, shown=shown, limit=limit)
    assert isinstance(seen, Look), seen
    return seen


def finetune(claims: Path, *arguments: str, **data):
    """The command, which may not import anything heavy."""
    return timed(claims, *arguments, **data)[0]


def timed(claims: Path, *arguments: str, enough: float = math.inf, **data):
    """The same, and its seconds of processor time, of which so many are few enough."""
    job = claims.parent / "job.yaml"
    job.write_text(manifest(**data))
    named = {"JOB": str(job), "CLAIMS": str(claims)}
    command = [sys.executable, "-m", "finetune_cli", *(named.get(part, part) for part in arguments)]
    return run_timed(command, cwd=ROOT, without=HEAVY, traps=claims.parent / "traps", enough=enough)


def test_records_are_shown_with_the_mask_and_counted(claims):
    text = look_text(look(claims), in_colour=False)
    assert "train: pvc://data/train.jsonl (1 file): 2 records" in text
    assert "46 tokens, 4 of them learnt; 0 records too long and dropped" in text
    assert "up to 32 tokens ######################################## 2" in text
    assert "--- train: pvc://data/train.jsonl line 1, 23 tokens\n<|im_start|>user\nq<|im_end|>\n" in text
    assert "<|im_start|>assistant\n[[a<|im_end|>]]\n" in text
    assert "\x1b[32ma<|im_end|>\x1b[0m" in look_text(look(claims), in_colour=True)


def test_a_thousand_chats_are_told_of_in_time(claims):
    """Of 430 tokens each."""
    turns = [{"role": "user", "content": "a question" * 4}, {"role": "assistant", "content": "an answer" * 17 + "."}]
    write(claims / "data/train.jsonl", [{"messages": turns * 2}] * 1000)
    allowed = FIRST_ANSWER_SECONDS * slowness()
    done, seconds = timed(claims, "data", "-f", "JOB", "--claims", "CLAIMS", enough=allowed)
    assert "430000 tokens, " in done.stdout
    assert "999 repeat an earlier one" in done.stdout
    assert seconds < allowed, allowed


def test_only_the_first_records_are_read_and_that_is_said(claims):
    seen = look(claims, limit=1, shown=0)
    assert (seen.sources[0]["records"], seen.sources[0]["is_whole"], seen.records) == (1, False, [])
    assert "the first 1 record\n" in look_text(seen, in_colour=False)


def test_what_would_be_dropped_repeated_and_held_out_is_counted(claims):
    write(claims / "data/held.jsonl", [CHAT])
    write(
        claims / "data/train.jsonl", [CHAT, CHAT, {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "a" * 99}]}]
    )
    seen = look(claims, validation={"source": "pvc://data/held.jsonl"}, maxSequenceLength=64)
    (train, held_out) = seen.sources
    assert [train[name] for name in ("split", "records", "dropped", "repeated", "held_out")] == ["train", 3, 1, 1, 2]
    assert (held_out["split"], held_out["records"]) == ("validation", 1)
    assert sorted(finding.rule for finding in seen.findings) == ["data-held-out-in-training", "data-records-dropped"]
    assert seen.is_refused
    text = look_text(seen, in_colour=False)
    assert "1 repeats an earlier one" in text
    assert "2 are also held out" in text


def test_without_a_tokenizer_records_are_shown_as_they_are(claims):
    (claims / "models/base/tokenizer.json").unlink()
    seen = look(claims)
    assert seen.why_no_tokens
    text = look_text(seen, in_colour=False)
    assert "user: q\nassistant: a" in text
    assert "The tokenizer of the model is not on this machine" in text


@pytest.mark.parametrize(("files", "data", "said"), table(__file__, "test_why_no_tokens_are_counted_is_told"))
def test_why_no_tokens_are_counted_is_told(claims, files, data, said):
    for name, content in files.items():
        (claims / "models/base" / name).write_text(content)
    seen = look(claims, **data)
    assert seen.why_no_tokens
    assert f"{said}, so tokens are not counted and templates not rendered.\n" in look_text(seen, in_colour=False)


def test_keys_that_are_not_read_are_named(claims):
    write(claims / "data/train.jsonl", [{**CHAT, "id": 1, "\x1b[2J": 2, "tools": []}, {**CHAT, "id": 2}])
    seen = look(claims)
    assert seen.sources[0]["unread"] == {"\x1b[2J": 1}
    assert "  keys that are not read: \u241b[2J (of 1)\n" in look_text(seen, in_colour=False)


def test_all_columns_count_for_what_is_not_read(claims):
    write_table(claims / "data/a.parquet", [{"prompt": "q", "completion": "a", "id": 1, "more": "m"}])
    seen = look(claims, source="pvc://data/a.parquet", format="PromptCompletion", chatTemplate=None)
    assert seen.sources[0]["unread"] == {"more": 1}


def test_a_record_cannot_command_the_terminal(claims):
    write(claims / "data/train.jsonl", [{"prompt": "\x1b[2J", "completion": "\x07"}])
    text = look_text(look(claims, format="PromptCompletion", chatTemplate=None), in_colour=False)
    assert "\u241b[2J" in text
    assert "\x1b" not in text
    assert "\x07" not in text


VALIDATE, RUN = ("validate", "-f", "JOB", "--claims", "CLAIMS"), ("run", "JOB", "--claims", "CLAIMS")


@pytest.mark.parametrize(
    ("command", "data", "rule", "fix"),
    [
        (VALIDATE, {"source": "pvc://data/trian.jsonl"}, "data-file-missing", "set spec.data.source: pvc://data/train.jsonl, or"),
        (RUN, {"source": "pvc://data/trian.jsonl"}, "data-file-missing", "set spec.data.source: pvc://data/train.jsonl, or"),
        (VALIDATE, {"source": "pvc://data/other.jsonl"}, "data-file-missing", "correct the path, or put the file there"),
        (RUN, {"format": "Text", "chatTemplate": None}, "data-record-invalid", "set spec.data.format: Chat"),
        (VALIDATE, {"chatTemplate": None}, "chat-template-unusable", "set spec.data.chatTemplate: ChatML"),
        (RUN, {"source": "pvc://data/a.txt"}, "txt-without-text", "set data.format: Text"),
        (VALIDATE, {"source": "pvc://data"}, "data-record-invalid", "write one JSON object per line"),
    ],
)
def test_a_mistake_is_told_in_time_and_without_torch(claims, data, rule, fix, command):
    if data.get("source") == "pvc://data":
        (claims / "data/train.jsonl").write_text("{\n")
    allowed = FIRST_ANSWER_SECONDS * slowness()
    done, seconds = timed(claims, *command, enough=allowed, **data)
    assert done.returncode == 1, done.stderr
    assert f"error: {rule}" in done.stdout
    assert fix in " ".join(done.stdout.split())
    assert seconds < allowed


@pytest.mark.parametrize("command", [VALIDATE, RUN])
@pytest.mark.parametrize(("wrong", "rule", "said"), table(__file__, "test_a_wrong_model_is_told_in_time_with_the_users_own_path"))
def test_a_wrong_model_is_told_in_time_with_the_users_own_path(claims, command, wrong, rule, said):
    base = claims / "models/base"
    if wrong == "directory":
        base.rename(claims / "models/base-2")
    else:
        (base / wrong).unlink()
    allowed = FIRST_ANSWER_SECONDS * slowness()
    done, seconds = timed(claims, *command, enough=allowed)
    assert done.returncode == 1, done.stderr
    told = "".join(done.stdout.split())
    assert f"error:{rule}" in told
    assert "field:spec.model.source" in told
    assert "".join(said.replace("CLAIMS", str(claims)).split()) in told
    assert ".finetune" not in told
    assert seconds < allowed


def test_an_adapter_without_a_name_for_its_base_is_told_before_it_is_trained(claims):
    done = finetune(claims, *VALIDATE)
    assert done.returncode == 0, done.stdout
    assert "warning: adapter-base-unnamed" in done.stdout
    assert "set spec.model.hubName" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--claims", "/nosuch"), "spec.model.source: claim models is the directory /nosuch/models, which does not exist; say"),
        (("--claims", "CLAIMS", "--claim", "data=/nosuch"), "--claim data=/nosuch: this directory does not exist"),
        (("--claims", "CLAIMS", "--claim", "dta=/nosuch"), "--claim dta: the job names no such claim; it names models, data"),
    ],
)
def test_a_mistyped_path_of_claims_is_told(claims, arguments, said):
    done = finetune(claims, "validate", "-f", "JOB", *arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


REFUSED = yaml.safe_dump({**MANIFEST, "spec": {**MANIFEST["spec"], "training": {"maxSteps": 10, "learningRate": "0"}}})


@pytest.mark.parametrize(
    ("text", "claim", "code", "shown", "told"),
    [
        # A job that is refused names its claims, too.
        (REFUSED, "data", 1, "error: learning-rate-zero", ""),
        (f"{REFUSED}---\n{manifest(source='pvc://sets/a.jsonl')}", "data", 1, "error: learning-rate-zero", ""),
        # What cannot be read may name any.
        (REFUSED.replace("learningRate", "lerningRate"), "dta", 2, "error: invalid-field", ""),
        (f"{manifest()}---\n{REFUSED.replace('maxSteps', 'steps')}", "dta", 2, "error: invalid-field", ""),
        (REFUSED, "dta", 2, "error: learning-rate-zero", "--claim dta: the job names no such claim; it names models, data"),
        (manifest(), "dta", 2, "tuned: accepted", "--claim dta: the job names no such claim; it names models, data"),
    ],
)
def test_what_the_rules_say_is_shown_whatever_is_wrong_with_the_claims(claims, text, claim, code, shown, told):
    given = ["--claims", str(claims), "--claim", f"{claim}={claims}/data"]
    result = CliRunner().invoke(app, ["validate", "-", *given], input=text)
    assert result.exit_code == code, result.output
    assert shown in result.stdout
    assert told in " ".join(result.stderr.split())
    assert ("no such claim" in result.stderr) == bool(told)


def test_a_job_whose_claims_are_elsewhere_hides_no_other(claims):
    (claims / "data/train.jsonl").write_text("{\n")
    other = {**MANIFEST, "metadata": {"name": "other"}, "spec": {**MANIFEST["spec"], "model": {"source": "pvc://far/base"}}}
    other["spec"]["data"] = {**MANIFEST["spec"]["data"], "source": "pvc://sets/train.jsonl"}
    text = f"{yaml.safe_dump(other)}---\n{manifest()}"
    result = CliRunner().invoke(app, ["validate", "-", "--claims", str(claims)], input=text)
    assert result.exit_code == 1, result.output
    assert "FineTuneJob other: accepted" in result.stdout
    assert "error: data-record-invalid" in result.stdout
    for field, claim in (("spec.model.source", "far"), ("spec.data.source", "sets")):
        said = f"other: {field}: claim {claim} is the directory {claims}/{claim}, which does not exist, so it is not checked"
        assert said in " ".join(result.stderr.split())
    # If nothing is there of any job, the place is wrong.
    result = CliRunner().invoke(app, ["validate", "-", "--claims", "/nosuch"], input=text)
    assert result.exit_code == 2
    assert "spec.model.source: claim far is the directory /nosuch/far, which does not exist; say" in result.stderr
    assert "FineTuneJob other: accepted" in result.stdout


def test_validate_names_the_claims_that_it_did_not_look_at(claims):
    (claims / "models").rename(claims.parent / "models")
    done = finetune(claims, *VALIDATE)
    assert done.returncode == 0
    said = f"tuned: spec.model.source: claim models is the directory {claims}/models, which does not exist, so it is not checked"
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize(("gpu", "config", "is_told"), table(__file__, "test_a_large_model_without_a_gpu_is_known_by_its_files"))
def test_a_large_model_without_a_gpu_is_known_by_its_files(claims, gpu, config, is_told):
    (claims / "models/base/config.json").write_text(json.dumps(CONFIGS[config]))
    profile = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneProfile", "metadata": {"name": "default"}}
    text = None if gpu is None else yaml.safe_dump({**profile, "spec": {"trainerImage": "t", **gpu}})
    (verdict,) = FirstRecords(claims, {}, is_given=False).judged(validate(manifest(), text), print).verdicts
    told = [finding.message for finding in verdict.findings if finding.rule == "large-model-on-cpu"]
    assert ["8.03 billion parameters" in message for message in told] == ([True] if is_told else [])


@pytest.mark.parametrize(
    ("method", "config", "is_told"), table(__file__, "test_experts_that_are_not_packed_are_known_by_the_configuration_alone")
)
def test_experts_that_are_not_packed_are_known_by_the_configuration_alone(claims, method, config, is_told):
    (claims / "models/base/config.json").write_text(json.dumps({**CONFIGS[config], "dtype": "bfloat16"}))
    (claims / "models/base/model.safetensors").unlink()
    text = yaml.safe_dump({**MANIFEST, "spec": {**MANIFEST["spec"], "method": {"type": method}}})
    (verdict,) = FirstRecords(claims, {}, is_given=False).judged(validate(text), print).verdicts
    told = [finding for finding in verdict.findings if finding.rule == "experts-not-packed"]
    assert [finding.severity for finding in told] == (["warning"] if is_told else [])
    if is_told:
        assert told[0].message == (
            "only 2.9% of the base is packed to 4 bits: only linear layers are, and the experts are 64 stacked parameters, "
            "such as model.layers.0.mlp.experts.gate_up_proj; their 96.6% stay in bfloat16"
        )


def test_a_run_is_refused_where_results_exist_or_cannot_be_written(claims):
    (claims / "out/tuned/adapter").mkdir(parents=True)
    allowed = FIRST_ANSWER_SECONDS * slowness()
    done, seconds = timed(claims, *RUN, enough=allowed)
    assert done.returncode == 1
    assert "error: output-exists" in done.stdout
    assert seconds < allowed
    (claims / "out/tuned/adapter").rmdir()
    (claims / "out/tuned").rmdir()
    (claims / "out/tuned").write_text("a file")
    done, seconds = timed(claims, *RUN, enough=allowed)
    assert "error: directory-not-writable" in done.stdout
    assert seconds < allowed


def local_workspace(job):
    """Of a job that runs on this machine."""
    return resolve(JobIdentity(namespace=job.metadata.namespace, name=job.metadata.name, uid=LOCAL_UID), job.spec, None).workspace


def test_validate_tells_of_results_of_another_job_and_writes_nothing(claims):
    (claims / "out/tuned/merged").mkdir(parents=True)
    before = sorted(claims.rglob("*"))
    result = CliRunner().invoke(app, ["validate", "-", "--claims", str(claims)], input=manifest())
    assert result.exit_code == 1, result.output
    assert "error: output-exists" in result.stdout
    assert "the directory holds merged already" in " ".join(result.stdout.split())
    assert sorted(claims.rglob("*")) == before
    # Once it has trained here they are its own.
    workspace = local_workspace(validate(manifest()).verdicts[0].job)
    WorkspaceLayout(claims / workspace.claim / workspace.path).adapter.mkdir(parents=True)
    assert CliRunner().invoke(app, ["validate", "-", "--claims", str(claims)], input=manifest()).exit_code == 0


def test_a_file_in_the_place_of_a_claim_is_told(claims):
    (claims / "out").write_text("a file")
    result = CliRunner().invoke(app, ["validate", "-", "--claims", str(claims)], input=manifest())
    assert result.exit_code == 2, result.output
    said = f"spec.output.destination: claim out is {claims}/out, which is a file; give a directory, or move it away"
    assert said in " ".join(result.stderr.split())


def test_a_missing_library_is_named_before_anything_runs(claims):
    job = claims.parent / "job.yaml"
    job.write_text(manifest())
    program = (
        "import importlib.util as util, sys; find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        f"sys.argv = ['finetune', 'run', {str(job)!r}, '--claims', {str(claims)!r}]\n"
        "from finetune_cli.__main__ import main; main()"
    )
    allowed = FIRST_ANSWER_SECONDS * slowness()
    command = [sys.executable, "-c", program]
    done, seconds = run_timed(command, cwd=ROOT, without=HEAVY, traps=claims.parent / "traps", enough=allowed)
    assert done.returncode == 2
    assert seconds < allowed
    assert "torch is not installed, and this command computes on this machine" in done.stderr
    assert not (claims / "workspace").exists()


def test_what_is_not_on_this_machine_is_no_finding_unless_the_user_says_where_it_is(claims):
    """A manifest for a cluster is judged by the rules alone."""
    done = finetune(claims, "validate", "-f", "JOB", source="pvc://elsewhere/train.jsonl")
    assert done.returncode == 0
    done = finetune(claims, "data", "-f", "JOB", "--claims", "CLAIMS", source="pvc://elsewhere/train.jsonl")
    assert done.returncode == 2
    assert "spec.data.source: claim elsewhere is the directory" in done.stderr
    assert "--claim elsewhere=PATH" in done.stderr


def test_the_answer_as_json(claims):
    done = finetune(claims, "data", "-f", "JOB", "--claims", "CLAIMS", "-n", "1", "-o", "json")
    answer = json.loads(done.stdout)
    assert answer["accepted"] is True
    assert answer["sources"][0]["lengths"] == {"32": 2}
    assert answer["records"][0]["pieces"][-2] == ["a<|im_end|>", True]
    assert done.returncode == 0


def test_one_misspelt_key_among_right_ones_is_put_right_in_the_record(claims):
    """A mapping would only make the others wrong, and the next fix would be the mapping of before."""
    pairs = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completio": "a"}]
    write(claims / "data/more/train.jsonl", pairs)
    plain = {"format": "PromptCompletion", "chatTemplate": None}
    (finding,) = look(claims, source="pvc://data/more/", **plain).findings
    assert (finding.fix, finding.changes) == ("write 'completion' as the other records of this source have it", ())
    assert finding.message == "pvc://data/more/train.jsonl line 2: key 'completion' is missing"
    (finding,) = look(claims, source="pvc://data/more/", mapping={"completion": "completio"}, **plain).findings
    assert (finding.fix, finding.changes) == ("write 'completio' as the other records of this source have it", ())
    write(claims / "data/more/train.jsonl", [pairs[0], pairs[1], pairs[1]])
    (finding,) = look(claims, source="pvc://data/more/", **plain).findings
    assert finding.fix == "set spec.data.mapping.completion: completio"
    assert finding.message.endswith("key 'completion' is missing (and the same on 1 more line)")


def test_a_refused_manifest_is_told_as_validate_tells_it(claims):
    done = finetune(claims, "data", "-f", "JOB", "--claims", "CLAIMS", format="Text")
    assert done.returncode == 1
    assert "chat-template-without-chat" in done.stdout


def test_what_a_library_prints_does_not_spoil_the_answer(claims, monkeypatch, capfd):
    def printing(order):
        os.write(1, b"printed")
        os.write(2, b"warned")
        return look_of_trainer(order)

    monkeypatch.setattr("finetune_trainer.roles.look.look", printing)
    assert look(claims).sources[0]["records"] == 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("does", "said"), table(__file__, "test_a_process_that_does_not_answer_is_told"))
def test_a_process_that_does_not_answer_is_told(claims, monkeypatch, does, said):
    monkeypatch.setattr("finetune_cli.local.look._PROGRAM", failing_look.__name__)
    monkeypatch.setenv(failing_look.FAILS, does)
    monkeypatch.setattr("finetune_cli.local.look.SECONDS", 1)
    with pytest.raises(LocalError, match=said):
        look(claims)


def test_validate_says_that_records_were_not_looked_at(claims, monkeypatch):
    """As from an archive of the plugin, which holds nothing that reads records."""
    monkeypatch.setattr("finetune_cli.local.look._PROGRAM", "no_such_reader")
    said: list[str] = []
    report = validate(manifest())
    assert FirstRecords(claims, {}, is_given=False).judged(report, said.append) == report
    (line,) = said
    assert line.startswith("tuned: judged without its first records: the records cannot be looked at")
    assert line.endswith("install finetune-operator[trainer,cli]")
    with pytest.raises(LocalError, match="install finetune-operator"):
        FirstRecords(claims, {}, is_given=True).judged(report, said.append)


PAIR = {"question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("records", "data", "code", "written", "said"),
    table(__file__, "test_fixes_of_what_records_show_are_made_and_the_exit_code_is_theirs"),
)
def test_fixes_of_what_records_show_are_made_and_the_exit_code_is_theirs(claims, records, data, code, written, said):
    write(claims / "data/train.jsonl", records)
    done = finetune(claims, *VALIDATE, "--fix", **({"chatTemplate": None} if "format" in data else {}), **data)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    printed = yaml.safe_load(done.stdout)["spec"]["data"]
    assert {name: printed[name] for name in (*written, *data)} == {**data, **written}
    assert ("mapping" in printed) == ("mapping" in written)


def test_of_records_of_two_kinds_the_manifest_follows_the_more_frequent(claims):
    write(claims / "data/train.jsonl", [PAIR, PAIR, {"text": "t"}])
    done = finetune(claims, *VALIDATE, "--fix", format="PromptCompletion", chatTemplate=None)
    assert done.returncode == 1
    assert yaml.safe_load(done.stdout)["spec"]["data"]["mapping"] == {"prompt": "question", "completion": "answer"}
    assert done.stderr.count("error: data-record-invalid") == 1
    assert "write 'question' as the other records of this source have it" in " ".join(done.stderr.split())


def test_fixes_of_records_that_undo_each_other_come_to_an_end(claims):
    """The first record wants a mapping, the others a format without it."""
    write(claims / "data/train.jsonl", [PAIR, {"text": "t"}, {"text": "u"}])
    done = finetune(claims, *VALIDATE, "--fix", format="PromptCompletion", chatTemplate=None)
    assert done.returncode == 1
    assert "error: data-record-invalid" in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("fixed tuned: ")] == [
        "fixed tuned: spec.data.mapping.prompt: question, spec.data.mapping.completion: answer (data-record-invalid)",
        "fixed tuned: spec.data.format: Text (data-record-invalid)",
        "fixed tuned: spec.data.format: Chat (mapping-without-effect)",
        "fixed tuned: spec.data.chatTemplate: ChatML (chat-template-unusable)",
    ]
