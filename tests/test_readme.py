"""README.md is executed: every bash block in a copy of the repository, shrunk, so that a renamed flag or file breaks it.

What is shrunk: `python` is a function that adds the flags of SHRINK to a stage's own (of two equal flags the last one counts);
evaluation tasks are ten; lines that make the environment are read by bash and not run; pytest, the results table (an hour) and
pretraining (a GPU) are only asked for their --help. The section "Your own failures" has a test file of its own.
"""
import os
import re
import shutil
import subprocess
import sys

import pytest

from common import ROOT, read_jsonl

README = (ROOT / "README.md").read_text("utf-8")
STAGES = ["optimize_hints.py", "train_opsd.py", "evaluate.py", "kl_diagnostics.py"]
SCRIPTS = [*STAGES, *(f"data/toolworld/{name}.py" for name in ("results", "pretrain"))]
SHRINK = {"optimize_hints.py": "--num_tasks 22 --max_rounds 3 --fresh 1",
          "train_opsd.py": "--num_tasks 22 --steps 2 --tasks_per_step 2 --rollouts_per_task 2 --eval_every 2 --eval_tasks few.jsonl",
          "evaluate.py": "--tasks few.jsonl --seeds 2", "kl_diagnostics.py": "--num_tasks 2 --rollouts 2",
          "data/toolworld/results.py": "--help", "data/toolworld/pretrain.py": "--help", "-m": "--help"}
ENVIRONMENT = re.compile(r"python3? -m venv .*? && pip install -r requirements\.txt &&\n")


def section(title):
    """The text from the heading `title` to the next one of its rank or a higher one."""
    start = re.search(rf"^(#+) {re.escape(title)}$", README, re.MULTILINE)
    assert start, f"README.md has no section {title!r}"
    return re.split(rf"^#{{1,{len(start[1])}}} ", README[start.end():], maxsplit=1, flags=re.MULTILINE)[0]


def blocks(text, language):
    """The code blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository without what git ignores, with ten evaluation tasks of as many kinds in few.jsonl."""
    folder = tmp_path_factory.mktemp("copy") / "repo"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "out", "__pycache__", ".pytest_cache"))
    lines = [line for name in ("tool", "chat") for line in (ROOT / f"data/toolworld/eval_{name}.jsonl").open().readlines()[:5]]
    (folder / "few.jsonl").write_text("".join(lines))
    return folder


def run_block(block, folder):
    """Runs a block as a newcomer would paste it; `python` is this interpreter and adds the flags of SHRINK."""
    cases = "\n".join(f"    {script}) more='{flags}' ;;" for script, flags in SHRINK.items())
    shim = f'python() {{ local more=\n  case "$1" in\n{cases}\n  esac\n  "{sys.executable}" "$@" $more; }}\n'
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", shim + ENVIRONMENT.sub("", block)], cwd=folder, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, env=os.environ | {"OMP_WAIT_POLICY": "passive"})
    assert done.returncode == 0, f"{block}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
    return done.stdout


def test_every_bash_block_runs(copy):
    elsewhere = section("Your own failures")
    printed = {block: run_block(block, copy) for block in blocks(README.replace(elsewhere, ""), "bash")}
    assert sum(map(len, map(str.splitlines, printed))) >= 10
    for line in ("mean reward:", "held-out hint-free pass@1:", "student: pass@1", "optimized - human:", "conformance: gold passes"):
        assert any(line in text for text in printed.values()), line
    for path in ("out/hints.jsonl", "out/opsd/checkpoint/model.safetensors", "out/eval/eval.jsonl", "out/eval/pass_by_step.png", "out/table/table.md",
                 "out/kl/kl_summary.jsonl", "out/full/eval/table.md"):
        assert (copy / path).stat().st_size > 0, path
    assert len(read_jsonl(copy / "out/opsd/metrics.jsonl")) == 2


def test_bash_blocks_are_valid_before_anything_is_left_out():
    for block in blocks(README, "bash"):
        assert subprocess.run(["bash", "-n", "-c", block]).returncode == 0, block


def test_set_up_is_one_command_for_the_main_job_and_one_for_the_tests():
    for title, last in [("Set-up and the main job", "python evaluate.py"), ("Set-up and tests", "-m pytest tests")]:
        block, = blocks(section(title), "bash")
        assert ENVIRONMENT.match(block) and block.rstrip().endswith(last) and "&&" in block
    assert subprocess.run(["bash", "-n", ROOT / ".ci/run"]).returncode == 0 and os.access(ROOT / ".ci/run", os.X_OK)


def help_of(script):
    return subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


def test_every_help_answers_and_every_flag_of_the_readme_exists():
    known = {script: set(re.findall(r"--(?:no-)?(\w+)", help_of(script))) for script in SCRIPTS}
    known["data/toolworld/prepare.py"] = {"check"}
    for script in STAGES:
        assert len(known[script]) > 8, script
    commands = README.replace("\\\n", " ")
    for script, rest in re.findall(r"\b([\w/]+\.py)((?: [^\n`&|]*)?)", commands):
        wrong = set(re.findall(r"--(?:no-)?(\w+)", rest)) - known.get(script, set())
        assert not wrong, f"{script} has no flag {sorted(wrong)}"
    others = {"index_url"}  # pip's
    everywhere = {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", README)}
    assert everywhere <= set().union(*known.values()) | others


def test_every_file_that_the_readme_names_exists(copy):
    made = r"^(out|my_world|models|\.venv)/|^my_hints\.jsonl$"  # by a command, or by the reader
    records = {"hints.jsonl", "metrics.jsonl", "rollouts.jsonl", "eval.jsonl"}
    worlds = [ROOT, ROOT / "data/toolworld"]
    for path in set(re.findall(r"(?<![\w/.-])[\w.-]+(?:/[\w.*$-]+)*(?:/|\.(?:py|jsonl|yaml|txt|md|json))(?![\w/])", README)):
        if not re.search(made, path) and path not in records and not path.startswith("http"):
            assert any(list(folder.glob(path.rstrip("/"))) for folder in worlds), f"README.md names {path}"
