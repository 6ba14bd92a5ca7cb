"""train_opsd: the loss identities of the design, the public fault cases that hit training, resume after SIGKILL."""
import dataclasses
import itertools
import json
import math
import multiprocessing
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import common
import train_opsd
from common import head_weight, load_model, load_tasks, pack_rows, packed_hidden, read_jsonl, render_prompt
from train_opsd import (Config, chunked_kl, chunked_loss, dense_loss, grpo_advantages, grpo_weight_at, lr_at, mix_advantages,
                        policy_gradient_loss, task_order)

DIVERGENCES = ["reverse_kl", "forward_kl", "jsd"]


def kl_of_logits(student, teacher, **options):
    """chunked_kl of logits (T, V): with the unit matrix as lm_head, hidden states are the logits."""
    student, teacher = torch.as_tensor(student), torch.as_tensor(teacher)
    return chunked_kl(student, torch.eye(student.shape[-1], dtype=student.dtype), teacher,
                      torch.eye(teacher.shape[-1], dtype=teacher.dtype), **options)


def kl_of_probs(student, teacher, **options):
    return float(kl_of_logits(torch.tensor([student]).log(), torch.tensor([teacher]).log(), **options))


# The dense loss.

def test_kl_01_the_divergence_is_the_one_named(case):
    case = case("KL-01")
    p, q, expected = case["input"]["student_probs"], case["input"]["teacher_probs"], case["expected"]
    assert kl_of_probs(p, q) == pytest.approx(expected["reverse_kl_student_teacher"], abs=1e-6)
    assert kl_of_probs(q, p) == pytest.approx(expected["forward_kl_teacher_student"], abs=1e-6)
    assert kl_of_probs(p, q, divergence="forward_kl") == pytest.approx(expected["forward_kl_teacher_student"], abs=1e-6)
    pair = case["input"]["disjoint_pair"]
    jsd = kl_of_probs(pair["student_probs"], pair["teacher_probs"], divergence="jsd")
    assert jsd == pytest.approx(expected["disjoint_jsd_0.5"], abs=1e-6)
    assert jsd <= math.log(2)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("top_k", [0, 5, 50])
def test_written_gradient_is_that_of_autograd(divergence, top_k):
    generator = torch.Generator().manual_seed(0)
    hidden, hidden_t = torch.randn(2, 13, 8, generator=generator)
    weight, weight_t = torch.randn(2, 50, 8, generator=generator)

    def reference(hidden, weight):
        logp, logq = (torch.log_softmax(h @ w.T / 0.7, -1) for h, w in ((hidden, weight), (hidden_t.double(), weight_t.double())))
        if 0 < top_k < 50:
            index = logp.topk(top_k, -1).indices
            rest = torch.ones_like(logp, dtype=torch.bool).scatter(-1, index, False)
            logp, logq = (torch.cat([x.gather(-1, index), x.exp().mul(rest).sum(-1, keepdim=True).log()], -1) for x in (logp, logq))
        p, q, m = logp.exp(), logq.exp(), (logp.exp() + logq.exp()) / 2
        return {"reverse_kl": (p * (logp - logq)).sum(), "forward_kl": (q * (logq - logp)).sum(),
                "jsd": (p * (logp - m.log()) + q * (logq - m.log())).sum() / 2}[divergence]

    inputs = hidden.requires_grad_(), weight.requires_grad_()
    loss = chunked_kl(*inputs, hidden_t, weight_t, chunk=4, divergence=divergence, top_k=top_k, temperature=0.7)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = reference(*exact)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for got, want in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, exact)):
        torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("top_k", [0, 5])
def test_equal_distributions_give_exact_zeros(divergence, top_k):
    hidden, weight = torch.randn(9, 8).requires_grad_(), torch.randn(40, 8).requires_grad_()
    loss = chunked_kl(hidden, weight, hidden.detach(), weight.detach(), chunk=4, divergence=divergence, top_k=top_k)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not hidden.grad.any() and not weight.grad.any()


def test_kl_03_token_mean_over_the_whole_step(case):
    case = case("KL-03")
    values = torch.tensor([x for row, mask in zip(case["input"]["per_token_kl"], case["input"]["mask"]) for x, m in zip(row, mask) if m])
    x = torch.zeros(len(values), 2)
    total = chunked_loss(lambda logp, logq, span: (values[span], torch.zeros_like(logp)), x, torch.eye(2), x, torch.eye(2), chunk=2)[0]
    assert float(total) / len(values) == pytest.approx(case["expected"]["token_mean"], abs=1e-6)
    nothing, weight = torch.zeros(0, 4).requires_grad_(), torch.randn(6, 4).requires_grad_()  # every token masked
    loss = chunked_kl(nothing, weight, nothing.detach(), weight.detach())
    loss.backward()
    assert float(loss.detach()) == case["expected"]["all_masked_loss"] and not weight.grad.any()


