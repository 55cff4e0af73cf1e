"""`make demo` as README has it: in a fresh clone, from no environment to a merged model that loads without PEFT."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documented import ROOT, as_written, blocks_of

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(3600)]
OF_THIS_CHECKOUT = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "DEMO_DIRECTORY")
"""Variables that a reader has not: the clone's own sources and environment are used."""


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "finetune-operator"
    subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True, timeout=300)
    yield place
    shutil.rmtree(place)  # an environment of six gigabytes, which pytest would keep


def test_the_first_command_of_the_readme_makes_a_verified_model(clone: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in OF_THIS_CHECKOUT}
    options = {"cwd": clone, "env": environment, "stdin": subprocess.DEVNULL, "text": True}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(as_written("make demo").split(), check=False, timeout=3000, **output, **options)
    said = done.stdout
    assert done.returncode == 0, said
    for role in ("preflight", "train", "merge"):
        assert f"quickstart: {role} succeeded after " in said
    assert "; rehearsal: Passed" in said
    assert "\nDone.\n" in said
    assert "  verification:  passed, " in said
    losses = re.search(r"held-out loss: +([0-9.]+) before, ([0-9.]+) after", said)
    assert losses is not None, said
    before, after = map(float, losses.groups())
    assert after < 0.9 * before
    assert said.splitlines()[-1].startswith("LlamaForCausalLM with ")
    assert " loads without PEFT and generates '" in said.splitlines()[-1]

    result = clone / "runs/demo/claims/models-out/quickstart"
    assert json.loads((result / "verification.json").read_text())["passed"] is True
    assert (result / "adapter/adapter_model.safetensors").stat().st_size > 0
    assert (result / "merged/model.safetensors.index.json").exists() or (result / "merged/model.safetensors").exists()
    assert "<html" in (result / "report.html").read_text()
    # All of it lies where `make clean` removes it, and git shows none of it.
    assert subprocess.run(["git", "status", "--porcelain"], check=True, capture_output=True, **options).stdout == ""
    # The environment is the clone's own, for the next command of the page.
    page = ROOT / "docs/tutorial/getting-started.md"
    (installed,) = [block for block in blocks_of(page) if block.text.startswith("make environment")]
    told = f"{as_written(installed)}python -c 'import finetune_cli; print(finetune_cli.__file__)'"
    where = subprocess.run(["bash", "-euo", "pipefail", "-c", told], check=True, capture_output=True, **options).stdout
    assert Path(where.splitlines()[-1]).is_relative_to(clone)
