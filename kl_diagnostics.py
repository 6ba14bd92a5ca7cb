"""Diagnostics: what a hint does to the teacher, measured before anyone pays for training.

In:   hints.jsonl (or any file of privileged information in its form) and the tasks it is for.
Out:  <out_dir>/kl_tokens.jsonl, one row per student rollout: id, seed, turn, is_error_turn, token_ids, student_logprobs,
      teacher_logprobs, teacher_entropy; <out_dir>/kl_summary.jsonl, one row per task: id, hint_reward, utility, d, ...

1. Sample `rollouts` completions of each task from the student's prompt and, with the same seeds, from the teacher's
   (the same model, with the hint); grade both. Utility = hinted pass rate - hint-free pass rate.
2. Score all of them under both prompts, packed alike: with an empty hint the two scores are equal bit for bit.
3. D, the sampled-token reverse KL: log student - log teacher of the student's tokens, sign kept; mean over the tokens
   of a rollout, then over rollouts, then over tasks.
4. Error-step contrast: how much more the teacher disapproves of failed turns than of passed ones of the same task.
   Differs from [B]: the grader flags the error turns, not a judge.
5. Teacher depth ([A] appendix A): how many tokens of the teacher's completion come before the first one that surprises
   the student by more than `tau` nats; beside it the teacher's entropy on the student's tokens.

    python kl_diagnostics.py --hints out/hints.jsonl
"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import (EngineConfig, RowLog, at_least, bootstrap_ci, die, grade_or_stop, head_weight, load_demos, load_engine, load_hints, load_model,
                    load_tasks, logits_of, opt, pack_rows, packed_hidden, parse_config, render_prompt, sample_tasks, seed_note, stable_seed, start_run, torch,
                    world_files)


@dataclass
class Config(EngineConfig):
    tasks: list[str] = opt(["data/toolworld/train_tool.jsonl", "data/toolworld/train_chat.jsonl"], "task files")
    num_tasks: int = opt(240, "balanced subset over failure kinds, 0 = all")
    hints: str = opt("out/hints.jsonl", "hints file; 'none' = empty hints")
    control: str = opt("none", "use empty hints, or each task's from another failure kind", ["none", "empty", "shuffled"])
    hint_position: str = opt("end", "where the hint stands in the prefix", ["end", "system", "first_user"])
    model: str = opt("data/toolworld/base", "Hugging Face folder, student and teacher in one")
    rollouts: int = opt(4, "completions per task and role")
    temperature: float = opt(1.0, "divides the logits of both roles, in sampling and in scoring")
    max_new_tokens: int = opt(96, "longest completion")
    tau: float = opt(3.0, "nats at which a token surprises the student (3 = it had given the token 5%)")
    seed: int = opt(0, "names the random streams")
    batch_tasks: int = opt(32, "tasks per engine batch")
    row_tokens: int = opt(512, "tokens of a packed row; a task with its completions is never split")
    chunk: int = opt(256, "tokens whose logits exist at one time")
    out_dir: str = opt("out/kl", "results folder")


# The three measures.

def sampled_reverse_kl(student_logprobs, teacher_logprobs, loss_mask=None):
    """D in nats per token: log student - log teacher of sampled tokens, mean over a rollout's tokens, then over rollouts.

    The arguments are one list per rollout, or one flat list for a single rollout. loss_mask is 1 on tokens
    the student sampled; others (a tool's output) are left out, and so are rollouts without any token:
    with none left the result is 0.0. An estimate of KL(student || teacher), so a single D may be negative.
    """
    if len(student_logprobs) and np.ndim(student_logprobs[0]) == 0:
        student_logprobs, teacher_logprobs = [student_logprobs], [teacher_logprobs]
        loss_mask = None if loss_mask is None else [loss_mask]
    means = []
    for r, (student, teacher) in enumerate(zip(student_logprobs, teacher_logprobs, strict=True)):
        gaps = np.subtract(student, teacher)
        if loss_mask is not None:
            gaps = gaps[np.asarray(loss_mask[r], bool)]
        if len(gaps):
            means.append(gaps.mean())
    return float(np.mean(means)) if means else 0.0


def error_step_contrast(turns, signed=False):
    """(contrast in nats per token, error turns used, error turns left out for want of a control).

    turns: rows of kl_tokens.jsonl. d of a turn = mean over its tokens of max(0, log student - log teacher);
    `signed` drops the max. Every error turn is set against the mean d of its controls: turns of the same
    task and turn index, in other rollouts, that are not flagged. contrast = the mean of those differences,
    None when no error turn has a control.
    """
    def disapproval(turn):
        gaps = np.subtract(turn["student_logprobs"], turn["teacher_logprobs"])
        return float(np.mean(gaps if signed else np.maximum(gaps, 0.0)))

    turns = [turn for turn in turns if len(turn["student_logprobs"])]
    controls, differences, alone = {}, [], 0
    for turn in turns:
        if not turn["is_error_turn"]:
            controls.setdefault((turn["id"], turn["turn"]), []).append(disapproval(turn))
    for turn in turns:
        if turn["is_error_turn"]:
            beside = controls.get((turn["id"], turn["turn"]))
            if beside:
                differences.append(disapproval(turn) - np.mean(beside))
            else:
                alone += 1
    return (float(np.mean(differences)) if differences else None), len(differences), alone


def teacher_depth(student_logprobs, tau):
    """Teacher tokens before the first with -log student > tau; all of them where none is. student_logprobs in nats."""
    return next((t for t, logprob in enumerate(student_logprobs) if -logprob > tau), len(student_logprobs))


# Scoring.

def score_completions(model, items, row_tokens=512, chunk=256, temperature=1.0):
    """Log-probs of given completions and the model's entropy before each of their tokens, in nats.

    items: (prefix_ids, [completion_ids, ...]) per task. Returns per task one (logprobs, entropies) per
    completion. Logits are made in float32 for `chunk` tokens at a time: [tokens, vocabulary] never exists whole.
    """
    head, logprobs, entropies = head_weight(model), [], []
    with torch.no_grad():
        for row in pack_rows(items, row_tokens):
            hidden = packed_hidden(model, row)  # (T, D), the states that predict row.targets
            for start in range(0, len(hidden), chunk):
                targets = row.targets[start:start + chunk].to(hidden.device)
                scores = torch.log_softmax(logits_of(hidden[start:start + chunk], head) / temperature, -1)  # (C, V)
                logprobs += scores.gather(-1, targets[:, None])[:, 0].tolist()
                entropies += (-(scores.exp() * scores).sum(-1)).tolist()
    scored, at = [], 0
    for _, completions in items:
        scored.append([])
        for ids in completions:
            scored[-1].append((logprobs[at:at + len(ids)], entropies[at:at + len(ids)]))
            at += len(ids)
    return scored


def measure_batch(engine, model, tokenizer, tasks, hints, cfg):
    """The rows of a batch of tasks: per task (the kl_tokens rows of its student rollouts, its kl_summary row)."""
    prompts, samples = {}, {}
    streams = [[stable_seed("kl", cfg.seed, task["id"], k) for k in range(cfg.rollouts)] for task in tasks]
    for role, texts in (("student", [""] * len(tasks)), ("teacher", [hints[task["id"]]["hint"] for task in tasks])):
        prompts[role] = [render_prompt(tokenizer, task["messages"], task["tools"], hint, cfg.hint_position, cfg.enable_thinking,
                                       load_demos(cfg.demos))
                         for task, hint in zip(tasks, texts)]
        samples[role] = sample_tasks(engine, tokenizer, tasks, prompts[role], streams, cfg.max_new_tokens, cfg.temperature)
    # Both roles score the student's and the teacher's completions, although the teacher's own scores of the latter are
    # not used: rows of the same make-up give the same low bits.
    completions = [[s.ids for s in student + teacher] for student, teacher in zip(samples["student"], samples["teacher"])]
    by_student, by_teacher = (score_completions(model, list(zip(prompts[role], completions)), cfg.row_tokens, cfg.chunk,
                                                cfg.temperature) for role in ("student", "teacher"))
    measured = []
    for i, task in enumerate(tasks):
        grades = {role: [grade_or_stop(task, sample.text) for sample in samples[role][i]] for role in ("student", "teacher")}
        turn = sum(message["role"] == "assistant" for message in task["messages"])  # index of the sampled turn in its episode
        token_rows = [{"id": task["id"], "hint_id": hints[task["id"]]["hint_id"], "seed": k, "turn": turn,
                       "is_error_turn": not grades["student"][k].passed, "token_ids": samples["student"][i][k].ids,
                       "student_logprobs": by_student[i][k][0], "teacher_logprobs": by_teacher[i][k][0],
                       "teacher_entropy": by_teacher[i][k][1], **seed_note(engine)} for k in range(cfg.rollouts)]
        teacher_tokens = [by_student[i][k][0] for k in range(cfg.rollouts, 2 * cfg.rollouts)]
        depths = [teacher_depth(logprobs, cfg.tau) for logprobs in teacher_tokens]
        rates = {role: np.mean([g.passed for g in grades[role]]) for role in grades}
        contrast, _, alone = error_step_contrast(token_rows)
        summary = {"id": task["id"], "hint_id": hints[task["id"]]["hint_id"], "hint": hints[task["id"]]["hint"],
                   "hint_reward": float(np.mean([g.reward for g in grades["teacher"]])), "pass_rate": float(rates["student"]),
                   "hinted_pass_rate": float(rates["teacher"]), "utility": float(rates["teacher"] - rates["student"]),
                   "d": sampled_reverse_kl(*([row[f"{role}_logprobs"] for row in token_rows] for role in ("student", "teacher"))),
                   "contrast": contrast, "error_turns_without_control": alone, "teacher_depth": float(np.mean(depths)),
                   "teacher_depths": depths, "teacher_lengths": [len(logprobs) for logprobs in teacher_tokens]}
        measured.append((token_rows, {name: value for name, value in summary.items() if value is not None}))
    return measured


def print_summary(summaries, token_rows, cfg):
    """The lines that the README shows; every number can be recomputed from the two files."""
    def interval(values):
        mean, low, high = bootstrap_ci([[value] for value in values])
        return f"{mean:+.4f} [{low:+.3f}, {high:+.3f}]"

    depths = np.concatenate([row["teacher_depths"] for row in summaries])
    lengths = np.concatenate([row["teacher_lengths"] for row in summaries])
    entropy = np.mean([np.mean(row["teacher_entropy"]) for row in token_rows])
    contrast, used, alone = error_step_contrast(token_rows)
    contrast = "undefined" if contrast is None else f"{contrast:+.4f}"
    free, hinted = (np.mean([row[name] for row in summaries]) for name in ("pass_rate", "hinted_pass_rate"))
    print(f"{len(summaries)} tasks x {cfg.rollouts} rollouts, hints {cfg.hints} (control {cfg.control}); 95% intervals over tasks")
    print(f"D {interval([row['d'] for row in summaries])} nats per token of the student, log student - log teacher")
    print(f"utility {interval([row['utility'] for row in summaries])}: pass rate {hinted:.3f} with the hint, {free:.3f} without")
    print(f"error-step contrast {contrast} over {used} failed turns; {alone} more had no passed one beside them")
    quantiles = ", ".join(f"{q}% {np.quantile(depths, q / 100):.0f}" for q in (10, 25, 50, 75, 90))
    print(f"teacher depth at tau {cfg.tau}: {quantiles} tokens; {np.mean(depths == lengths):.3f} of the completions without a "
          f"surprise (mean length {lengths.mean():.1f})")
    print(f"teacher entropy on the student's tokens {entropy:.4f} nats")


def main(cfg):
    at_least(1, cfg, "rollouts", "max_new_tokens", "batch_tasks", "row_tokens", "chunk")
    if cfg.temperature <= 0:
        die("--temperature is above 0: D is a mean over what the student samples")
    tasks = load_tasks(cfg.tasks, cfg.num_tasks)
    hints = load_hints(cfg.hints, tasks, cfg.control, cfg.seed)
    without = len(tasks) - len(hints)
    if without:
        print(f"{without} of {len(tasks)} tasks have no hint and are left out")
    tasks = [task for task in tasks if task["id"] in hints] or die(f"{cfg.hints} has a hint for none of the tasks")
    out_dir = start_run(cfg.out_dir, cfg, inputs=[*cfg.tasks, cfg.hints, cfg.demos, cfg.model, *world_files(tasks)])
    token_rows, summaries = RowLog(out_dir / "kl_tokens.jsonl", ("id", "seed")), RowLog(out_dir / "kl_summary.jsonl", ("id",))
    model, tokenizer = load_model(cfg.model, cfg.device, cfg.dtype)
    engine, _ = load_engine(cfg, cfg.model, (model, tokenizer))
    bar = tqdm(total=len(tasks), desc="diagnose", unit="task", disable=None)
    for start in range(0, len(tasks), cfg.batch_tasks):
        batch = tasks[start:start + cfg.batch_tasks]
        if not all(map(summaries.get, batch)):  # a batch that a kill cut is done again as it was
            for rows, summary in measure_batch(engine, model, tokenizer, batch, hints, cfg):
                for row in rows:
                    token_rows.add(row)
                summaries.add(summary)
        bar.update(len(batch))
        bar.set_postfix_str(f"D {np.mean([row['d'] for row in summaries.rows.values()]):.3f}")
    bar.close()
    print_summary(list(summaries.rows.values()), list(token_rows.rows.values()), cfg)


if __name__ == "__main__":
    main(parse_config(Config))
