"""What a look at each character says of a regular expression is what `re.compile` says, and no tenant's expression is
compiled."""

import ast
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from finetune_job.module_expressions import is_plainly_malformed, key_expression
from tests.support.examples import examples

OPERATOR = Path(__file__).parents[3] / "operator"
COMPILES = (
    "finetune_memory/adapters.py",
    "finetune_memory/devices.py",
    "finetune_cli/corrections/addresses.py",
    "finetune_cli/corrections/proposals.py",
)
"""Estimates and corrections, which `finetune` makes on the machine of the one who wrote the manifest, and preflight. Corrections
compile the patterns of our own schema alone, and devices.py those of our own table."""


@pytest.mark.parametrize(
    "text",
    ["(q", "q)", "q_proj(", "[q", "[]q", "[^]q", "q\\", "[q\\]", "*.q_proj", "+q", "a|*b", "(*q)", "((a)", "a)(b", "(a))("],
)
def test_plain_faults_are_seen(text: str) -> None:
    with pytest.raises(re.error):
        re.compile(text)
    assert is_plainly_malformed(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "q_proj", r"layers\.(0|1)\..*", "[(]", "[]()]", "[^](]", r"\(", r"[\]]", "a(?#()", "(?x) # (", "(?:a)*", "[a-]"),
        *("(?(1)a|b)()", "[--]]", "a|b", "(?P<a>.)(?P=a)", "a{,2}", "{", "}", "]", r"\\(a)", "(?ix:a # )\n)"),
    ],
)  # fmt: skip
def test_what_may_compile_is_left_to_preflight(text: str) -> None:
    assert not is_plainly_malformed(text)


PIECES = st.lists(
    st.sampled_from([*"()[]{}|*+?^$ab-:#xiP<>=!.,1\\\n", "(?", "(?:", "(?#", "(?x)", "(?i:", "(?P<a>", "[^", "[]", r"\d", "{1,}"])
).map("".join)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=examples(600, 3000), deadline=None)
@given(PIECES)
@example("(?x)#(")
@example("(?#[)")
def test_nothing_that_compiles_is_taken_for_malformed(text: str) -> None:
    for expression in (text, key_expression(text)):
        if is_plainly_malformed(expression):
            with pytest.raises((re.error, OverflowError, RecursionError)):
                re.compile(expression)


def test_a_key_is_judged_inside_of_what_peft_makes_of_it() -> None:
    assert not is_plainly_malformed(key_expression("a)(b"))
    assert is_plainly_malformed(key_expression("a\\"))


def _is_ours(node: ast.expr) -> bool:
    """Whether an expression is written in the sources: a literal, or a constant of a module."""
    if isinstance(node, ast.JoinedStr):
        return all(_is_ours(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _is_ours(node.func.value)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


def test_the_operator_compiles_no_expression_that_is_not_written_in_its_sources() -> None:
    found = []
    for path in sorted(OPERATOR.rglob("*.py")):
        if path.as_posix().endswith(COMPILES):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name in ("eval", "exec", "compile", "ast.literal_eval", "fnmatch.fnmatch") or name.startswith("jinja2."):
                found.append(f"{path.relative_to(OPERATOR)}:{node.lineno}: {name}")
            is_of_re = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "re"
            if is_of_re and name != "re.escape" and not _is_ours(node.args[0]):
                found.append(f"{path.relative_to(OPERATOR)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
