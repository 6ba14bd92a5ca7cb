"""Episodes: ids, mask and teacher alignment of a hand-built one, breakdowns and lengths, and a run of training and evaluation."""
import json

import pytest
import torch

import train_opsd
from common import Sample, load_model, pack_episodes, packed_hidden, play_tasks, read_jsonl, render_prompt
from evaluate import evaluate_model, pass_rate
from test_models import keeps_thoughts, qwen3  # noqa: F401
from test_train import same_weights
from train_opsd import grpo_advantages

WORLD = """
from common import Grade, InfraError

class Env:
    played = []  # what every environment was told

    def reset(self, task):
        self.spec, self.turns, self.letters = task["spec"], 0, 0

    def step(self, message):
        self.turns += 1
        self.letters += len(message["content"])
        Env.played.append(message["content"])
        if self.spec.get("breaks_at") == self.turns and Env.played.count(message["content"]) <= self.spec["times"]:
            raise InfraError("the shop is closed")
        answers = self.spec["answers"][self.turns - 1:self.turns]
        return answers, not answers or "even" in self.spec and self.letters % 3 == 0

    def grade(self):
        passed = self.letters % 2 == 0 if "even" in self.spec else self.turns == 3
        return Grade(float(passed), "intended", "")
"""
ANSWERS = [{"role": "tool", "content": "7 left"}, {"role": "user", "content": "Blue."}]
CALL = '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>'
TEXTS = {"thinking": [f"<think>\nFirst count.\n</think>\n\n{CALL}", "<think>\nAsk.\n</think>\n\nBlue or red?", "<think>\nEasy.\n</think>\n\nBlue it is."],
         "instruct": [CALL, "Blue or red?", "Blue it is."]}
HINT = "Ask for the colour."


@pytest.fixture
def task(tmp_path, waits):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/env.py").write_text(WORLD)
    return {"id": "shop1", "world": str(tmp_path / "shop"), "tools": [], "spec": {"answers": ANSWERS},
            "messages": [{"role": "system", "content": "You sell pens."}, {"role": "user", "content": "A pen, please."}]}


class Script:
    """An engine that says the next of `texts` at each call, whatever it is asked."""
    max_length = 1000

    def __init__(self, tokenizer, texts):
        self.turns = iter([[*tokenizer(text)["input_ids"], tokenizer.convert_tokens_to_ids("<|im_end|>")] for text in texts])
        self.calls = []

    def generate(self, prompts, seeds, *rest, **options):
        self.calls.append((prompts, seeds))
        ids = next(self.turns)
        return [[Sample(list(ids), [0.0] * len(ids), "stop") for _ in of_prompt] for of_prompt in seeds]


def play(engine, tokenizer, tasks, seeds=((5,),), max_turns=9, room=0):
    return play_tasks(engine, tokenizer, tasks, seeds, lambda task, later: render_prompt(tokenizer, task["messages"], task["tools"], later=later),
                      max_turns, 20, 1.0, room)


@pytest.mark.parametrize("position", ["end", "system", "first_user"])
@pytest.mark.parametrize("kind", ["thinking", "instruct"])
def test_ids_mask_and_teacher_alignment_of_three_turns(task, qwen3, keeps_thoughts, kind, position):  # noqa: F811
    tokenizer, said = {"thinking": qwen3, "instruct": keeps_thoughts}[kind], TEXTS[kind]
    [[episode]] = play(Script(tokenizer, said), tokenizer, [task])
    assert episode.grade.passed and [message["content"] for message in episode.messages] == [said[0], "7 left", said[1], "Blue.", said[2]]
    cfg, hints = train_opsd.Config(hint_position=position, row_tokens=1000), {"shop1": {"hint": HINT}}
    rows = train_opsd.pack_roles([[episode]], tokenizer, train_opsd.render_prompts(tokenizer, [task], hints, cfg, 1000), hints, cfg)

    def read(role):
        """The item's pieces (text, 1 where it was sampled), written out by hand, one list for each item that is expected."""
        system, user = "You sell pens.", "A pen, please."
        if role == "teacher":
            system, user = (f"{system}\n{HINT}", user) if position == "system" else (system, f"{user}\n{HINT}")
        prefix = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        response = "\n<|im_start|>user\n<tool_response>\n7 left\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        reply = "\n<|im_start|>user\nBlue.<|im_end|>\n<|im_start|>assistant\n"
        first, second, third = (text + "<|im_end|>" for text in said)
        if kind == "instruct":
            return [[(prefix, 0), (first, 1), (response, 0), (second, 1), (reply, 0), (third, 1)]]
        forgotten = f"{prefix}{CALL}<|im_end|>{response}Blue or red?<|im_end|>{reply}"  # the user has spoken: the thoughts are gone
        return [[(prefix, 0), (first, 1), (response, 0), (second, 1)], [(forgotten, 0), (third, 1)]]

    for role, (row,) in zip(("student", "teacher"), rows):
        ids, predict, positions, numbers = [], [], [], []
        for number, item in enumerate(read(role)):
            start = len(ids)
            for text, sampled in item:
                piece = tokenizer(text, add_special_tokens=False)["input_ids"]
                predict += [len(ids) + k - 1 for k in range(len(piece))] if sampled else []  # the state before a token predicts it
                ids += piece
            positions += range(len(ids) - start)
            numbers += [number] * (len(ids) - start)
        assert row.input_ids.tolist() == ids and row.predict.tolist() == predict
        assert row.position_ids.tolist() == positions and row.task.tolist() == numbers
        assert row.targets.tolist() == [ids[at + 1] for at in predict]
        assert row.targets.tolist() == [token for turn in episode.turns for token in turn.sample.ids]  # so those of both roles are the same


