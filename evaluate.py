"""Evaluation: does the student do it without the hint?

In:   a model folder and task files; or the folders that earlier runs left behind (--runs, --compare).
Out:  <out_dir>/eval.jsonl (id, seed, completion, reward, passed, action, finish_reason), table.md, three plots.

1. Refuse tasks that the model was trained on, by id and by normalised text.
2. Sample every task from its hint-free prompt, `seeds` times, in fixed batches, and grade each completion, or with --max_turns
   each whole episode (`completion` is then its last turn, `messages` all that was said and observed).
   A killed run starts again: a batch that lacks rows is sampled as it was and only those rows are added.
3. A world that breaks down is asked again; then the row has an `error`, counts as failed, and is said aloud.
4. pass@1 = mean of `passed` over tasks and seeds, its interval from resampled tasks with the seeds nested inside;
   pass@k = the unbiased estimate per task, then the mean over tasks.
5. Two conditions are compared by per-task differences; with several training seeds each one's sign is shown.
6. Table and plots: a condition is one folder, or several, one for each training seed.

    python evaluate.py
    python evaluate.py --runs base=out/eval/base human=out/human-1,out/human-2 optimized=out/opt-1,out/opt-2
"""
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import (EngineConfig, RowLog, at_least, bootstrap_ci, die, load_demos, load_engine, load_tasks, opt, paired_ci, parse_config,
                    pass_at_k, play_tasks, read_jsonl, render_prompt, seed_note, stable_seed, start_run, world_files, write_text)


@dataclass
class Config(EngineConfig):
    model: str = opt("out/opsd/checkpoint", "Hugging Face folder of the student")
    base: str = opt("data/toolworld/base", "model to set beside it, evaluated into out_dir/base; 'none' = the student alone")
    tasks: list[str] = opt(["data/toolworld/eval_tool.jsonl", "data/toolworld/eval_chat.jsonl"], "held-out task files")
    num_tasks: int = opt(0, "balanced subset over failure kinds, 0 = all")
    seeds: int = opt(4, "completions per task")
    seed: int = opt(0, "names the random streams; the same for every model, so that comparisons are paired")
    temperature: float = opt(1.0, "sampling temperature, 0 = greedy")
    max_new_tokens: int = opt(96, "longest completion")
    max_turns: int = opt(1, "turns that the model acts in the world before it is graded: whole episodes; 1 = the next step alone")
    batch_tasks: int = opt(64, "tasks per engine batch")
    runs: list[str] = opt([], "only report these conditions: name=folder, or name=folder,folder with a folder per training seed")
    compare: list[str] = opt([], "only compare two such conditions: second minus first")
    out_dir: str = opt("out/eval", "results folder")


# Sampling and grading.

def evaluate_model(engine, tokenizer, tasks, seeds, path=None, key=None, seed=0, temperature=1.0, max_new_tokens=96,
                   batch_tasks=64, enable_thinking=None, demos=(), max_turns=1):
    """Grades `seeds` hint-free completions of every task, or whole episodes of max_turns turns; returns the rows, task by task.

    path: where rows are appended as they come. Finished rows already there are kept, rows with an
    `error` are tried again. key: fields that every row of this evaluation has, such as {"step": 20};
    rows of `path` with other values belong to another evaluation. Raises Refusal, naming the task, for a
    prompt that does not fit the model.
    """
    key, rows = key or {}, []
    log = RowLog(path, (*key, "id", "seed"), ("id", "seed", *key), finished=lambda row: "error" not in row)
    bar = tqdm(total=len(tasks) * seeds, desc="evaluate", unit="rollout", leave=None, disable=None)  # gone when another is above it
    for start in range(0, len(tasks), batch_tasks):
        batch = tasks[start:start + batch_tasks]
        places = [[{**key, "id": task["id"], "seed": k} for k in range(seeds)] for task in batch]
        if not all(log.get(place) for of_task in places for place in of_task):
            # The whole batch again: its shape changes low bits of the logits, and so now and then a sample.
            streams = [[stable_seed("evaluate", seed, task["id"], k) for k in range(seeds)] for task in batch]
            groups = play_tasks(engine, tokenizer, batch, streams, lambda task, later: render_prompt(
                tokenizer, task["messages"], task["tools"], enable_thinking=enable_thinking, demos=demos, later=later),
                max_turns, max_new_tokens, temperature)
            for of_task, group in zip(places, groups):
                for place, episode in zip(of_task, group):
                    log.add({**place, **episode_fields(episode), **seed_note(engine)})
        rows += [log.get(place) for of_task in places for place in of_task]
        bar.update(len(batch) * seeds)
        bar.set_postfix_str(f"pass@1 {pass_rate(rows):.3f}")
    bar.close()
    say_errors(rows, path or "evaluation")
    return rows