def test_kl_04_rows_that_predict_the_completion(case):
    case = case("KL-04")
    given, expected, ids = case["input"], case["expected"], case["input"]["completion_ids"]
    for neighbours in ([], [([0] * 7, [[1, 1], [2]])]):  # alone, and behind a task of other lengths
        loss, logprobs = 0, []
        states = []
        for length, logits in ((given["student_prompt_len"], given["student_logits"]), (given["teacher_prompt_len"], given["teacher_logits"])):
            row, = pack_rows([*neighbours, ([0] * length, [ids])], 100)
            table = torch.cat([torch.zeros(len(row.input_ids) - length - len(ids), 3), torch.tensor(logits)])
            mine = row.owner == row.owner.max()
            assert row.targets[mine].tolist() == ids
            states.append(table[row.predict[mine]])
        assert float(kl_of_logits(*states)) == expected["mean_reverse_kl"]
        for state, role in zip(states, ("student", "teacher")):
            logprobs = torch.log_softmax(state, -1).gather(-1, torch.tensor(ids)[:, None])
            assert float(logprobs.sum()) == pytest.approx(expected[f"sampled_logprob_sum_{role}"], abs=1e-6)


def test_kl_06_top_k_with_a_bucket_for_the_rest(case):
    case = case("KL-06")
    p, q, expected = case["input"]["student_probs"], case["input"]["teacher_probs"], case["expected"]
    assert kl_of_probs(p, q, top_k=2) == pytest.approx(expected["top2_plus_tail_bucket"], abs=1e-6)
    assert kl_of_probs(p, q, top_k=5) == kl_of_probs(p, q) == pytest.approx(expected["full_reverse_kl"], abs=1e-6)
    generator = torch.Generator().manual_seed(1)
    for scale, k in itertools.product((0.1, 3.0, 30.0), (1, 4, 19)):
        student, teacher = scale * torch.randn(2, 200, 20, generator=generator)
        coarse, full = ([float(kl_of_logits(s[None], t[None], top_k=top_k)) for s, t in zip(student, teacher)] for top_k in (k, 0))
        assert all(-1e-6 <= c <= f + 1e-5 * (1 + f) for c, f in zip(coarse, full))


def test_kl_07_bfloat16_logits_are_scored_in_float32(case):
    case = case("KL-07")
    given, expected = case["input"], case["expected"]
    student, teacher = (torch.tensor([given[f"{role}_logits_bf16"]], dtype=torch.bfloat16) for role in ("student", "teacher"))
    assert float(kl_of_logits(student, teacher)) == pytest.approx(expected["reverse_kl"], abs=1e-6)
    assert float(kl_of_logits(student, student)) == expected["identical_pair_kl"]


def test_kl_09_never_more_than_a_chunk_of_logits(case, monkeypatch):
    check = case("KL-09")["input"]["equality_check"]
    generator = torch.Generator().manual_seed(check["seed"])
    hidden, hidden_t = torch.randn(2, check["tokens"], 16, generator=generator) / 4
    weight, weight_t = torch.randn(2, check["vocab"], 16, generator=generator)
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    whole = chunked_kl(*inputs, hidden_t, weight_t, chunk=check["tokens"])
    dense = common.reverse_kl(hidden @ weight.T, hidden_t @ weight_t.T).sum()
    sizes, log_softmax = [], torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda x, dim: sizes.append(x.numel()) or log_softmax(x, dim))
    for chunk in (check["chunk"], 7):  # 7 leaves a shorter last chunk
        chunked = chunked_kl(*inputs, hidden_t, weight_t, chunk=chunk)
        assert max(sizes) <= check["chunk"] * check["vocab"] and sum(sizes) == 2 * check["tokens"] * check["vocab"]
        sizes.clear()
        for other in (whole, dense):
            assert float(chunked.detach()) == pytest.approx(float(other.detach()), rel=1e-6)
            for got, want in zip(torch.autograd.grad(chunked, inputs, retain_graph=True), torch.autograd.grad(other, inputs, retain_graph=True)):
                torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-5)