def test_a_row_gives_the_states_of_every_turn_read_alone(tiny_model_dir):
    """Two episodes that share the first prompt: the second goes on, is rewritten, and goes on again."""
    model, _ = load_model(tiny_model_dir)
    draw = torch.Generator().manual_seed(0)
    first, a, b, c, d, seen, other, tail = (torch.randint(0, 400, (length,), generator=draw).tolist() for length in (9, 4, 3, 5, 2, 6, 8, 3))
    group = [[(first, a)], [(first, b), (first + b + seen, c), (other, d), (other + d + tail, a)]]
    with torch.no_grad():
        alone = torch.cat([model.base_model(torch.tensor([prompt + ids])).last_hidden_state[0, len(prompt) - 1:-1]
                           for turns in group for prompt, ids in turns])
        for row_tokens in (1, 1000):
            rows = pack_episodes([[[(first, d)]], group], row_tokens)
            states = torch.cat([packed_hidden(model, row) for row in rows])
            torch.testing.assert_close(states[len(d):], alone, atol=2e-5, rtol=1e-4)
    assert torch.cat([row.targets for row in rows]).tolist() == d + a + b + c + d + a
    row, = rows
    num_read = len(first) + len(a) + len(b + seen + c) + len(other + d + tail + a) + len(first + d)  # shared within a task, not beyond
    assert len(row.input_ids) == num_read and row.owner.unique().tolist() == [0, 1, 2, 3]


def test_episodes_advance_together_on_streams_of_their_own(task, qwen3):  # noqa: F811
    short = {**task, "id": "shop2", "spec": {"answers": []}}
    engine = Script(qwen3, TEXTS["thinking"])
    groups = play(engine, qwen3, [task, short], [[5, 6], [7]])
    assert [[len(episode.turns) for episode in group] for group in groups] == [[3, 3], [1]]
    assert [seeds for _, seeds in engine.calls][0] == [[5, 6], [7]] and [len(prompts) for prompts, _ in engine.calls] == [2, 2, 2]
    assert len({seed for _, seeds in engine.calls for of_prompt in seeds for seed in of_prompt}) == 3 + 2 + 2
    assert [[episode.grade.passed for episode in group] for group in groups] == [[True, True], [False]]
    [[one]] = play(Script(qwen3, TEXTS["thinking"]), qwen3, [task], max_turns=2)
    assert len(one.turns) == 2 and not one.grade.passed  # graded where it stopped
    [[cut]] = play(engine := Script(qwen3, TEXTS["thinking"]), qwen3, [task], room=920)
    assert len(cut.turns) < 3 and cut.turns[-1].sample.finish_reason == "length" and not cut.grade.passed
    assert len(engine.calls[-1][0][0]) + 20 + 920 <= engine.max_length


def test_a_breakdown_is_replayed_and_one_that_stays_is_no_verdict(task, qwen3, tmp_path, waits):  # noqa: F811
    task["spec"] |= {"breaks_at": 2, "times": 2}
    [[episode]] = play(Script(qwen3, TEXTS["instruct"]), qwen3, [task])
    assert episode.grade.passed and len(episode.turns) == 3 and waits == [1, 2]
    task["spec"]["times"] = 100
    row, = evaluate_model(Script(qwen3, TEXTS["instruct"]), qwen3, [task], 1, tmp_path / "eval.jsonl", max_turns=3)
    assert row["error"] == "the shop is closed" and row["reward"] == 0 and not row["passed"]
    with pytest.raises(SystemExit, match="task shop1: its world broke down .the shop is closed.; the same command goes on"):
        cfg = train_opsd.Config(max_turns=3, rollouts_per_task=1)
        prompts = {"shop1": ([1], [1, 2])}
        train_opsd.sample_episodes(Script(qwen3, TEXTS["instruct"]), qwen3, [(0, task)], prompts, cfg)


