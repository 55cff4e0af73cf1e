"""No rule raises, whatever the schema accepts: in the operator an exception would leave the job without a word in its status."""

import random
import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext
from tests.support.cases import table
from tests.support.examples import examples
from tests.unit.finetune_job.rules.manifests import applied, judged, manifest

SCHEMA = FineTuneJobSpec.model_json_schema(by_alias=True)
DECIMALS = ["0", "1", "0.5", "1e-8", "2e-4", "9e99", "1e-99", "0.99999999999999999999"]
PLACES = ["pvc://a", "pvc://a/x.csv", "pvc://w/", "hf://o/n", "hf://datasets/o/n/x", "s3://abc", "s3://abc/k", "oci://r:5000/a:v"]
TEXTS = [*DECIMALS, *PLACES, "", "q", "(", " ", ",", "all-linear", "lm_head", "5GB", "1Gi", "9999999999Ti", "o/n", "a" * 40]
SETTINGS = {
    "r": [0, 1, 4096], "alpha": [0, 8, 65536, "8"], "rankPattern": [{"(": 4}, {"q": 0}], "alphaPattern": [{}, {"q": 1}],
    "targetModules": [None, "(", "all-linear", [], ["q", ""]], "layersToTransform": [0, [0], []],
    "layersPattern": ["h", [], [""]],
    "moduleDropout": ["0.5", -1, True], "initWeights": [False, "x"], "nosuch": [None, [[1]], {"a": {"b": 1}}],
}  # fmt: skip
"""Of PEFT, right and wrong: the schema does not look into them."""
PROFILES = [None, FineTuneProfileSpec(trainer_image="trainer"), FineTuneProfileSpec(trainer_image="a", max_active_jobs=1)]


def written(schema: dict[str, Any], draw: random.Random) -> Any:
    """A value of about that form: the least, the most, the default, and texts of every kind."""
    options = [one for one in schema.get("anyOf", [schema]) if one != {"type": "null"}]
    chosen = draw.choice(options)
    if "$ref" in chosen:
        chosen = SCHEMA["$defs"][chosen["$ref"].rpartition("/")[2]]
    if "enum" in chosen:
        return draw.choice(chosen["enum"])
    match chosen.get("type"):
        case "object" if "properties" in chosen:
            required, share = chosen.get("required", ()), draw.choice([0.1, 0.3, 0.6])
            names = [name for name in chosen["properties"] if name in required or draw.random() < share]
            return {name: written(chosen["properties"][name], draw) for name in names}
        case "object" if isinstance(chosen.get("additionalProperties"), dict):
            return {draw.choice(TEXTS): written(chosen["additionalProperties"], draw) for _ in range(draw.randrange(3))}
        case "object":
            return {name: draw.choice(SETTINGS[name]) for name in draw.sample(sorted(SETTINGS), draw.randrange(4))}
        case "array":
            return [written(chosen["items"], draw) for _ in range(max(draw.randrange(3), chosen.get("minItems", 0)))]
        case "integer":
            least, most = chosen.get("minimum", 0), chosen.get("maximum", 10**9)
            return draw.choice([least, most, min(max(draw.choice([1, 2, 3, 8, 64]), least), most)])
        case "boolean":
            return draw.random() < 0.5
    return draw.choice(fitting(chosen))


def fitting(schema: dict[str, Any]) -> list[str]:
    pattern = schema.get("pattern")
    if pattern is None:
        return [text for text in TEXTS if len(text) >= schema.get("minLength", 0)]
    return [text for text in TEXTS if re.search(pattern, text)]


@settings(max_examples=examples(300, 5000), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(PROFILES))
def test_no_rule_raises_on_what_the_schema_accepts(seed, profile) -> None:
    try:
        spec = FineTuneJobSpec.model_validate(written(SCHEMA, random.Random(seed)))
    except ValidationError:
        return
    evaluate(RuleContext(spec, profile))


REACHING: list[dict[str, list[Any]]] = table(__file__, "REACHING")


@pytest.mark.parametrize("values", REACHING)
def test_steps_that_are_too_large_are_made_right_whatever_is_left_at_its_default(values: dict[str, list[Any]]) -> None:
    found = 0
    for drawn in product(*values.values()):
        spec = manifest({path: value for path, value in zip(values, drawn, strict=True) if value is not None})
        for finding in judged(spec):
            if finding.rule == "steps-too-large":
                found += 1
                assert finding.value != "unset", spec
                assert "steps-too-large" not in {each.rule for each in judged(applied(spec, finding.changes))}, spec
    assert found
