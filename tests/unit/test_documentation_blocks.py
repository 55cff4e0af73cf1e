"""Every command and every block of code of the pages is executed by a test that is named, or it is said why none does so.

The list is tests/support/documented_by.yaml; what it says of a test is checked when that test has run. Executed here are the
commands that need no cluster, no torch and no GPU.
"""

import ast
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from finetune_cli.app import app
from finetune_cli.checks.validate import validate
from tests import suites
from tests.support import documented_by
from tests.support.cases import table
from tests.support.documented import PAGES, ROOT, Block, as_written, blocks_of, indented_blocks_of, spans_of
from tests.support.documented_by import BLOCKS, LINES, NAMES
from tests.unit.finetune_cli.commands.test_data import chat, manifest, write
from tests.unit.finetune_memory.configs import CONFIGS
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer

ENTRIES = {**BLOCKS, **LINES}
PROGRAMS, NO_COMMANDS = set(table(__file__, "PROGRAMS")), set(table(__file__, "NO_COMMANDS"))
OF_OTHER_PRODUCTS = {"accelerate", "axolotl", "llamafactory-cli", "trl"}
"""Commands of other products, with which docs/reference/coming-from.md compares ours."""
NEED_VARIABLES = {"krew-bundle", "push", "release"}
"""Targets that say so if they are called without."""
FINETUNE: Any = typer.main.get_command(app)


def blocks() -> list[Block]:
    return [block for page in PAGES for block in [*blocks_of(page, None), *indented_blocks_of(page)]]