def latest_rows(rows):
    """{(id, seed): row}: of rows written twice the last finished one counts, an error only where there is none."""
    latest = {}
    for row in rows:
        place = row["id"], row["seed"]
        if "error" not in row or "error" in latest.get(place, row):
            latest[place] = row
    return latest


def episode_fields(episode):
    """What a row says of an Episode: its last turn and its grade, a reward of 0 and the error where the world broke down; of
    several turns also their messages."""
    sample, grade = episode.turns[-1].sample, episode.grade
    graded = {"reward": 0.0, "passed": False, "error": episode.error} if episode.error else {
        "reward": grade.reward, "passed": grade.passed, "action": grade.action}
    return {"completion": sample.text, **graded, "finish_reason": sample.finish_reason,
            **({"messages": episode.messages} if len(episode.turns) > 1 else {})}


def say_errors(rows, where):
    """Prints how many rows count as failed because the world broke down."""
    errors = [row for row in rows if "error" in row]
    if errors:
        print(f"{where}: {len(errors)} of {len(rows)} completions were never graded and count as failed: "
              f"task {errors[0]['id']} ({errors[0]['error']}){', ...' if len(errors) > 1 else ''}")


def refuse_overlap(trained, evaluated):
    """Raises Refusal where a trained task is evaluated: same id, or same conversation up to case and blanks.

    trained: task rows and hint rows (which have an id and no messages); evaluated: task rows.
    """
    def text(task):
        return " ".join(" ".join(message.get("content") or "" for message in task["messages"]).lower().split())

    ids = {row["id"] for row in trained if "id" in row}
    texts = {text(row): row["id"] for row in trained if "messages" in row}
    found = [task["id"] if task["id"] in ids else f"{task['id']} (the text of {texts[text(task)]})"
             for task in evaluated if task["id"] in ids or text(task) in texts]
    if found:
        die(f"{len(found)} evaluation tasks were trained on: {', '.join(found[:5])}{', ...' if len(found) > 5 else ''}")


def evaluate_folder(model_dir, out_dir, tasks, cfg):
    """Evaluates the model in `model_dir` into `out_dir`/eval.jsonl."""
    training = read_config(Path(model_dir).parent)
    if "hints" in training:  # a checkpoint of train_opsd: beside it stands what it learned from
        hints = read_jsonl(training["hints"]) if Path(training["hints"]).is_file() else []
        refuse_overlap([*load_tasks(training["tasks"], training["num_tasks"]), *hints], tasks)
    out_dir = start_run(out_dir, replace(cfg, model=model_dir), inputs=[*cfg.tasks, cfg.demos, model_dir, *world_files(tasks)],
                        ignore=("base", "runs", "compare"))
    engine, tokenizer = load_engine(cfg, model_dir)
    rows = evaluate_model(engine, tokenizer, tasks, cfg.seeds, out_dir / "eval.jsonl", None, cfg.seed,
                          cfg.temperature, cfg.max_new_tokens, cfg.batch_tasks, cfg.enable_thinking, load_demos(cfg.demos), cfg.max_turns)
    cut = sum(row["finish_reason"] == "length" for row in rows)
    print(f"{out_dir}: {len(tasks)} tasks x {cfg.seeds} seeds of {model_dir}, {cut} completions cut at {cfg.max_new_tokens} tokens")


# Reading what runs left behind.

@dataclass
class Run:
    """One folder: its final evaluation and, where a training run stands behind it, the course of that."""
    rows: list
    curve: dict = field(default_factory=dict)  # step -> pass@1 on the evaluation tasks
    metrics: list = field(default_factory=list)  # rows of metrics.jsonl
    teacher: float | None = None  # mean fresh reward of its hints, on the training tasks


def read_config(folder):
    """The flags of the run in `folder`; {} where there was none."""
    path = Path(folder) / "config.json"
    return json.loads(path.read_text("utf-8"))["config"] if path.is_file() else {}


def eval_file(folder):
    """The evaluation in a folder (its own eval/ first, then the training run's), or None. A file stands for itself."""
    paths = (Path(folder) / "eval" / "eval.jsonl", Path(folder) / "eval.jsonl", Path(folder))
    return next((path for path in paths if path.is_file()), None)


