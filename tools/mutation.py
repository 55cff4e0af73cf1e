"""`python -m tools.mutation --count 100`: change the pure packages in one place at a time, and check that a unit test fails.

cosmic-ray makes the mutants. This program draws a random sample (and prints its seed), applies each to a copy of the tree, and
runs the unit tests of the changed module there. Mutants that no test notices are printed as a diff. The score of a run over
all packages is added to bench/results/mutation.json.

mutmut 3.8 cannot be used: it names a module by its path, so it calls those below `operator/` `operator.finetune_job...` and finds
no test that reaches them.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "mutation.json"
PURE = ("finetune_job", "finetune_memory", "finetune_operator/decide")
"""Folders below `operator/` without effects: their tests take seconds and depend on nothing else."""
OPERATORS = (
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Div")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Is_IsNot", "IsNot_Is")),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "AddNot"),
    *("ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub", "NumberReplacer", "ExceptionReplacer"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
)
"""Changes that a person could make by mistake. cosmic-ray's other operators mostly break the import or change only types."""
SPARE_SECONDS = 60.0
"""Tests with a mutant may take three times as long as without it, plus this time."""
_PYTEST = ("-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not nightly")


@dataclass(frozen=True)
class Mutant:
    """One change in one module."""

    module: str
    """The path of the module below `operator/`."""
    operator: str
    occurrence: int
    """Index of the changed place among all places of the module where the operator applies."""

    @property
    def path(self) -> Path:
        """The path of the module in a tree."""
        return Path("operator", self.module)

    def applied(self, source: str) -> str:
        """Return the changed source."""
        from cosmic_ray.mutating import mutate_code

        changed: str | None = mutate_code(source, _operator(self.operator), self.occurrence)
        assert changed is not None, self
        return changed


@cache
def _operator(name: str) -> Any:
    from cosmic_ray.plugins import get_operator

    return get_operator(f"core/{name}")()


def mutants_of(module: str) -> Iterator[Mutant]:
    """Yield the mutants of a module, named by its path below `operator/`. Decorators are left out: they change no result."""
    from cosmic_ray.ast import ast_nodes, get_ast

    source = (ROOT / "operator" / module).read_text(encoding="utf-8")
    decorators = {number for number, line in enumerate(source.splitlines(), 1) if line.lstrip().startswith("@")}
    nodes = list(ast_nodes(get_ast(source)))
    for operator in OPERATORS:
        places = [start for node in nodes for start, _ in _operator(operator).mutation_positions(node)]
        yield from (Mutant(module, operator, number) for number, (line, _) in enumerate(places) if line not in decorators)


def modules(only: Sequence[str] = ()) -> list[str]:
    """List the modules of the pure packages whose path begins with one of `only`, or all of them."""
    paths = [path for folder in PURE for path in sorted((ROOT / "operator" / folder).rglob("*.py"))]
    names = [str(path.relative_to(ROOT / "operator")) for path in paths]
    return [name for name in names if not only or name.startswith(tuple(only))]


def tests_of(module: str) -> tuple[list[str], list[str]]:
    """List the test files of a module: those that have its name or import it, and the others in its folder."""
    folder = ROOT / "tests" / "unit" / Path(module).parent
    while not list(folder.glob("test_*.py")):
        folder = folder.parent
    dotted = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = dotted.rpartition(".")
    imports = re.compile(rf"^(from {re.escape(dotted)} import|from {re.escape(package)} import .*\b{name}\b)", re.MULTILINE)
    unit_tests = sorted((ROOT / "tests" / "unit" / module.split("/", maxsplit=1)[0]).rglob("test_*.py"))
    named = sorted(folder.glob(f"test_{Path(module).stem}*.py"))
    near = [*named, *(path for path in unit_tests if path not in named and imports.search(path.read_text(encoding="utf-8")))]
    others = [path for path in sorted(folder.glob("test_*.py")) if path not in near]
    return [str(path.relative_to(ROOT)) for path in near], [str(path.relative_to(ROOT)) for path in others]


class Copy:
    """A copy of the tree, in which modules are changed and tested."""

    def __init__(self, directory: Path) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
        )
        for name in listed.stdout.decode().split("\0"):
            if (source := ROOT / name).is_file() and name:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, directory / name)
        self._directory = directory
        self._seconds: dict[tuple[str, ...], float] = {}
        """How long tests take without a mutant."""

    def passes(self, tests: Sequence[str], limit: float | None = None) -> bool:
        """Run tests, and return whether all pass within the limit of seconds."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(self._directory / folder) for folder in ("operator", "trainer_image", ".")),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, *_PYTEST, *tests]
        process = subprocess.Popen(
            command, cwd=self._directory, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
        try:
            return process.wait(limit) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()

    def notices(self, mutant: Mutant) -> bool:
        """Return whether a test fails or times out with the mutant.

        Raises:
            SystemExit: the tests fail without the mutant.
        """
        return any(self._fails(mutant, tests) for tests in tests_of(mutant.module) if tests)

    def _fails(self, mutant: Mutant, tests: Sequence[str]) -> bool:
        if (known := tuple(tests)) not in self._seconds:
            started = time.monotonic()
            if not self.passes(tests):
                sys.exit(f"without a mutant, tests of {mutant.module} fail: pytest {' '.join(tests)}")
            self._seconds[known] = time.monotonic() - started
        path = self._directory / mutant.path
        source = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(source), encoding="utf-8")
        try:
            return not self.passes(tests, 3 * self._seconds[known] + SPARE_SECONDS)
        finally:
            path.write_text(source, encoding="utf-8")


def difference(mutant: Mutant) -> str:
    """Return what the mutant changes, as a diff without context."""
    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    lines = difflib.unified_diff(source.splitlines(), mutant.applied(source).splitlines(), n=0, lineterm="")
    return "\n".join(list(lines)[2:])


def score(mutants: Sequence[Mutant], survivors: Sequence[Mutant]) -> dict[str, str]:
    """Return for each package how many of its mutants were noticed, as `noticed/all`."""
    scores = {}
    for folder in PURE:
        drawn, missed = (sum(mutant.module.startswith(f"{folder}/") for mutant in group) for group in (mutants, survivors))
        scores[folder] = f"{drawn - missed}/{drawn}"
    return scores


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw mutants and test each. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=None, help="seed of the draw; default: the current time")
    parser.add_argument("--only", nargs="*", default=[], metavar="PATH", help="modules below operator/: finetune_memory/pace.py")
    options = parser.parse_args(arguments)
    seed = int(time.time()) if options.seed is None else options.seed
    mutants = [mutant for module in modules(options.only) for mutant in mutants_of(module)]
    drawn = random.Random(seed).sample(mutants, min(options.count, len(mutants)))
    print(f"{len(drawn)} of {len(mutants)} mutants, seed {seed}", flush=True)
    survivors: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        copy = Copy(Path(directory))
        for mutant in sorted(drawn, key=lambda mutant: mutant.module):
            if not copy.notices(mutant):
                survivors.append(mutant)
                print(f"not noticed: {mutant.path}, {mutant.operator}\n{difference(mutant)}", flush=True)
    share = 1 - len(survivors) / max(1, len(drawn))
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} mutants were noticed ({share:.0%}); seed {seed}")
    if not options.only:
        known: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
        run = {
            "date": datetime.now(UTC).date().isoformat(),
            "seed": seed,
            "noticed": score(drawn, survivors),
            "survivors": [f"{mutant.module} {' '.join(difference(mutant).split())}" for mutant in survivors],
        }
        RESULTS.write_text(json.dumps([*known, run], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
