"""What the command line loads: nothing that costs time for nothing, and rich only where something is drawn."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEAVY = {
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "kubernetes",
    "kopf",
    "prometheus_client",
    "aiohttp",
    "rich",
    "numpy",
    "jinja2",
    "requests",
    "oauthlib",
}
UNUSED = {
    "importlib.metadata",  # by which pydantic looks for plugins
    "finetune_job.api.documentation",
    "finetune_cli.corrections.one_pass",
    "finetune_cli.render.estimate",
}
"""Modules that a manifest without mistakes does not need."""
PROGRAM = """
import json, sys
from finetune_cli.__main__ import main
sys.argv = ["finetune", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit as end:
    print(json.dumps([end.code, sorted({name.partition(".")[0] for name in sys.modules})]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", "-f", "examples/quickstart.yaml"],
        ["validate", "-f", "examples/quickstart.yaml", "-o", "json"],
        ["validate", "-f", "examples/quickstart.yaml", "--fix"],
        ["explain"],
        ["explain", "spec.training.learningRate"],
    ],
)
def test_no_heavy_library_is_loaded(arguments: list[str]) -> None:
    program = PROGRAM.replace('{name.partition(".")[0] for name in sys.modules}', "sys.modules")
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    code, names = json.loads(done.stderr)
    modules = {name.partition(".")[0] for name in names}
    assert code in (0, None)
    assert HEAVY & modules == set()
    assert "yaml" in modules
    assert arguments[0] != "validate" or "--fix" in arguments or UNUSED & set(names) == set()


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["completion", "bash"], ["merge", "--help"]])
def test_what_needs_no_rules_loads_none(arguments: list[str]) -> None:
    program = PROGRAM.replace('name.partition(".")[0] for name in', "name for name in")
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code in (0, None)
    assert {"finetune_job.rules.book", "finetune_job.api.job", "finetune_cli.documents"} & set(modules) == set()
    # Of the others typer itself reads the values of options by pydantic.
    assert "pydantic" not in modules or not arguments[0].startswith("--")
    assert HEAVY & {name.partition(".")[0] for name in modules} == set()


