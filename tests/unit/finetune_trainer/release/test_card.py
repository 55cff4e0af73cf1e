"""The model card: what the Hub and people read, and that no name of a user is taken for markup."""

import dataclasses
import re

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune_job.plan.run_plan import GLOBAL_BATCH_FIELD, Choice
from finetune_trainer.inspection.report import read_report
from finetune_trainer.release.adapter_check import ServingReport
from finetune_trainer.release.card import adapter_card, chosen_settings, front_matter, model_card
from finetune_trainer.release.facts import RunFacts
from finetune_trainer.release.licence import Licence
from tests.support.cases import table
from tests.unit.finetune_trainer.release.example import DATA_COMMIT, FROM_HUB, IMAGE, example

HUB = {"output.destination": "hf://team/tuned"}


def read_back(card: str) -> dict:
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert match is not None
    return yaml.safe_load(match[1])


def test_the_batch_is_the_one_that_preflight_chose(tmp_path):
    run = example(tmp_path, {"training.globalBatchSize": None})
    report, chosen = read_report(run.context.workspace.model_report), Choice(field=GLOBAL_BATCH_FIELD, value=6, reason="few")
    told = []
    for batches in ((), (chosen,)):
        run.context.workspace.model_report.write_text(report.model_copy(update={"batches": batches}).model_dump_json())
        told.append(dict(chosen_settings(run.facts().plan))["global_batch_size"])
    assert told == ["16", "6"]


def test_the_hub_reads_what_it_needs(tmp_path):
    facts = example(tmp_path, FROM_HUB | HUB).facts()
    assert read_back(model_card(facts)) == {
        "base_model": "maker/base",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "other",
        "license_name": "maker-terms",
        "license_link": "LICENSE",
        "datasets": ["maker/records"],
        "tags": ["finetune-operator", "lora"],
    }
    assert read_back(adapter_card(facts))["library_name"] == "peft"
    assert read_back(adapter_card(facts))["base_model_relation"] == "adapter"


def test_everything_about_the_run_is_on_the_card(tmp_path):
    made = example(tmp_path, FROM_HUB | HUB)
    card = model_card(made.facts())
    expected = [
        f"`hf://datasets/maker/records/train` at `{DATA_COMMIT}`",
        "| 30 | 4,321 | 1,234 |",
        f"* `a.jsonl`: SHA-256 `{'e' * 64}`",
        "10 optimizer steps over 1,000 tokens, 600 of them supervised.",
        "| base model | 0 | 2.5000 |",
        "| last | 10 | 1.7500 |",
        "| same most likely token | 99.000% | at least 97.00% |",
        "| mean KL divergence of 90% of positions, nats | 0.0001 | at most 0.005 |",
        f"| plan, SHA-256 | `{made.context.plan_sha256}` |",
        f"| trainer image | `{IMAGE}` |",
        f"| base digest, SHA-256 over configuration, index, headers and sizes | `{'c' * 64}` |",
        "whose licence still applies: `maker-terms`",
        "| `learning_rate` |",
        "| `r` | `16` |",
        "| `weight_decay` | `0` |",
    ]
    assert [part for part in expected if part not in card] == []


def test_names_that_the_hub_does_not_know_are_left_out(tmp_path):
    found = read_back(model_card(example(tmp_path).facts()))
    assert "base_model" not in found
    assert "datasets" not in found


def test_an_adapter_alone_is_an_adapter(tmp_path):
    facts = example(tmp_path, FROM_HUB | HUB | {"merge.enabled": False}).facts()
    card = model_card(facts)
    assert read_back(card)["library_name"] == "peft"
    assert "AutoPeftModelForCausalLM.from_pretrained('team/tuned'" in card
    assert "tuned=team/tuned\n" in card
    assert "Verification" not in card


@pytest.mark.parametrize(("destination", "expected"), table(__file__, "test_the_card_says_how_to_load_from_the_destination"))
def test_the_card_says_how_to_load_from_the_destination(tmp_path, destination, expected):
    card = model_card(example(tmp_path, FROM_HUB | {"output.destination": destination}).facts())
    assert [part for part in expected if part not in card] == []
    assert "--enable-lora --max-lora-rank 16" in card


def test_a_base_that_only_its_owner_can_reach_is_a_directory_of_the_reader(tmp_path):
    card = model_card(example(tmp_path, {"model": {"source": "pvc://models/base"}}).facts())
    assert "with a copy of `pvc://models/base` in `./base`:" in card
    assert "from_pretrained('./base', dtype" in card
    assert "PeftModel.from_pretrained(base, './adapter')" in card
    assert "vllm serve ./base --enable-lora" in card
    assert "from_pretrained('pvc:" not in card


def test_it_is_the_same_each_time_and_names_no_directory(tmp_path):
    card = model_card(example(tmp_path / "one", FROM_HUB).facts())
    assert card == model_card(example(tmp_path / "two", FROM_HUB).facts())
    assert str(tmp_path) not in card


def test_the_card_says_why_vllm_does_not_serve_an_adapter(tmp_path):
    made = example(tmp_path)
    card = model_card(made.facts(ServingReport(("it has no DoRA",), None)))
    assert "vLLM does not serve the adapter as it is: `it has no DoRA`." in card
    assert "--enable-lora" not in card


TEXT = st.text(max_size=60) | st.sampled_from(
    [
        "---\nx: y",
        "a: b",
        "`x` | y",
        "```\n# not a title",
        "<script>alert(1)</script>",
        "[x](http://y)",
        "'\"\\",
        "\u202ename",
        "#",
        "- a",
        "@x",
    ]
)


@pytest.fixture(scope="module")
def plain_facts(tmp_path_factory) -> RunFacts:
    return example(tmp_path_factory.mktemp("claims"), FROM_HUB | HUB).facts()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=TEXT, source=TEXT, licence=TEXT, link=TEXT, model=TEXT)
def test_no_text_of_a_user_breaks_the_card(plain_facts, name, source, licence, link, model):
    plan = plain_facts.plan
    plan = plan.model_copy(
        update={"job": plan.job.model_copy(update={"name": name}), "model": plan.model.model_copy(update={"name": model})}
    )
    sources = tuple(dataclasses.replace(one, source=source) for one in plain_facts.sources)
    facts = dataclasses.replace(
        plain_facts, plan=plan, sources=sources, base_source=source, licence=Licence("other", licence, link, (licence,))
    )
    card = model_card(facts)
    assert read_back(card) == front_matter(facts, is_adapter=False)
    assert read_back(card).get("license_name", "") == licence
    body = card.split("\n---\n", 1)[1]
    outside = "".join(re.split(r"(?ms)^(`{3,})[a-z]*$.*?^\1$", body)[::2])
    titles = [line for line in outside.splitlines() if line.startswith("#")]
    assert len(titles) == 9
    # What is not in a code span is ours: no user's markup, no tag, no link is left there.
    for line in outside.splitlines():
        plain = re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", line)
        assert not re.search(r"<script|\]\(http|`", plain), line
