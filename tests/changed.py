"""Which tests a change needs: `git diff --name-only main | python tests/changed.py`; CI runs all."""

import sys
from pathlib import Path

TESTS_OF = {
    "amp/compat": ["tests/compat"],
    "amp/diagnosis": ["tests/diagnosis", "tests/trials", "tests/test_hurried_mistakes.py"],
    "amp/integrations": ["tests/integrations"],
    "amp/numerics": ["tests/numerics"],
    "amp/terminal": ["tests/trials", "tests/test_hurried_mistakes.py"],
    "amp/trials": ["tests/trials", "tests/test_hurried_mistakes.py"],
    "docs": ["tests/test_docs.py", "tests/test_site.py", "tests/test_benchmarks.py"],
    "examples": ["tests/test_examples.py", "tests/test_docs.py"],
    "kernels": ["tests/kernels", "tests/test_optimizers.py", "tests/test_fp8.py", "tests/test_fp4.py"],
}
"""By folder; any other change, as of what all levels use, needs all tests."""


def tests_of(path: str) -> list[str]:
    """Return what to run for a file that has changed."""
    if Path(path).match("tests/**/test_*.py") or Path(path).match("tests/test_*.py"):
        return [path] if Path(path).exists() else []
    if path.endswith(".md"):
        return TESTS_OF["docs"]
    found = [tests for folder, tests in TESTS_OF.items() if path.startswith(f"{folder}/")]
    return found[0] if found else ["tests"]


chosen = {test for path in sys.stdin.read().split() for test in tests_of(path)}
print(*(["tests"] if "tests" in chosen or not chosen else sorted(chosen)))