def test_the_release_is_said() -> None:
    done = subprocess.run([sys.executable, "-m", "finetune_cli", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"finetune \d+\.\d+\.\d+\S*\n", done.stdout)


ENTRY = """
import sys
from finetune_cli.__main__ import main
sys.argv[0] = "finetune"
main()
"""


@pytest.fixture
def on_path(tmp_path: Path) -> dict[str, str]:
    """An environment in which `finetune` is the program of these sources."""
    program = tmp_path / "finetune"
    program.write_text(f"#!{sys.executable}\n{ENTRY}")
    program.chmod(0o755)
    sources = os.pathsep.join([str(ROOT / "operator"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": sources}


def test_bash_completes_words(on_path: dict[str, str]) -> None:
    cases = {"finetune val": "validate", "finetune completion z": "zsh", "finetune validate --pro": "--profile"}
    script = "source <(finetune completion bash); function=$(complete -p finetune | sed -E 's/.*-F ([^ ]+) .*/\\1/')\n" + "".join(
        f"COMP_WORDS=({line}); COMP_CWORD={len(line.split()) - 1}; $function finetune; echo ${{COMPREPLY[@]}}\n" for line in cases
    )
    done = subprocess.run(["bash", "-c", script], env=on_path, capture_output=True, text=True, timeout=120, check=True)
    for found, expected in zip(done.stdout.splitlines(), cases.values(), strict=True):
        assert expected in found.split(), done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(on_path: dict[str, str], shell: str) -> None:
    done = subprocess.run(["finetune", "completion", shell], env=on_path, capture_output=True, text=True, check=True)
    assert "finetune" in done.stdout
    assert f"_FINETUNE_COMPLETE=complete_{shell}" in done.stdout


def on_terminal(environment: dict[str, str], *arguments: str) -> str:
    """What a command prints on a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "finetune_cli", *arguments], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 65_536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            shown += chunk
        process.wait(60)
    os.close(ours)
    return shown.decode()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["explain", "no-such-word"], ["merge"], ["validate", "-f", "README.md"], ["run", "README.md"]]
)
def test_without_colours_nothing_is_emphasised(arguments: list[str]) -> None:
    shown = on_terminal({**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color", "FORCE_COLOR": ""}, *arguments)
    assert shown
    assert "\x1b[" not in shown


def test_the_start_does_no_needless_work() -> None:
    """No collection of what stays loaded, no signature of another verb, and no validator of a default nobody has asked for."""
    program = PROGRAM.replace(
        '[end.code, sorted({name.partition(".")[0] for name in sys.modules})]',
        "[[each.callback.__name__ for each in sys.modules['finetune_cli.app'].app.registered_commands], "
        "len(sys.modules['finetune_cli.app'].app.registered_groups), "
        "sys.modules['finetune_job.api.profile'].NetworkSettings.__pydantic_complete__, "
        "__import__('gc').isenabled(), __import__('gc').get_freeze_count()]",
    )
    arguments = json.dumps(["validate", "-f", "examples/quickstart.yaml"])
    done = subprocess.run(
        [sys.executable, "-c", program, arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    verbs, groups, is_built, collects, frozen = json.loads(done.stderr)
    assert (verbs, groups) == (["validate"], 0)
    assert not is_built
    assert collects
    assert frozen > 10_000


def test_the_end_goes_through_nothing_that_was_loaded() -> None:
    first = "import atexit, gc, sys\natexit.register(lambda: print(len(gc.get_objects()), *gc.get_threshold(), file=sys.stderr))"
    arguments = json.dumps(["validate", "-f", "examples/quickstart.yaml"])
    done = subprocess.run(
        [sys.executable, "-c", first + PROGRAM, arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    left, new, *_ = map(int, done.stderr.splitlines()[-1].split())
    assert left < 1_000
    assert new > 10_000


def test_hundreds_of_manifests_are_judged_in_one_call(tmp_path: Path) -> None:
    text = (ROOT / "examples/quickstart.yaml").read_text()
    many = tmp_path / "many.yaml"
    many.write_text("---\n".join(text.replace("name: quickstart", f"name: job-{number}") for number in range(300)))
    done = subprocess.run(
        [sys.executable, "-m", "finetune_cli", "validate", "-f", str(many), "-o", "json"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    documents = json.loads(done.stdout)["documents"]
    assert [(each["outcome"], each["name"]) for each in documents] == [("accepted", f"job-{number}") for number in range(300)]


@pytest.mark.parametrize(
    ("arguments", "code", "said", "needed"),
    [
        (["list"], 2, "no usable kubeconfig", "kubernetes.client"),
        (["list", "--claims", "nowhere"], 0, "no job was run below nowhere", "finetune_cli.local.known_runs"),
    ],
    ids=["cluster", "this machine"],
)
def test_a_look_at_jobs_loads_no_more_than_it_needs(
    arguments: list[str], code: int, said: str, needed: str, tmp_path: Path
) -> None:
    program = PROGRAM.replace('{name.partition(".")[0] for name in sys.modules}', "sys.modules")
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "absent")}
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    *message, answer = done.stderr.splitlines()
    ended, modules = json.loads(answer)
    assert ended == code
    assert said in "\n".join([done.stdout, *message])
    assert needed in modules
    heavy = {
        "finetune_job.rules.book",
        "finetune_cli.checks.validate",
        "finetune_cli.jobs.diagnosis",
        "finetune_operator.decide.account",
        "finetune_operator.decide.restart_policy",
        "kopf",
        "aiohttp",
        "rich",
        "requests",
        "charset_normalizer",
        "oauthlib.oauth2.rfc6749",
        "kubernetes.stream",
        "kubernetes.watch",
        *({"kubernetes"} - {needed.partition(".")[0]}),
    }
    assert heavy & set(modules) == set()
