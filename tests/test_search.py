"""optimize_hints.py: leak check, strategy, writers (against a real HTTP server on loopback), resume."""
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import optimize_hints
from common import Grade, InfraError, Sample, append_jsonl, load_world, read_jsonl
from conftest import LetterTokenizer, error_body
from optimize_hints import (Config, Confidence, OpenAIWriter, ScriptedWriter, cost, fill_markers, leak_check, marker_values, request_body,
                            search, writer_messages)

TOOLS = [{"type": "function", "function": {"name": name, "description": about, "parameters": {"type": "object", "properties": arguments}}}
         for name, about, arguments in [
             ("refund_item", "Refund an item.", {"item_id": {"type": "string"}, "amount_cents": {"type": "integer"},
                                                 "reason": {"type": "string", "enum": ["damaged", "late"]}}),
             ("exchange_item", "Exchange an item.", {"item_id": {"type": "string"}})]]
WORLD = '''
from common import Grade
class Env:
    def reset(self, task):
        self.task = task
    def step(self, message):
        self.text = message["content"]
    def grade(self):
        good = self.text.startswith(self.task["spec"]["begin"])
        return Grade(float(good), "intended", "Correct." if good else "The value of `item_id` is wrong.")
'''
RULES = {"feedback": "value of `(\\w+)` is wrong", "hints": [
    "Look @@1@@ up in the list before @@TOOL@@.", "Magic: take the @@1@@ of the item that the user names.", "Mind the @@1@@.",
    "Magic: @@ARG:id@@ comes from the record.", "Be careful with @@OTHER@@.", "Perhaps the user wants something else."]}


def make_task(number, world="toolworld"):
    call = {"name": "refund_item", "arguments": {"item_id": "ITM-1", "amount_cents": 7}}
    return {"id": f"t{number}", "world": str(world), "tools": TOOLS, "failure_kind": "wrong_id", "spec": {"begin": "ok", "canary": "CANARY"},
            "messages": [{"role": "system", "content": "Policy: verify the user first. Credit score checks are free."},
                         {"role": "user", "content": f"Please refund the lamp, {number}. I am Ana Lopez, ana@shop.example, order ORD-77, 12,900 in all."},
                         {"role": "assistant", "content": "", "tool_calls": [
                             {"type": "function", "function": {"name": "get_order", "arguments": {"order_id": "ORD-77"}}}]},
                         {"role": "tool", "content": '{"item": "lamp", "item_id": "ITM-5", "due": "2026-03-05", "sizes": [100,200], "total": 12900}'}],
            "failed_completion": f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "failed_feedback": "The value of `item_id` is wrong."}


class FakeEngine:
    """A magic hint passes on 4 of 5 seeds, no hint on 1 of 5. The text also shows the batch, as low bits would."""

    def __init__(self):
        self.batches = []

    def generate(self, prompts, seeds, *rest, **options):
        self.batches.append([(LetterTokenizer().decode(ids), of) for ids, of in zip(prompts, seeds)])
        shape = sum(map(len, prompts))
        texts = [[f"{'ok' if seed % 5 < (4 if 'Magic' in prompt else 1) else 'no'} {shape}" for seed in of] for prompt, of in self.batches[-1]]
        return [[Sample([ord(letter) for letter in text], [0.0] * len(text), "stop") for text in of] for of in texts]


@pytest.fixture
def world(tmp_path):
    (tmp_path / "world").mkdir()
    (tmp_path / "world/env.py").write_text(WORLD)
    append_jsonl(tmp_path / "world/writer_rules.jsonl", RULES)
    return tmp_path / "world"


@pytest.fixture
def cfg(tmp_path):
    (tmp_path / "out").mkdir()
    return Config(out_dir=str(tmp_path / "out"), max_rounds=6, concurrency=4)


def files(out_dir):
    return {name: (Path(out_dir) / name).read_bytes() for name in ("hints.jsonl", "hint_trials.jsonl", "writer_calls.jsonl")}


