"""optimize_hints.py: how each --search spreads its rollouts, against graders with known arms; objectives, gates, the shared prompt, the audit."""
import json
from dataclasses import replace
from pathlib import Path

import pytest

import optimize_hints
from common import Grade, InfraError, Sample, load_engine, load_world, read_jsonl, reverse_kl, torch
from conftest import LetterTokenizer, make_tasks
from optimize_hints import SEARCHES, Config, ScriptedWriter, rollout_budget, search
from test_search import FakeEngine, chat_answer, cfg, files, make_task, world  # noqa: F401

STRATEGIES = [name for name in SEARCHES if name != "none"]


def play(name, rewards, num_hints=15, **fields):
    """(strategy, allocation): a lockstep round by round; hint number i earns rewards[i], a list that is read in turn and again from its start.

    allocation: per engine batch the list of (hint, number of rollouts)."""
    strategy, batches, told = SEARCHES[name](Config(**fields)), [], 0
    pulls = [0] * num_hints
    while orders := strategy.orders():
        batch = []
        for hint, num in orders:
            if hint is None:
                strategy.hints_left -= 1
                hint, told = told, told + 1
            of_hint = rewards[hint % len(rewards)]
            trials = [{"reward": of_hint[(pulls[hint] + k) % len(of_hint)]} for k in range(num)]
            pulls[hint] += num
            batch.append((hint, num, trials))
        for hint, num, trials in batch:
            strategy.tell(hint, trials)
        batches.append([(hint, num) for hint, num, _ in batch])
    return strategy, batches


NONE, ALL, LUCK = [0.0], [1.0], [1.0, 0.0, 0.0]


@pytest.mark.parametrize("name, rewards, batches, best", [
    # one rollout each; the lucky hint 1 gets two more and falls through; hint 3 passes three of three
    ("confidence", [NONE, LUCK, NONE, ALL], [[(0, 1)], [(1, 1)], [(1, 2)], [(2, 1)], [(3, 1)], [(3, 2)]], 3),
    ("fixed3", [NONE, LUCK, NONE, ALL], [[(0, 3)], [(1, 3)], [(2, 3)], [(3, 3)]], 3),
    ("sequential", [NONE, LUCK, NONE, ALL], [[(0, 1)], [(1, 1)]], 1),  # luck is enough for it
    ("best_of_n", [NONE, LUCK, NONE, ALL], [[(i, 3) for i in range(5)]], 3),
    ("batch", [NONE, LUCK, NONE, ALL], [[(0, 3), (1, 3), (2, 3)], [(3, 3), (4, 3)]], 3),
    # 5 hints; 10 left, 2 rungs: 10 // 2 // 3 = 1 for each of 3; 7 left, 1 rung: 3 for each of 2; 1 left over
    ("halving", [NONE, LUCK, NONE, ALL, NONE], [[(i, 1) for i in range(5)], [(1, 1), (3, 1), (0, 1)], [(3, 3), (1, 3)]], 3),
    # 3 new, the same 3 again; 3 new, and then the best 3 of 6: hint 3 (1 of 1), hint 1 (1 of 2), hint 0 (the earliest of the zeros with 2); ...
    ("beam", [NONE, LUCK, NONE, ALL, NONE, NONE], [[(0, 1), (1, 1), (2, 1)], [(1, 1), (0, 1), (2, 1)], [(3, 1), (4, 1), (5, 1)],
                                                   [(3, 1), (1, 1), (0, 1)], [(6, 1), (7, 1), (8, 1)]], 3),
    # bounds after 5: hints 1 and 3 lead, the earliest first; then 3 until it has passed three times
    ("ucb", [NONE, LUCK, NONE, ALL, NONE], [[(i, 1) for i in range(5)], [(1, 1)], [(3, 1)], [(3, 1)]], 3)])
