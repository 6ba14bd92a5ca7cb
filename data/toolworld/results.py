"""Runs the results table of the README: 240 training failures, 3 training seeds, 4 evaluation seeds.

1. the search writes hints once; kl_diagnostics measures the teacher under optimized, human, shuffled and neutral hints
2. every condition trains (presets beside this file); its last checkpoint is evaluated hint-free on 400 held-out tasks
3. evaluate.py --runs prints the table with paired intervals and draws the plots; results.jsonl keeps the passes by task

    python data/toolworld/results.py                            # 2 cores, about an hour; a run that was cut goes on
    python data/toolworld/results.py --jobs 12 --device cuda    # one GPU
    python data/toolworld/results.py --num_tasks 22 --steps 2 --seeds 1 --out_dir out/try --report_dir out/try/report
"""
import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import evaluate  # noqa: E402
from common import load_tasks, read_jsonl, write_jsonl  # noqa: E402

CONDITIONS = ("shuffled", "human", "filter", "optimized")  # the last one is drawn by failure kind
PRESETS = {"empty": "control_empty", "shuffled": "control_shuffled", "human": "human", "filter": "filter"}
TEACHERS = ("optimized", "human", "shuffled", "neutral")
REPORT_DIR = "data/toolworld/results"


def stage(args, script, *flags):
    """Runs one stage, its output in a log beside its results; a failure ends everything with the log's last lines."""
    out = ROOT / flags[flags.index("--out_dir") + 1]
    out.mkdir(parents=True, exist_ok=True)
    threads = {} if args.jobs == 1 else {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, *flags, *num_tasks(args), "--device", args.device], cwd=ROOT,
                          env={**os.environ, **threads}, capture_output=True, text=True)
    (out / f"{Path(script).stem}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"{script} {' '.join(flags)} failed:\n{done.stderr[-2000:]}")
    print(script, *flags, flush=True)


def num_tasks(args):
    """The flag as every stage takes it; without it each stage has its own default."""
    return [] if args.num_tasks is None else ["--num_tasks", str(args.num_tasks)]


def train_and_evaluate(args, condition, seed):
    folder = f"{args.out_dir}/{condition}-{seed}"
    preset = [f"data/toolworld/{PRESETS[condition]}.yaml"] if condition in PRESETS else []
    hints = [] if condition == "human" else ["--hints", f"{args.out_dir}/hints.jsonl"]  # the preset names human hints
    steps = [] if args.steps is None else ["--steps", str(args.steps)]
    stage(args, "train_opsd.py", *preset, *hints, *steps, "--seed", str(seed), "--out_dir", folder)
    stage(args, "evaluate.py", "--model", f"{folder}/checkpoint", "--base", "none", "--out_dir", f"{folder}/eval")


def measure_teacher(args, name):
    hints = {"human": "data/toolworld/human_hints.jsonl", "neutral": "data/toolworld/neutral_hints.jsonl"}
    stage(args, "kl_diagnostics.py", "--hints", hints.get(name, f"{args.out_dir}/hints.jsonl"),
          "--control", "shuffled" if name == "shuffled" else "none", "--out_dir", f"{args.out_dir}/kl-{name}")


def run_all(args):
    """Every run; a finished one costs nothing but the time in which its stage notices."""
    if not (ROOT / args.out_dir / "hints.jsonl").exists():
        stage(args, "optimize_hints.py", "--out_dir", args.out_dir)
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(stage, args, "evaluate.py", "--model", "data/toolworld/base", "--base", "none",
                            "--out_dir", f"{args.out_dir}/base")]
        jobs += [pool.submit(measure_teacher, args, name) for name in TEACHERS]
        jobs.append(pool.submit(train_and_evaluate, args, "empty", 0))  # nothing to learn: one seed shows it
        jobs += [pool.submit(train_and_evaluate, args, condition, seed)
                 for condition in CONDITIONS for seed in range(args.seeds)]
        for job in jobs:
            job.result()


def passes(folder):
    """{task id: passes over the evaluation seeds}"""
    counts = {}
    for row in read_jsonl(ROOT / folder / "eval.jsonl"):
        counts[row["id"]] = counts.get(row["id"], 0) + int(row["passed"])
    return counts


