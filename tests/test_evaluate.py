"""evaluate.py: rows and resume (RUN-01, RUN-02), held-out check (EVAL-03), intervals and denominators (EVAL-04), reports."""
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import evaluate
from common import HFEngine, Sample, append_jsonl, bootstrap_ci, load_model, parse_config, read_jsonl, torch
from conftest import LetterTokenizer
from evaluate import (Config, Run, difference, evaluate_model, latest_rows, main, pass_at_ks, pass_rate, read_conditions, read_run,
                      refuse_overlap, teacher_reward)

WORLD = """
from common import Grade, InfraError

class Env:
    def reset(self, task):
        self.spec = task["spec"]
    def step(self, message):
        self.text = message["content"]
    def grade(self):
        if self.spec.get("broken"):
            raise InfraError("the database is gone")
        passed = self.text == self.spec["want"]
        return Grade(float(passed), "intended" if passed else "malformed", "")
"""


class Scripted:
    """An engine whose answer to a prompt and seed is fixed: the prompt's last character, or "?" for odd seeds."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, seeds, *rest, **options):
        self.calls.append((prompts, seeds))
        return [[Sample([ids[-1] if seed % 2 else ord("?")], [0.0], "stop") for seed in of_prompt]
                for ids, of_prompt in zip(prompts, seeds)]


@pytest.fixture
def world(tmp_path, waits):
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "env.py").write_text(WORLD)
    return str(tmp_path / "world")


def make_tasks(world, num, **spec):
    return [{"id": f"t{i}", "world": world, "messages": [{"role": "user", "content": f"say {chr(97 + i)}"}], "tools": [],
             "spec": {"want": chr(97 + i), **spec}, "failure_kind": "even" if i % 2 == 0 else "odd"} for i in range(num)]


def as_rows(table, seeds=None):
    """Rows from {id: [passed, ...]}."""
    return [{"id": i, "seed": k, "passed": bool(p)} for i, passes in table.items() for k, p in enumerate(passes)]


# Rows and resume.

def test_rows_have_the_fields_of_the_design_and_their_mean_is_pass_at_1(world, tmp_path):
    tasks, path = make_tasks(world, 5), tmp_path / "eval.jsonl"
    rows = evaluate_model(Scripted(), LetterTokenizer(), tasks, 4, path, batch_tasks=2)
    assert rows == read_jsonl(path)
    assert [(row["id"], row["seed"]) for row in rows] == [(f"t{i}", k) for i in range(5) for k in range(4)]
    assert list(rows[0]) == ["id", "seed", "completion", "reward", "passed", "action", "finish_reason"]
    assert pass_rate(rows) == np.mean([row["reward"] for row in rows]) == bootstrap_ci(rows)[0]
    assert evaluate_model(Scripted(), LetterTokenizer(), tasks, 4, batch_tasks=2) == rows  # without a file


def test_every_cut_of_the_file_resumes_to_the_same_bytes_with_the_original_batches(world, tmp_path):
    tasks, whole, engine = make_tasks(world, 5), tmp_path / "whole.jsonl", Scripted()
    evaluate_model(engine, LetterTokenizer(), tasks, 2, whole, batch_tasks=2)
    content = whole.read_bytes()
    for cut in range(0, len(content), 37):  # a kill may leave half a line (RUN-01)
        path, again = tmp_path / f"cut{cut}.jsonl", Scripted()
        path.write_bytes(content[:cut])
        evaluate_model(again, LetterTokenizer(), tasks, 2, path, batch_tasks=2)
        assert path.read_bytes() == content
        assert all(call in engine.calls for call in again.calls)


def test_run_02_only_missing_rows_and_errors_are_run_again(world, tmp_path, case):
    data = case("RUN-02")
    path, tasks = tmp_path / "eval.jsonl", make_tasks(world, 3)[1:]  # t1 and t2
    for row in data["input"]["file"]:
        extra = {"error": "gone"} if row.get("status") == "error" else {}
        append_jsonl(path, {"id": row["task"], "seed": row["seed"], "passed": row.get("reward", 0) >= 1, **extra})
    before = len(read_jsonl(path))
    engine = Scripted()
    engine.generate = lambda prompts, seeds, *rest, **options: [[Sample([ord("?")], [0.0], "stop")] * len(s) for s in seeds]
    rows = evaluate_model(engine, LetterTokenizer(), tasks, 2, path)
    added = [[row["id"], row["seed"]] for row in read_jsonl(path)[before:]]
    assert added == data["expected"]["calls_on_resume"]
    assert len(rows) == data["expected"]["unique_rows"] and pass_rate(rows) == data["expected"]["mean_reward"]
    evaluate_model(engine, LetterTokenizer(), tasks, 2, path)
    assert len(read_jsonl(path)) == before + 1  # calls_on_second_resume: none


def test_a_prompt_that_does_not_fit_is_refused_by_its_task(world, tiny_model_dir):
    tasks = make_tasks(world, 3)
    tasks[2]["messages"][0]["content"] = "long " * 1000
    model, tokenizer = load_model(tiny_model_dir)
    with pytest.raises(ValueError, match="task t2: .* do not fit"):
        evaluate_model(HFEngine(model, tokenizer), tokenizer, tasks, 1)


def test_rows_of_another_step_are_another_evaluation(world, tmp_path):
    tasks, path = make_tasks(world, 2), tmp_path / "eval.jsonl"
    for step in (0, 10):
        evaluate_model(Scripted(), LetterTokenizer(), tasks, 1, path, {"step": step})
    assert [row["step"] for row in read_jsonl(path)] == [0, 0, 10, 10]
    engine = Scripted()
    evaluate_model(engine, LetterTokenizer(), tasks, 1, path, {"step": 10})
    assert not engine.calls


def test_a_broken_world_is_tried_three_times_then_counts_as_failed_and_is_said_aloud(world, tmp_path, capsys):
    tasks = make_tasks(world, 3)
    tasks[1]["spec"]["broken"] = True
    rows = evaluate_model(Scripted(), LetterTokenizer(), tasks, 2, tmp_path / "eval.jsonl")
    assert [row.get("error") for row in rows] == [None, None, "the database is gone", "the database is gone", None, None]
    assert "2 of 6 completions were never graded and count as failed: task t1 (the database is gone)" in capsys.readouterr().out
    assert len(rows) == 6 and not rows[2]["passed"] and rows[2]["reward"] == 0 and "action" not in rows[2]
    del tasks[1]["spec"]["broken"]  # mended: the error rows are run again and the new ones count
    again = evaluate_model(Scripted(), LetterTokenizer(), tasks, 2, tmp_path / "eval.jsonl")
    assert not any("error" in row for row in again)
    assert list(latest_rows(read_jsonl(tmp_path / "eval.jsonl")).values()) == again


# Held-out tasks.

def test_eval_03_overlap_is_refused_by_id_and_by_normalised_text(case):
    def task(row):
        return {"id": row["id"], "messages": [{"role": "user", "content": row["text"]}]}

    pair = case("EVAL-03")["input"]["near_duplicate"]
    with pytest.raises(ValueError, match="d1") as raised:
        refuse_overlap([task(pair["train"])], [task(pair["eval"])])
    assert "C1" in str(raised.value)
    tasks = [task(row) for row in case("EVAL-03")["input"]["tasks"]]
    refuse_overlap(tasks[:4], tasks[4:])
    with pytest.raises(ValueError, match="1 evaluation tasks were trained on: B2"):
        refuse_overlap([{"id": "B2", "hint": "x"}], tasks)  # a hint row records what it was built from


# Intervals, denominators, comparisons.

def test_eval_04_tasks_are_resampled_and_crashes_stay_in_the_denominator(case):
    data = case("EVAL-04")
    table = {f"t{i}": rewards for i, rewards in enumerate(data["input"]["rewards_tasks_by_seed"])}
    mean, low, high = bootstrap_ci(as_rows(table))
    assert (mean, [low, high]) == (data["expected"]["mean"], data["expected"]["task_bootstrap_exact_27_min_max"])
    crashed = data["input"]["crashed"]
    rows = as_rows({f"t{i}": [i < crashed["passed"]] for i in range(crashed["planned"])})
    rows[-1]["error"] = "crash"
    assert pass_rate(rows) == data["expected"]["crashed_score"]


def test_eval_04_an_unfinished_run_is_refused(tmp_path):
    tasks = [{"id": "a"}, {"id": "b"}]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in as_rows({"a": [1, 0], "b": [1]})))
    with pytest.raises(ValueError, match="1 of 2 tasks lack rows"):
        read_run(tmp_path, tasks)
    append_jsonl(tmp_path / "eval.jsonl", {"id": "b", "seed": 1, "passed": True})
    assert pass_rate(read_run(tmp_path, tasks).rows) == 0.75
    with pytest.raises(ValueError, match="rows of 1 other tasks"):
        read_run(tmp_path, tasks[:1])


def test_pass_at_k_is_averaged_over_tasks_and_training_seeds():
    runs = [Run(as_rows({"a": [1, 1, 0, 0], "b": [0, 0, 0, 0]})), Run(as_rows({"a": [1, 0, 0, 0], "b": [1, 1, 1, 1]}))]
    # pass@2 from c of 4: 2 -> 1 - 1/6, 1 -> 1/2, 0 -> 0, 4 -> 1
    assert pass_at_ks(runs) == pytest.approx({1: 7 / 16, 2: (5 / 6 + 0 + 1 / 2 + 1) / 4, 4: 3 / 4})


def test_difference_is_paired_by_task_and_shows_each_training_seed():
    base = [Run(as_rows({"a": [1, 0], "b": [0, 0], "c": [1, 1]}))]
    better = [Run(as_rows({"a": [1, 1], "b": [1, 0], "c": [1, 1]})), Run(as_rows({"a": [0, 0], "b": [0, 0], "c": [1, 1]}))]
    mean, low, high, by_seed = difference(base, better)
    # per task: a 1/2 - 1/2, b 1/4 - 0, c 0
    assert mean == pytest.approx(1 / 12) and low == 0 and high == pytest.approx(1 / 4)
    assert by_seed == pytest.approx([2 / 6, -1 / 6])
    same = difference(better, better)
    assert same == (0, 0, 0, [0, 0])
    with pytest.raises(ValueError, match="2 training seeds against 3"):
        difference(better, better + base)


# Reports.

def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folders(world, tmp_path):
    """A base evaluation and two training runs, with steps, a cut step, metrics and hints."""
    tasks = make_tasks(world, 4)
    write_rows(tmp_path / "tasks.jsonl", tasks)
    write_rows(tmp_path / "hints.jsonl", [{"id": "x", "hint": "h", "fresh_reward": r, "passed": r == 1} for r in (1.0, 0.5)])
    write_rows(tmp_path / "base" / "eval.jsonl", as_rows({f"t{i}": [i == 0] for i in range(4)}))
    for s in (1, 2):
        run = tmp_path / f"opt-{s}"
        steps = [{"step": step, **row} for step, passes in ((0, 1), (10, 3))
                 for row in as_rows({f"t{i}": [i < passes] for i in range(4)})]
        write_rows(run / "eval.jsonl", steps)
        write_rows(run / "metrics.jsonl", [{"step": step, "loss": 0.5 / step, "reverse_kl": 0.5 / step} for step in range(1, 11)])
        (run / "config.json").write_text(json.dumps({"config": {"control": "none", "hints": str(tmp_path / "hints.jsonl")}}))
    return tmp_path


def test_a_training_folder_gives_last_step_curve_metrics_and_teacher(folders):
    tasks = read_jsonl(folders / "tasks.jsonl")
    run = read_run(folders / "opt-1", tasks)
    assert pass_rate(run.rows) == 0.75 and run.curve == {0: 0.25, 10: 0.75} and len(run.metrics) == 10 and run.teacher == 0.75
    write_rows(folders / "opt-1" / "eval" / "eval.jsonl", as_rows({f"t{i}": [1, 1] for i in range(4)}))
    assert pass_rate(read_run(folders / "opt-1", tasks).rows) == 1.0  # its own final evaluation goes first
    append_jsonl(folders / "opt-1" / "eval.jsonl", {"step": 20, "id": "t0", "seed": 0, "passed": True})
    assert read_run(folders / "opt-1", tasks).curve == {0: 0.25, 10: 0.75}  # a step cut by a kill is no point


def test_an_evaluation_folder_finds_the_training_run_of_its_checkpoint(folders):
    tasks = read_jsonl(folders / "tasks.jsonl")
    write_rows(folders / "eval" / "eval.jsonl", as_rows({f"t{i}": [1] for i in range(4)}))
    (folders / "eval" / "config.json").write_text(json.dumps({"config": {"model": str(folders / "opt-1" / "checkpoint")}}))
    run = read_run(folders / "eval", tasks)
    assert pass_rate(run.rows) == 1.0 and run.curve == {0: 0.25, 10: 0.75} and run.teacher == 0.75


def test_teacher_reward_is_that_of_the_hints_trained_on(folders):
    training = {"control": "none", "hints": str(folders / "hints.jsonl")}
    assert teacher_reward(training) == 0.75 and teacher_reward(training | {"filter": "passed"}) == 1.0
    assert teacher_reward(training | {"control": "shuffled"}) is None and teacher_reward({"control": "none", "hints": "none"}) is None


def test_report_writes_table_and_plots(folders, capsys):
    cfg = Config(tasks=[str(folders / "tasks.jsonl")], out_dir=str(folders / "report"),
                 runs=[f"base={folders}/base", f"optimized={folders}/opt-1,{folders}/opt-2"])
    main(cfg)
    table = (folders / "report" / "table.md").read_text()
    line = next(line for line in table.splitlines() if "optimized" in line and "0.750 0.750" in line)
    assert "+0.500 [" in line and line.rstrip(" |").endswith("++")
    assert {path.name for path in (folders / "report").glob("*.png")} == {"pass_by_step.png", "pass_by_kind.png", "loss_and_kl.png"}
    assert "optimized: pass@1 0.7500" in capsys.readouterr().out


def test_compare_says_difference_interval_and_signs(folders, capsys):
    main(Config(tasks=[str(folders / "tasks.jsonl")], compare=[f"{folders}/base", f"optimized={folders}/opt-1,{folders}/opt-2"]))
    assert "optimized - base: +0.5000 [" in (out := capsys.readouterr().out) and out.strip().endswith("+0.500, +0.500")


def test_folders_without_an_evaluation_are_skipped_and_equal_names_refused(folders, capsys):
    tasks = read_jsonl(folders / "tasks.jsonl")
    assert list(read_conditions([f"{folders}/base/", f"{folders}/world"], tasks)) == ["base"]
    assert "skipped" in capsys.readouterr().out
    with pytest.raises(ValueError, match="two conditions"):
        read_conditions([f"{folders}/base", f"base={folders}/opt-1"], tasks)
    with pytest.raises(ValueError, match="no eval.jsonl"):
        read_conditions([f"x={folders}/world"], tasks)
    with pytest.raises(ValueError, match="give one"):
        main(parse_config(Config, ["--tasks", f"{folders}/tasks.jsonl", "--runs", "a", "--compare", "b", "c"]))


# The whole stage on a real model.

KILL = """
import os, signal, sys
import common, {stage}
from common import append_jsonl, parse_config
left = [int(sys.argv.pop(1))]
def append(path, row):
    append_jsonl(path, row)
    left[0] -= 1
    if not left[0]:
        open(path, "ab").write(b'{{"id": "half a li')
        os.kill(os.getpid(), signal.SIGKILL)