def test_tok_05_tool_output_is_context_and_no_target(case):
    case = case("TOK-05")
    origin, kl = case["input"]["token_origin"], torch.tensor(case["input"]["per_token_kl"])
    ids, prefix = list(range(len(origin))), [9, 9]
    turns = [list(group) for key, group in itertools.groupby(ids, lambda i: origin[i]) if key == "A"]
    rows = pack_rows([(prefix + ids[:turn[0]], [turn]) for turn in turns], 4)  # one item per sampled turn
    targets = torch.cat([row.targets for row in rows])
    assert targets.numel() == case["expected"]["token_count"]
    assert float(kl[targets].mean()) == pytest.approx(case["expected"]["mean_kl_model_tokens"])
    assert set(ids[:turns[1][0]]) <= set(rows[-1].input_ids.tolist())  # the observation is in the context of the later turn


# The policy-gradient loss.

def test_adv_01_advantages_within_a_group(case):
    case = case("ADV-01")
    groups = grpo_advantages(case["input"]["groups"])
    assert groups[0].tolist() == case["expected"]["group_1"]
    # The case adds 1e-4 to the std; the design divides by the population std alone.
    torch.testing.assert_close(groups[1], torch.tensor(case["expected"]["group_2_population_std"], dtype=torch.float64), atol=2e-4, rtol=0)
    assert groups[1].tolist() == [1, -1, -1, 1]
    assert grpo_advantages(case["input"]["single"][0]).tolist() == case["expected"]["single"]
    assert grpo_advantages(case["input"]["float_noise_group"]).tolist() == [0, 0, 0, 0]
    share, size = case["input"]["success_rate"], case["input"]["group_size"]
    rewards = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)))
    odds = (rewards * share + (1 - rewards) * (1 - share)).prod(-1)
    silent = (grpo_advantages(rewards) == 0).all(-1)
    assert float(odds[silent].sum()) == pytest.approx(case["expected"]["share_of_groups_without_signal"])


def test_adv_02_the_reduction_is_the_token_mean(case):
    case = case("ADV-02")
    lengths, advantages = case["input"]["completion_lengths"], case["input"]["advantages"]
    num_tokens = sum(lengths)
    grpo = torch.tensor(advantages).repeat_interleave(torch.tensor(lengths))
    hidden, head = torch.zeros(num_tokens, 3), torch.eye(3)
    token_loss = policy_gradient_loss(torch.zeros(num_tokens, dtype=torch.long), torch.full((num_tokens,), -math.log(3)), grpo, weight=1)
    loss = float(chunked_loss(token_loss, hidden, head, hidden, head)[0]) / num_tokens
    assert loss == pytest.approx(case["expected"]["token_mean"], abs=1e-6)


def test_adv_04_sampled_advantages_have_the_dense_gradient(case):
    case = case("ADV-04")
    expected, mix = case["expected"], case["input"]["mix"]
    p, q = (torch.tensor(case["input"][f"{role}_probs"]) for role in ("student", "teacher"))
    opsd = q.log() - p.log()
    torch.testing.assert_close(opsd, torch.tensor(expected["opsd_advantages"]), atol=1e-6, rtol=0)
    mixed = mix_advantages(mix["grpo_advantage"], float(opsd[mix["sampled_id"]]), mix["lambda"])
    assert mixed == pytest.approx(expected["mixed_advantage"], abs=1e-6)

    logits = p.log().repeat(3, 1).requires_grad_()  # one row for each token that can be sampled
    token_loss = policy_gradient_loss(torch.arange(3), p.log(), torch.full((3,), torch.nan), weight=0)
    chunked_loss(token_loss, logits, torch.eye(3), q.log().repeat(3, 1), torch.eye(3), chunk=2)[0].backward()
    enumerated = (p[:, None] * logits.grad).sum(0)
    torch.testing.assert_close(-enumerated, torch.tensor(expected["expected_ascent_gradient_wrt_logits"]), atol=1e-6, rtol=0)

    dense = p.log()[None].requires_grad_()
    chunked_kl(dense, torch.eye(3), q.log()[None], torch.eye(3)).backward()
    torch.testing.assert_close(enumerated, dense.grad[0], atol=1e-6, rtol=0)


def test_importance_ratio_is_clipped_at_two_and_advantages_on_request():
    hidden, targets = torch.zeros(2, 4), torch.tensor([0, 1])
    sampler = torch.tensor([0.25, 0.05]).log()  # ratios 1 and 5
    for clip, advantage in ((None, 3.0), (0.5, 0.5)):
        loss = chunked_loss(policy_gradient_loss(targets, sampler, torch.full((2,), 3.0), 1, clip), hidden, torch.eye(4), hidden, torch.eye(4))[0]
        assert float(loss) == pytest.approx(-advantage * (1 + 2))