def read_run(folder, tasks):
    """The Run in a training folder (its last step, unless it has eval/) or in an evaluation folder.

    Raises Refusal unless all of `tasks`, and no others, have the same number of rows: an average over
    the tasks that happened to finish is no pass@1.
    """
    path = eval_file(folder) or die(f"{folder}: no eval.jsonl")
    rows = read_jsonl(path, ("id", "seed", "passed"))
    last = max((row.get("step", 0) for row in rows), default=0)
    run = Run(list(latest_rows(row for row in rows if row.get("step", 0) == last).values()))
    counts = Counter(row["id"] for row in run.rows)
    if counts.keys() != {task["id"] for task in tasks} or len(set(counts.values())) > 1:
        most = max(counts.values(), default=1)
        short = sum(counts[task["id"]] < most for task in tasks)
        others = len(counts.keys() - {task["id"] for task in tasks})
        die(f"{path}: {short} of {len(tasks)} tasks lack rows, and it has rows of {others} other tasks; finish that run, or "
            "give the --tasks and --num_tasks it was evaluated on")
    train_dir = Path(folder)
    if not (train_dir / "metrics.jsonl").is_file():  # an evaluation: the training run is where its checkpoint lies
        train_dir = Path(read_config(path.parent).get("model", folder)).parent
    if (train_dir / "metrics.jsonl").is_file():
        run.metrics = read_jsonl(train_dir / "metrics.jsonl", ("step", "loss", "reverse_kl"))
        run.curve = read_curve(train_dir / "eval.jsonl")
        run.teacher = teacher_reward(read_config(train_dir))
    return run


def read_curve(path):
    """{step: pass@1} of a training run; a step that a kill cut short would show its first tasks only and is left out."""
    steps = {}
    for row in read_jsonl(path, ("step", "id", "seed", "passed")) if path.is_file() else []:
        steps.setdefault(row["step"], []).append(row)
    steps = {step: latest_rows(rows).values() for step, rows in sorted(steps.items())}
    full = max(map(len, steps.values()), default=0)
    return {step: pass_rate(rows) for step, rows in steps.items() if len(rows) == full}


def teacher_reward(training):
    """Mean fresh reward of the hints a training run used; None where nobody measured it (human, shuffled, empty)."""
    if training.get("control") != "none" or not Path(training["hints"]).is_file():
        return None
    rewards = [row["fresh_reward"] for row in read_jsonl(training["hints"])
               if "fresh_reward" in row and (training.get("filter") != "passed" or row["passed"])]
    return float(np.mean(rewards)) if rewards else None


def read_conditions(specs, tasks):
    """{name: [Run for each training seed]} from "name=folder,folder" or "folder" (skipped when it holds no evaluation)."""
    conditions = {}
    for spec in specs:
        name, named, folders = spec.partition("=")
        if not named:
            name, folders = Path(spec).name, spec
            if not eval_file(spec):
                print(f"skipped {spec}: no eval.jsonl")
                continue
        if name in conditions:
            die(f"two conditions are called {name!r}: write name=folder")
        conditions[name] = [read_run(folder, tasks) for folder in folders.split(",")]
        say_errors(pool(conditions[name]), name)
    return conditions


# Reporting.

def pool(runs, ids=None):
    """The rows of all training seeds, of the tasks `ids` only if given."""
    return [row for run in runs for row in run.rows if ids is None or row["id"] in ids]


def pass_rate(rows):
    return float(np.mean([row["passed"] for row in rows]))


def pass_at_ks(runs):
    """{k: pass@k} for k = 1, 2, 4, ... up to the evaluation seeds; training seeds are averaged, never pooled."""
    values = {}
    for run in runs:
        counts = {}
        for row in run.rows:
            counts.setdefault(row["id"], []).append(row["passed"])
        for k in (2 ** power for power in range(10)):
            if k <= len(next(iter(counts.values()))):
                values.setdefault(k, []).append(np.mean([pass_at_k(len(passed), sum(passed), k) for passed in counts.values()]))
    return {k: float(np.mean(of_runs)) for k, of_runs in values.items()}


def difference(first, second):
    """(mean, low, high, [difference for each training seed]) of pass@1, second minus first, paired by task.

    Training seeds are paired in the order given; one run against several is set against each of them.
    """
    if len(first) != len(second) and 1 not in (len(first), len(second)):
        die(f"{len(first)} training seeds against {len(second)}: give equally many, or one")
    num = max(len(first), len(second))
    firsts, seconds = (runs if len(runs) == num else runs * num for runs in (first, second))
    by_seed = [pass_rate(b.rows) - pass_rate(a.rows) for a, b in zip(firsts, seconds)]
    return *paired_ci(pool(first), pool(second)), by_seed


