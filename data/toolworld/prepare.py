"""Makes every data file of toolworld from the base student, byte for byte, and proves that the graders work.

1. train_tool.jsonl (800), train_chat.jsonl (600): situations in which the base student, sampled once, really failed;
   its failed step and the public feedback are kept
2. eval_tool.jsonl, eval_chat.jsonl (200 each): other wordings, other names, other ids; failed or not
3. eval_facilities.jsonl (100): a department that no training task comes from
4. hard.jsonl (132): training tool-call failures that the hint-free student passes at most 2 times in 8
5. conformance: gold passes, doing nothing fails, prefixes replay, the recorded failure fails, wrong then right passes
6. manifest.json: the hash of every file of the world

    python data/toolworld/prepare.py          # 5 minutes on 2 cores; float64, so that other machines draw the same
    python data/toolworld/prepare.py --check  # conformance and hashes only, seconds
"""
import hashlib
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from common import (  # noqa: E402
    HFEngine, grade_completion, load_model, read_jsonl, render_prompt, sample_tasks, stable_seed, torch,
    write_jsonl, write_text)
from env import Env  # noqa: E402
from scenarios import CHAT_KINDS, DEPARTMENT_OF, KINDS, TOOL_KINDS, call_text, make_task  # noqa: E402

SIZES = {"train_tool": 800, "train_chat": 600, "eval_tool": 200, "eval_chat": 200, "eval_facilities": 100, "hard": 132}
# The world, not its makers: later work may change those and the writer's templates, but no file below.
FROZEN = [
    "env.py", "scenarios.py", "guidance.py", "human_hints.jsonl", "neutral_hints.jsonl",
    *(f"{name}.jsonl" for name in SIZES),
    *(f"base/{name}" for name in (
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "pretrain_log.jsonl")),
]
MAX_NEW_TOKENS = 96


def cells(kinds, facilities=False):
    """{kind: its tools} inside or outside the held-back department."""
    return {kind: [t for t in tools if (DEPARTMENT_OF.get(t, t) == "facilities") == facilities]
            for kind, tools in kinds.items()}


def draw(kinds, count, split, facilities=False, start=0):
    """count situations, kinds in turn, inside a kind its tools in turn."""
    of_kind = {kind: tools for kind, tools in cells(kinds, facilities).items() if tools}
    names, tasks = sorted(of_kind), []
    for i in range(count):
        turn, at = divmod(i, len(names))
        tools = of_kind[names[at]]
        tasks.append(make_task(names[at], tools[turn % len(tools)], split, start + i)[0])
    return tasks


def sample(engine, tokenizer, tasks, num, stream):
    """num hint-free completions of every task, as text."""
    prompts = [render_prompt(tokenizer, task["messages"], task["tools"]) for task in tasks]
    seeds = [[stable_seed("toolworld", stream, task["id"], j) for j in range(num)] for task in tasks]
    return [[sample.text for sample in of_task]
            for of_task in sample_tasks(engine, tokenizer, tasks, prompts, seeds, MAX_NEW_TOKENS, 1.0)]


