"""Runs every search strategy of [A] on the 132 hard failures, within the same budgets of teacher rollouts, and compares fresh rewards.

1. optimize_hints.py with hard.yaml for each strategy, budget and search seed; the writer and the number of hints allowed are the same
2. fresh rewards by task are averaged over seeds; each strategy is paired with the best one of its budget, interval over tasks
3. results_topologies.jsonl has a row for each run, topologies.md and .png the comparison

    python data/toolworld/topologies.py                             # 2 cores, about a minute a run; a run that was cut goes on
    python data/toolworld/topologies.py --jobs 17 --device cuda     # one GPU
    python data/toolworld/topologies.py --budgets 15 --seeds 1 --strategies confidence beam --out_dir out/try --report_dir out/try
"""
import argparse
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(HERE)]

from common import paired_ci, read_jsonl, write_jsonl  # noqa: E402
from results import stage  # noqa: E402

STRATEGIES = ("confidence", "fixed3", "sequential", "best_of_n", "batch", "halving", "beam", "ucb", "agent")


def search(args, strategy, budget, seed):
    """One run's folder, made unless it is finished."""
    folder = f"{args.out_dir}/{strategy}-{budget}-{seed}"
    if not (ROOT / folder / "summary.jsonl").exists():
        stage(args, "optimize_hints.py", "data/toolworld/hard.yaml", "--search", strategy, "--budget", str(budget), "--max_rounds", str(budget),
              "--confirm", str(args.confirm), "--seed", str(seed), "--out_dir", folder)
    return folder


def run_row(folder, strategy, budget, seed):
    """What a run found: the search's own mean, the fresh one, and how often three of three was luck."""
    hints, summary = read_jsonl(ROOT / folder / "hints.jsonl"), read_jsonl(ROOT / folder / "summary.jsonl")[0]
    sure = [row["fresh_reward"] for row in hints if row["passed"]]
    return {"strategy": strategy, "budget": budget, "seed": seed, "search_reward": summary.get("hint_reward"),
            "fresh_reward": mean(row["fresh_reward"] for row in hints), "empty_reward": summary["empty_reward"],
            "rollouts_per_task": summary["num_rollouts"] / summary["tasks"], "hints_tested": summary["hints_tested"], "passed": len(sure),
            "passed_by_luck": sum(fresh < 0.5 for fresh in sure) / max(1, len(sure)),  # fresh rate over 8 under a half
            "fresh_by_task": {row["id"]: row["fresh_reward"] for row in hints}}


def by_task(rows):
    """[{id, reward}]: fresh rewards of one strategy and budget, all seeds; a task without a hint in a seed has none there."""
    return [{"id": task, "reward": reward} for row in rows for task, reward in row["fresh_by_task"].items()]


def table(rows):
    lines = ["| budget | strategy | fresh reward, by seed | minus the best [95%] | in the search | rollouts a task | passed, of them by luck |",
             "|---|---|---|---|---|---|---|"]
    for budget in sorted({row["budget"] for row in rows}):
        runs = {}
        for row in rows:
            if row["budget"] == budget:
                runs.setdefault(row["strategy"], []).append(row)
        order = sorted(runs, key=lambda strategy: -mean(row["fresh_reward"] for row in runs[strategy]))
        for strategy in order:
            of = lambda field: [row[field] for row in runs[strategy] if row[field] is not None]
            pair = "best" if strategy == order[0] else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*paired_ci(by_task(runs[order[0]]), by_task(runs[strategy])))
            own = f"{mean(of('search_reward')):.3f}" if of("search_reward") else ""
            lines.append(f"| {budget} | {strategy} | {mean(of('fresh_reward')):.3f}: {' '.join(f'{x:.3f}' for x in of('fresh_reward'))} | {pair} | {own} "
                         f"| {mean(of('rollouts_per_task')):.1f} | {mean(of('passed')):.0f}, {mean(of('passed_by_luck')):.3f} |")
    return "\n".join(lines) + "\n"


def plot(rows, path):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        points = {}
        for row in rows:
            if row["strategy"] == strategy:
                points.setdefault(row["budget"], []).append((row["rollouts_per_task"], row["fresh_reward"]))
        x = [mean(spent for spent, _ in points[budget]) for budget in sorted(points)]
        fresh = [[reward for _, reward in points[budget]] for budget in sorted(points)]
        line, = axes.plot(x, [mean(y) for y in fresh], marker="o", label=strategy)
        axes.fill_between(x, [min(y) for y in fresh], [max(y) for y in fresh], alpha=0.15, color=line.get_color())
    axes.set(xlabel="teacher rollouts a task", ylabel="fresh reward on the hard failures (band: search seeds)")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", default="out/topologies", help="where the runs go")
    parser.add_argument("--report_dir", default="data/toolworld/results", help="where rows, table and plot go")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--budgets", nargs="+", type=int, default=[15, 45], help="teacher rollouts a task")
    parser.add_argument("--seeds", type=int, default=3, help="search seeds")
    parser.add_argument("--confirm", type=int, default=2, help="as in optimize_hints.py")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    args.num_tasks = None  # the preset names the tasks
    (ROOT / args.report_dir).mkdir(parents=True, exist_ok=True)
    runs = list(itertools.product(args.strategies, args.budgets, range(args.seeds)))
    with ThreadPoolExecutor(args.jobs) as pool:
        folders = list(pool.map(lambda run: search(args, *run), runs))
    rows = [run_row(folder, *run) for folder, run in zip(folders, runs)]
    write_jsonl(ROOT / args.report_dir / "results_topologies.jsonl", rows)
    (ROOT / args.report_dir / "topologies.md").write_text(table(rows))
    plot(rows, ROOT / args.report_dir / "topologies.png")
    print(table(rows))


if __name__ == "__main__":
    main()
