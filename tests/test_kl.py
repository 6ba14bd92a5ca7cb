"""kl_diagnostics.py: direction and alignment of D (KL-01, KL-03, KL-04, TOK-05), contrast, depth, identities, resume."""
from types import SimpleNamespace

import numpy as np
import pytest

from common import HFEngine, load_model, parse_config, read_jsonl, render_prompt, torch
from kl_diagnostics import Config, error_step_contrast, main, sampled_reverse_kl, score_completions, teacher_depth
from test_evaluate import WORLD, make_tasks, run_until_killed, write_rows


# D.

def test_kl_01_expected_d_is_the_reverse_kl(case):
    data = case("KL-01")
    student, teacher = np.log(data["input"]["student_probs"]), np.log(data["input"]["teacher_probs"])
    tokens = [0] * 7 + [1] * 2 + [2]  # one-token rollouts as often as the student draws them
    d = sampled_reverse_kl([[student[t]] for t in tokens], [[teacher[t]] for t in tokens])
    assert d == pytest.approx(data["expected"]["reverse_kl_student_teacher"], abs=1e-6)
    swapped = sampled_reverse_kl([[teacher[t]] for t in tokens], [[student[t]] for t in tokens])
    assert swapped == -d  # the sign is kept


def test_kl_03_mean_over_tokens_then_rollouts_and_nothing_from_an_empty_rollout(case):
    data = case("KL-03")
    gaps, mask = data["input"]["per_token_kl"], data["input"]["mask"]
    zeros = [[0.0] * len(row) for row in gaps]
    assert sampled_reverse_kl(gaps, zeros, mask) == pytest.approx(data["expected"]["mean_of_sequence_means"], abs=1e-9)
    none = data["input"]["all_masked_batch"]
    assert sampled_reverse_kl(none["per_token_kl"], [[0.0, 0.0]], none["mask"]) == data["expected"]["all_masked_loss"]
    with_empty = sampled_reverse_kl(gaps + none["per_token_kl"], zeros + [[0.0, 0.0]], mask + none["mask"])
    assert with_empty == sampled_reverse_kl(gaps, zeros, mask)  # left out, not counted as 0


def test_tok_05_tokens_that_a_tool_wrote_do_not_count(case):
    data = case("TOK-05")
    mask = [origin == "A" for origin in data["input"]["token_origin"]]
    d = sampled_reverse_kl(data["input"]["per_token_kl"], [0.0] * 6, mask)
    assert d == pytest.approx(data["expected"]["mean_kl_model_tokens"], abs=1e-9)


def table_model(logits):
    """A stand-in whose state at a position is that row of `logits`, under an identity head."""
    table = torch.tensor(logits)
    return SimpleNamespace(device="cpu", config=SimpleNamespace(model_type="table"),
                           get_output_embeddings=lambda: SimpleNamespace(weight=torch.eye(table.shape[1])),
                           base_model=lambda ids, position_ids, **_: SimpleNamespace(last_hidden_state=table[position_ids]))


def test_kl_04_each_role_is_read_from_its_own_prompt_length(case):
    data = case("KL-04")
    ids, scored = data["input"]["completion_ids"], {}
    for role in ("student", "teacher"):
        model = table_model(data["input"][f"{role}_logits"])
        prompt = [0] * data["input"][f"{role}_prompt_len"]
        (scored[role], _), = score_completions(model, [(prompt, [ids])])[0]
        # the row beside others of other lengths gives the same
        beside = score_completions(model, [([0], [[1]]), (prompt, [[2], ids, [0, 1]]), ([1, 1, 1], [[0]])], row_tokens=9, chunk=2)
        assert beside[1][1][0] == scored[role]
        assert sum(scored[role]) == pytest.approx(data["expected"][f"sampled_logprob_sum_{role}"], abs=1e-6)
    assert sampled_reverse_kl(scored["student"], scored["teacher"]) == data["expected"]["mean_reverse_kl"]


# Contrast and depth.