# The leak check.

@pytest.mark.parametrize("hint, reason", [
    ("", "empty"), (" \n", "empty"), ("Look it up. " * 60, "longer"),
    ("Take the id from the record", "repeats"), ("take  the ID from the record!", "repeats"),
    ("Do what the grader wants.", "grader"), ("This earns the full reward.", "grader"), ("It will be scored by amount.", "grader"),
    ("In the previous attempt the id was wrong.", "recorded failure"), ("Unlike the recorded failure, look first.", "recorded failure"),
    ("Last time the id was wrong.", "recorded failure"), ("Mind the failed step.", "recorded failure"), ("Avoid the mistake with the id.", "recorded failure"),
    ("The assistant used the first id.", "hindsight"), ("You forgot the id.", "hindsight"), ("The id should have come first.", "hindsight"),
    ("The correct answer is the lamp.", "hindsight"), ("In hindsight the lamp matters.", "hindsight"),
    ('Send {"name": "refund_item"}', "call itself"), ("Use refund_item(item_id=ITM-5).", "call itself"), ("Write <tool_call> now.", "call itself"),
    ("The amount is 4200.", "4200"), ("The amount is 12,901.", "12,901"), ("The amount is 12 901.", "12 901"), ("It is 1 2 9 0 1.", "1 2 9 0 1"),
    ("The amount is ４２.", "42"), ("The amount is -4200.", "4200"), ("A 45-day window applies.", "45"), ("What the gra\u200bder wants.", "grader"), ("The amount is 129.", "129"), ("It costs $12.90 in all.", "12.90"), ("Refund four of them.", "four"),
    ("Set item_id to ITM-9.", "ITM-9"), ("Set item_id to itm9.", "itm9"), ("Say 2026-03-06 to the user.", "2026-03-06"),
    ("Say 2026/03/05 to the user.", "2026/03/05"), ("It is due on March the fifth.", "March"), ("Send it to bob@shop.example.", "bob@shop.example"),
    ("Refund it to Maria Garcia.", "Maria"), ("Refund it to MARIA.", "MARIA"), ("It is for the following person. Maria.", "Maria"),
    ('The reason is "bad smell".', "bad smell"), ("Set the level to 'gold'.", "gold"), ("Use `refund_all`.", "refund_all"),
    ("Set the tier to gold_plus.", "gold_plus")])
def test_leak_check_rejects(hint, reason):
    assert reason in leak_check(hint, make_task(1), earlier=["Take the id from the record."])


@pytest.mark.parametrize("hint", [
    "Take the item_id of the lamp from the record.", "The total is 12900.", "The total is 12,900.", "The total is 12,900.00, refund all of it.",
    "Use ITM-5.", "Use itm-5 for the lamp.", "The user is Ana Lopez (ana@shop.example).", "ANA LOPEZ wants a refund.", "The size is 200.",
    'Set the reason to "damaged".', "Write the date as YYYY-MM-DD, so 2026-03-05.", "Call refund_item with the item_id; `amount_cents` is in cents.",
    "Check the credit score first.", "First verify the user, then refund.", "Do not repeat the refused call.", "If ORD-77 is open, go on."])
def test_leak_check_allows(hint):
    assert leak_check(hint, make_task(1)) == ""


def test_leak_check_sees_cuts_and_values_that_only_an_attempt_used():
    task = make_task(1)
    assert leak_check("Take the item_id.", task, finish_reason="length") == "was cut"
    assert leak_check("Give bad smell as the reason.", task) == ""
    tried = {"completion": '<tool_call>\n{"name": "refund_item", "arguments": {"reason": "Bad Smell"}}\n</tool_call>'}
    assert "bad smell" in leak_check("Give bad smell as the reason.", task | {"trials": [tried]})


# The strategy.

def tell(strategy, hint, *rewards):
    strategy.tell(hint, [{"reward": reward} for reward in rewards])