def failures(engine, tokenizer, kinds, count):
    """count situations in which the first sample failed, balanced over kinds."""
    names, kept, start = sorted(kinds), {kind: [] for kind in kinds}, 0
    quota = {kind: count // len(names) + (i < count % len(names)) for i, kind in enumerate(names)}
    while wanted := {kind: kinds[kind] for kind in names if len(kept[kind]) < quota[kind]}:
        pool = draw(wanted, 32 * len(names), "train", start=start)
        start += len(pool)
        for task, (text,) in zip(pool, sample(engine, tokenizer, pool, 1, "failure")):
            kind, grade = task["failure_kind"], grade_completion(task, text)
            if not grade.passed and len(kept[kind]) < quota[kind]:
                kept[kind].append(task | {"failed_completion": text, "failed_feedback": grade.feedback})
    return [kept[kind][i] for i in range(max(quota.values())) for kind in names if i < quota[kind]]


def gold_steps(task):
    """What passes, as texts. A chat task's row holds patterns only: its answer is made again from the id."""
    if "chat" not in task["spec"]:
        return [call_text(c["name"], c["arguments"]) for c in task["spec"]["gold"]]
    split, kind, tool, seed = task["id"].split("-")
    return [make_task(kind, tool, split, int(seed))[1]]


def conformance(tasks):
    """How many refused steps could be put right in the same episode.

    Raises AssertionError with the task's id where a grader is wrong.
    """
    corrected = 0
    for task in tasks:
        for step in gold_steps(task):
            assert grade_completion(task, step).passed, f"{task['id']}: gold fails"
        assert not grade_completion(task, "").passed, f"{task['id']}: doing nothing passes"
        env = Env()
        env.reset(task)  # replays the prefix and raises where an observation differs
        if "failed_completion" in task:
            observations, _ = env.step({"role": "assistant", "content": task["failed_completion"]})
            assert not env.grade().passed, f"{task['id']}: the recorded failure passes"
            if all(o["content"].startswith("error") for o in observations) and "chat" not in task["spec"]:
                # the wrong step was refused or was no call: the right one still passes
                env.step({"role": "assistant", "content": gold_steps(task)[0]})
                assert env.grade().passed, f"{task['id']}: wrong and then right fails"
                corrected += 1
        env.reset(task)  # the prefix restored: nothing of the failed attempt is left
        for step in gold_steps(task):
            env.step({"role": "assistant", "content": step})
        assert env.grade().passed, f"{task['id']}: gold fails after a failed attempt"
    return corrected


def make_files():
    """Steps 1 to 4."""
    model, tokenizer = load_model(HERE / "base", dtype=torch.float64)
    engine = HFEngine(model, tokenizer)
    files = {"train_tool": failures(engine, tokenizer, cells(TOOL_KINDS), SIZES["train_tool"]),
             "train_chat": failures(engine, tokenizer, cells(CHAT_KINDS), SIZES["train_chat"]),
             "eval_tool": draw(TOOL_KINDS, SIZES["eval_tool"], "eval"),
             "eval_chat": draw(CHAT_KINDS, SIZES["eval_chat"], "eval"),
             "eval_facilities": draw(KINDS, SIZES["eval_facilities"], "eval", facilities=True)}
    tries = sample(engine, tokenizer, files["train_tool"], 8, "hard")
    hard = [task["id"] for task, texts in zip(files["train_tool"], tries)
            if sum(grade_completion(task, text).passed for text in texts) <= 2]
    files["hard"] = [{"id": name} for name in sorted(random.Random(0).sample(hard, SIZES["hard"]))]
    print(f"hint-free student passes at most 2 of 8 on {len(hard)} of {len(tries)} tool-call failures")
    for name, rows in files.items():
        write_jsonl(HERE / f"{name}.jsonl", rows)


def main():
    check = "--check" in sys.argv
    if not check:
        make_files()
    files = {name: read_jsonl(HERE / f"{name}.jsonl") for name in SIZES}
    tasks = [row for name, rows in files.items() if name != "hard" for row in rows]
    corrected = conformance(tasks)
    hashes = {name: hashlib.sha256((HERE / name).read_bytes()).hexdigest() for name in sorted(FROZEN)}
    if check:
        frozen = json.loads((HERE / "manifest.json").read_text())
        changed = [name for name in hashes if frozen.get(name) != hashes[name]]
        assert not changed, f"changed since the world was frozen: {', '.join(changed)}"
    else:
        write_text(HERE / "manifest.json", json.dumps(hashes, indent=1) + "\n")
    print("counts", " ".join(f"{name}={len(rows)}" for name, rows in files.items()))
    print(f"conformance: gold passes {len(tasks)}/{len(tasks)}, doing nothing passes 0/{len(tasks)}, "
          f"every prefix replays, {corrected} refused steps corrected")


if __name__ == "__main__":
    main()