def turn(i, k, flagged, gaps, index=0):
    return {"id": i, "seed": k, "turn": index, "is_error_turn": flagged, "student_logprobs": gaps,
            "teacher_logprobs": [0.0] * len(gaps)}


def test_error_step_contrast_by_hand():
    turns = [turn("a", 0, True, [1.0, 3.0]),  # d = 2
             turn("a", 1, False, [1.0, -1.0]),  # d = 1/2, signed 0
             turn("a", 2, False, [0.5]),  # d = 1/2
             turn("b", 0, True, [-2.0, 4.0]),  # d = 2, signed 1
             turn("b", 1, False, [1.0]),  # d = 1
             turn("b", 1, False, [9.0], index=1),  # another turn is no control
             turn("c", 0, True, [5.0]), turn("c", 1, True, [7.0])]  # no passed rollout: left out and counted
    contrast, used, alone = error_step_contrast(turns)
    assert (contrast, used, alone) == (((2 - 0.5) + (2 - 1)) / 2, 2, 2)
    assert error_step_contrast(turns, signed=True) == (((2 - 0.25) + (1 - 1)) / 2, 2, 2)
    assert error_step_contrast([turn("c", 0, True, [5.0])]) == (None, 0, 1)
    assert error_step_contrast([turn("c", 0, True, []), turn("c", 1, False, [1.0])]) == (None, 0, 0)


def test_teacher_depth_counts_tokens_before_the_first_surprise():
    assert teacher_depth([-0.1, -2.9, -3.1, -0.1], 3.0) == 2
    assert teacher_depth([-3.0, -3.0], 3.0) == 2  # tau itself is no surprise
    assert teacher_depth([-4.0], 3.0) == 0 and teacher_depth([], 3.0) == 0


# Scoring and the whole stage on a real model.

@pytest.fixture
def flags(tmp_path, tiny_model_dir):
    """Flags of a small run: five tasks with a hint each; a completion passes when its length is even."""
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "env.py").write_text(WORLD.replace('self.text == self.spec["want"]', "len(self.text) % 2 == 0"))
    tasks = make_tasks(str(tmp_path / "world"), 5)
    write_rows(tmp_path / "tasks.jsonl", tasks)
    hints = [{"id": task["id"], "hint_id": f"h{i}", "hint": "Say it " + "again " * i} for i, task in enumerate(tasks)]
    write_rows(tmp_path / "hints.jsonl", hints)
    small = ["--batch_tasks", "2", "--max_new_tokens", "6", "--row_tokens", "300"]
    return lambda out, *more: ["--model", tiny_model_dir, "--tasks", f"{tmp_path}/tasks.jsonl", "--hints",
                               f"{tmp_path}/hints.jsonl", "--out_dir", f"{tmp_path}/{out}", *small, *more]


def test_gen_02_scores_are_the_samplers_log_probs_at_its_temperature(tiny_model_dir):
    model, tokenizer = load_model(tiny_model_dir)
    prompts = [[5, 6, 7], [8] * 20, [9, 10]]
    for temperature in (0.6, 1.0):
        samples = HFEngine(model, tokenizer).generate(prompts, [[1, 2], [3], [4, 5, 6]], 8, temperature)
        items = [(prompt, [sample.ids for sample in of_prompt]) for prompt, of_prompt in zip(prompts, samples)]
        scored = score_completions(model, items, 64, 4, temperature)
        for of_prompt, scores in zip(samples, scored):
            for sample, (logprobs, _) in zip(of_prompt, scores):
                assert logprobs == pytest.approx(sample.logprobs, abs=1e-5)


