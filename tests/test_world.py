"""data/toolworld: frozen files, graders that can be trusted, sets that share nothing, hints that give nothing away."""
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from common import ROOT, HFEngine, grade_completion, load_model, load_tasks, read_jsonl, render_prompt, stop_ids
from optimize_hints import VISIBLE, Config, ScriptedWriter, leak_check, leaves

WORLD = ROOT / "data/toolworld"
TRAIN, EVAL = ("train_tool", "train_chat"), ("eval_tool", "eval_chat", "eval_facilities")
COUNTS = {"train_tool": 800, "train_chat": 600, "eval_tool": 200, "eval_chat": 200, "eval_facilities": 100}


@pytest.fixture(scope="module")
def files():
    """{name of a task file: its tasks}"""
    return {name: load_tasks([WORLD / f"{name}.jsonl"]) for name in COUNTS}


@pytest.fixture(scope="module")
def world():
    """(prepare, scenarios): the modules that make the data; the stages never import them."""
    sys.path.insert(0, str(WORLD))
    import prepare
    import scenarios
    yield prepare, scenarios
    sys.path.remove(str(WORLD))


@pytest.fixture(scope="module")
def base_tokenizer():
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(WORLD / "base")


def of(files, names):
    return [task for name in names for task in files[name]]


def user_text(task):
    return " ".join(message["content"] for message in task["messages"] if message["role"] == "user")


def normalised(task):
    """Every word of the prefix, as evaluate.refuse_overlap compares it."""
    return " ".join(" ".join(message["content"] for message in task["messages"]).lower().split())


def view(task):
    return {key: task[key] for key in VISIBLE if key in task}


def test_the_world_is_frozen(world):
    """Later work adds files beside these and changes none of them."""
    prepare, _ = world
    frozen = json.loads((WORLD / "manifest.json").read_text())
    assert frozen.keys() == set(prepare.FROZEN)
    changed = [name for name, digest in frozen.items() if hashlib.sha256((WORLD / name).read_bytes()).hexdigest() != digest]
    assert not changed, f"not what they were when the world was frozen: {changed}"
    assert (WORLD / "base/model.safetensors").stat().st_size <= 16 * 2**20


def test_counts_and_kinds(files, world):
    _, scenarios = world
    assert {name: len(tasks) for name, tasks in files.items()} == COUNTS
    tool, chat = set(scenarios.TOOL_KINDS), set(scenarios.CHAT_KINDS)
    assert len(tool) >= 12
    for name, kinds in [("train_tool", tool), ("eval_tool", tool), ("train_chat", chat), ("eval_chat", chat)]:
        per_kind = Counter(task["failure_kind"] for task in files[name])
        assert per_kind.keys() == kinds
        assert max(per_kind.values()) - min(per_kind.values()) <= 1, "kinds take turns"
    subset = load_tasks([WORLD / f"{name}.jsonl" for name in TRAIN], Config.num_tasks)
    assert Config.num_tasks >= 200 and {task["failure_kind"] for task in subset} == tool | chat
    hard = [row["id"] for row in read_jsonl(WORLD / "hard.jsonl", ("id",))]
    assert len(set(hard)) == len(hard) == 132 and set(hard) <= {task["id"] for task in files["train_tool"]}


def test_conformance(files, world):
    """Gold passes, doing nothing fails, prefixes replay, the recorded failure fails, a refused step can be put right."""
    prepare, _ = world
    assert prepare.conformance(of(files, COUNTS)) > 100


def test_a_prefix_that_does_not_replay_is_refused(files):
    task = json.loads(json.dumps(next(task for task in files["eval_tool"] if task["messages"][-1]["role"] == "tool")))
    task["messages"][-1]["content"] += " "
    with pytest.raises(ValueError, match=task["id"]):
        grade_completion(task, "")


def test_recorded_failures_and_their_feedback(files):
    for task in of(files, TRAIN):
        grade = grade_completion(task, task["failed_completion"])
        assert not grade.passed and grade.feedback == task["failed_feedback"], task["id"]
    assert not any("failed_completion" in task for task in of(files, EVAL)), "evaluation tasks are failed or not: no step is recorded"


