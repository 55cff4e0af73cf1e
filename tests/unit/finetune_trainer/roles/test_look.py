"""The look at the first records says what preflight says of all of them, in its words."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune_job.api.base import claim_path
from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.plan.run_plan import AddedTokenPlan, DataPlan, DatasetPlan
from finetune_trainer.data import render_limit
from finetune_trainer.data.prepare import prepare
from finetune_trainer.preflight.fit import fit_findings
from finetune_trainer.roles.look import look
from tests.support.tiny_model import plan_of, tiny_spec
from tests.unit.finetune_trainer.data.chat_templates import CHATML

OTHER_KEYS = Path(__file__).parents[1] / "data" / "other_keys.yaml"
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CHAT = {"messages": TURNS}
LONG = {"messages": [TURNS[0], {"role": "assistant", "content": "a" * 400}]}


@pytest.fixture
def claims(tmp_path):
    (tmp_path / "data").mkdir()
    CHATML.tokenizer().save_pretrained(tmp_path / "models")
    return tmp_path


def write(claims, name, records):
    (claims / "data" / name).write_text(
        "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
    )


def plan(validation=None, **changes):
    def dataset(name, field, splits):
        address = f"pvc://data/{name}"
        return DatasetPlan(location=claim_path(address), source=address, field=field, weight=1, splits=splits)

    settings = {
        "train": (dataset("train.jsonl", "spec.data.source", ("train",)),),
        "validation": validation and dataset(validation, "spec.data.validation.source", ("validation", "test")),
        "format": DataFormat.CHAT,
        "max_sequence_length": 100,
        "packing": True,
        "loss_on": LossOn.ASSISTANT,
    }
    return DataPlan(**settings | changes)


def job(**training):
    one_rank = {"processesPerNode": 1}
    return plan_of(tiny_spec(training={"globalBatchSize": None, "microBatchSize": None, **training}, parallelism=one_rank))


def order(claims, data, told=None, added_tokens=(), **changes):
    tokens = tuple(AddedTokenPlan(**token) for token in added_tokens)
    told = told or job()
    told = told.model_copy(update={"data": data, "model": told.model.model_copy(update={"added_tokens": tokens})})
    held_out = [("validation", data.validation)] if data.validation is not None else []
    sources = [("train", each) for each in data.train] + held_out
    return {
        "claims_root": str(claims),
        "plan": told.model_dump(mode="json"),
        "sources": [{"split": split, **each.model_dump(mode="json")} for split, each in sources],
        "model": str(claims / "models"),
        "limit": 100,
        "shown": 1,
        "only_existing": False,
        "model_files": None,
        "places": None,
    } | changes


def said(findings):
    return sorted(
        (finding["rule"], finding["severity"], finding["field"], finding["message"], finding["fix"]) for finding in findings
    )


@pytest.mark.parametrize(
    ("train", "held_out", "rules"),
    [
        ([CHAT, LONG], None, ["data-records-dropped"]),
        ([LONG], None, ["data-all-too-long"]),
        ([CHAT, "{", {"chat": TURNS}, {"chat": TURNS}], None, ["data-record-invalid", "data-record-invalid"]),
        ([CHAT, {"messages": TURNS[:1]}], None, ["data-record-invalid"]),
        ([{"prompt": "q", "chosen": "a", "rejected": "b"}], None, ["data-preference-pairs"]),
        ([{**CHAT, "label": False}], None, ["data-preference-pairs"]),
        ([{**CHAT, "mood": 1, "id": 1}, LONG], None, ["data-keys-unread", "data-records-dropped"]),
        ([{"messages": [{**TURNS[0], "mood": 1}, TURNS[1]]}], None, ["chat-words-left-out"]),
        ([{"messages": [TURNS[0], {**TURNS[1], "weight": 0}]}], None, ["data-record-invalid"]),
        ([{**CHAT, "chat_template_kwargs": {"mood": 1}}], None, ["chat-words-left-out"]),
        ([], None, ["data-empty"]),
        ([CHAT, LONG], [CHAT], ["data-held-out-in-training", "data-records-dropped"]),
        ([CHAT], "train.jsonl", ["data-held-out-in-training", "data-held-out-in-training"]),
    ],
)
def test_preflight_says_the_same(claims, train, held_out, rules):
    write(claims, "train.jsonl", train)
    if isinstance(held_out, list):
        write(claims, "held.jsonl", held_out)
    data = plan(held_out if isinstance(held_out, str) else "held.jsonl" if held_out else None)
    found = look(order(claims, data))["findings"]
    assert sorted(finding["rule"] for finding in found) == rules
    with prepare(data, claims, claims / "models", CHATML.tokenizer(), claims / "prepared", num_workers=0) as preparation:
        told = said(finding.model_dump(mode="json") for finding in preparation.findings)
    assert said(found) == told


KEYS = st.sampled_from([row[2] for row in yaml.safe_load(OTHER_KEYS.read_text()) if row[1] in ("record", "turn")] + ["mood"])
VALUES = st.sampled_from([None, "", "x", True, False, 0, 1, 0.5, [], ["a.png"], [0, 1], {"a": None}, {"mood": "b"}, "false"])
OTHERS = st.dictionaries(KEYS, VALUES, max_size=2)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(extras=st.lists(st.tuples(OTHERS, OTHERS), min_size=1, max_size=5))
def test_preflight_says_the_same_about_records_with_any_other_keys(claims, extras):
    records = [
        {"messages": [{"role": "user", "content": f"q{number}"}, {**TURNS[1], **of_turn}], **of_record}
        for number, (of_record, of_turn) in enumerate(extras)
    ]
    write(claims, "train.jsonl", records)
    data = plan()
    with prepare(data, claims, claims / "models", CHATML.tokenizer(), claims / "prepared", num_workers=0) as preparation:
        told = said(finding.model_dump(mode="json") for finding in preparation.findings)
    assert said(look(order(claims, data))["findings"]) == [each for each in told if each[0] != "data-records-repeated"]


def test_a_template_that_never_ends_is_a_finding(claims, monkeypatch):
    monkeypatch.setattr(render_limit, "RENDER_SECONDS", 0.2)
    write(claims, "train.jsonl", [CHAT])
    loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    endless = f"{{% if messages[0]['content'] == 'q' %}}{loops}{{% endif %}}"
    (finding,) = look(order(claims, plan(chat_template=endless + CHATML.template)))["findings"]
    assert "takes more than" in finding["message"]


def test_what_is_not_there_is_left_out_if_it_may_be_missing(claims):
    data = plan("held.jsonl")
    write(claims, "held.jsonl", [CHAT])
    assert [finding["rule"] for finding in look(order(claims, data))["findings"]] == ["data-file-missing"]
    seen = look(order(claims, data, only_existing=True))
    assert (seen["findings"], [source["split"] for source in seen["sources"]]) == ([], ["validation"])


def test_a_tokenizer_that_does_not_load_is_a_finding_and_records_are_read_all_the_same(claims):
    write(claims, "train.jsonl", [CHAT])
    (claims / "models/tokenizer.json").write_text("{")
    seen = look(order(claims, plan()))
    assert [finding["rule"] for finding in seen["findings"]] == ["tokenizer-unusable"]
    assert (bool(seen["why_no_tokens"]), seen["sources"][0]["records"]) == (True, 1)


def test_added_tokens_are_one_token_each_and_known_ones_are_told(claims):
    """CHATML's tokenizer has the markers of its turns already."""
    write(claims, "train.jsonl", [{"messages": [TURNS[0], {"role": "assistant", "content": "a<|tool|>b"}]}])
    tool = {"content": "<|tool|>"}
    plain, added = (look(order(claims, plan(), added_tokens=tokens)) for tokens in ([], [tool]))
    assert plain["sources"][0]["tokens"] == added["sources"][0]["tokens"] + len("<|tool|>") - 1
    known = look(order(claims, plan(), added_tokens=[tool, {"content": "<|im_end|>", "special": True}]))
    (finding,) = known["findings"]
    assert (finding["rule"], finding["value"]) == ("added-token-known", "<|im_end|>")
    assert [(change["field"], change["value"]) for change in finding["changes"]] == [("spec.model.addedTokens", [tool])]
    assert known["why_no_tokens"] == "The tokenizer cannot be used (see below)"