def test_kl_09_logits_never_exist_for_more_than_a_chunk(tiny_model_dir, monkeypatch):
    model, _ = load_model(tiny_model_dir)
    items = [([1, 2, 3], [[4] * 9, [5] * 4]), ([6], [[7] * 10])]
    whole, sizes, log_softmax = score_completions(model, items), [], torch.log_softmax

    def spy(logits, dim):
        sizes.append(len(logits))
        assert logits.dtype == torch.float32 and not logits.requires_grad
        return log_softmax(logits, dim)

    monkeypatch.setattr(torch, "log_softmax", spy)
    chunked = score_completions(model, items, chunk=8)
    assert sizes == [8, 8, 7]
    for a, b in zip(sum(whole, []), sum(chunked, [])):
        assert a[0] == pytest.approx(b[0], abs=1e-6) and a[1] == pytest.approx(b[1], abs=1e-6)


@pytest.mark.parametrize("control", ["empty", "none"])
def test_with_an_empty_hint_everything_is_exactly_zero_and_with_a_hint_it_is_not(flags, tmp_path, control, capsys):
    main(parse_config(Config, flags("kl", "--control", control)))
    tokens, summaries = (read_jsonl(tmp_path / "kl" / name) for name in ("kl_tokens.jsonl", "kl_summary.jsonl"))
    assert len(tokens) == 20 and [row["id"] for row in summaries] == [f"t{i}" for i in range(5)]
    assert all(len(row["token_ids"]) == len(row["student_logprobs"]) == len(row["teacher_entropy"]) for row in tokens)
    if control == "empty":
        assert all(row["student_logprobs"] == row["teacher_logprobs"] for row in tokens)
        assert all(row["d"] == 0.0 and row["utility"] == 0.0 and row.get("contrast", 0.0) == 0.0 for row in summaries)
        assert "D +0.0000 [+0.000, +0.000]" in capsys.readouterr().out
    else:
        assert all(row["d"] != 0.0 for row in summaries)
    for summary in summaries:
        own = [row for row in tokens if row["id"] == summary["id"]]
        assert summary["d"] == np.mean([np.mean(np.subtract(row["student_logprobs"], row["teacher_logprobs"])) for row in own])
        assert summary["pass_rate"] == np.mean([not row["is_error_turn"] for row in own])
        assert all(0 <= depth <= length for depth, length in zip(summary["teacher_depths"], summary["teacher_lengths"]))


def test_scores_in_the_files_are_those_of_plain_unpacked_forwards(flags, tmp_path, tiny_model_dir):
    main(parse_config(Config, flags("kl")))
    model, tokenizer = load_model(tiny_model_dir)
    tasks, hints = ({row["id"]: row for row in read_jsonl(tmp_path / name)} for name in ("tasks.jsonl", "hints.jsonl"))
    for row in read_jsonl(tmp_path / "kl" / "kl_tokens.jsonl"):
        for role, hint in (("student", ""), ("teacher", hints[row["id"]]["hint"])):
            prompt = render_prompt(tokenizer, tasks[row["id"]]["messages"], [], hint)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + row["token_ids"]])).logits[0]
            logprobs = torch.log_softmax(logits[len(prompt) - 1:-1], -1)  # logits[t] predict token t + 1
            assert row[f"{role}_logprobs"] == pytest.approx([float(logprobs[t, i]) for t, i in enumerate(row["token_ids"])], abs=1e-5)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        assert row["teacher_entropy"] == pytest.approx(entropy.tolist(), abs=1e-5)


def test_killed_and_started_again_gives_the_files_of_an_unbroken_run(flags, tmp_path):
    run_until_killed("kl_diagnostics", 12, flags("killed"))  # in the third task: its rows are there in part, its summary is not
    for out in ("killed", "whole"):
        main(parse_config(Config, flags(out)))
    for name in ("kl_tokens.jsonl", "kl_summary.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_numbers_of_other_hints_are_not_taken_over(flags, tmp_path):
    main(parse_config(Config, flags("kl", "--num_tasks", "2", "--rollouts", "1")))
    write_rows(tmp_path / "hints.jsonl", [{"id": f"t{i}", "hint_id": "h", "hint": "Another"} for i in range(5)])
    with pytest.raises(ValueError, match="hints.jsonl has changed since the run"):
        main(parse_config(Config, flags("kl", "--num_tasks", "2", "--rollouts", "1")))