def test_feedback_never_shows_the_gold_values(files):
    """A gold value may stand in feedback only when it is a word of the feedback's own (an argument's name, say)."""
    for task in of(files, TRAIN):
        golds = [str(value) for call in task["spec"].get("gold", []) for value in call["arguments"].values()]
        golds += re.findall(r"\d[\d-]+", " ".join(task["spec"].get("chat", {}).get("must", [])))
        shown = [value for value in golds if re.search(rf"(?<!\w){re.escape(value)}(?!\w)", task["failed_feedback"])]
        assert not shown, f"{task['id']}: {task['failed_feedback']!r} shows {shown}"


def names_and_ids(tasks):
    """(ids such as ORD379268, names of items, flights, ... in the records)"""
    text = json.dumps([task["messages"] for task in tasks])
    names = {name for task in tasks for message in task["messages"] if message["role"] == "tool"
             for value in (json.loads(message["content"]) if message["content"].startswith("{") else {}).values()
             if isinstance(value, dict) for name in value}
    return set(re.findall(r"\b[A-Z]{3}\d{6}\b", text)), names


def test_training_and_evaluation_share_no_task_id_record_or_name(files):
    train, held_out = of(files, TRAIN), of(files, EVAL)
    assert not {task["id"] for task in train} & {task["id"] for task in held_out}
    assert not {normalised(task) for task in train} & {normalised(task) for task in held_out}
    (train_ids, train_names), (eval_ids, eval_names) = names_and_ids(train), names_and_ids(held_out)
    assert len(train_ids) > 1000 and not train_ids & eval_ids
    assert len(train_names) > 20 and not train_names & eval_names