@pytest.fixture
def run(task, tiny_model_dir, tmp_path):
    """run(name, **flags) trains the tiny model on two tasks whose world asks for three turns, and returns the run's folder."""
    for name in ("train", "eval"):
        rows = [{**task, "id": f"{name}{i}", "messages": [task["messages"][0], {"role": "user", "content": f"{i} pens for {name}."}],
                 "spec": {"answers": ANSWERS[:1 + i]}} for i in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "hints.jsonl").write_text("".join(json.dumps({"id": f"train{i}", "hint_id": "h", "hint": HINT}) + "\n" for i in range(2)))

    def run(name, **flags):
        train_opsd.main(train_opsd.Config(**{**dict(
            tasks=[str(tmp_path / "train.jsonl")], eval_tasks=[str(tmp_path / "eval.jsonl")], hints=str(tmp_path / "hints.jsonl"),
            model=str(tiny_model_dir), out_dir=str(tmp_path / name), steps=2, tasks_per_step=2, rollouts_per_task=2, max_new_tokens=8,
            lr=1e-2, eval_every=2, save_every=1, max_turns=4), **flags}))
        return tmp_path / name

    run.folder = tmp_path
    return run


def test_a_run_of_episodes_leaves_a_row_for_each_turn(run):
    folder = run("run")
    metrics, rows, evals = (read_jsonl(folder / f"{name}.jsonl") for name in ("metrics", "rollouts", "eval"))
    assert [row["turn"] for row in rows if row["step"] == 1 and row["id"] == "train1"] == [0, 1, 2] * 2
    assert [row["turn"] for row in rows if row["step"] == 1 and row["id"] == "train0"] == [0, 1] * 2
    for step in metrics:
        of_step = [row for row in rows if row["step"] == step["step"]]
        assert sum(len(row["completion_ids"]) for row in of_step) == step["num_tokens"] and step["reverse_kl"] > 0
        assert sum(row["reverse_kl"] * len(row["completion_ids"]) for row in of_step) == pytest.approx(step["loss"] * step["num_tokens"], rel=1e-4)
        assert step["reward_mean"] == 0.5 and step["logprob_gap"] < 1e-4  # the tasks of three turns pass; the trainer reads what was sampled
    for before, row in zip(rows, rows[1:]):
        if row["turn"]:
            said = before.get("messages", []) + [{"role": "assistant", "content": before["completion"]}]
            assert row["messages"] == said + ANSWERS[row["turn"] - 1:row["turn"]]
    assert [len(row["messages"]) for row in evals] == [3, 5] * 2 and pass_rate(evals) == 0.5 and evals[0]["messages"][-1]["content"] == evals[0]["completion"]


@pytest.mark.parametrize("flags", [{}, {"loss": "policy_gradient"}, {"lora_rank": 2}])
def test_an_empty_hint_moves_nothing_over_episodes(run, tiny_model_dir, flags):
    folder = run("empty", control="empty", steps=1, **flags)
    metrics, = read_jsonl(folder / "metrics.jsonl")
    assert metrics["loss"] == metrics["grad_norm"] == metrics["reverse_kl"] == 0.0
    assert same_weights(folder / "checkpoint", tiny_model_dir)


def test_every_token_of_an_episode_carries_its_advantage(run, task):
    """And with rewards alone the hints are ignored bit for bit, over turns too."""
    path = run.folder / "train.jsonl"
    rows = [row | {"spec": {**row["spec"], "even": True}} for row in read_jsonl(path)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = dict(loss="policy_gradient", grpo_weight=1.0, steps=1, rollouts_per_task=16, lr=1e-3)
    folder = run("a", **flags)
    assert same_weights(folder / "checkpoint", run("b", control="empty", **flags) / "checkpoint")
    (metrics,), turns = (read_jsonl(folder / f"{name}.jsonl") for name in ("metrics", "rollouts"))
    total = 0.0
    for name in ("train0", "train1"):
        episodes = {}  # seed -> its rows
        for row in turns:
            if row["id"] == name:
                episodes.setdefault(row["seed"], []).append(row)
        advantages = grpo_advantages([rows[0]["reward"] for rows in episodes.values()])
        assert advantages.any() and len({row["reward"] for rows in episodes.values() for row in rows}) == 2
        total += sum(float(advantage) * sum(len(row["completion_ids"]) for row in rows) for advantage, rows in zip(advantages, episodes.values()))
    assert metrics["loss"] == pytest.approx(-total / metrics["num_tokens"], rel=1e-4)  # importance ratios are 1


def test_refreshed_hints_are_for_single_steps(run):
    with pytest.raises(SystemExit, match="--max_turns 1"):
        run("refused", refresh_every=1)
