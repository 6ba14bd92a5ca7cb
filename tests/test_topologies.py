"""optimize_hints.py: how each --search spreads its rollouts, against graders with known arms; objectives, gates, the shared prompt, the audit."""
import json
from dataclasses import replace
from pathlib import Path

import pytest

import optimize_hints
from common import InfraError, load_world, read_jsonl
from conftest import LetterTokenizer
from optimize_hints import SEARCHES, Config, rollout_budget, search
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
