"""Pages that are generated say what is true. That they are fresh is tested with the commands that write them."""

import re
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from finetune_cli.answers import Panel
from finetune_cli.app import app
from finetune_cli.checks.validate import validate
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.crd import structural_schema
from tests.unit.finetune_cli.manifests import ACCEPTED, Quoted
from tools.pages import coming_from
from tools.pages.commands import page as page_of_commands
from tools.pages.fields import page as page_of_fields


def paths(schema: dict[str, Any], path: str = "spec") -> set[str]:
    """Of all fields, without those of lists and maps."""
    found = {path}
    for name, node in schema.get("properties", {}).items():
        found |= paths(node, f"{path}.{name}")
    return found


JOB, PROFILE = (paths(structural_schema(model)) for model in (FineTuneJobSpec, FineTuneProfileSpec))


def table(page: str, heading: str) -> dict[str, list[str]]:
    """First cell of each row, without what marks it -> the others."""
    text = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| `")]
    return {row[0].replace(" **required**", "").strip("`"): row[1:] for row in rows}


def fields(page: str, kind: str) -> dict[str, list[str]]:
    """Path of each field -> what is below its name, and what it means."""
    parts = re.split(rf"^### {kind} (.*)$", page, flags=re.MULTILINE)[1:]
    return {
        f"{parent}.{name}": [facts, meaning]
        for parent, text in zip(parts[::2], parts[1::2], strict=True)
        for name, facts, meaning in re.findall(
            r"^\| `(.*?)`<br>(.*?) (?<!\\)\| (.*) \|$", text.partition("\n## ")[0], re.MULTILINE
        )
    }


def test_every_field_of_a_job_is_on_the_page_with_type_bounds_default_and_meaning() -> None:
    rows = fields(page_of_fields(), "FineTuneJob")
    assert JOB - {"spec"} <= set(rows)
    assert rows["spec.run.stallDeadlineSeconds"][0] == "integer: seconds; 60 to 604,800"
    assert rows["spec.data.maxSequenceLength"][0] == "integer: tokens; 8 to 1,048,576; default `2048`"
    assert rows["spec.training.optimizer"][0].startswith("one of AdamW, RAdam, SGD")
    assert rows["spec.training.learningRate"][0].startswith('number in quotes, as in "2e-4"; ')
    assert rows["spec.workspace.volumeClaimTemplate.storage"][0].startswith("**required**; size, as in 100Gi")
    assert rows["spec.method.lora.targetModules"][0] == "list of string; at most 256 entries"
    assert rows["spec.method.lora.rankPattern"][0].startswith("map of integer")
    assert rows["spec.model.source"][0] == "**required**; address to read; at most 512 characters"
    assert all(meaning for name, (_, meaning) in rows.items() if not name.endswith(("[]", ".*")))


def test_fields_of_a_profile_that_each_role_has_are_told_once() -> None:
    rows = fields(page_of_fields(), "FineTuneProfile")
    assert "spec.pods.train.schedulerName" in rows
    assert "spec.pods.merge.schedulerName" not in rows
    assert rows["spec.pods.merge"][1].endswith("Its fields are those of `spec.pods.train`.")


def test_what_a_gpu_changes_is_told_of_fields_that_there_are() -> None:
    named = set(re.findall(r"`(spec\.[A-Za-z.]+)`", page_of_fields().partition("## FineTuneJob")[0]))
    assert len(named) > 6
    assert named - JOB - {"spec.parallelism"} == set()


def test_every_command_is_on_the_page() -> None:
    page = page_of_commands()
    headings = ("validate [FILE]...", "estimate [FILE]", "run FILE", "attach NAME", "explain [WORD]")
    for heading in (f"finetune {each}" for each in headings):
        assert f"\n## {heading}\n" in page
    assert "| `--gpu-memory` | Memory of one device, as in 80Gi. Unset: the profile's. |" in page
    assert "| `--verify`, `--no-verify`<br>default `on` | Compare the result with base and adapter. |" in page
    assert "| 130 | Interrupted by SIGINT or SIGTERM; a run can be continued. |" in page


def test_every_command_has_a_short_summary_and_a_panel() -> None:
    commands = typer.main.get_command(app).commands.values()
    summaries = {command.name: command.help.partition("\n\n")[0] for command in commands}
    assert [f"{name}: {summary}" for name, summary in summaries.items() if len(summary) > 50 or summary[-1] != "."] == []
    assert [command.name for command in commands if command.rich_help_panel not in set(Panel)] == []


def test_the_help_names_every_command_below_its_panel() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    panels = {part.partition(":\n")[0].rpartition("\n")[2]: part for part in re.split(r"\n\n", text) if ":\n" in part}
    assert list(panels) == ["Options", *Panel]
    shown = [line.split()[0] for panel in Panel for line in panels[panel].splitlines()[1:]]
    assert sorted(shown) == sorted(typer.main.get_command(app).commands)


SETTINGS = {(name, str(value)): value for settings in coming_from.TOOLS.values() for name, value in settings.items()}


@pytest.mark.parametrize(("name", "_text"), SETTINGS)
def test_a_setting_of_another_tool_is_answered_as_the_page_says(name: str, _text: str) -> None:
    told = coming_from.right_column(name, SETTINGS[name, _text])
    named = set(re.findall(r"spec(?:\.[a-zA-Z0-9]+)+", told))
    assert named <= JOB, told
    assert named or told.startswith("remove it: ")
    document = yaml.safe_load(ACCEPTED)
    for part, settings in coming_from.WRITTEN.items():
        document["spec"][part] = document["spec"].get(part, {}) | settings
    training = document["spec"]["training"]
    training.pop(coming_from.SAME_NAME.get(name, "").removeprefix("training."), None)
    # Of a field that has the same name here, its value is what is foreign.
    (training if name == "optimizer" else document["spec"])[name] = SETTINGS[name, _text]
    found = [finding for verdict in validate(yaml.dump(document, Dumper=Quoted)).verdicts for finding in verdict.findings]
    assert told in "; ".join(f"{finding.field}: {finding.fix}".replace(": write ", ": ") for finding in found)


def test_the_page_on_other_tools_names_what_is_known_of_them() -> None:
    page = coming_from.page()
    rows = table(page, "axolotl")
    assert rows["micro_batch_size: 2"] == ["spec.training.microBatchSize"]
    assert rows["load_in_4bit: true"] == ["spec.method.type: QLoRA, which packs the base in 4 bits"]
    assert table(page, "LLaMA-Factory")["lora_target: all"] == ["spec.method.lora.targetModules: [all-linear]"]
    assert table(page, "TRL and PEFT")["deepspeed: zero3.json"][0].startswith("remove it: FSDP shards parameters")
