"""Runs every fault test, the slow ones too, and writes what each promise came to into README.md beside this
file.
"""

import os
import platform
import sys
import time
import tomllib
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
UNLIMITED = ("-o", "timeout=0", "-o", "faulthandler_timeout=0")  # proofs take as long as they take
FAULTS = tomllib.loads((HERE / "proofs.toml").read_text())
NAMED = [
    test for about in FAULTS.values() for tests in about.values() if isinstance(tests, list) for test in tests
]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
RANKS = ("failed", "known to fail", "skipped", "passed")  # which of several outcomes of its cases is a test's
TOP = """# What runs survive

Written by `make test-faults`, which runs every test that is named here; the cases of a test count as one.

{date}, Python {python}, {packages}, {cores} cores: of {count} tests {came}, in {minutes:.0f} minutes.

| id | event | what is promised | tests | result | seconds |
|---|---|---|---|---|---|
"""


class Recorder:
    """What came of each test, by its name without the case, and which promises the marks of tests name."""

    def __init__(self):
        self.marked, self.seconds, self.results = defaultdict(dict), defaultdict(float), defaultdict(dict)

    def pytest_collection_modifyitems(self, items):
        for item in items:
            for fault, promise in (mark.args for mark in item.iter_markers("fault")):
                self.marked[fault].setdefault(promise, {})[bare(item.nodeid)] = None

    def pytest_runtest_logreport(self, report):
        name = bare(report.nodeid)
        self.seconds[name] += report.duration
        if report.when == "call" or not report.passed:
            outcome = f"known to fail: {report.wasxfail}" if hasattr(report, "wasxfail") else report.outcome
            dealt = [value for _, value in report.user_properties]
            self.results[name].setdefault(outcome, []).extend(dealt)


def bare(test):
    """tests/test_a.py::test_b[case] -> test_a.py::test_b."""
    return test.partition("[")[0].removeprefix("tests/")


def table(recorder):
    """The lines of the table, one for each promise."""
    for fault, about in FAULTS.items():
        for promise, tests in (about | recorder.marked[fault]).items():
            if promise != "event":
                results, seconds = {}, sum(recorder.seconds[test] for test in tests)
                for test in tests:
                    for outcome, dealt in (recorder.results[test] or {"not run": []}).items():
                        results.setdefault(outcome, []).extend(dealt)
                said = "; ".join(
                    f"{name} ({'; '.join(dealt)})" if dealt else name for name, dealt in results.items()
                )
                shown = "<br>".join(f"`{test}`" for test in tests)
                yield f"| {fault} | {about['event']} | {promise} | {shown} | {said} | {seconds:.0f} |\n"


def tally(recorder):
    """How many tests came to what; of several cases the worst counts, but passed and skipped are named
    together.
    """
    counts = Counter()
    for outcomes in recorder.results.values():
        # without the reason why one is known to fail
        found = {outcome.partition(":")[0] for outcome in outcomes}
        skipped = "passed but for cases that were skipped" if found == {"passed", "skipped"} else ""
        counts[skipped or min(found, key=RANKS.index)] += 1
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


def main():
    os.chdir(HERE.parents[1])
    recorder, begin = Recorder(), time.time()
    named = [f"tests/{test}" for test in dict.fromkeys(NAMED)]
    code = pytest.main(
        ["-q", "-m", "", *UNLIMITED, *named, "tests/faults", *sys.argv[1:]], plugins=[recorder]
    )
    top = TOP.format(
        date=time.strftime("%Y-%m-%d"),
        python=platform.python_version(),
        packages=", ".join(f"{name} {version(name)}" for name in PACKAGES),
        cores=os.cpu_count(),
        came=tally(recorder),
        count=len(recorder.results),
        minutes=(time.time() - begin) / 60,
    )
    (HERE / "README.md").write_text(top + "".join(table(recorder)))
    sys.exit(code)


if __name__ == "__main__":
    main()
