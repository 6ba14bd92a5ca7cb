"""What a GPU run leans on, tried on the CPU: float32 masters, the bucketed update, checkpointed layers, the loss's gradients."""
import dataclasses

import pytest
import torch

import train_opsd
from common import load_model, pack_rows
from train_opsd import Config, chunked_loss, dense_loss, loss_and_gradients, prepare_layers, student_pass, teacher_states, trained_weights, update


def optimizer_of(weights, lr):
    return torch.optim.AdamW([master for _, master in weights], lr=lr, weight_decay=0.0, fused=True)


def test_small_updates_of_bfloat16_weights_add_up_in_their_masters():
    start = torch.rand(64) + 1  # between 1 and 2 two bfloat16 numbers are 2^-7 apart
    models = [torch.nn.ParameterList([torch.nn.Parameter(start.bfloat16().to(dtype))]) for dtype in (torch.bfloat16, torch.float32)]
    pairs = [trained_weights(model) for model in models]
    assert pairs[0][0][0] is not pairs[0][0][1] and pairs[1][0][0] is pairs[1][0][1]
    for weights in pairs:
        optimizer = optimizer_of(weights, 1e-4)
        for _ in range(200):
            weights[0][0].grad = torch.ones(64, dtype=weights[0][0].dtype)
            update(optimizer, weights, 100.0)
    half, full = (weights[0][0].detach() for weights in pairs)
    torch.testing.assert_close(pairs[0][0][1].detach(), full, atol=1e-6, rtol=0)
    assert torch.equal(half, full.bfloat16()) and ((start.bfloat16().float() - half.float()) > 0.01).all()


def test_buckets_and_clipping_are_torchs_own(tiny_model_dir):
    results = []
    for bucket in (None, 2**28, 1000):
        model, _ = load_model(tiny_model_dir)
        weights, generator = trained_weights(model), torch.Generator().manual_seed(0)
        optimizer = optimizer_of(weights, 1e-3)
        for _ in range(3):
            for weight, _ in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            if bucket:
                norm = update(optimizer, weights, 1.0, bucket)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        results.append((float(norm), [weight.detach().clone() for weight, _ in weights]))
    for norm, weights in results[1:]:
        assert norm == results[0][0] and all(map(torch.equal, weights, results[0][1]))


def test_a_gradient_that_is_not_finite_moves_nothing(tiny_model_dir):
    model, _ = load_model(tiny_model_dir)
    weights, before = trained_weights(model), [weight.detach().clone() for weight in model.parameters()]
    for weight, _ in weights:
        weight.grad = torch.zeros_like(weight)
    weights[3][0].grad.view(-1)[5] = torch.nan
    with pytest.raises(RuntimeError, match="the gradient norm is nan"):
        update(optimizer_of(weights, 1e-3), weights, 1.0)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("flags", [{"gradient_checkpointing": True}, {"dtype": "bfloat16", "gradient_checkpointing": True}])
def test_checkpointed_layers_give_the_same_gradients(tiny_model_dir, flags):
    draw = torch.Generator().manual_seed(0)
    ids = lambda length: torch.randint(10, 400, (length,), generator=draw).tolist()
    items = [(ids(30), [ids(8), ids(5)]), (ids(12), [ids(9)])]
    rows, hinted = pack_rows(items, 50), pack_rows([(ids(6) + prefix, done) for prefix, done in items], 60)
    found = []
    for cfg in (Config(**{**flags, "gradient_checkpointing": False}), Config(**flags)):
        model, teacher = (load_model(tiny_model_dir, dtype=cfg.dtype)[0] for _ in range(2))
        for one in (model, teacher):
            prepare_layers(one, cfg)
        hidden_t = teacher_states(teacher, hinted, cfg)
        loss, _, _ = student_pass(model, teacher, rows, hidden_t, lambda span: dense_loss(), len(hidden_t), cfg)
        found.append((loss, [weight.grad for weight in model.parameters()]))
    assert found[0][0] == found[1][0] > 0 and all(map(torch.equal, found[0][1], found[1][1]))


