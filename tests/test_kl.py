"""kl_diagnostics.py: direction and alignment of D (KL-01, KL-03, KL-04, TOK-05), contrast, depth, identities, resume."""
import copy
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

import kl_diagnostics
from common import load_model, read_jsonl, reverse_kl, torch
from kl_diagnostics import Config, error_step_contrast, main, sampled_reverse_kl, score_completions, teacher_depth


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
    return {"id": i, "seed": k, "turn": index, "is_error_turn": flagged, "student_logprobs": gaps, "teacher_logprobs": [0.0] * len(gaps)}


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
