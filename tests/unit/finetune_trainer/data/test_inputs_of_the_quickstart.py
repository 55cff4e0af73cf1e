"""The inputs of the quick start are small, real, the same each time, and what the example names."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from tools import quickstart

EXAMPLE = yaml.safe_load((Path(__file__).parents[4] / "examples" / "quickstart.yaml").read_text())["spec"]


@pytest.fixture(scope="module")
def claims(tmp_path_factory):
    root = tmp_path_factory.mktemp("claims")
    quickstart.make_claims(root)
    return root


def records(claims, source):
    return [json.loads(line) for line in (claims / source.removeprefix("pvc://")).read_text().splitlines()]


def test_training_and_held_out_records_are_apart_and_the_same_each_time(claims):
    train = records(claims, EXAMPLE["data"]["source"])
    held_out = records(claims, EXAMPLE["data"]["validation"]["source"])
    assert (len(train), len(held_out)) == (560, 80)
    assert not {record["prompt"] for record in train} & {record["prompt"] for record in held_out}
    assert [*held_out, *train] == quickstart.docstring_pairs(quickstart.NUM_PAIRS)


def test_records_are_signatures_with_the_first_sentence_of_their_docstring(claims):
    for record in records(claims, EXAMPLE["data"]["source"]):
        assert record["prompt"].startswith("def ")
        assert record["prompt"].endswith("):\n")
        assert record["completion"].endswith(".")
        assert "\n" not in record["completion"]


def test_the_model_has_several_readable_shards_and_a_tokenizer_that_loses_nothing(claims):
    model = claims / EXAMPLE["model"]["source"].removeprefix("pvc://")
    shards = sorted(model.glob("*.safetensors"))
    assert len(shards) >= 2
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in shards)
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "def größer(x):\n    €"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
