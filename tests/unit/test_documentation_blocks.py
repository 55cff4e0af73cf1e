"""Every block of README and docs is run by a test, or tried here: a new one of no known kind fails.

Tests that follow a page as its reader would are found by its name and the headings that they name. The rest is tried here:
commands of `finetune` are run if they need no torch, cluster or GPU, and else read by the program's own parser; `make` has the
targets; manifests, profiles and values of the chart are accepted.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_job.api.profile import FineTuneProfile
from tests.e2e.test_documented_lines import LINES
from tests.support import values_schema
from tests.unit.finetune_cli.commands.test_data import chat, manifest, write
from tests.unit.finetune_memory.configs import CONFIGS
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "charts/finetune-operator/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FOLLOWED = {
    "docs/metrics.md": "tests/simulation/test_counters.py",
    "docs/platform": "tests/integration/test_pages.py",
    "docs/release.md": "tests/e2e/test_release.py",
    "docs/results.md": "tests/integration/test_publish.py",
}
"""Pages whose commands a test runs that has its own way of finding them."""
DIAGRAMS = {"docs/architecture.md"}
RUN_HERE = {"validate", "data", "estimate", "explain"}
"""Of the others, which take long or need a cluster, the arguments alone are read here."""
RUN_ON_CLUSTERS = {"submit", "list", "status", "logs", "fork", "reproduce", "download", "doctor"}
"""By tests/unit/finetune_cli/commands/test_download.py as README has them, `doctor` by tests/e2e/test_doctor.py; what else is not
run here is run by tests/e2e/test_documented_lines.py."""
CLUSTER_COMMANDS = (
    r"kubectl (apply -f examples/\S+|get (ftj|finetunejobs?|endpointslices) .*|get ftj -w|create secret generic .*)"
    r"|kubectl -n NS (describe|get) finetunejob JOB.*"
    r"|helm (install|test) finetune.*|openssl .*"
)
"""Lines whose like are run in tests/integration; that files and settings in them exist is seen here."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    heading: str
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Commands, continued lines joined, without comments."""
        joined = self.text.replace("\\\n", " ")
        return [text for line in joined.splitlines() if (text := re.sub(r"\s+#\s.*", "", line).strip())]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        headings = re.findall(r"^## (.+)$", text[: match.start()], re.MULTILINE)
        inner = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        yield Block(str(page.relative_to(ROOT)), headings[-1] if headings else "", match[2], inner)


FOLLOWERS = {
    path: source
    for folder in ("integration", "e2e")
    for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
    if "blocks_of(" in (source := path.read_text())
}


def is_followed(block: Block) -> bool:
    """Whether a test runs it as a reader would."""
    for place, test in FOLLOWED.items():
        if block.page.startswith(place):
            return (ROOT / test).is_file()
    name = block.page.rpartition("/")[2] if block.page != "charts/finetune-operator/README.md" else block.page
    return any(name in source and f'"{block.heading}"' in source for source in FOLLOWERS.values())


BLOCKS = [block for page in PAGES for block in blocks(page)]
TRIED = [
    block for block in BLOCKS if not (block.language in ("sh", "promql") and is_followed(block)) and block.page not in DIAGRAMS
]


def names(listed: list[Block]) -> list[str]:
    return [f"{block.page}-{block.lines[0][:40]}" for block in listed]


def test_what_is_followed_is_most() -> None:
    """A test that is renamed is noticed."""
    assert sum(block.language == "sh" for block in BLOCKS) - sum(block.language == "sh" for block in TRIED) > 35
    assert all((ROOT / test).is_file() for test in FOLLOWED.values())
    assert {block.page for block in BLOCKS if block.language == "sh" and is_followed(block)} >= {
        "docs/getting-started.md",
        "docs/release.md",
        "docs/platform/install.md",
    }


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands of README find `job.yaml`, the directory DIR and `path/to/model`."""
    write(tmp_path / "DIR/data/train.jsonl", [chat("a")])
    for model in ("DIR/models/base", "path/to/model"):
        byte_tokenizer(["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>").save_pretrained(tmp_path / model)
        (tmp_path / model / "config.json").write_text(json.dumps(CONFIGS["Qwen2.5-0.5B"] | {"dtype": "bfloat16"}))
    (tmp_path / "DIR/config.json").write_text(json.dumps(CONFIGS["Qwen2.5-0.5B"] | {"dtype": "bfloat16"}))
    (tmp_path / "job.yaml").write_text(manifest())
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", TRIED, ids=names(TRIED))
def test_a_block_is_run_or_is_of_a_known_kind(block: Block, desk: Path) -> None:
    if block.language in ("sh", "console", ""):
        for line in block.lines:
            try_command(line)
    elif block.language == "json":
        for line in block.text.splitlines():
            json.loads(line)
    elif block.language == "dockerfile":
        installed = re.search(r"pip install --target \S+ ([^&]+) &&", block.text)
        assert installed is not None
        assert set(installed[1].split()) == {"wandb", "mlflow-skinny", "sqlalchemy", "alembic"}, (
            "another set than the test installs"
        )
        assert all(path in (ROOT / "trainer_image/Containerfile").read_text() for path in ("/opt/finetune/venv", "python3.11"))
    else:
        assert block.language == "yaml", f"{block.page}: a block in {block.language!r}, which no test tries"
        for document in yaml.safe_load_all(block.text):
            try_document(document)


def try_command(line: str) -> None:
    program, *arguments = shlex.split(re.sub(r"^(kubectl |\.venv/bin/)finetune ", "finetune ", line), comments=True)
    if program == "finetune":
        try_finetune(arguments)
    elif program == "make":
        targets = [word for word in arguments if "=" not in word]
        done = subprocess.run(["make", "-n", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert targets
    else:
        assert re.fullmatch(CLUSTER_COMMANDS, line), f"no test runs: {line}"
        assert all((ROOT / file).exists() for file in re.findall(r"(?:examples|charts)/\S+", line))
        assert all(is_a_value(name) for name in re.findall(r"(?:--set |,)([a-zA-Z.]+)=", line))


def is_a_value(name: str) -> bool:
    node: Any = json.loads(values_schema.FILE.read_text())
    for part in name.split("."):
        node = node["properties"].get(part)
        if node is None:
            return False
    return True


def try_finetune(arguments: list[str]) -> None:
    verb = arguments[0]
    if verb == "explain":
        arguments = [verb, "Stalled" if arguments[1:] == ["WORD"] else arguments[1]]
    group: Any = typer.main.get_command(app)
    context = group.make_context("finetune", [], resilient_parsing=True)
    command = group.get_command(context, verb)
    assert command is not None, f"finetune has no command {verb}"
    if verb in RUN_HERE and not any(each.startswith("job/") for each in arguments):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        # "what fits", as README says of this line.
        assert "--gpu" not in arguments or re.search(r"limit +79\.0 GiB  of one H100\n +fits ", done.output), done.output
        return
    assert verb in RUN_ON_CLUSTERS or verb in LINES or arguments[-1].startswith("job/"), f"no test runs {verb} as it is written"
    # Raises an error for an option that there is not, and for an argument that is missing.
    command.make_context(verb, list(arguments[1:]), parent=context)


def try_document(document: Any) -> None:
    if "kind" not in document:
        schema = json.loads(values_schema.FILE.read_text())
        # Values of the chart, or a part of a profile's.
        values = document if document.keys() & schema["properties"].keys() else {"profiles": {"default": document}}
        jsonschema.validate(values, schema)
    elif document["kind"] == "FineTuneProfile":
        FineTuneProfile.model_validate(document)
    else:
        assert document["apiVersion"] == "rbac.authorization.k8s.io/v1"
        assert document["kind"] in ("ClusterRole", "Role")
        groups = {group for rule in document["rules"] for group in rule["apiGroups"]}
        assert groups <= {"", "apps", "finetune.dev", "networking.k8s.io", "storage.k8s.io"}


def test_commands_within_sentences_are_there() -> None:
    verbs = set(typer.main.get_command(app).commands)
    makefile = (ROOT / "Makefile").read_text()
    targets = {name for line in re.findall(r"^([a-z][a-z0-9 -]*):", makefile, re.MULTILINE) for name in line.split()}
    for page in PAGES:
        written = page.read_text()
        assert set(re.findall(r"`(?:kubectl )?finetune ([a-z]+)", written)) - verbs == set(), page
        assert set(re.findall(r"`make ([a-z][a-z-]+)", written)) - targets == set(), page


def test_lines_that_people_write_are_at_most_130_wide() -> None:
    too_wide = []
    for page in PAGES:
        written, is_code = page.read_text(), False
        if "Generated" in written[:500]:
            continue
        for number, line in enumerate(written.splitlines(), start=1):
            is_code ^= line.lstrip().startswith("```")
            if len(line) > 130 and not is_code and not line.startswith("|"):
                too_wide.append(f"{page.relative_to(ROOT)}:{number}")
    assert too_wide == []


@pytest.mark.parametrize(
    "line",
    [
        "finetune validate --filename job.yaml --colour",
        "finetune tune job.yaml",
        "finetune merge --base DIR",
        "make nothing-of-this-name",
        "frobnicate --all",
        "helm install finetune charts/finetune-operator --set image.digets=x",
        "kubectl apply -f examples/none.yaml",
    ],
)
def test_a_command_that_there_is_not_is_seen(line: str, desk: Path) -> None:
    with pytest.raises(Exception, match=r"no test runs|no command|No such option|Missing parameter|No rule|assert"):
        try_command(line)