common.append_jsonl = append
{stage}.main(parse_config({stage}.Config))
"""


def run_until_killed(stage, rows, flags):
    """Runs a stage in its own process, which SIGKILL ends in the middle of writing row number `rows` + 1."""
    done = subprocess.run([sys.executable, "-c", KILL.format(stage=stage), str(rows), *flags], capture_output=True, text=True,
                          cwd=Path(evaluate.__file__).parent, env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())})
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_killed_and_started_again_gives_the_files_of_an_unbroken_run(world, tmp_path, tiny_model_dir):
    (tmp_path / "world" / "env.py").write_text(WORLD.replace('self.text == self.spec["want"]', "len(self.text) % 2 == 0"))
    write_rows(tmp_path / "tasks.jsonl", make_tasks(world, 5))

    def flags(out):
        return ["--model", tiny_model_dir, "--base", "none", "--tasks", f"{tmp_path}/tasks.jsonl", "--seeds", "3",
                "--batch_tasks", "2", "--max_new_tokens", "4", "--out_dir", f"{tmp_path}/{out}"]

    run_until_killed("evaluate", 8, flags("killed"))
    for out in ("killed", "whole"):
        main(parse_config(Config, flags(out)))
    for name in ("eval.jsonl", "table.md", "pass_by_kind.png"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert len(read_jsonl(tmp_path / "whole" / "eval.jsonl")) == 15


def test_base_and_student_side_by_side_and_changed_weights_refused(world, tmp_path, tiny_model_dir, capsys):
    write_rows(tmp_path / "tasks.jsonl", make_tasks(world, 3))
    shutil.copytree(tiny_model_dir, tmp_path / "run" / "checkpoint")
    cfg = Config(model=str(tmp_path / "run" / "checkpoint"), base=tiny_model_dir, tasks=[str(tmp_path / "tasks.jsonl")], seeds=2,
                 max_new_tokens=3, out_dir=str(tmp_path / "eval"))
    main(cfg)
    assert "student - base: +0.0000 [+0.000, +0.000]" in capsys.readouterr().out  # the same weights and random streams
    model, _ = load_model(tiny_model_dir)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(tmp_path / "run" / "checkpoint")
    with pytest.raises(ValueError, match="run/checkpoint has changed"):
        main(cfg)
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": {"tasks": cfg.tasks, "num_tasks": 1, "hints": "none"}}))
    with pytest.raises(ValueError, match="1 evaluation tasks were trained on: t0"):
        main(cfg)