def test_confidence_confirms_full_credit_and_stops_at_three_of_three(cfg):
    s = Confidence(cfg)
    assert s.ask() == [(None, 1)]
    tell(s, "a", 0.0)
    assert s.orders() == [(None, 1)]
    tell(s, "b", 1.0)
    assert s.ask() == [("b", 2)]
    tell(s, "b", 1.0, 0.0)
    assert s.orders() == [(None, 1)] and s.best() == "b"
    tell(s, "c", 1.0)
    tell(s, "c", 1.0, 1.0)
    assert s.orders() == [] and s.passed and s.best() == "c"


def test_confidence_graded_rewards_and_ties(cfg):
    s = Confidence(cfg)
    tell(s, "a", 0.5)
    assert s.ask() == [("a", 2)]
    tell(s, "a", 0.5, 0.5)
    tell(s, "b", 0.5)
    assert s.ask() == [(None, 1)] and s.best() == "a"  # not above the incumbent; a tie goes to more rollouts
    tell(s, "c", 0.6)
    assert s.ask() == [("c", 2)]
    tie = Confidence(cfg)
    tell(tie, "a", 0.0), tell(tie, "b", 0.0)
    assert tie.best() == "a"  # then to the earliest: a task where nothing worked keeps a hint


# The scripted writer.

def test_scripted_writer_fills_markers_moves_on_and_ends(world, cfg):
    view = make_task(1, world) | {"trials": []}
    writer, hints = ScriptedWriter(cfg, [view]), []
    while answer := writer.write(view, len(hints)):
        hints.append(answer["hint"])
        view["trials"].append({"hint": answer["hint"], "rejected": "no"})
    assert sorted(hints) == sorted(["Look item_id up in the list before refund_item.", "Magic: take the item_id of the item that the user names.",
                                    "Mind the item_id.", "Magic: item_id comes from the record.", "Be careful with exchange_item.",
                                    "Perhaps the user wants something else."])
    orders = {ScriptedWriter(replace(cfg, seed=seed), [view]).write(view | {"trials": []}, 0)["hint"] for seed in range(12)}
    assert len(orders) > 2  # a seeded shuffle


def test_scripted_writer_reads_policy_and_records(world, cfg):
    writer, view = ScriptedWriter(cfg, [make_task(1, world)]), make_task(1, world) | {"trials": []}
    assert writer.expand("@@POLICY:user@@ @@FIELD:due@@ @@VALUE:item$@@ @@TOOLS@@ @@1@@", marker_values(view), ["x"]) == [
        "Policy: verify the user first. due lamp refund_item, exchange_item x"]
    assert writer.expand("The @@FIELD:_id@@ of @@OTHER@@ in @@ARG:integer@@.", marker_values(view)) == ["The item_id of exchange_item in amount_cents."]
    assert writer.expand("Use @@TOOL@@.", marker_values(view | {"failed_completion": "Sorry."})) == []
    with pytest.raises(SystemExit, match="@@NOPE@@"):
        writer.expand("@@NOPE@@", marker_values(view))


def test_scripted_writer_without_rules_uses_the_schemas(world, cfg):
    (world / "writer_rules.jsonl").unlink()
    view = make_task(1, world) | {"trials": []}
    writer = ScriptedWriter(cfg, [view])
    answer = writer.write(view, 0)
    assert leak_check(answer["hint"], view) == ""


# The openai writer, over HTTP.

def chat_answer(hint, finish_reason="stop"):
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "served-model",
            "choices": [{"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": hint}}],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 20, "total_tokens": 1020}}


def num_hints(request):
    return len(set(re.findall(r'\{"hint": "(.*?)"', request)))


@pytest.fixture
def server(server):
    server.reply = lambda body: (200, {}, chat_answer("Take the item_id from the record."))
    return server


@pytest.fixture
def openai_cfg(cfg, server):
    return replace(cfg, writer="openai", writer_model="m", base_url=server.url)