def test_allocations_by_hand_at_15_rollouts(name, rewards, batches, best):
    strategy, done = play(name, rewards, budget=15)
    assert done == batches and strategy.best() == best


def test_halving_at_45_spends_all_and_keeps_the_best_survivor():
    strategy, batches = play("halving", [[1.0, 0.0]] * 7 + [[1.0, 1.0, 0.0]] + [[0.0]] * 7, budget=45)
    assert [[num for _, num in batch] for batch in batches] == [[1] * 15, [1] * 8, [2] * 4, [7] * 2]
    assert [hint for hint, _ in batches[1]] == list(range(8)) and [hint for hint, _ in batches[2]] == [7, 0, 1, 2]
    assert strategy.best() == 7 and strategy.left == 0
    # an arm that was dropped at a lucky 1 of 1 does not beat the winner of the last rung
    strategy, batches = play("halving", [[1.0, 1.0, 0.0]], budget=15)
    assert strategy.best() in dict(batches[-1])


def test_halving_goes_on_when_all_arms_tie_or_only_one_is_there():
    strategy, batches = play("halving", [NONE], budget=15)
    assert [len(batch) for batch in batches] == [5, 3, 2] and strategy.best() == 0
    strategy = SEARCHES["halving"](Config(budget=15))
    strategy.tell("only", [{"reward": 0.0}])
    strategy.hints_left = 0
    assert strategy.orders() == [] and strategy.best() == "only"


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("budget, max_rounds, confirm", [(15, 15, 2), (45, 15, 2), (1, 15, 2), (7, 4, 1), (10, 15, 0), (0, 3, 2), (44, 15, 4)])
@pytest.mark.parametrize("rewards", [[NONE], [ALL], [LUCK], [[0.3], [0.5], [0.7, 0.1]], [NONE, LUCK, ALL]])
def test_no_budget_is_exceeded_and_every_rollout_counts(name, budget, max_rounds, confirm, rewards):
    fields = {"budget": budget, "max_rounds": max_rounds, "confirm": confirm}
    strategy, batches = play(name, rewards, **fields)
    spent = sum(num for batch in batches for _, num in batch)
    assert 0 < spent <= rollout_budget(Config(**fields)) and spent == sum(map(len, strategy.rewards.values()))
    assert len(strategy.rewards) <= max_rounds
    assert all(num > 0 for batch in batches for _, num in batch)