@pytest.mark.parametrize(
    ("packing", "training", "rules"),
    [
        # 40 records of 26 tokens, 3 to a sequence of 100: 14 sequences.
        (True, {"globalBatchSize": 16}, ["fewer-sequences-than-batch"]),
        (True, {}, []),
        (False, {"globalBatchSize": 16}, []),
        (True, {"globalBatchSize": 1, "epochs": 1, "maxSteps": None}, ["packing-leaves-few-steps"]),
        (True, {"globalBatchSize": 1, "epochs": 2, "maxSteps": None}, []),
    ],
)
def test_too_few_sequences_are_told_as_preflight_tells_them(claims, packing, training, rules):
    write(claims, "train.jsonl", [{"messages": [{"role": "user", "content": f"{n:03}"}, TURNS[1]]} for n in range(40)])
    data, told = plan(packing=packing), job(**training)
    found = look(order(claims, data, told))["findings"]
    assert [finding["rule"] for finding in found] == rules
    with prepare(data, claims, claims / "models", CHATML.tokenizer(), claims / "prepared", num_workers=0) as preparation:
        fit = fit_findings(told.model_copy(update={"data": data}), preparation.splits, None, 0, None)
    assert said(found) == said(finding.model_dump(mode="json") for finding in fit)
    # Of these, 13 at most were seen, so nothing is known of the rest.
    assert look(order(claims, data, told, limit=13))["findings"] == []