def test_API_01_request_bodies(case, cfg):
    data, flavour = case("API-01"), {"openai-reasoning": "reasoning", "vllm": "chat"}
    for asked, body in zip(data["input"]["requests"], data["expected"]["bodies"]):
        this = replace(cfg, writer_model=asked["model"], writer_api=flavour[asked["api"]], writer_max_tokens=asked["max_out"],
                       writer_temperature=asked["temperature"])
        assert request_body(this, asked.get("seed")) == body


def test_API_01_prompts_keep_braces(case):
    data = case("API-01")
    assert fill_markers(data["input"]["template"], {"FAILURE": data["input"]["failure"]}) == data["expected"]["prompt"]
    assert fill_markers("@@A@@ @@B@@", {"A": "@@B@@", "B": "{x}"}) == "@@B@@ {x}"  # one pass


def test_API_01_a_refused_parameter_is_dropped_once_and_remembered(case, server, openai_cfg, waits):
    refused = case("API-01")["input"]["error_400"]

    def reply(body):
        if refused["param"] in body:
            return 400, {}, error_body(refused["code"], refused["param"])
        if "max_tokens" in body:
            return 400, {}, error_body("unsupported_parameter", "max_tokens")
        return 200, {}, chat_answer("Take the item_id.")
    server.reply = reply
    writer, view = OpenAIWriter(openai_cfg, []), make_task(1) | {"trials": []}
    row = writer.write(view, 0)
    assert row["hint"] == "Take the item_id." and row["seed"] >= 0 and waits == []
    writer.write(view, 1)
    sent = [body.keys() - {"messages", "model", "seed"} for body in server.bodies]
    assert sent == [{"max_tokens", "temperature"}, {"max_tokens"}, {"max_completion_tokens"}, {"max_completion_tokens"}]


def test_API_03_retries(case, server, openai_cfg, waits):
    data, timeout = case("API-03"), 0.3
    cfg = replace(openai_cfg, max_retries=data["input"]["max_attempts"] - 1, writer_timeout=timeout)
    answers = {"429 insufficient_quota": (429, {}, error_body("insufficient_quota")), "429 retry-after=7": (429, {"retry-after": "7"}, error_body("rate")),
               "500": (500, {}, error_body("server")), "400": (400, {}, error_body("bad", "model")), "200": (200, {}, chat_answer("Go on."))}
    expected = data["expected"]
    for number, row in enumerate(data["input"]["rows"]):
        todo, server.bodies[:], waits[:] = list(row), [], []

        def reply(body):
            name = todo.pop(0)
            if name == "timeout":
                threading.Event().wait(timeout * 2)
                name = "200"
            return answers[name]
        server.reply = reply
        writer = OpenAIWriter(cfg, [])
        if expected["raise"][number]:
            with pytest.raises(SystemExit, match=expected["raise"][number]):
                writer.send([], 0)
        else:
            writer.send([], 0)
        assert len(server.bodies) == expected["attempts"][number] <= expected["http_calls_at_most"], row
        assert len(waits) == expected["attempts"][number] - 1
        if number == 1:
            assert waits[0] >= expected["min_wait_before_2nd_attempt_row_2_s"]


def test_retry_after_may_be_a_date(server, openai_cfg, waits):
    todo = [(503, {"retry-after": formatdate(time.time() + 40, usegmt=True)}, error_body("busy")), (200, {}, chat_answer("Go on."))]
    server.reply = lambda body: todo.pop(0)
    OpenAIWriter(openai_cfg, []).send([], 0)
    assert 38 < waits[0] <= 40


def test_answers_of_reasoning_models_and_empty_ones(server, openai_cfg):
    view, writer = make_task(1) | {"trials": []}, OpenAIWriter(openai_cfg, [])
    for content, finish_reason, hint in [("<think>12 or 13?</think>\nTake it.", "stop", "Take it."), (None, "content_filter", ""), ("Take", "length", "Take")]:
        server.reply = lambda body: (200, {}, chat_answer(content, finish_reason))
        row = writer.write(view, 0)
        assert (row["hint"], row["finish_reason"], row["model"]) == (hint, finish_reason, "served-model")
    server.reply = lambda body: (200, {}, chat_answer("Take it.") | {"usage": None})
    assert "prompt_tokens" not in writer.write(view, 0)