def test_gen_02_trainer_and_sampler_temper_alike(case):
    case = case("GEN-02")
    logits, token, temperature = torch.tensor([case["input"]["logits"]]), case["input"]["sampled_id"], case["input"]["temperature"]
    _, trainer, _ = chunked_loss(dense_loss(), logits, torch.eye(3), logits, torch.eye(3), torch.tensor([token]), temperature=temperature)
    assert float(trainer) == pytest.approx(case["expected"]["logprob_tempered"], abs=1e-6)


# Schedules, order, selection, flags.

def test_learning_rate_warms_up_then_decays_to_a_tenth():
    cfg = Config(steps=60, warmup_steps=5, lr=2e-4)
    rates = [lr_at(step, cfg) for step in range(1, 61)]
    assert rates[0] == pytest.approx(2e-4 / 5) and max(rates) == rates[4] == 2e-4 and rates[-1] == pytest.approx(2e-5)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert lr_at(1, Config(steps=1, warmup_steps=0)) == pytest.approx(2e-5)


def test_grpo_schedules_lower_the_hints_share():
    constant, linear, adaptive = (Config(loss="policy_gradient", grpo_weight=0.2, grpo_schedule=name, steps=41)
                                  for name in ("constant", "linear", "adaptive"))
    assert grpo_weight_at(41, constant, [0.5] * 40) == pytest.approx(0.2)
    assert [grpo_weight_at(step, linear, []) for step in (1, 21, 41)] == pytest.approx([0.2, 0.6, 1.0])
    rising, flat = [0.1] * 10 + [0.2] * 10 + [0.3] * 10, [0.3] * 10 + [0.2] * 10 + [0.3] * 10
    assert grpo_weight_at(31, adaptive, rising) == pytest.approx(0.2)
    assert grpo_weight_at(31, adaptive, flat) == pytest.approx(1 - 0.8 / 4)
    assert grpo_weight_at(30, adaptive, flat[:-1]) == pytest.approx(1 - 0.8 / 2)