def test_the_default_budget_never_binds_confidence():
    free, bound = play("confidence", [LUCK])[1], play("confidence", [LUCK], budget=10 ** 6)[1]
    assert free == bound and sum(num for batch in free for _, num in batch) == 45


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_search_finds_magic_within_its_budget(name, cfg, world):
    cfg = replace(cfg, search=name, budget=15, max_rounds=15)
    hints, trials, calls = search(cfg, [make_task(n, world) for n in range(6)], FakeEngine(), LetterTokenizer())
    assert [row["id"] for row in hints] == [f"t{n}" for n in range(6)]
    for row in hints:
        mine = [trial for trial in trials[row["id"]] if "reward" in trial]
        assert row["num_rollouts"] == len(mine) <= 15 and len({trial["seed"] for trial in mine}) == len(mine)
        assert row["hint_reward"] == pytest.approx(sum(t["reward"] for t in mine if t["hint"] == row["hint"]) / sum(t["hint"] == row["hint"] for t in mine))
    assert sum("Magic" in row["hint"] for row in hints) >= 4
    before = files(cfg.out_dir)
    assert search(cfg, [make_task(n, world) for n in range(6)], None, LetterTokenizer())[0] == hints and files(cfg.out_dir) == before


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_search_cut_anywhere_allocates_what_the_unbroken_one_does(name, cfg, world, tmp_path):
    cfg, tasks = replace(cfg, search=name, budget=12), [make_task(n, world) for n in range(3)]
    search(cfg, tasks, FakeEngine(), LetterTokenizer())
    whole = files(cfg.out_dir)
    lines = whole["hint_trials.jsonl"].splitlines(True)
    last_round = max(row["round"] for row in read_jsonl(Path(cfg.out_dir) / "writer_calls.jsonl"))
    for cut in (0, 1, len(lines) // 3, len(lines) // 2, len(lines) - 1):
        out = tmp_path / f"cut{cut}"
        out.mkdir()
        (out / "hint_trials.jsonl").write_bytes(b"".join(lines[:cut]) + lines[cut][:20])
        if cut % 2:  # the answers of the writer are on disk up to the round before the last
            kept = [line for line in whole["writer_calls.jsonl"].splitlines(True) if json.loads(line)["round"] < last_round]
            (out / "writer_calls.jsonl").write_bytes(b"".join(kept))
        search(replace(cfg, out_dir=str(out)), tasks, FakeEngine(), LetterTokenizer())
        assert files(out) == whole, cut


@pytest.mark.parametrize("name", ["best_of_n", "halving", "beam", "ucb"])
def test_a_breakdown_is_void_in_every_search(name, cfg, world, monkeypatch, waits):
    cfg, tasks, env = replace(cfg, search=name, budget=12), [make_task(n, world) for n in range(3)], load_world(str(world)).Env
    real, calls = env.grade, []

    def broken(self):
        calls.append(1)
        if self.task["id"] == "t1" and 5 < len(calls) < 1000:
            raise InfraError("no connection")
        return real(self)
    monkeypatch.setattr(env, "grade", broken)
    hints, trials, _ = search(cfg, tasks, FakeEngine(), LetterTokenizer())
    assert [row["id"] for row in hints] == ["t0", "t2"]
    monkeypatch.setattr(env, "grade", real)
    search(cfg, tasks, FakeEngine(), LetterTokenizer())
    other = replace(cfg, out_dir=str(world))
    search(other, tasks, FakeEngine(), LetterTokenizer())
    key = lambda row: (row["id"], row["phase"], row.get("round", 0), row["hint_id"], row.get("seed", 0))
    rows = [sorted(read_jsonl(Path(c.out_dir) / "hint_trials.jsonl"), key=key) for c in (cfg, other)]
    assert [list(map(key, r)) for r in rows][0] == [list(map(key, r)) for r in rows][1]  # the same hints, seeds and rounds


# The agent.

def tool_answer(hint, num):
    answer = chat_answer("")
    answer["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": "test_hint", "arguments": json.dumps({"hint": hint, "num_rollouts": num})}}]}
    return answer


def test_the_agent_drives_test_hint_and_ends_when_it_likes(server, cfg, world):
    cfg = replace(cfg, search="agent", writer="openai", writer_model="m", base_url=server.url, budget=7, max_rounds=9, confirm=9)
    plan = [("Mind the item_id.", 2), ("Magic: take the lamp.", 1), ("Magic: take the lamp.", 2), ("In the previous attempt the id was wrong.", 1), ("Go on.", 50)]

    def reply(body):
        num = sum(message["role"] == "tool" for message in body["messages"])
        return 200, {}, tool_answer(*plan[num]) if num < len(plan) else chat_answer("I am done.")
    server.reply = reply
    hints, trials, calls = search(cfg, [make_task(n, world) for n in range(2)], FakeEngine(), LetterTokenizer())
    for rows in trials.values():
        spent = [[t["hint"] for t in rows if t["round"] == r and "reward" in t] for r in range(5)]
        assert [len(hints) for hints in spent] == [2, 1, 2, 0, 2]  # the last order of 50 is cut to what is left of 7
        assert sum("rejected" in t for t in rows) == 1 and len({t["seed"] for t in rows if "seed" in t}) == 7
    last = max((body for body in server.bodies), key=lambda body: len(body["messages"]))
    assert last["tools"][0]["function"]["name"] == "test_hint" and "CANARY" not in json.dumps(server.bodies)
    left = [json.loads(message["content"])["rollouts_left"] for message in last["messages"] if message["role"] == "tool"]
    assert left == [5, 4, 2, 2] and "Rollouts left: 7" in last["messages"][1]["content"]
    ids = [message["tool_calls"][0]["id"] for message in last["messages"] if message["role"] == "assistant"]
    assert ids == [message["tool_call_id"] for message in last["messages"] if message["role"] == "tool"]


