"""Runs the results table of the README: 240 training failures, every condition over 3 training seeds, 4 evaluation seeds.

1. the search writes hints once; kl_diagnostics measures the teacher under optimized, human and shuffled hints
2. every condition trains (presets beside this file), then its last checkpoint is evaluated hint-free on the 400 held-out tasks
3. evaluate.py --runs prints the table with paired intervals and draws the plots; results.jsonl keeps every task's number of passes

    python data/toolworld/results.py                            # 2 cores, about an hour; a run that was cut goes on
    python data/toolworld/results.py --jobs 12 --device cuda    # one GPU
"""
import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import evaluate  # noqa: E402
from common import load_tasks  # noqa: E402

SEEDS, CONDITIONS = (0, 1, 2), ("shuffled", "human", "filter", "optimized")  # the last one is drawn by failure kind
PRESETS = {"empty": "control_empty", "shuffled": "control_shuffled", "human": "human", "filter": "filter"}


def stage(args, script, *flags):
    """Runs one stage with its output kept in a log beside its results; a failure ends everything with the log's last lines."""
    out = ROOT / flags[flags.index("--out_dir") + 1]
    out.mkdir(parents=True, exist_ok=True)
    threads = {} if args.jobs == 1 else {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, *flags, "--device", args.device], cwd=ROOT, env={**os.environ, **threads}, capture_output=True, text=True)
    (out / f"{Path(script).stem}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"{script} {' '.join(flags)} failed:\n{done.stderr[-2000:]}")
    print(script, *flags, flush=True)


def train_and_evaluate(args, condition, seed):
    folder = f"{args.out_dir}/{condition}-{seed}"
    preset = [f"data/toolworld/{PRESETS[condition]}.yaml"] if condition in PRESETS else []
    hints = [] if condition == "human" else ["--hints", f"{args.out_dir}/hints.jsonl"]
    stage(args, "train_opsd.py", *preset, *hints, "--seed", str(seed), "--out_dir", folder)
    stage(args, "evaluate.py", "--model", f"{folder}/checkpoint", "--base", "none", "--out_dir", f"{folder}/eval")


def passes(folder):
    """{task id: passes over the evaluation seeds}"""
    counts = {}
    for line in (ROOT / folder / "eval.jsonl").read_text().splitlines():
        row = json.loads(line)
        counts[row["id"]] = counts.get(row["id"], 0) + int(row["passed"])
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", default="out/results", help="where the runs go")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--report", action="store_true", help="no runs, only the report of those in out_dir")
    args = parser.parse_args()
    if not args.report:
        run_all(args)
    report(args)


def run_all(args):
    """Every run that is not finished yet."""
    if not (ROOT / args.out_dir / "hints.jsonl").exists():
        stage(args, "optimize_hints.py", "--out_dir", args.out_dir)
    jobs = [lambda: stage(args, "evaluate.py", "--model", "data/toolworld/base", "--base", "none", "--out_dir", f"{args.out_dir}/base")]
    searched = f"{args.out_dir}/hints.jsonl"
    for name, hints, control in (("optimized", searched, "none"), ("human", "data/toolworld/human_hints.jsonl", "none"), ("shuffled", searched, "shuffled"),
                                 ("neutral", "data/toolworld/neutral_hints.jsonl", "none")):
        jobs.append(lambda name=name, hints=hints, control=control: stage(args, "kl_diagnostics.py", "--hints", hints, "--control", control, "--out_dir", f"{args.out_dir}/kl-{name}"))
    jobs.append(lambda: train_and_evaluate(args, "empty", 0))
    jobs += [lambda c=condition, s=seed: train_and_evaluate(args, c, s) for condition in CONDITIONS for seed in SEEDS]
    with ThreadPoolExecutor(args.jobs) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()


def report(args):
    """results/results.jsonl, table.md and the plots, from the finished runs."""
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    runs = {"base": [f"{args.out_dir}/base"], "empty": [f"{args.out_dir}/empty-0"], **{c: [f"{args.out_dir}/{c}-{s}" for s in SEEDS] for c in CONDITIONS}}
    rows = []
    for condition, folders in runs.items():
        for seed, folder in enumerate(folders):
            counts = passes(folder if condition == "base" else f"{folder}/eval")
            rows.append({"condition": condition, "training_seed": seed, "pass@1": round(sum(counts.values()) / 4 / len(counts), 4), "passes_of_4": [counts[i] for i in sorted(counts)]})
    for name in ("optimized", "human", "shuffled", "neutral"):
        summary = [json.loads(line) for line in (ROOT / args.out_dir / f"kl-{name}" / "kl_summary.jsonl").read_text().splitlines()]
        mean = lambda key: round(float(np.mean([row[key] for row in summary])), 4)
        rows.append({"teacher": name, "hinted_pass_rate": mean("hinted_pass_rate"), "pass_rate": mean("pass_rate"), "d": mean("d"), "tasks": len(summary)})
    teachers = [row for row in rows if "teacher" in row]
    (results / "teacher.md").write_text("\n".join([
        "| hints | pass rate with the hint | utility | D, nats per token |", "|---|---|---|---|",
        *(f"| {t['teacher']} | {t['hinted_pass_rate']:.3f} | {t['hinted_pass_rate'] - t['pass_rate']:+.3f} | {t['d']:.4f} |" for t in teachers),
        f"| none | {teachers[0]['pass_rate']:.3f} | 0 | 0 |"]) + "\n")
    hints = [json.loads(line) for line in (ROOT / args.out_dir / "hints.jsonl").read_text().splitlines()]
    rows.append({"search": "confidence", "tasks": len(hints), **{key: round(float(np.mean([row[key] for row in hints])), 4) for key in ("hint_reward", "fresh_reward", "empty_reward", "passed", "num_rollouts")}})
    tasks = load_tasks([f"data/toolworld/{name}.jsonl" for name in ("eval_tool", "eval_chat")])
    conditions = evaluate.read_conditions([f"{c}={','.join(folders)}" for c, folders in runs.items()], tasks)
    for other in ("base", "shuffled", "human", "filter"):
        mean, low, high, by_seed = evaluate.difference(conditions[other], conditions["optimized"])
        rows.append({"difference": f"optimized - {other}", "mean": round(mean, 4), "low": round(low, 4), "high": round(high, 4), "by_training_seed": [round(d, 4) for d in by_seed]})
    (results / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    subprocess.run([sys.executable, "evaluate.py", "--runs", *(f"{c}={','.join(folders)}" for c, folders in runs.items()), "--out_dir", str(results.relative_to(ROOT))], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
