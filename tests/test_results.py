"""The README's figures are those of the committed results, and the results are those of their own rows."""
import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "data/toolworld/results"
README = (ROOT / "README.md").read_text()
ROWS = [json.loads(line) for line in (RESULTS / "results.jsonl").read_text().splitlines()]
RUNS = {}
for row in ROWS:
    if "condition" in row:
        RUNS.setdefault(row["condition"], []).append(np.array(row["passes_of_4"]) / 4)  # one entry per task


def test_readme_shows_the_committed_tables():
    table = (RESULTS / "table.md").read_text().splitlines()
    lines = table[next(i for i, line in enumerate(table) if line.startswith("| condition")):][:8]
    assert "\n".join(lines) in README
    assert (RESULTS / "teacher.md").read_text().strip() in README


@pytest.mark.parametrize("condition", RUNS)
def test_pass_rates_are_means_of_the_per_task_passes(condition):
    rates = [row["pass@1"] for row in ROWS if row.get("condition") == condition]
    assert rates == pytest.approx([run.mean() for run in RUNS[condition]], abs=1e-4)
    table_row = next(line for line in README.splitlines() if line.startswith(f"| {condition} "))
    assert f"{np.mean(RUNS[condition]):.3f} [" in table_row


def test_differences_are_paired_means_and_have_one_sign_for_all_training_seeds():
    for row in (row for row in ROWS if "difference" in row):
        first, second = (np.mean(RUNS[name.strip()], axis=0) for name in reversed(row["difference"].split(" - ")))
        assert row["mean"] == pytest.approx((second - first).mean(), abs=1e-4)
        assert row["low"] < row["mean"] < row["high"]
        assert len({np.sign(value) for value in row["by_training_seed"]}) == 1
    human = next(row for row in ROWS if row.get("difference") == "optimized - human")
    assert f"{human['mean']:+.3f} [{human['low']:+.3f}, {human['high']:+.3f}]" in README


def test_empty_hints_change_no_answer():
    assert np.array_equal(RUNS["empty"][0], RUNS["base"][0])


def test_the_luck_of_the_search_is_the_one_in_the_readme():
    search = next(row for row in ROWS if "search" in row)
    assert f"scores its own choices at {search['hint_reward']:.3f} and fresh seeds give {search['fresh_reward']:.3f}" in README