def difference_line(conditions):
    """What `difference` says about the first and the last condition, in one line."""
    (name_a, first), *_, (name_b, second) = conditions.items()
    mean, low, high, by_seed = difference(first, second)
    seeds = ", ".join(f"{value:+.3f}" for value in by_seed)
    return f"{name_b} - {name_a}: {mean:+.4f} [{low:+.3f}, {high:+.3f}] paired by task; by training seed {seeds}"


def markdown(header, rows):
    """A Markdown table, padded so that it reads well on a terminal too."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in [header, *rows]]
    return "\n".join(f"| {line} |" for line in [lines[0], " | ".join("-" * width for width in widths), *lines[1:]]) + "\n"


def results_table(conditions, sets):
    """One row per condition. sets: {name of a task file: its ids}."""
    name_a, first = next(iter(conditions.items()))
    ks = list(pass_at_ks(first))[1:]
    header = ["condition", "pass@1 [95%]", "by training seed", *sets, *(f"pass@{k}" for k in ks), "hinted teacher",
              f"minus {name_a} [95%], signs"]
    rows = []
    for name, runs in conditions.items():
        mean, low, high = bootstrap_ci(pool(runs))
        at_k, teachers = pass_at_ks(runs), [run.teacher for run in runs if run.teacher is not None]
        row = [name, f"{mean:.3f} [{low:.3f}, {high:.3f}]", " ".join(f"{pass_rate(run.rows):.3f}" for run in runs)]
        row += [f"{pass_rate(pool(runs, ids)):.3f}" for ids in sets.values()]
        row += [f"{at_k[k]:.3f}" if k in at_k else "" for k in ks] + [f"{np.mean(teachers):.3f}" if teachers else ""]
        mean, low, high, by_seed = difference(first, runs)
        signs = "".join("+" if d > 0 else "-" if d < 0 else "0" for d in by_seed)
        rows.append(row + ["" if runs is first else f"{mean:+.3f} [{low:+.3f}, {high:+.3f}] {signs}"])
    return markdown(header, rows)


def kinds_table(conditions, kinds):
    """pass@1 by failure kind. kinds: {failure kind: ids}."""
    rows = [[kind, len(ids), *(f"{pass_rate(pool(runs, ids)):.3f}" for runs in conditions.values())]
            for kind, ids in kinds.items()]
    return markdown(["failure kind", "tasks", *conditions], rows)


# Plots.

COLOURS = ["#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito: safe for the colour-blind


def new_figure(width, height, columns=1):
    """A figure and its axes, without the frame lines that carry nothing."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="0.92")
        ax.set_axisbelow(True)
    return figure, axes


def draw_curves(ax, curves, colour, label):
    """{step: value} curves, one per training seed: their mean thick, each of several thin behind it."""
    steps = sorted(set.intersection(*map(set, curves)))
    for curve in curves if len(curves) > 1 else []:
        ax.plot(list(curve), list(curve.values()), color=colour, lw=0.8, alpha=0.4)
    means = [np.mean([curve[step] for curve in curves]) for step in steps]
    ax.plot(steps, means, color=colour, lw=2, marker="o" if len(steps) < 20 else None, ms=4, label=label)


def plot_steps(conditions, path):
    """pass@1 by step; a condition without steps (the base) is a dashed line, the teacher with its hints a dotted one."""
    figure, (ax,) = new_figure(8, 4)
    teachers = {}  # value -> colour and conditions: those that share a hints file share a line
    for number, (name, runs) in enumerate(conditions.items()):
        colour = COLOURS[number % len(COLOURS)]
        curves = [run.curve for run in runs if run.curve]
        if curves:
            draw_curves(ax, curves, colour, name)
        else:
            ax.axhline(pass_rate(pool(runs)), color=colour, ls="--", lw=1.5, label=name)
        for value in {run.teacher for run in runs if run.teacher is not None}:
            teachers.setdefault(value, (colour, []))[1].append(name)
    for value, (colour, names) in teachers.items():
        ax.axhline(value, color=colour, ls=":", lw=1.5, label=f"hinted teacher ({', '.join(names)}),\non the training tasks")
    ax.set(xlabel="optimizer step", ylabel="pass@1 without hints", ylim=(0, 1), title="Held-out tasks, by training step")
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path)


