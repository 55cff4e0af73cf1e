"""A job that adds tokens, on a real node: a gang of two pods trains their rows, and what comes out knows them."""

import json

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.stack import ROOT, Stack, condition_of

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(900)]
EXAMPLE = "examples/quickstart-cluster.yaml"
TOKENS = [{"content": "<|tool|>", "special": True, "stop": True}, {"content": "<step>"}]


def test_results_know_the_added_tokens(stack: Stack) -> None:
    model = yaml.safe_load((ROOT / EXAMPLE).read_text())["spec"]["model"] | {"addedTokens": TOKENS}
    name = stack.apply_example(EXAMPLE, {"model": model}, name="added-tokens")
    stack.wait(lambda: condition_of(stack.job(name), "Finished").get("status") == "True", f"{name} to finish")
    job = stack.job(name)
    assert condition_of(job, "Succeeded").get("status") == "True", job["status"]
    (rows,) = [one for one in job["status"]["plan"]["choices"] if one["field"] == "spec.method.lora.trainableTokenIndices"]
    output = stack.claim("models-out") / name
    for directory in (output / "merged", output / "adapter"):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ids = [tokenizer(each["content"], add_special_tokens=False)["input_ids"] for each in TOKENS]
        assert ids == [[number] for number in json.loads(rows["value"])]
    merged = AutoModelForCausalLM.from_pretrained(output / "merged")
    assert merged.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert merged.generation_config.eos_token_id[-1] == ids[0][0]
    assert json.loads((output / "verification.json").read_text())["passed"] is True