def test_search_with_a_server_counts_tokens_usd_and_never_shows_the_spec(server, openai_cfg, world):
    def reply(body):
        time.sleep(0.02)
        request = body["messages"][1]["content"]
        number = re.search(r"lamp, (\d+)", request)[1]
        return 200, {}, chat_answer(["Mind the item_id.", "In the previous attempt the id was wrong.", "Magic: take the lamp, number 4242.",
                                     f"Magic: take the lamp, as {number} asks.", "Magic: look the item_id of the lamp up."][num_hints(request) % 5])
    server.reply = reply
    hints, trials, calls = search(openai_cfg, [make_task(n, world) for n in range(6)], FakeEngine(), LetterTokenizer())
    assert server.most_busy > 1 and len(server.bodies) == len(calls)
    text = json.dumps(server.bodies)
    assert "CANARY" not in text and '"spec' not in text and "reward" in text
    assert any("recorded failure" in trial.get("rejected", "") for rows in trials.values() for trial in rows)
    assert any("4242" in trial.get("rejected", "") for rows in trials.values() for trial in rows)
    assert all("Magic" in row["hint"] and "4242" not in row["hint"] for row in hints if row["passed"]) and any(row["passed"] for row in hints)
    n = len(calls)
    assert cost(openai_cfg, calls) == (1000 * n, 20 * n, "unknown")
    assert cost(replace(openai_cfg, price_in=0.5, price_out=2.0), calls) == (1000 * n, 20 * n, f"{n * (500 + 40) / 1e6:.4f}")


def test_a_failing_server_stops_the_run_and_keeps_what_was_paid(server, openai_cfg, world, waits):
    tasks, broken = [make_task(n, world) for n in range(6)], [True]

    def reply(body):
        if broken[0] and "lamp, 3." in body["messages"][1]["content"]:
            return 429, {}, error_body("insufficient_quota")
        return 200, {}, chat_answer("Magic: take the lamp.")
    server.reply = reply
    with pytest.raises(SystemExit, match="quota"):
        search(openai_cfg, tasks, FakeEngine(), LetterTokenizer())
    paid = {row["id"] for row in read_jsonl(Path(openai_cfg.out_dir) / "writer_calls.jsonl")}
    broken[0], server.bodies[:] = False, []
    search(replace(openai_cfg, max_rounds=1), tasks, FakeEngine(), LetterTokenizer())
    assert paid and {re.search(r"lamp, (\d)", body["messages"][1]["content"])[1] for body in server.bodies} == {str(n) for n in range(6)} - {i[1:] for i in paid}


# The search.

class Sealed(dict):
    """A spec that nobody may read."""

    def _refuse(self, *args):
        raise AssertionError("the spec was read")
    __getitem__ = __iter__ = __len__ = __contains__ = __repr__ = __str__ = get = items = keys = values = copy = _refuse


@pytest.mark.parametrize("writer", ["scripted", "openai"])
def test_only_the_grader_reads_the_spec(writer, cfg, openai_cfg, world, monkeypatch):
    tasks = [make_task(n, world) | {"spec": Sealed(begin="ok")} for n in range(3)]
    graded = []

    def fake_grade(task, text):
        graded.append(type(task["spec"]))
        return Grade(float(text.startswith("ok")), "intended", "Correct.")
    monkeypatch.setattr(optimize_hints, "grade_completion", fake_grade)
    hints, _, _ = search(cfg if writer == "scripted" else openai_cfg, tasks, FakeEngine(), LetterTokenizer())
    assert set(graded) == {Sealed} and len(hints) == 3
    assert "CANARY" not in json.dumps(writer_messages(make_task(1) | {"trials": []}))