def test_train_03_data_order_does_not_depend_on_where_a_run_began():
    whole = task_order(6, 1234, 0, 18)
    epochs = [whole[i:i + 6] for i in (0, 6, 12)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 3
    assert task_order(6, 1234, 0, 5) + task_order(6, 1234, 5, 9) + task_order(6, 1234, 14, 4) == whole
    assert task_order(6, 1235, 0, 18) != whole


def test_filter_keeps_the_hints_that_passed():
    tasks = [{"id": name} for name in "abcd"]
    hints = {"a": {"passed": True, "hint_reward": 0.5}, "b": {"passed": False, "hint_reward": 0.4}, "c": {"passed": True, "hint_reward": 1.0}}
    kept = lambda **flags: [task["id"] for task in train_opsd.select_tasks(tasks, hints, Config(**flags))]
    assert kept() == ["a", "b", "c"]
    assert kept(filter="passed") == ["a", "c"]
    assert kept(min_hint_reward=0.5) == ["a", "c"] and kept(min_hint_reward=0.6, filter="passed") == ["c"]
    with pytest.raises(SystemExit, match="no task"):
        kept(min_hint_reward=1.1)
    del hints["a"]["passed"]
    with pytest.raises(SystemExit, match="task a has no field 'passed'"):
        kept(filter="passed")


@pytest.mark.parametrize("flags", [
    {"grpo_weight": 0.5}, {"advantage_clip": 1.0}, {"grpo_schedule": "linear"}, {"loss": "policy_gradient", "top_k": 5},
    {"loss": "policy_gradient", "divergence": "jsd"}, {"loss": "policy_gradient", "grpo_weight": 1.0, "rollouts_per_task": 1},
    {"loss": "policy_gradient", "grpo_weight": 1.5}, {"temperature": 0.0}, {"steps": 0}])
def test_contradictory_flags_are_refused(flags):
    with pytest.raises(SystemExit, match="error: .*--"):
        train_opsd.check(Config(**flags))


def test_rows_after_a_checkpoint_are_dropped_byte_for_byte(tmp_path):
    path, kept = tmp_path / "metrics.jsonl", '{"step": 1, "x": 0.1}\n{"step":2, "text": "é"}\n'
    path.write_bytes(kept.encode() + b'{"step": 3}\n{"step": 3, "text": "\xc3')
    train_opsd.drop_rows_after(path, 2)
    assert path.read_bytes() == kept.encode()
    train_opsd.drop_rows_after(tmp_path / "absent.jsonl", 2)


# The whole path on a tiny model.

def packed(items, model, row_tokens=10_000):
    return torch.cat([packed_hidden(model, row) for row in pack_rows(items, row_tokens)])


def gradients(model, loss):
    """The gradient of every weight, flat, and leaves none behind."""
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


@pytest.fixture(scope="module")
def tiny(tiny_model_dir, tiny_tasks):
    """(student, teacher, items without hint, items with hint): three tasks of two completions each."""
    (student, tokenizer), (teacher, _) = (load_model(tiny_model_dir, "cpu", "float32") for _ in range(2))
    generator = random.Random(0)
    plain, hinted = [], []
    for number, task in enumerate(load_tasks([tiny_tasks])[:3]):
        completions = [[generator.randrange(student.config.vocab_size) for _ in range(4 + number + k)] for k in range(2)]
        plain.append((render_prompt(tokenizer, task["messages"], task["tools"]), completions))
        hinted.append((render_prompt(tokenizer, task["messages"], task["tools"], "Use the exact id."), completions))
    return student, teacher.requires_grad_(False), plain, hinted


@pytest.mark.parametrize("options", [{"divergence": name, "top_k": k} for name in DIVERGENCES for k in (0, 4)] + ["policy_gradient"])
def test_empty_hint_has_loss_zero_and_no_gradient(tiny, options):
    student, teacher, plain, _ = tiny
    hidden, hidden_t = packed(plain, student, 300), packed(plain, teacher, 300)
    assert torch.equal(hidden, hidden_t)
    if options == "policy_gradient":
        targets = torch.cat([row.targets for row in pack_rows(plain, 300)])
        token_loss = policy_gradient_loss(targets, torch.full((len(targets),), -1.0), torch.ones(len(targets)), weight=0)
    else:
        token_loss = dense_loss(**options)
    loss = chunked_loss(token_loss, hidden, head_weight(student), hidden_t, head_weight(teacher), chunk=5)[0]
    assert float(loss.detach()) == 0.0
    assert not gradients(student, loss).any()


def test_packed_rows_give_the_loss_and_gradient_of_single_sequences(tiny):
    student, teacher, plain, hinted = tiny

    def alone(items, model):  # one plain forward per completion; logits[:, t] predict token t + 1
        return torch.cat([model(torch.tensor([prefix + ids]), use_cache=False).logits[0, len(prefix) - 1:-1]
                          for prefix, completions in items for ids in completions])

    reference = common.reverse_kl(alone(plain, student), alone(hinted, teacher).detach()).sum()
    expected = gradients(student, reference)
    for row_tokens in (1, 10_000):  # a row for each task, one row for all
        loss = chunked_kl(packed(plain, student, row_tokens), head_weight(student), packed(hinted, teacher, row_tokens), head_weight(teacher))
        assert float(loss.detach()) == pytest.approx(float(reference.detach()), rel=1e-5)
        torch.testing.assert_close(gradients(student, loss), expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)


HINT = "Use the exact id."


@pytest.fixture
def run(tiny_model_dir, tiny_tasks, tmp_path):
    """run(name, **flags) trains on eight tiny tasks, two of them held out, into tmp_path/name and returns that folder."""
    tasks = read_jsonl(tiny_tasks)
    for name, rows in (("train", tasks[2:]), ("eval", tasks[:2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_hints(tmp_path / "hints.jsonl", tasks, HINT)
    defaults = dict(tasks=[str(tmp_path / "train.jsonl")], eval_tasks=[str(tmp_path / "eval.jsonl")], hints=str(tmp_path / "hints.jsonl"),
                    model=str(tiny_model_dir), steps=2, tasks_per_step=3, rollouts_per_task=2, max_new_tokens=8, lr=1e-2,
                    warmup_steps=1, row_tokens=600, eval_every=2, save_every=2)

    def run(name, **flags):
        cfg = Config(**{**defaults, "out_dir": str(tmp_path / name), **flags})
        train_opsd.main(cfg)
        return tmp_path / name

    run.defaults, run.folder = defaults, tmp_path
    return run


def write_hints(path, tasks, hint):
    path.write_text("".join(json.dumps({"id": task["id"], "hint_id": f"{task['id']}/{len(hint)}", "hint": hint, "passed": True}) + "\n"
                            for task in tasks))


def weights(folder):
    from safetensors.torch import load_file
    return load_file(Path(folder) / "model.safetensors")


def same_weights(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def files(folder):
    """{path: content} of a finished run; timings, the command line and the out_dir left out."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            if path.name == "metrics.jsonl":
                content = [{k: v for k, v in row.items() if not k.startswith("seconds_")} for row in read_jsonl(path)]
            if path.name == "config.json" and path.parent == Path(folder):
                content = {k: v for k, v in json.loads(content)["config"].items() if k != "out_dir"}
            found[str(path.relative_to(folder))] = content
    return found


def test_a_run_leaves_what_the_design_says(run, capsys):
    folder = run("run", steps=4)
    metrics, rollouts, rows = (read_jsonl(folder / f"{name}.jsonl") for name in ("metrics", "rollouts", "eval"))
    assert [row["step"] for row in metrics] == [1, 2, 3, 4] and len(rollouts) == 4 * 3 * 2
    assert sorted({row["step"] for row in rows}) == [0, 2, 4] and len(rows) == 3 * 2
    assert all(row["reverse_kl"] > 0 and row["loss"] == pytest.approx(row["reverse_kl"], rel=1e-4) for row in metrics)
    for step in metrics:
        of_step = [row for row in rollouts if row["step"] == step["step"]]
        assert sum(len(row["completion_ids"]) for row in of_step) == step["num_tokens"]
        assert sum(row["reverse_kl"] * len(row["completion_ids"]) for row in of_step) == pytest.approx(step["reverse_kl"] * step["num_tokens"], rel=1e-4)
    assert all(len(row["completion_ids"]) == len(row["logprobs"]) and row["weight_version"] == row["step"] - 1 for row in rollouts)
    assert all(row["finish_reason"] in ("stop", "length") and row["hint_id"] for row in rollouts)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", "config.json", "eval.jsonl", "metrics.jsonl", "rollouts.jsonl"]
    assert not (folder / "checkpoint" / "training_state.pt").exists()
    by_step = {step: [row["passed"] for row in rows if row["step"] == step] for step in (0, 2, 4)}
    first, last = (sum(by_step[step]) / len(by_step[step]) for step in (0, 4))
    out = capsys.readouterr().out
    assert f"pass@1: {first:.3f} -> {last:.3f}" in out and "chosen on the evaluation tasks" in out
    run("run", steps=4)  # a finished run only reports
    assert f"pass@1: {first:.3f} -> {last:.3f}" in capsys.readouterr().out


def test_gen_02_log_probs_at_the_first_step(run):
    for temperature in (0.6, 1.0):
        gap = read_jsonl(run(f"t{temperature}", steps=1, temperature=temperature) / "metrics.jsonl")[0]["logprob_gap"]
        assert gap < 1e-4  # the case allows 0.05


@pytest.mark.parametrize("teacher", ["frozen", "ema", "live"])
def test_empty_hints_leave_the_weights_bit_identical(run, tiny_model_dir, teacher):
    folder = run("empty", control="empty", teacher=teacher)
    assert same_weights(folder / "checkpoint", tiny_model_dir)
    assert all(row["loss"] == row["reverse_kl"] == row["grad_norm"] == 0 for row in read_jsonl(folder / "metrics.jsonl"))


def test_hints_move_the_weights_and_not_the_frozen_teacher(run, tiny_model_dir, monkeypatch):
    teachers, load_teacher = [], train_opsd.load_teacher
    monkeypatch.setattr(train_opsd, "load_teacher", lambda *args: teachers.append(load_teacher(*args)) or teachers[-1])
    folder = run("hints")
    assert not same_weights(folder / "checkpoint", tiny_model_dir)
    base, _ = load_model(tiny_model_dir)
    assert all(torch.equal(a, b) for a, b in zip(teachers[0].parameters(), base.parameters()))
    assert not any(p.requires_grad or p.grad is not None for p in teachers[0].parameters())


def test_train_02_teacher_is_the_starting_policy_without_dropout(run, tiny_model_dir, tmp_path):
    model, tokenizer = load_model(tiny_model_dir)
    with torch.no_grad():  # a start that is no longer the released base, and that asks for dropout
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path / "tuned")
    tokenizer.save_pretrained(tmp_path / "tuned")
    folder = run("tuned_run", model=str(tmp_path / "tuned"), control="empty")
    assert all(row["reverse_kl"] == 0 for row in read_jsonl(folder / "metrics.jsonl"))
    assert same_weights(folder / "checkpoint", tmp_path / "tuned")
    assert read_jsonl(run("tuned_gap", model=str(tmp_path / "tuned"), steps=1) / "metrics.jsonl")[0]["logprob_gap"] < 1e-4


def test_weight_one_ignores_hints_bit_for_bit(run):
    tasks = read_jsonl(run.defaults["tasks"][0])
    write_hints(run.folder / "other.jsonl", tasks, "Say nothing at all, and say it at length.")
    grpo = dict(loss="policy_gradient", grpo_weight=1.0, rollouts_per_task=4)
    a, b = run("a", **grpo), run("b", hints=str(run.folder / "other.jsonl"), **grpo)
    assert same_weights(a / "checkpoint", b / "checkpoint")
    ids = [[(row["id"], row["completion_ids"]) for row in read_jsonl(folder / "rollouts.jsonl")] for folder in (a, b)]
    assert ids[0] == ids[1]
    metrics = [read_jsonl(folder / "metrics.jsonl")[0] for folder in (a, b)]
    assert metrics[0]["loss"] == metrics[1]["loss"] and metrics[0]["reverse_kl"] != metrics[1]["reverse_kl"]
    assert any(row["grad_norm"] > 0 for row in read_jsonl(a / "metrics.jsonl"))
    c = run("c", **{**grpo, "grpo_weight": 0.9})
    assert not same_weights(a / "checkpoint", c / "checkpoint")


def test_one_micro_batch_or_many(run):
    many, one = (read_jsonl(run(name, steps=1, row_tokens=tokens) / "metrics.jsonl")[0] for name, tokens in (("many", 1), ("one", 100_000)))
    for field in ("loss", "reverse_kl", "grad_norm"):
        assert many[field] == pytest.approx(one[field], rel=1e-4)


def test_ema_and_live_teachers(tiny_model_dir):
    student, _ = load_model(tiny_model_dir)
    cfg = Config(model=str(tiny_model_dir))
    assert train_opsd.load_teacher(dataclasses.replace(cfg, teacher="live"), student, {}) is student
    teacher = train_opsd.load_teacher(dataclasses.replace(cfg, teacher="ema"), student, {})
    with torch.no_grad():
        for p in student.parameters():
            p += 1
    before = [p.clone() for p in teacher.parameters()]
    train_opsd.update_ema(teacher, student, 0.75)
    for old, now in zip(before, teacher.parameters()):
        torch.testing.assert_close(now, old + 0.25)
    again = train_opsd.load_teacher(dataclasses.replace(cfg, teacher="ema"), student, {"teacher": teacher.state_dict()})
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), teacher.parameters()))


def test_prompts_that_do_not_fit_are_refused_with_the_task_id(run):
    with pytest.raises(SystemExit, match=r"task \S+: \d+ tokens of prompt"):
        run("long", max_new_tokens=100_000)


def test_training_on_a_held_out_task_is_refused(run):
    with pytest.raises(SystemExit):
        run("overlap", eval_tasks=run.defaults["tasks"])


def test_train_04_checkpoint_is_a_plain_hugging_face_folder(case, run, tiny_model_dir):
    checkpoint = run("save", steps=1) / "checkpoint"
    stored, base = weights(checkpoint), weights(tiny_model_dir)
    assert stored.keys() == base.keys() and all(tensor.numel() for tensor in stored.values())
    tied = {"lm_head.weight", "model.embed_tokens.weight"} & stored.keys()
    assert len(tied) == case("TRAIN-04")["expected"]["tensors_written_for_tied_pair"]
    ids = list(range(5, 25))
    code = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(checkpoint)!r}, dtype=torch.float32).eval()
assert len(AutoTokenizer.from_pretrained({str(checkpoint)!r})) > 0
assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
torch.save(model(torch.tensor([{ids}])).logits.detach(), {str(checkpoint / 'logits.pt')!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    model, _ = load_model(checkpoint)
    torch.testing.assert_close(torch.load(checkpoint / "logits.pt"), model(torch.tensor([ids])).logits.detach(), atol=1e-6, rtol=0)


def test_a_world_that_breaks_down_is_asked_again_and_then_stops_the_run_in_one_line(run, tiny_tasks, monkeypatch, waits):
    env = common.load_world(read_jsonl(tiny_tasks)[0]["world"]).Env
    real, broken, flags = env.grade, [], dict(steps=4, save_every=1, eval_every=4)
    unbroken = run("unbroken", **flags)
    metrics = run.folder / "run" / "metrics.jsonl"

    def grade(self):
        if metrics.exists() and len(read_jsonl(metrics)) == 2 and len(broken) < 3:  # in step 3
            broken.append(self)
            raise common.InfraError("no connection")
        return real(self)

    monkeypatch.setattr(env, "grade", grade)
    with pytest.raises(SystemExit, match=r"task \S+: its world broke down \(no connection\); the same command goes on from there$"):
        run("run", **flags)
    assert waits == [1, 2]
    assert files(run("run", **flags)) == files(unbroken)


def test_without_hints_it_says_what_to_run_first(run):
    with pytest.raises(SystemExit, match="run `python optimize_hints.py` first"):
        run("none", hints=str(run.folder / "absent.jsonl"))


# Resume.

@pytest.mark.parametrize("flags", [{}, {"teacher": "ema"}, {"loss": "policy_gradient", "grpo_weight": 0.5, "grpo_schedule": "adaptive"},
                                   {"refresh_every": 1, "refresh_rollouts": 2}])
def test_train_03_resumed_run_equals_the_unbroken_one(run, monkeypatch, flags):
    unbroken = run("unbroken", steps=4, **flags)
    calls, append = itertools.count(), train_opsd.append_jsonl

    def cut(path, row):
        if next(calls) == 17:  # step 3 has its metrics and some of its rollouts on disk
            raise KeyboardInterrupt
        append(path, row)

    monkeypatch.setattr(train_opsd, "append_jsonl", cut)
    with pytest.raises(KeyboardInterrupt):
        run("resumed", steps=4, **flags)
    assert (run.folder / "resumed" / "checkpoint-2" / "training_state.pt").exists()
    assert read_jsonl(run.folder / "resumed" / "metrics.jsonl")[-1]["step"] == 3
    monkeypatch.setattr(train_opsd, "append_jsonl", append)
    assert files(run("resumed", steps=4, **flags)) == files(unbroken)


def test_failing_tasks_get_new_hints_and_the_others_keep_theirs(run, monkeypatch):
    passing = {f"chat{i}" for i in range(4)}  # the pass rates decide, whatever a random model says
    graded = train_opsd.evaluate_model

    def evaluate_model(*args, **options):
        return [row | {"passed": row["id"] in passing} for row in graded(*args, **options)]
    monkeypatch.setattr(train_opsd, "evaluate_model", evaluate_model)
    folder = run("refreshed", steps=4, refresh_every=2, refresh_rollouts=2)
    asked = read_jsonl(folder / "refresh-2" / "eval.jsonl")
    assert len(asked) == 6 * 2 and not (folder / "refresh-4").exists()  # nothing would train on hints found after the last step
    new = {row["id"]: row["hint_id"] for row in read_jsonl(folder / "refresh-2" / "refreshed.jsonl")}
    assert new and not new.keys() & passing
    for row in read_jsonl(folder / "rollouts.jsonl"):
        assert (row["hint_id"] == new.get(row["id"])) == (row["step"] > 2 and row["id"] in new)


def test_the_latest_whole_checkpoint_counts(tmp_path):
    for name in ("checkpoint-8", "checkpoint-10", "checkpoint-12.tmp", "checkpoint-mine"):
        (tmp_path / name).mkdir()
    assert train_opsd.latest_checkpoint(tmp_path, 20) == (tmp_path / "checkpoint-10", 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-mine"]
    (tmp_path / "checkpoint").mkdir()  # killed before the older one was removed
    assert train_opsd.latest_checkpoint(tmp_path, 20) == (tmp_path / "checkpoint", 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "checkpoint-mine"]
    assert train_opsd.latest_checkpoint(tmp_path / "new", 20) == (None, 0)


def test_sigkill_at_random_moments_changes_nothing(run):
    # Children are forked from a server that has the imports done and has run nothing yet: a start costs no seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_opsd", "torch", "transformers.models.qwen3.modeling_qwen3", "transformers.AutoTokenizer"])
    flags = {**run.defaults, "steps": 12, "eval_every": 3, "save_every": 2}

    def start(name):
        process = context.Process(target=train_opsd.main, args=(Config(**{**flags, "out_dir": str(run.folder / name)}),))
        process.start()
        return process

    unbroken = start("unbroken")
    unbroken.join()
    assert unbroken.exitcode == 0
    generator, metrics = random.Random(0), run.folder / "killed" / "metrics.jsonl"
    rows = lambda: metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    for _ in range(3):
        process, last = start("killed"), rows() + generator.randrange(4)
        while rows() < last and process.is_alive():  # some steps of training ...
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.05))  # ... and a bit of the next one, of an evaluation or of a checkpoint
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert 0 < rows() < 12
    process = start("killed")
    process.join()
    assert files(run.folder / "killed") == files(run.folder / "unbroken")