def plot_kinds(conditions, kinds, path):
    """Bars by failure kind, the first condition (before) and the last (after), worst kind before on top."""
    names = list(dict.fromkeys([list(conditions)[0], list(conditions)[-1]]))
    order = sorted(kinds, key=lambda kind: -pass_rate(pool(conditions[names[0]], kinds[kind])))
    figure, (ax,) = new_figure(7.5, 1.2 + 0.36 * len(order))
    for name, colour, shift in zip(names, ("#BBBBBB", COLOURS[1]), (0.2, -0.2)):
        rates = [pass_rate(pool(conditions[name], kinds[kind])) for kind in order]
        ax.barh(np.arange(len(order)) + shift, rates, 0.4, color=colour, label=name)
    ax.set_yticks(range(len(order)), [f"{kind.replace('_', ' ')} ({len(kinds[kind])})" for kind in order])
    ax.grid(axis="y", visible=False)
    ax.set(xlim=(0, 1), ylim=(-0.6, len(order) - 0.4), xlabel="pass@1 without hints", title="By failure kind (number of tasks)")
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path)


def plot_losses(conditions, path):
    """Training loss and reverse KL by step; with the default loss they are the same number."""
    figure, axes = new_figure(9, 3.6, columns=2)
    for ax, name, title in zip(axes, ("loss", "reverse_kl"), ("Training loss", "KL(student || teacher), nats per token")):
        for number, (condition, runs) in enumerate(conditions.items()):
            curves = [{row["step"]: row[name] for row in run.metrics} for run in runs if run.metrics]
            if curves:
                draw_curves(ax, curves, COLOURS[number % len(COLOURS)], condition)
        ax.set(xlabel="optimizer step", title=title)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.savefig(path)


def report(conditions, tasks, cfg):
    """Prints and writes the tables, draws the plots."""
    sets, kinds = {}, {}
    for path in cfg.tasks:
        if ids := {task["id"] for task in load_tasks([path])} & {task["id"] for task in tasks}:
            sets[Path(path).stem] = ids
    for task in sorted(tasks, key=lambda task: task.get("failure_kind", "other")):
        kinds.setdefault(task.get("failure_kind", "other"), set()).add(task["id"])
    out_dir = Path(cfg.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    table, by_kind = results_table(conditions, sets), kinds_table(conditions, kinds)
    write_text(out_dir / "table.md", f"{table}\n{by_kind}")
    plot_kinds(conditions, kinds, out_dir / "pass_by_kind.png")
    written = ["table.md", "pass_by_kind.png"]
    if any(run.metrics for runs in conditions.values() for run in runs):
        plot_steps(conditions, out_dir / "pass_by_step.png")
        plot_losses(conditions, out_dir / "loss_and_kl.png")
        written += ["pass_by_step.png", "loss_and_kl.png"]
    print(f"\n{by_kind}\n{table}")
    for name, runs in conditions.items():
        mean, low, high = bootstrap_ci(pool(runs))
        at_k = "  ".join(f"pass@{k} {value:.3f}" for k, value in pass_at_ks(runs).items() if k > 1)
        seeds = len(runs[0].rows) // len(tasks)
        print(f"{name}: pass@1 {mean:.4f} [{low:.3f}, {high:.3f}]  {at_k}  ({len(runs)} x {len(tasks)} tasks x {seeds} seeds)")
    if len(conditions) > 1:
        print(difference_line(conditions))
    print(f"wrote {out_dir}/: {', '.join(written)}")


def main(cfg):
    at_least(1, cfg, "seeds", "max_new_tokens", "batch_tasks", "max_turns")
    at_least(0, cfg, "temperature")
    tasks = load_tasks(cfg.tasks, cfg.num_tasks)
    if cfg.runs and cfg.compare:
        die("--runs and --compare are two different reports: give one")
    if cfg.compare:
        conditions = read_conditions(cfg.compare, tasks)
        if len(conditions) != 2:
            die("--compare takes two conditions")
        print(difference_line(conditions))
        return
    specs = cfg.runs
    if not specs:
        folders = {"base": (cfg.base, f"{cfg.out_dir}/base"), "student": (cfg.model, cfg.out_dir)}
        if cfg.base in ("none", cfg.model):
            del folders["base"]
        elif cfg.model == Config.model and not Path(cfg.model).exists():
            print(f"{cfg.model} does not exist yet: {cfg.base} alone is evaluated")
            del folders["student"]
        for model_dir, out_dir in folders.values():
            evaluate_folder(model_dir, out_dir, tasks, cfg)
        specs = [f"{name}={out_dir}" for name, (_, out_dir) in folders.items()]
    report(read_conditions(specs, tasks), tasks, cfg)


if __name__ == "__main__":
    main(parse_config(Config))