def test_search_rows_seeds_and_rewards(cfg, world):
    engine, tasks = FakeEngine(), [make_task(n, world) for n in range(8)]
    hints, trials, _ = search(cfg, tasks, engine, LetterTokenizer())
    rows = read_jsonl(Path(cfg.out_dir) / "hint_trials.jsonl")
    by_phase = {phase: [row for row in rows if row["phase"] == phase] for phase in ("search", "fresh")}
    assert {row["seed"] for row in by_phase["search"]}.isdisjoint(row["seed"] for row in by_phase["fresh"])
    assert all(row["hint"] for row in by_phase["search"])  # the empty hint is a control, never a candidate
    for row in read_jsonl(Path(cfg.out_dir) / "hints.jsonl"):
        assert list(row) == ["id", "hint_id", "hint", "writer", "hint_reward", "fresh_reward", "empty_reward", "num_rollouts", "rounds", "passed"]
        mine = [r for r in by_phase["search"] if r["id"] == row["id"]]
        of_hint = [r["reward"] for r in mine if r["hint_id"] == row["hint_id"]]
        assert row["hint_reward"] == sum(of_hint) / len(of_hint) and row["num_rollouts"] == len(mine)
        assert row["passed"] == (of_hint == [1, 1, 1]) and row["rounds"] == len({r["round"] for r in mine}) <= 6
        hinted, empty = [[r for r in by_phase["fresh"] if r["id"] == row["id"] and r["hint"] == hint] for hint in (row["hint"], "")]
        assert [r["seed"] for r in hinted] == [r["seed"] for r in empty] and len(hinted) == 4
        assert row["fresh_reward"] == sum(r["reward"] for r in hinted) / 4 and row["empty_reward"] == sum(r["reward"] for r in empty) / 4
    assert len(hints) == 8 and sum(row["passed"] for row in hints) > 3
    first, second = engine.batches[:2]  # lockstep: all tasks, then the promising ones
    assert len(first) == 8 and all(len(seeds) == 1 for _, seeds in first) and all(len(seeds) == 2 for _, seeds in second)
    assert len(engine.batches) <= 2 * cfg.max_rounds + 1
    prefix = {LetterTokenizer().decode(LetterTokenizer().apply_chat_template(t["messages"])["input_ids"]) for t in tasks}
    assert all(any(prompt.startswith(p) for p in prefix) for batch in engine.batches for prompt, _ in batch)  # the same prefix every time


def test_a_broken_world_is_void_and_never_a_reward_of_zero(cfg, world, monkeypatch, waits):
    tasks, env = [make_task(n, world) for n in range(4)], load_world(str(world)).Env
    search(replace(cfg, out_dir=str(world)), tasks, FakeEngine(), LetterTokenizer())
    calls, real = [], env.grade

    def shaky(self):
        calls.append(self.task["id"])
        if calls.count(self.task["id"]) % 3:  # two of three tries fail
            raise InfraError("no connection")
        return real(self)
    monkeypatch.setattr(env, "grade", shaky)
    search(cfg, tasks, FakeEngine(), LetterTokenizer())
    assert files(cfg.out_dir) == files(world)


def test_a_task_whose_world_stays_broken_is_left_out_and_tried_again(cfg, world, monkeypatch, waits, capsys):
    tasks, env = [make_task(n, world) for n in range(4)], load_world(str(world)).Env
    real = env.grade

    def broken(self):
        if self.task["id"] == "t2":
            raise InfraError("no connection")
        return real(self)
    monkeypatch.setattr(env, "grade", broken)
    hints, _, _ = search(cfg, tasks, FakeEngine(), LetterTokenizer())
    rows = read_jsonl(Path(cfg.out_dir) / "hint_trials.jsonl")
    assert [row["id"] for row in hints] == ["t0", "t1", "t3"] and not any(row["id"] == "t2" for row in rows)
    assert "1 tasks are left out" in capsys.readouterr().out
    monkeypatch.setattr(env, "grade", real)
    hints, _, _ = search(cfg, tasks, FakeEngine(), LetterTokenizer())
    assert [row["id"] for row in hints] == ["t0", "t1", "t2", "t3"]
    after = read_jsonl(Path(cfg.out_dir) / "hint_trials.jsonl")
    assert after[:len(rows)] == rows and {row["id"] for row in after[len(rows):]} == {"t2"}