def test_gradients_are_scaled_and_added_up_however_tokens_are_cut():
    torch.manual_seed(0)
    hidden, hidden_t, weight, weight_t = (torch.randn(23, 8), torch.randn(23, 8), torch.randn(40, 8), torch.randn(40, 8))
    inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss, _, _ = chunked_loss(dense_loss(), *inputs, hidden_t, weight_t, temperature=0.7)
    wanted = torch.autograd.grad(loss, inputs)
    for chunk, weight_tokens in ((256, 1408), (5, 9), (9, 5), (1, 1)):
        grad_weight = torch.ones_like(weight)
        got, grad_hidden, _, _ = loss_and_gradients(dense_loss(), hidden, weight, hidden_t, weight_t, grad_weight, scale=0.25, chunk=chunk,
                                                    temperature=0.7, weight_tokens=weight_tokens)
        assert float(got) == pytest.approx(float(loss.detach()), rel=1e-6)
        torch.testing.assert_close(grad_hidden, wanted[0] / 4)
        torch.testing.assert_close(grad_weight, 1 + wanted[1] / 4)


def test_bfloat16_runs_resume_with_their_masters(tiny_model_dir, tiny_tasks, tmp_path, monkeypatch):
    lines = tiny_tasks.read_text().splitlines(True)
    (tmp_path / "train.jsonl").write_text("".join(lines[2:]))
    (tmp_path / "eval.jsonl").write_text("".join(lines[:2]))
    cfg = Config(tasks=[str(tmp_path / "train.jsonl")], eval_tasks=[str(tmp_path / "eval.jsonl")], hints="none", model=str(tiny_model_dir), steps=4, tasks_per_step=3,
                 rollouts_per_task=2, max_new_tokens=8, lr=1e-4, warmup_steps=1, row_tokens=600, eval_every=4, save_every=2, dtype="bfloat16",
                 loss="policy_gradient", grpo_weight=1.0)
    save = train_opsd.save_checkpoint

    def cut(out_dir, step, *args):
        save(out_dir, step, *args)
        if step == 2 and out_dir.name == "cut":
            raise KeyboardInterrupt
    train_opsd.main(dataclasses.replace(cfg, out_dir=str(tmp_path / "unbroken")))
    monkeypatch.setattr(train_opsd, "save_checkpoint", cut)
    with pytest.raises(KeyboardInterrupt):
        train_opsd.main(dataclasses.replace(cfg, out_dir=str(tmp_path / "cut")))
    assert len(torch.load(tmp_path / "cut/checkpoint-2/training_state.pt")["masters"]) > 0
    train_opsd.main(dataclasses.replace(cfg, out_dir=str(tmp_path / "cut")))
    for name in ("rollouts.jsonl", "checkpoint/model.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes(), name


@pytest.mark.parametrize("flags", [{"gradient_checkpointing": True}, {"gradient_checkpointing": True, "teacher": "live"}])
def test_checkpointed_layers_and_sampling_take_turns(tiny_model_dir, tiny_tasks, tmp_path, flags):
    lines = tiny_tasks.read_text().splitlines(True)
    (tmp_path / "train.jsonl").write_text("".join(lines[2:]))
    (tmp_path / "eval.jsonl").write_text("".join(lines[:2]))
    (tmp_path / "hints.jsonl").write_text('{"failure_kind": "wrong_unit", "hint": "In minutes."}\n{"failure_kind": "too_long", "hint": "Be brief."}\n')
    found = []
    for name, on in (("plain", {**flags, "gradient_checkpointing": False}), ("checkpointed", flags)):
        train_opsd.main(Config(tasks=[str(tmp_path / "train.jsonl")], eval_tasks=[str(tmp_path / "eval.jsonl")], hints=str(tmp_path / "hints.jsonl"),
                               model=str(tiny_model_dir), steps=3, tasks_per_step=3, rollouts_per_task=2, max_new_tokens=8, lr=1e-3,
                               warmup_steps=1, row_tokens=600, eval_every=2, save_every=3, out_dir=str(tmp_path / name), **on))
        found.append([(tmp_path / name / file).read_bytes() for file in ("rollouts.jsonl", "eval.jsonl", "checkpoint/model.safetensors")])
    assert found[0] == found[1]