def means(rows, keys):
    return {key: round(float(np.mean([row[key] for row in rows])), 4) for key in keys}


def condition_rows(runs):
    """pass@1 of every run, and the passes that it comes from, tasks in the order of their ids."""
    for condition, folders in runs.items():
        for seed, folder in enumerate(folders):
            counts = passes(folder if condition == "base" else f"{folder}/eval")
            yield {"condition": condition, "training_seed": seed,
                   "pass@1": round(sum(counts.values()) / 4 / len(counts), 4),
                   "passes_of_4": [counts[i] for i in sorted(counts)]}


def teacher_rows(args):
    for name in TEACHERS:
        summary = read_jsonl(ROOT / args.out_dir / f"kl-{name}" / "kl_summary.jsonl")
        yield {"teacher": name, **means(summary, ("hinted_pass_rate", "pass_rate", "d")), "tasks": len(summary)}


def teacher_table(teachers):
    lines = ["| hints | pass rate with the hint | utility | D, nats per token |", "|---|---|---|---|"]
    for row in teachers:
        utility = row["hinted_pass_rate"] - row["pass_rate"]
        lines.append(f"| {row['teacher']} | {row['hinted_pass_rate']:.3f} | {utility:+.3f} | {row['d']:.4f} |")
    return "\n".join([*lines, f"| none | {teachers[0]['pass_rate']:.3f} | 0 | 0 |"]) + "\n"


def difference_rows(args, specs):
    """optimized minus every other condition, paired by task."""
    tasks = load_tasks([f"data/toolworld/{name}.jsonl" for name in ("eval_tool", "eval_chat")], args.num_tasks or 0)
    conditions = evaluate.read_conditions(specs, tasks)
    for other in ("base", "shuffled", "human", "filter"):
        mean, low, high, by_seed = evaluate.difference(conditions[other], conditions["optimized"])
        yield {"difference": f"optimized - {other}", "mean": round(mean, 4), "low": round(low, 4),
               "high": round(high, 4), "by_training_seed": [round(d, 4) for d in by_seed]}


def report(args):
    """results.jsonl, teacher.md, table.md and the plots, from the finished runs."""
    out = ROOT / args.report_dir
    out.mkdir(parents=True, exist_ok=True)
    runs = {"base": [f"{args.out_dir}/base"], "empty": [f"{args.out_dir}/empty-0"]}
    for condition in CONDITIONS:
        runs[condition] = [f"{args.out_dir}/{condition}-{seed}" for seed in range(args.seeds)]
    specs = [f"{condition}={','.join(folders)}" for condition, folders in runs.items()]
    teachers = list(teacher_rows(args))
    hints = read_jsonl(ROOT / args.out_dir / "hints.jsonl")
    measures = ("hint_reward", "fresh_reward", "empty_reward", "passed", "num_rollouts")
    rows = [*condition_rows(runs), *teachers,
            {"search": "confidence", "tasks": len(hints), **means(hints, measures)}, *difference_rows(args, specs)]
    write_jsonl(out / "results.jsonl", rows)
    (out / "teacher.md").write_text(teacher_table(teachers))
    subprocess.run([sys.executable, "evaluate.py", "--runs", *specs, *num_tasks(args), "--out_dir", args.report_dir],
                   cwd=ROOT, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", default="out/results", help="where the runs go")
    parser.add_argument("--report_dir", default=REPORT_DIR, help="where the table and the plots go")
    parser.add_argument("--num_tasks", type=int, help="of every stage; without it 240 failures and 400 held-out tasks")
    parser.add_argument("--steps", type=int, help="of train_opsd.py; without it its default")
    parser.add_argument("--seeds", type=int, default=3, help="training seeds of a condition")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--report", action="store_true", help="no runs, only the report of those in out_dir")
    args = parser.parse_args()
    if args.report_dir == REPORT_DIR and (args.num_tasks, args.steps, args.seeds) != (None, None, 3):
        parser.error("these are not the runs of the README's table: give another --report_dir")
    if not args.report:
        run_all(args)
    report(args)


if __name__ == "__main__":
    main()