def test_RUN_02_last_finished_row_wins_and_unfinished_rows_run_again(cfg, world):
    tasks = [make_task(n, world) for n in range(3)]
    search(cfg, tasks, FakeEngine(), LetterTokenizer())
    path, whole = Path(cfg.out_dir) / "hint_trials.jsonl", files(cfg.out_dir)
    rows = read_jsonl(path)
    error = {key: rows[-1][key] for key in ("id", "hint_id", "hint", "phase", "seed")}
    stale = rows[0] | {"reward": 0.5}
    path.unlink()
    for row in [stale, *rows[:-1], error | {"status": "error"}]:
        append_jsonl(path, row)
    engine = FakeEngine()
    search(cfg, tasks, engine, LetterTokenizer())
    assert files(cfg.out_dir)["hints.jsonl"] == whole["hints.jsonl"]
    assert len(engine.batches) == 1 and read_jsonl(path)[-1] == rows[-1]  # one batch for the one missing row
    search(cfg, tasks, engine, LetterTokenizer())
    assert len(engine.batches) == 1  # nothing is left to do


def test_a_hints_file_is_measured_without_search(cfg, world):
    path = world / "human.jsonl"
    append_jsonl(path, {"failure_kind": "wrong_id", "hint": "Magic: take the id of the item that the user names."})
    tasks = [make_task(0, world), make_task(1, world) | {"failure_kind": "other"}]
    hints, trials, calls = search(replace(cfg, writer="file", hints_file=str(path), search="none"), tasks, FakeEngine(), LetterTokenizer())
    assert [row["id"] for row in hints] == ["t0"] and "hint_reward" not in hints[0]
    assert hints[0]["num_rollouts"] == 0 and not hints[0]["passed"] and hints[0]["fresh_reward"] > 0 and len(calls) == 1


def test_a_prompt_that_does_not_fit_names_its_task(cfg, world):
    class Small(FakeEngine):
        def generate(self, *args, **options):
            raise ValueError("prompt 1: 9000 tokens + 96 new ones do not fit the model's 512")
    with pytest.raises(SystemExit, match="task t1: prompt 1"):
        search(cfg, [make_task(n, world) for n in range(3)], Small(), LetterTokenizer())


# SIGKILL. The child runs a search with the fake engine and kills itself at its kill_at-th record.

def child(world, kill_at, url, out_dir):
    cfg = Config(out_dir=out_dir, max_rounds=5, concurrency=3, **({"writer": "openai", "writer_model": "m", "base_url": url} if url else {}))
    count, append, write = [0], common.append_jsonl, common.write_text

    def dying(record, path, content):
        count[0] += 1
        if count[0] == kill_at:
            if Path(path).name == "writer_calls.jsonl":
                record(path, content)  # a paid answer is on disk in one write
            else:
                with open(f"{path}" if record is append else f"{path}.tmp", "ab") as file:
                    file.write(json.dumps(content).encode()[:40])
            os.kill(os.getpid(), signal.SIGKILL)
        record(path, content)
    common.append_jsonl = lambda path, row: dying(append, path, row)
    common.write_text = lambda path, text: dying(write, path, text)
    search(cfg, [make_task(n, world) for n in range(4)], FakeEngine(), LetterTokenizer())


def start(world, kill_at, url, out_dir):
    Path(out_dir).mkdir(exist_ok=True)
    code = "import sys; from test_search import child; child(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])"
    return subprocess.run([sys.executable, "-c", code, str(world), str(kill_at), url, str(out_dir)], cwd=Path(__file__).parent,
                          capture_output=True, text=True).returncode