def test_an_agent_that_answers_in_words_ends_its_task(server, cfg, world):
    cfg = replace(cfg, search="agent", writer="openai", writer_model="m", base_url=server.url, budget=6)
    bad = tool_answer("", 1)
    bad["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = "{not json"

    def reply(body):
        num = sum(message["role"] == "tool" for message in body["messages"])
        return 200, {}, [bad, tool_answer("Magic: take the lamp.", 1), chat_answer("That will do.")][num]
    server.reply = reply
    hints, trials, calls = search(cfg, [make_task(0, world)], FakeEngine(), LetterTokenizer())
    assert [trial.get("rejected") for trial in trials["t0"]] == ["is empty", None]
    assert hints[0]["num_rollouts"] == 1 and len(calls) == 3


# Objectives and gates, on a real model of two layers.

@pytest.fixture(scope="module")
def tiny(tiny_model_dir):
    return load_engine(Config(), str(tiny_model_dir))  # (engine, tokenizer)


@pytest.fixture
def tiny_cfg(cfg):
    return replace(cfg, max_new_tokens=8, max_rounds=2, fresh=1)


HINT = "Count the minutes."


def test_edit_shows_the_failed_step_and_grades_at_the_prefix(tiny_cfg, tiny, monkeypatch):
    engine, tokenizer = tiny
    task, graded, prompts = make_tasks()[0], [], []
    monkeypatch.setattr(optimize_hints, "grade_completion", lambda task, text: graded.append(task) or Grade(1.0, "intended", ""))
    monkeypatch.setattr(optimize_hints, "sample_tasks", lambda e, t, tasks, p, seeds, *rest: prompts.extend(p) or [
        [Sample([1], [0.0], "stop", "x") for _ in of] for of in seeds])
    (finish, _), = optimize_hints.edit(tiny_cfg, [(task, HINT)], [[1, 2]], engine, tokenizer)
    text = tokenizer.decode(prompts[0])
    assert finish()["reward"] == 1.0 and graded == [task]
    assert text.index("error: at most 120") < text.rindex(task["failed_completion"]) < text.index("anew") < text.index(HINT)


def test_token_shift_counts_moved_tokens_and_an_empty_hint_moves_none(tiny_cfg, tiny):
    engine, tokenizer = tiny
    tasks = make_tasks()[:4]
    for hint in (HINT, ""):
        batch = [(task, hint) for task in tasks]
        trials = optimize_hints.token_shift(tiny_cfg, batch, [[1]] * 4, engine, tokenizer)
        for (finish,), task, (student, teacher, ids) in zip(trials, tasks, optimize_hints.failed_logits(tiny_cfg, batch, engine, tokenizer)):
            kl, result = reverse_kl(student, teacher), finish()
            top = sorted(range(len(ids)), key=lambda t: -kl[t])[:-(-len(ids) // 10)]
            moved = [int(teacher[t].argmax()) != ids[t] for t in top]
            if hint:
                assert result["reward"] == sum(moved) / len(top) and result["feedback"].count("->") == sum(moved)
            else:
                assert kl.abs().max() < 1e-5
    # the packed logits are those of the prompt and the trace alone
    prefix, (student, _, ids) = optimize_hints.prompt_ids(tiny_cfg, tokenizer, tasks[0], ""), next(optimize_hints.failed_logits(tiny_cfg, [(tasks[0], HINT)], *tiny))
    with torch.no_grad():
        alone = engine.model(torch.tensor([prefix + ids])).logits[0, len(prefix) - 1:-1]
    assert (alone - student).abs().max() < 1e-3


def test_gates_of_the_student(tiny_cfg, tiny):
    engine, tokenizer = tiny
    tasks = make_tasks()[:3]
    items = [(task, HINT, task["failed_completion"]) for task in tasks] + [(tasks[0], "", "Something else entirely.")]
    near = optimize_hints.embedding(tiny_cfg, items, engine, tokenizer)
    assert max(near[:3]) < 1e-5 < near[3]  # the failed step itself is at distance 0
    shift = optimize_hints.logit_shift(tiny_cfg, items, engine, tokenizer)
    assert min(shift[:3]) > 1e-4 and abs(shift[3]) < 1e-5
    surprisal, = optimize_hints.natural(tiny_cfg, items[:1], engine, tokenizer)
    ids, without = (optimize_hints.prompt_ids(tiny_cfg, tokenizer, tasks[0], text) for text in (HINT, ""))
    start = next(i for i, (a, b) in enumerate(zip(without, ids)) if a != b)
    assert HINT.split()[0] in tokenizer.decode(ids[start:start + len(ids) - len(without)])
    with torch.no_grad():
        logprobs = engine.model(torch.tensor([ids])).logits[0].log_softmax(-1)  # logits[t] predict token t + 1
    expected = [-float(logprobs[t - 1, ids[t]]) for t in range(start, start + len(ids) - len(without))]
    assert surprisal == pytest.approx(sum(expected) / len(expected), abs=1e-3)


@pytest.mark.parametrize("gate", ["natural", "logit_shift", "embedding"])
def test_a_gated_hint_is_a_rejection_and_costs_no_more_than_it_must(gate, tiny_cfg, tiny, tmp_path):
    tasks = make_tasks()[:4]
    plain, _, _ = search(tiny_cfg, tasks, *tiny)
    whole = files(tiny_cfg.out_dir)
    for threshold, out in ((1e9, "open"), (-1.0, "shut")):
        cfg = replace(tiny_cfg, gate=gate, gate_threshold=threshold, out_dir=str(tmp_path / out))
        Path(cfg.out_dir).mkdir()
        hints, trials, calls = search(cfg, tasks, *tiny)
        if out == "open":
            assert files(cfg.out_dir) == whole
            continue
        rows = [row for of_task in trials.values() for row in of_task]
        assert hints == [] and sum(f"gate {gate}" in row.get("rejected", "") for row in rows) > 0
        assert all("rejected" in row for row in rows) or gate == "embedding"
        costs = read_jsonl(Path(cfg.out_dir) / "gates.jsonl")
        before = files(cfg.out_dir)
        search(cfg, tasks, *tiny)
        assert read_jsonl(Path(cfg.out_dir) / "gates.jsonl") == costs and files(cfg.out_dir) == before
        if gate == "embedding":  # one rollout went into every hint that was turned down, and it counts
            assert sum("reward" in row for row in rows) == sum("gate" in row.get("rejected", "") for row in rows)


def test_the_judge_is_asked_once_for_a_hint(server, cfg, world):
    cfg = replace(cfg, gate="natural", gate_model="judge", base_url=server.url, budget=15)
    server.reply = lambda body: (200, {}, chat_answer("<think>no?</think> Yes." if "Magic" in body["messages"][0]["content"] else "No, it is not."))
    hints, trials, _ = search(cfg, [make_task(n, world) for n in range(3)], FakeEngine(), LetterTokenizer())
    assert all("Magic" in row["hint"] for row in hints) and len(hints) == 3
    assert any("gate natural" in row.get("rejected", "") for rows in trials.values() for row in rows)
    assert {body["model"] for body in server.bodies} == {"judge"} and "CANARY" not in json.dumps(server.bodies)
    asked = len(server.bodies)
    assert asked == len(read_jsonl(Path(cfg.out_dir) / "gates.jsonl"))
    search(cfg, [make_task(n, world) for n in range(3)], FakeEngine(), LetterTokenizer())
    assert len(server.bodies) == asked


def test_embeddings_come_from_the_endpoint(server, cfg):
    def reply(body):
        vectors = [[1.0, 0.0] if "lamp" in text else [0.0, 1.0] for text in body["input"]]
        rows = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        return 200, {}, {"object": "list", "model": "e", "data": rows[::-1], "usage": {"prompt_tokens": 1, "total_tokens": 1}}
    server.reply = reply
    cfg = replace(cfg, gate="embedding", gate_model="e", base_url=server.url)
    task = make_task(1) | {"failed_completion": "the lamp"}
    assert optimize_hints.embedding(cfg, [(task, "h", "a lamp"), (task, "h", "")], None, None) == pytest.approx([0.0, 1.0])


# The shared prompt, the audit, the weak writer.

def test_the_hinter_prompt_is_accepted_on_fresh_paired_batches_and_resumes(cfg, world, tmp_path):
    tasks = [make_task(n, world) for n in range(16)]
    cfg = replace(cfg, target="hinter_prompt", prompt_batch=4, seed=3)
    hints, trials, calls = search(cfg, tasks, FakeEngine(), LetterTokenizer())
    records = read_jsonl(Path(cfg.out_dir) / "prompts.jsonl")
    assert [record["round"] for record in records] == [0, 1, 2, 3]  # 16 tasks: every batch is fresh
    rows = read_jsonl(Path(cfg.out_dir) / "hint_trials.jsonl")
    batches = [{row["id"] for row in rows if row.get("round") == n} for n in range(4)]
    assert all(len(batch) == 4 for batch in batches) and len(set().union(*batches)) == 16
    for n in range(1, 4):  # paired: a task has one seed, under both prompts
        assert all(len({row["seed"] for row in rows if row.get("round") == n and row["id"] == i}) == 1 for i in batches[n])
    assert sum(row.get("phase") == "search" and "reward" in row for row in rows) <= 16 * rollout_budget(cfg)
    incumbent = records[0]["prompt"]
    for record in records[1:]:
        moved = [line for line in record["prompt"].split("\n")]
        assert sorted(moved) == sorted(incumbent.split("\n"))  # a new order of the same templates
        incumbent = record["prompt"] if record["reward"] > record["incumbent_reward"] else incumbent
    used = {call["template"] for call in calls if call["round"] == 4}
    assert used == {incumbent.split("\n")[0]} and len(hints) == 16  # one template serves this one kind of failure
    whole = files(cfg.out_dir)
    half = whole["hint_trials.jsonl"].splitlines(True)[:9]
    (tmp_path / "half").mkdir()
    (tmp_path / "half/hint_trials.jsonl").write_bytes(b"".join(half))
    search(replace(cfg, out_dir=str(tmp_path / "half")), tasks, FakeEngine(), LetterTokenizer())
    assert files(tmp_path / "half") == whole


def test_a_minimal_change_moves_one_template(cfg, world):
    results = [{"template": name, "reward": reward} for name, reward in (("a", 0.0), ("b", 0.0), ("b", 0.0), ("c", 1.0))]
    view = make_task(1, world) | {"trials": []}
    assert ScriptedWriter(cfg, [view]).reflect("a\nb\nc\nd", results, 1)["hint"] == "c\nd\nb\na"
    assert ScriptedWriter(replace(cfg, minimal_change=True), [view]).reflect("a\nb\nc\nd", results, 1)["hint"] == "a\nc\nd\nb"


def test_a_server_reflects_on_its_hints(server, cfg, world):
    def reply(body):
        system = body["messages"][0]["content"]
        if system.startswith("You improve"):
            assert "word for word" in system and "Mind the item_id." in body["messages"][1]["content"]
            return 200, {}, chat_answer("Use magic.")
        return 200, {}, chat_answer("Magic: take the lamp." if system.endswith("Use magic.") else "Mind the item_id.")
    server.reply = reply
    cfg = replace(cfg, writer="openai", writer_model="m", base_url=server.url, target="hinter_prompt", prompt_batch=6, minimal_change=True, max_rounds=1)
    hints, _, _ = search(replace(cfg, budget=9), [make_task(n, world) for n in range(12)], FakeEngine(), LetterTokenizer())
    assert [row["hint"] for row in hints] == ["Magic: take the lamp."] * 12 and "CANARY" not in json.dumps(server.bodies)


def test_a_hint_that_does_not_transfer_is_dropped(cfg, world, monkeypatch):
    tasks = [make_task(n, world) for n in range(5)] + [make_task(5, world) | {"failure_kind": "alone"}]
    hints, trials, _ = search(replace(cfg, siblings=2), tasks, FakeEngine(), LetterTokenizer())
    rows = [row for row in read_jsonl(Path(cfg.out_dir) / "hint_trials.jsonl") if row["phase"] == "transfer"]
    assert len(rows) == 10 and not any(row["id"] == "t5" for row in rows) and "transfer_reward" not in hints[5]
    for hint in hints[:5]:
        mine = [row for row in rows if row["hint_id"] == hint["hint_id"]]
        assert len({row["id"] for row in mine} - {hint["id"]}) == 2 and hint["transfer_reward"] == sum(row["reward"] for row in mine) / 2
    kept, trials, _ = search(replace(cfg, siblings=2, min_transfer=1.0), tasks, FakeEngine(), LetterTokenizer())
    assert [row["id"] for row in kept] == [row["id"] for row in hints if row.get("transfer_reward", 1.0) == 1.0]
    assert sum("does not transfer" in row.get("rejected", "") for of_task in trials.values() for row in of_task) == 6 - len(kept) > 0


def test_the_weak_writer_knows_the_tools_only(cfg, world):
    view = make_task(1, world) | {"trials": []}
    hints = {ScriptedWriter(replace(cfg, writer="scripted_weak"), [view]).write(view, 0, slot)["hint"] for slot in range(4)}
    assert len(hints) == 4 and not any("Magic" in hint for hint in hints)


@pytest.mark.parametrize("change, message", [
    ({"gate_model": "x"}, "gate_model"), ({"gate_threshold": 1.0}, "gate_threshold"), ({"engine": "vllm", "gate": "logit_shift"}, "engine hf"),
    ({"engine": "vllm", "objective": "token_shift", "confirm": 0}, "engine hf"), ({"objective": "token_shift"}, "confirm 0"),
    ({"min_transfer": 0.5}, "siblings"), ({"minimal_change": True}, "hinter_prompt"), ({"target": "hinter_prompt", "search": "beam"}, "of its own"),
    ({"budget": -1}, "budget"), ({"search": "agent", "writer": "file", "hints_file": "x"}, "agent")])
def test_contradictions_are_refused(cfg, change, message):
    with pytest.raises(SystemExit, match=message):
        optimize_hints.main(replace(cfg, **change))


def test_the_summary_has_what_tables_need(tiny_model_dir, tiny_tasks, tmp_path, capsys):
    cfg = Config(tasks=[str(tiny_tasks)], num_tasks=4, model=str(tiny_model_dir), out_dir=str(tmp_path / "out"), max_rounds=2, max_new_tokens=8,
                 search="beam", objective="edit", gate="embedding", siblings=1)
    optimize_hints.main(cfg)
    row, = read_jsonl(tmp_path / "out/summary.jsonl")
    assert row["search"] == "beam" and row["budget"] == 6 and row["num_rollouts"] <= 4 * 6 and row["usd_per_hint"] == 0
    assert "stand-in computed with the student" in capsys.readouterr().out
