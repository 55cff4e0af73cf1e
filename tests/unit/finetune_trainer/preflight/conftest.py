"""Claims with a tiny model and data, and a job to change."""

import copy
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml

from finetune_job.api.job import parse_job
from finetune_job.plan.digest import plan_sha256
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity
from finetune_trainer.context import RunContext
from finetune_trainer.preflight import added_tokens, job_steps
from tests.support.forked_base import start_forked
from tools import quickstart

EXAMPLES = Path(__file__).parents[4] / "examples"
PAIRS = [
    {"prompt": f"def name_{number}(value):\n", "completion": "Return the value. " * (number % 4 + 1)} for number in range(128)
]


@pytest.fixture(scope="session")
def made_claims(tmp_path_factory):
    """Made once; tests change copies."""
    root = tmp_path_factory.mktemp("made")
    for claim in (quickstart.MODEL_CLAIM, quickstart.DATA_CLAIM, quickstart.OUTPUT_CLAIM, quickstart.WORKSPACE_CLAIM):
        (root / claim).mkdir()
    quickstart.write_json_lines(root / "data" / "train.jsonl", PAIRS[8:])
    quickstart.write_json_lines(root / "data" / "validation.jsonl", PAIRS[:8])
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    quickstart.make_model(root / "models" / "tiny-llama", [pair["completion"] for pair in PAIRS], small, max_shard_size="50KB")
    return root


@pytest.fixture
def claims(made_claims, tmp_path):
    return Path(shutil.copytree(made_claims, tmp_path / "claims"))


@pytest.fixture
def model(claims):
    """The model directory."""
    return claims / "models" / "tiny-llama"


@pytest.fixture(scope="session")
def manifest():
    """The quick start, with fewer tokens per sequence."""
    document = yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text())
    document["spec"]["data"]["maxSequenceLength"] = 64
    return document


@pytest.fixture
def context(claims, manifest):
    """`context({"data.packing": False})`: the quick start with these fields of the spec changed, on the copied claims."""

    def made(changes=None, document=None, profile=None):
        changed = copy.deepcopy(document or manifest)
        # What these tests look at comes before it (tests/unit/finetune_trainer/rehearsal).
        changed["spec"].setdefault("preflight", {"rehearsal": "Skip"})
        for path, value in (changes or {}).items():
            *parents, last = path.split(".")
            target = changed["spec"]
            for parent in parents:
                target = target.setdefault(parent, {})
            target[last] = value
        # The rehearsal has tests of its own.
        changed["spec"].setdefault("preflight", {"rehearsal": "Skip"})
        job = parse_job(changed)
        plan = resolve(JobIdentity(namespace="default", name=job.metadata.name, uid="0123456789abcdef"), job.spec, profile)
        return RunContext(plan, plan_sha256(plan), claims, 0)

    return made


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Starting the processes that prepare data and write a base takes longer than their work here."""
    monkeypatch.setattr(added_tokens, "_start", start_forked)
    monkeypatch.setattr(job_steps, "prepare", partial(job_steps.prepare, num_workers=0))