def test_a_killed_search_ends_with_the_same_files(world, tmp_path):
    assert start(world, 0, "", tmp_path / "unbroken") == 0
    whole = files(tmp_path / "unbroken")
    records = whole["hint_trials.jsonl"].count(b"\n") + whole["writer_calls.jsonl"].count(b"\n") + 2
    for kill_at in (6, 11, records - 20, records - 1, records):
        out_dir = tmp_path / f"killed{kill_at}"
        assert start(world, kill_at, "", out_dir) == -signal.SIGKILL
        assert start(world, 0, "", out_dir) == 0
        assert files(out_dir) == whole, kill_at


def test_a_killed_search_repeats_no_paid_call(world, tmp_path, server):
    hints = ["Mind the item_id.", "Magic: take the lamp.", "Look the lamp up.", "Magic: the record has the item_id.", "Go on."]
    server.reply = lambda body: (200, {}, chat_answer(hints[num_hints(body["messages"][1]["content"]) % 5]))
    assert start(world, 0, server.url, tmp_path / "unbroken") == 0
    paid, server.bodies[:] = len(server.bodies), []
    for kill_at in (2, 9):  # killed again and again in the same folder
        assert start(world, kill_at, server.url, tmp_path / "killed") == -signal.SIGKILL
    assert start(world, 0, server.url, tmp_path / "killed") == 0
    assert files(tmp_path / "killed") == files(tmp_path / "unbroken")
    in_flight = 2 * 2  # a call under way when the kill comes (concurrency - 1, twice) cannot be known to be paid
    assert paid <= len(server.bodies) <= paid + in_flight


# The command.

def test_EVAL_03_no_tasks_is_refused_not_replaced(cfg, tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(SystemExit, match="no tasks"):
        optimize_hints.main(replace(cfg, tasks=[str(tmp_path / "none.jsonl")]))


@pytest.mark.parametrize("change, message", [
    ({"writer": "file"}, "hints_file"), ({"hints_file": "x.jsonl"}, "hints_file"), ({"writer": "openai"}, "writer_model"), ({"base_url": "http://x"}, "base_url"), ({"fresh": 0}, "fresh")])
def test_contradictory_flags_are_refused(cfg, change, message):
    with pytest.raises(SystemExit, match=message):
        optimize_hints.main(replace(cfg, **change))


def test_a_file_of_ids_selects_tasks(tiny_model_dir, tiny_tasks, tmp_path):
    ids = [row["id"] for row in read_jsonl(tiny_tasks)]
    (tmp_path / "ids.jsonl").write_text(json.dumps({"id": ids[1]}) + "\n")
    cfg = Config(tasks=[str(tiny_tasks)], num_tasks=0, ids=str(tmp_path / "ids.jsonl"), model=str(tiny_model_dir), out_dir=str(tmp_path / "out"),
                 max_rounds=1, max_new_tokens=8)
    optimize_hints.main(cfg)
    assert len(ids) > 1 and read_jsonl(tmp_path / "out" / "summary.jsonl")[0]["tasks"] == 1
    (tmp_path / "ids.jsonl").write_text('{"id": "nobody"}\n')
    with pytest.raises(SystemExit, match="nobody is in none of"):
        optimize_hints.main(replace(cfg, out_dir=str(tmp_path / "other")))


def test_main_on_a_model(tiny_model_dir, tiny_tasks, tmp_path, capsys):
    cfg = Config(tasks=[str(tiny_tasks)], num_tasks=0, model=str(tiny_model_dir), out_dir=str(tmp_path / "out"), max_rounds=2, max_new_tokens=8)
    optimize_hints.main(cfg)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5].startswith("tasks ") and "on fresh seeds" in lines[-4] and "stand-in" in lines[0]
    before = files(cfg.out_dir)
    optimize_hints.main(replace(cfg, concurrency=2))  # resumes; nothing changes
    assert files(cfg.out_dir) == before
    with pytest.raises(SystemExit, match="confirm"):
        optimize_hints.main(replace(cfg, confirm=1))