def test_training_and_evaluation_share_no_wording(files, world):
    """Of every list of wordings the last third is for evaluation only. A wording is looked for in the tasks as a regex."""
    _, scenarios = world
    lists = [scenarios.FRAMES, scenarios.OPENINGS, scenarios.MENTIONS, scenarios.ENUM_CLAUSES, *scenarios.OPERATIONS.values(),
             *scenarios.OBLIQUE.values(), *scenarios.CUES.values(), *scenarios.QUESTIONS.values()]

    def found(template, texts):
        """A name stands in quotes, a date or an id has its form, any other field is any words of the same sentence."""
        fields = {"child": r'"\w+"', "variant": r'"\w+"', "date": r"[\d-]+(?: \w+ \d+)?", "id": r"[A-Z]{3}\d{6}", "name": r"\w+"}
        pieces = re.split(r"\{(\w+)\}", template.strip())  # text and field in turn
        pieces = [fields.get(piece, "[^.?]+?") if number % 2 else re.escape(piece) for number, piece in enumerate(pieces)]
        pattern = re.compile(r"(?<!\w)" + "".join(pieces) + r"(?!\w)", re.IGNORECASE)
        return [text for text in texts if pattern.search(text)]

    texts = {True: [user_text(task) for task in of(files, EVAL)], False: [user_text(task) for task in of(files, TRAIN)]}
    looked_for = 0
    for wordings in lists:
        cut = len(wordings) - max(1, len(wordings) // 3)
        assert not set(filter(None, wordings[:cut])) & set(wordings[cut:])
        for number, wording in enumerate(wordings):
            if len(re.sub(r"\{\w+\}", "", wording)) >= 14:  # "Please {op}." alone says little
                for_evaluation = number >= cut
                looked_for += bool(found(wording, texts[for_evaluation]))
                other = found(wording, texts[not for_evaluation])
                assert not other, f"{wording!r} is for {'evaluation' if for_evaluation else 'training'} only: {other[0]!r}"
    assert looked_for > 100, "and in its own set nearly every wording is found"


def test_human_hints_serve_every_kind_and_give_nothing_away(files, world):
    _, scenarios = world
    rows = read_jsonl(WORLD / "human_hints.jsonl", ("failure_kind", "hint"))
    hints = {row["failure_kind"]: row["hint"] for row in rows}
    assert len(rows) == len(hints) and hints.keys() == scenarios.KINDS.keys()
    refused = {(hints[task["failure_kind"]], reason) for task in of(files, TRAIN)[::5]
               if (reason := leak_check(hints[task["failure_kind"]], view(task)))}
    assert not refused


def test_scripted_writer_has_hints_for_every_kind_of_failure_and_nearly_all_pass_the_leak_check(files):
    views = [view(task) | {"trials": []} for task in of(files, TRAIN)[::13]]  # coprime to 16 and 6: every kind
    writer, written, refused = ScriptedWriter(Config(), views), 0, Counter()
    for task in views:
        hints = []
        while answer := writer.write(task, len(hints)):
            hints.append(answer["hint"])
            task["trials"].append({"hint": answer["hint"], "rejected": "so that the writer moves on"})
        reasons = {hint: leak_check(hint, task) for hint in hints}
        assert list(reasons.values()).count("") >= 2, f"{task['id']}: {reasons}"
        written += len(hints)
        refused.update(f"{hint} -> {reason}" for hint, reason in reasons.items() if reason)
    print(f"{written} hints, {refused.total()} refused:", *refused.most_common(5), sep="\n")
    assert refused.total() <= 0.03 * written


def test_tasks_do_not_depend_on_the_hash_seed():
    code = ("import hashlib, json; from prepare import draw; from scenarios import KINDS, make_task; "
            "rows = [make_task(kind, tools[0], split, 7) for kind, tools in KINDS.items() for split in ('train', 'eval', 'pretrain')]; "
            "print(hashlib.sha256(json.dumps([rows, draw(KINDS, 44, 'eval')]).encode()).hexdigest())")
    digests = {subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                              env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{WORLD}:{ROOT}"}).stdout for seed in ("1", "2")}
    assert len(digests) == 1


def test_evaluation_files_are_what_the_world_draws(files, world):
    """The rest of prepare.py samples from the base model and takes minutes; these need no model."""
    prepare, scenarios = world
    assert files["eval_tool"] == prepare.draw(scenarios.TOOL_KINDS, 200, "eval")
    assert files["eval_chat"] == prepare.draw(scenarios.CHAT_KINDS, 200, "eval")
    assert files["eval_facilities"] == prepare.draw(scenarios.KINDS, 100, "eval", facilities=True)


def test_no_training_task_comes_from_the_held_back_department(files):
    departments = {name: {task["spec"]["department"] for task in tasks} for name, tasks in files.items()}
    assert departments.pop("eval_facilities") == {"facilities"}
    assert all(seen == {"orders", "travel", "accounts", "billing"} for seen in departments.values()), departments


def test_tokenizer_round_trips_and_prompts_are_short(files, base_tokenizer):
    prompts = [render_prompt(base_tokenizer, task["messages"], task["tools"]) for task in of(files, COUNTS)]
    for ids in prompts[::11]:
        assert base_tokenizer.encode(base_tokenizer.decode(ids), add_special_tokens=False) == ids
    lengths = list(map(len, prompts))
    print(f"prompts: mean {sum(lengths) / len(lengths):.0f} tokens, longest {max(lengths)}")
    assert max(lengths) < 500
    odd = "Zürich — 12,900 € <tool_call>\n{\"a\": \"}\\\"\"}\n</tool_call>\t日本"
    assert base_tokenizer.decode(base_tokenizer.encode(odd, add_special_tokens=False)) == odd


def test_base_is_an_ordinary_folder_that_answers(files):
    model, tokenizer = load_model(WORLD / "base")
    assert model.config.model_type == "qwen3" and 4e6 < model.num_parameters() < 5e6
    assert "<|im_end|>" in tokenizer.convert_ids_to_tokens(stop_ids(tokenizer, model)) and len(tokenizer) <= model.config.vocab_size
    for token in ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "<think>"):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    tasks = files["eval_tool"][:16]
    prompts = [render_prompt(tokenizer, task["messages"], task["tools"]) for task in tasks]
    samples = HFEngine(model, tokenizer).generate(prompts, [[0]] * len(tasks), 96)
    grades = [grade_completion(task, tokenizer.decode(sample.ids, skip_special_tokens=True)) for task, (sample,) in zip(tasks, samples)]
    assert all(sample.finish_reason == "stop" for sample, in samples) and {grade.passed for grade in grades} == {True, False}


def test_every_gold_value_can_be_read_off_the_prefix(files, world):
    """Otherwise a task could not be solved, with a hint or without."""
    _, scenarios = world
    for task in of(files, COUNTS):
        known = " ".join(text for _, text in leaves([task["messages"], task["tools"]]))
        for call in task["spec"].get("gold", []):
            for argument, value in call["arguments"].items():
                forms = [str(value), str(value // 100) if argument == "amount_cents" else "",
                         scenarios.long_date(value) if argument in ("date", "until") else ""]
                assert any(form and form in known for form in forms), f"{task['id']}: {argument} {value}"
