"""README.md is executed: every bash block in a copy of the repository, shrunk, so that a renamed flag or file breaks it.

What is shrunk: a command gets the flags of SHRINK after its own (of two equal flags the last one counts), evaluation tasks are
ten. What is not run: making the environment and pytest (bash checks their syntax); the results table (an hour) and pretraining
(a GPU) only say their --help. One interpreter runs all commands, since loading transformers is most of a small run. The section "Your own
failures" has a test file of its own, which starts the stages as a reader would.
"""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from common import ROOT, read_jsonl

README = (ROOT / "README.md").read_text("utf-8")
STAGES = ["optimize_hints.py", "train_opsd.py", "evaluate.py", "kl_diagnostics.py"]
SCRIPTS = [*STAGES, *(f"data/toolworld/{name}.py" for name in ("results", "pretrain"))]
SHRINK = {"optimize_hints.py": "--num_tasks 12 --max_rounds 3 --fresh 1 --max_new_tokens 48",
          "train_opsd.py": "--num_tasks 12 --max_new_tokens 48 --steps 2 --tasks_per_step 2 --rollouts_per_task 2 --eval_every 2 --eval_tasks few.jsonl",
          "evaluate.py": "--tasks few.jsonl --seeds 2 --max_new_tokens 48", "kl_diagnostics.py": "--num_tasks 2 --rollouts 2 --max_new_tokens 48",
          "data/toolworld/results.py": "--help", "data/toolworld/pretrain.py": "--help"}
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


RUN_ALL = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    print("$", *sys.argv, flush=True)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""


def commands(block):
    """The block's commands as lists of words, shrunk; a block holds nothing but python commands."""
    words = [shlex.split(line) for line in re.split(r"\n|&&", ENVIRONMENT.sub("", block).replace("\\\n", " ")) if line.strip()]
    for line in words:
        while "=" in line[0]:
            del line[0]  # a variable for one command
        assert line.pop(0) == "python", line
    return [line + SHRINK.get(line[0], "").split() for line in words if line[:2] != ["-m", "pytest"]]


def test_every_bash_block_runs(copy):
    text = README.replace(section("Your own failures"), "")
    lines = [line for block in blocks(text, "bash") for line in commands(block)]
    assert {line[0] for line in lines} >= {*STAGES, "data/toolworld/results.py", "data/toolworld/prepare.py"}
    done = subprocess.run([sys.executable, "-c", RUN_ALL, json.dumps(lines)], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    for line in ("mean reward:", "held-out hint-free pass@1:", "student: pass@1", "optimized - human:", "conformance: gold passes"):
        assert line in done.stdout, line
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
    known |= {"data/toolworld/prepare.py": {"check"}, "data/smollm2/prepare.py": {"out_dir", "wheel", "gguf"}}
    for script in STAGES:
        assert len(known[script]) > 8, script
    commands = README.replace("\\\n", " ")
    for script, rest in re.findall(r"\b([\w/]+\.py)((?: [^\n`&|]*)?)", commands):
        wrong = set(re.findall(r"--(?:no-)?(\w+)", rest)) - known.get(script, set())
        assert not wrong, f"{script} has no flag {sorted(wrong)}"
    others = {"index_url", "nproc_per_node"}  # pip's and torchrun's
    everywhere = {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", README)}
    assert everywhere <= set().union(*known.values()) | others


def test_every_file_that_the_readme_names_exists(copy):
    made = r"^(out|my_world|models|\.venv)/|^my_hints\.jsonl$"  # by a command, or by the reader
    records = {"hints.jsonl", "metrics.jsonl", "rollouts.jsonl", "eval.jsonl"}
    worlds = [ROOT, ROOT / "data/toolworld"]
    for path in set(re.findall(r"(?<![\w/.-])[\w.-]+(?:/[\w.*$-]+)*(?:/|\.(?:py|jsonl|yaml|txt|md|json|png))(?![\w/])", README)):
        if not re.search(made, path) and path not in records and not path.startswith("http"):
            assert any(list(folder.glob(path.rstrip("/"))) for folder in worlds), f"README.md names {path}"