def spans() -> dict[str, list[str]]:
    """What is code within sentences, and on which pages."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for span in spans_of(page):
            found.setdefault(span, []).append(str(page.relative_to(ROOT)))
    return found


def is_command(span: str) -> bool:
    """Whether it has to be in one of the lists: a program with two words after it, or a target of make."""
    first, *rest = span.split()
    return first in PROGRAMS and (len(rest) > 1 or (first == "make" and len(rest) == 1))


def unlisted() -> Iterator[str]:
    """Commands and blocks that no list has."""
    for block in blocks():
        if block.key not in BLOCKS:
            yield from (f"{block.page}:{block.line}: {line}" for line in block.commands if line not in LINES)
    for span, places in spans().items():
        if is_command(span) and span not in LINES and span not in NAMES:
            yield f"{places[0]}: {span}"


def test_every_command_is_in_the_list() -> None:
    assert list(unlisted()) == []


def test_the_list_has_nothing_that_no_page_has() -> None:
    there = {block.key for block in blocks()} | {line for block in blocks() for line in block.commands} | set(spans())
    assert ENTRIES.keys() - there == set()
    assert NAMES - spans().keys() == set()
    assert NO_COMMANDS - spans().keys() == set()
    assert NAMES & LINES.keys() == set()


def test_two_blocks_are_not_one() -> None:
    """An entry for a whole block stands for one block alone."""
    assert [key for key, count in Counter(block.key for block in blocks() if block.key in BLOCKS).items() if count > 1] == []


def test_what_looks_like_a_command_is_known_as_one_or_as_none() -> None:
    """A program that nobody has thought of here is noticed."""
    verbs = set(FINETUNE.commands)
    unknown = {
        span
        for span in spans()
        if re.fullmatch(r"[A-Za-z][\w./-]*", span.split()[0]) and " " in span and not span.startswith(("http", "Queue "))
        if span.split()[0] not in PROGRAMS | OF_OTHER_PRODUCTS | verbs and span not in NO_COMMANDS
    }
    assert unknown == set()


def test_every_fence_is_read() -> None:
    """One that the expression does not match would hide its commands."""
    for page in PAGES:
        text = page.read_text()
        fences = re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE)
        assert len(fences) == 2 * len(blocks_of(page, None)), page


@functools.cache
def functions_of(path: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}


def test_the_tests_are_there_and_what_they_replace_is_in_the_page() -> None:
    texts = {block.key: block.text for block in blocks()} | {line: line for line in LINES}
    for key, entry in ENTRIES.items():
        if entry.test:
            path, _, name = entry.test.partition("::")
            assert name in functions_of(path), entry.test
            assert [word for word in entry.words | entry.played if word not in texts[key]] == [], key


def test_each_entry_says_one_thing_and_most_are_executed_letter_by_letter() -> None:
    for name in ("blocks", "lines"):
        for key, row in table(documented_by.__file__, name).items():
            assert row.keys() <= {"by", "words", "played", "make", "untested"}, key
    for key, entry in ENTRIES.items():
        assert bool(entry.test) + bool(entry.make) + (len(entry.untested) > 8) == 1, key
    assert sum(bool(entry.untested) for entry in ENTRIES.values()) < len(ENTRIES) / 4
    letter_by_letter = [entry for entry in ENTRIES.values() if entry.test and not entry.words and not entry.played]
    assert len(letter_by_letter) > 0.45 * len(ENTRIES)


def test_what_a_target_of_make_runs_is_a_part_of_it() -> None:
    """`make nightly` runs these lines; the suites of `make test` are these."""
    shown = subprocess.run(["make", "-n", "-C", ROOT, "nightly"], capture_output=True, text=True, check=True).stdout
    nightly = set(re.split(r"\s+", shown))
    of_suites = {suite.name for group in suites.GROUPS for suite in group.suites}
    for line, entry in ENTRIES.items():
        if entry.make:
            target = line.split()[1]
            assert target in nightly if entry.make == "nightly" else target.removeprefix("test-") in of_suites, line


def test_targets_and_programs_that_the_lists_name_exist() -> None:
    """Also in commands that no test executes."""
    named = {match[1] for span in spans() if (match := re.match(r"make ([a-z-]+)", span))}
    shown = subprocess.run(
        ["make", "-n", "-C", ROOT, *sorted(named - NEED_VARIABLES)], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    for line in [*spans(), *(line for block in blocks() for line in block.commands)]:
        if line not in NO_COMMANDS and (
            match := re.match(r"(?:\S*python3?|\.venv/bin/python) (?:-P )?(?:-m ([\w.]+)|(\S+\.py))", line)
        ):
            part = match[1].replace(".", "/") if match[1] else match[2]
            places = [ROOT / folder / part for folder in ("", "operator", "trainer_image")]
            assert any(place.is_file() or place.is_dir() or place.with_suffix(".py").is_file() for place in places), line


def test_commands_that_are_named_have_these_verbs_and_options() -> None:
    context = FINETUNE.make_context("finetune", [], resilient_parsing=True)
    for span in spans():
        match = re.match(r"(?:kubectl )?finetune ([a-z]+)((?: .*)?)$", span)
        if match is None:
            continue
        command = FINETUNE.get_command(context, match[1])
        assert command is not None, span
        options = {name for option in command.params for name in [*option.opts, *option.secondary_opts]}
        assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", match[2])) - options == set(), span


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """Where the pages' commands find `job.yaml`, the directory DIR and `path/to/model`."""
    write(tmp_path / "DIR/data/train.jsonl", [chat("a")])
    for model in ("DIR/models/base", "path/to/model"):
        byte_tokenizer(["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>").save_pretrained(tmp_path / model)
        (tmp_path / model / "config.json").write_text(json.dumps(CONFIGS["Qwen2.5-0.5B"] | {"dtype": "bfloat16"}))
    (tmp_path / "DIR/config.json").write_text(json.dumps(CONFIGS["Qwen2.5-0.5B"] | {"dtype": "bfloat16"}))
    (tmp_path / "job.yaml").write_text(manifest())
    (tmp_path / "runs").mkdir()
    # The default place of claims.
    (tmp_path / "runs/claims").symlink_to(tmp_path / "DIR")
    return tmp_path


def run(directory: Path, line: str, *, code: int = 0) -> str:
    """A line in a shell, as a reader types it; what it prints."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    modules = os.pathsep.join(str(ROOT / folder) for folder in ("operator", "trainer_image", ""))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=directory,
        env=os.environ | {"PATH": path, "PYTHONPATH": modules},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_commands_that_need_no_cluster_are_run_as_they_are_written(desk: Path) -> None:
    assert "accepted" in run(desk, as_written("finetune validate -f job.yaml"))
    assert "kind: FineTuneJob" in run(desk, as_written("finetune validate --fix -f job.yaml"))
    for line in ("finetune data -f job.yaml", "finetune data -f job.yaml --claims DIR"):
        # "the first records: template, mask, lengths, repetitions"
        said = run(desk, as_written(line))
        assert "1 record" in said
        assert "[[" in said, line
    # "what fits", as the page says of this line.
    fits = run(desk, as_written("finetune estimate -f job.yaml --model DIR --gpu H100"))
    assert re.search(r"limit +79\.0 GiB  of one H100\n +fits ", fits), fits
    limited = run(desk, as_written("finetune estimate -f job.yaml --model path/to/model --gpu-memory 80Gi"))
    assert re.search(r"limit +80\.0 GiB  --gpu-memory\n", limited), limited
    assert "GiB" in run(desk, as_written("finetune estimate -f job.yaml"))
    # "what a word of ours means, its test, the fix"
    said = run(desk, as_written("finetune explain WORD", {"WORD": "Stalled"}))
    assert "Stalled" in said
    assert "audit-interval-differs" in run(desk, as_written("finetune explain audit-interval-differs"))
    refused = ROOT / "examples/refused/qlora-8-bit-fsdp1.yaml"
    said = run(desk, as_written("finetune validate FILE", {"FILE": shlex.quote(str(refused))}), code=1)
    assert "quantization-bits" in said


GENERATORS = {
    "coming-from": "tools.pages.coming_from",
    "commands": "tools.pages.commands",
    "fields": "tools.pages.fields",
    "findings": "tools.pages.findings",
    "rules": "tools.pages.rules",
    "failures": "finetune_operator.decide.failures.table",
    "pitfalls": "tests.pitfalls.catalogue",
}


@pytest.mark.nightly
def test_a_generator_writes_its_page_as_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "docs/reference").mkdir(parents=True)
    for name, module in GENERATORS.items():
        page = f"docs/reference/{name}.md"
        line = as_written(f"python -m {module} > {page}")
        run(tmp_path, line)
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), f"{name}: run {line}"
    # This one finds the page, and what it reads, from its own place. With their bytecode files are as new as they were.
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    run(tmp_path, as_written("python -m tests.sweep.methods_table"))
    assert (tmp_path / "docs/reference/methods.md").read_text() == (ROOT / "docs/reference/methods.md").read_text()


def is_part_of(part: Any, whole: Any) -> bool:
    """Whether a document has nothing that the other has not."""
    if isinstance(part, dict):
        return all(name in whole and is_part_of(value, whole[name]) for name, value in part.items())
    return bool(part == whole)


def test_a_block_that_no_shell_reads_is_what_it_says(desk: Path) -> None:
    """README's job is that of the example; a record is learnt from; an image of one's own has what a test installs."""
    (job,) = blocks_of(ROOT / "README.md", "yaml")
    assert [finding for verdict in validate(as_written(job)).verdicts for finding in verdict.findings] == []
    shown, example = yaml.safe_load(job.text), yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())
    assert is_part_of(shown, example)
    (record,) = blocks_of(ROOT / "docs/tutorial/getting-started.md", "json")
    (desk / "DIR/data/train.jsonl").write_text(as_written(record))
    said = run(desk, "finetune data -f job.yaml --claims DIR")
    assert "1 record" in said
    assert "[[Which order is it?" in said
    (image,) = blocks_of(ROOT / "docs/how-to/training.md", "dockerfile")
    installed = re.search(r"pip install --target \S+ ([^&]+) &&", image.text)
    assert installed is not None
    assert set(installed[1].split()) == {"wandb", "mlflow-skinny", "sqlalchemy", "alembic"}, "another set than the test installs"
    containerfile = (ROOT / "trainer_image/Containerfile").read_text()
    assert all(path in containerfile for path in ("/opt/finetune/venv", "python3.11"))


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
