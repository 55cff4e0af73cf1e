"""A command loads no library that takes a second, unless it needs it."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import table

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "transformers", "peft", "accelerate", "kubernetes", "kopf", "prometheus_client", "aiohttp", "numpy", "jinja2"}
PROGRAM = """
import json, sys
from finetune_cli.__main__ import main
sys.argv = ["finetune", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit as end:
    print(json.dumps([end.code, sorted(sys.modules)]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "said", "needed", "unneeded"), table(__file__, "test_a_command_loads_no_more_than_it_needs")
)
def test_a_command_loads_no_more_than_it_needs(
    arguments: list[str], code: int, said: str, needed: str, unneeded: list[str], tmp_path: Path
) -> None:
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "absent")}
    command = [sys.executable, "-c", PROGRAM, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
    *message, answer = done.stderr.splitlines()
    ended, modules = json.loads(answer)
    assert (ended or 0) == code
    assert said in "\n".join([done.stdout, *message])
    assert needed in modules
    libraries = {name.partition(".")[0] for name in modules}
    assert (HEAVY - {needed.partition(".")[0]}) & libraries == set()
    assert set(unneeded) & set(modules) == set()


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
