"""train_opsd --lora_rank: what moves, who teaches, what is written (needs peft)."""
import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("peft")

import train_opsd  # noqa: E402
from common import head_weight, load_model, load_tasks, pack_rows, packed_hidden, plain_weights, read_jsonl, render_prompt  # noqa: E402
from test_train import files, run, same_weights, weights  # noqa: E402, F401
from train_opsd import Config  # noqa: E402

LORA = {"lora_rank": 4, "lora_alpha": 8.0}


def adapted(folder, size=0.0):
    """(model, tokenizer) with adapters; `size` moves the factors that start at zero."""
    model, tokenizer = load_model(folder)
    train_opsd.add_adapter(model, Config(**LORA))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B" in name:
                weight += size * torch.randn(weight.shape, generator=generator)
    return model, tokenizer


@pytest.fixture
def items(tiny_model_dir, tiny_tasks):
    """Items of pack_rows: three tasks with two completions each."""
    _, tokenizer = load_model(tiny_model_dir)
    return [(render_prompt(tokenizer, task["messages"], task["tools"]), [[5, 6, 7 + i], [9 + i, 8]])
            for i, task in enumerate(load_tasks([tiny_tasks])[:3])]


def test_only_adapters_move(run, tiny_model_dir, monkeypatch):  # noqa: F811
    models, add = [], train_opsd.add_adapter
    monkeypatch.setattr(train_opsd, "add_adapter", lambda model, *args: models.append(model) or add(model, *args))
    folder = run("lora", steps=3, **LORA)
    [model] = models
    base, _ = load_model(tiny_model_dir)
    names = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert names == {name for name, _ in model.named_parameters() if ".lora_" in name} and len(names) == 2 * 7 * 2  # all linear layers
    plain = {name.replace(".base_layer", ""): weight for name, weight in model.named_parameters() if ".lora_" not in name}
    assert all(torch.equal(weight, plain[name]) and plain[name].grad is None for name, weight in base.named_parameters())
    assert all(weight.any() for name, weight in model.named_parameters() if ".lora_B" in name)
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert len(metrics) == 3 and all(row["grad_norm"] > 0 and row["reverse_kl"] > 0 and row["logprob_gap"] < 1e-4 for row in metrics)


def test_teacher_with_its_adapter_off_is_the_base_exactly(tiny_model_dir, items):
    model, _ = adapted(tiny_model_dir, 0.1)
    base, _ = load_model(tiny_model_dir)
    rows, cfg = pack_rows(items, 300), Config(**LORA, model=tiny_model_dir)
    teacher = train_opsd.load_teacher(cfg, model, {})
    with torch.no_grad():
        expected, student = (torch.cat([packed_hidden(m, row) for row in rows]) for m in (base, model))
    assert torch.equal(train_opsd.teacher_states(teacher, rows, cfg), expected)
    assert not torch.allclose(student, expected)
    with torch.no_grad():  # and it is on again
        assert torch.equal(torch.cat([packed_hidden(model, row) for row in rows]), student)
    live = Config(**LORA, model=tiny_model_dir, teacher="live")
    assert torch.equal(train_opsd.teacher_states(model, rows, live), student)
    broken = [rows[0], None]
    with pytest.raises(AttributeError):
        train_opsd.teacher_states(teacher, broken, cfg)
    with torch.no_grad():  # even after a pass that failed
        assert torch.equal(torch.cat([packed_hidden(model, row) for row in rows]), student)


@pytest.mark.parametrize("teacher", ["frozen", "live"])
def test_empty_hints_move_no_adapter(run, tiny_model_dir, teacher):  # noqa: F811
    folder = run("empty", control="empty", teacher=teacher, steps=3, save_every=2, **LORA)
    assert all(row["loss"] == row["reverse_kl"] == row["grad_norm"] == 0 for row in read_jsonl(folder / "metrics.jsonl"))
    assert same_weights(folder / "checkpoint", tiny_model_dir)


def test_head_without_gradient(tiny_model_dir, items):
    model, _ = adapted(tiny_model_dir, 0.1)
    base, _ = load_model(tiny_model_dir)
    rows, cfg = pack_rows(items, 300), Config(**LORA)
    hidden_t = train_opsd.teacher_states(model, rows, cfg)
    loss, _, _ = train_opsd.student_pass(model, model, rows, hidden_t, lambda span: train_opsd.dense_loss(), len(hidden_t), cfg)
    assert loss > 0 and head_weight(model).grad is None
    assert all((weight.grad is not None) == (".lora_" in name) for name, weight in model.named_parameters())
    train_opsd.student_pass(base, model, rows, hidden_t + 1, lambda span: train_opsd.dense_loss(), len(hidden_t), cfg)
    assert head_weight(base).grad.any()  # with every weight in training it has one


@pytest.mark.parametrize("flags", [{}, {"dtype": "bfloat16", "lr": 1e-3}, {"teacher": "live", "gradient_checkpointing": True}])
def test_train_03_resumed_run_equals_the_unbroken_one(run, monkeypatch, flags):  # noqa: F811
    flags = {"steps": 4, **LORA, **flags}
    unbroken, append = run("unbroken", **flags), train_opsd.append_jsonl

    def cut(path, row):
        if path.name == "rollouts.jsonl" and row["step"] == 3:
            raise KeyboardInterrupt
        append(path, row)
    monkeypatch.setattr(train_opsd, "append_jsonl", cut)
    with pytest.raises(KeyboardInterrupt):
        run("resumed", **flags)
    halfway = run.folder / "resumed" / "checkpoint-2"
    assert (halfway / "training_state.pt").exists() and (halfway / "adapter_model.safetensors").exists()
    assert not (halfway / "model.safetensors").exists()  # the base is not written again
    monkeypatch.setattr(train_opsd, "append_jsonl", append)
    assert files(run("resumed", **flags)) == files(unbroken)


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


def test_the_finished_checkpoint_is_plain_and_its_adapter_folder_is_the_same_policy(run, case, tiny_model_dir):  # noqa: F811
    checkpoint, ids = run("lora", **LORA) / "checkpoint", list(range(5, 25))
    stored, base = weights(checkpoint), weights(tiny_model_dir)
    assert stored.keys() == base.keys() and not same_weights(checkpoint, tiny_model_dir)
    assert len({"lm_head.weight", "model.embed_tokens.weight"} & stored.keys()) == case("TRAIN-04")["expected"]["tensors_written_for_tied_pair"]
    assert not (checkpoint / "adapter_config.json").exists() and not (checkpoint / "training_state.pt").exists()
    code = f"""
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
merged = AutoModelForCausalLM.from_pretrained({str(checkpoint)!r}, dtype=torch.float32).eval()
assert merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()
assert not any("lora" in name or "base_layer" in name for name, _ in merged.named_modules())
base = AutoModelForCausalLM.from_pretrained({tiny_model_dir!r}, dtype=torch.float32).eval()
by_peft = PeftModel.from_pretrained(base, {str(checkpoint / 'adapter')!r}).merge_and_unload()
found = [model(torch.tensor([{ids}])).logits.detach() for model in (merged, by_peft)]
torch.testing.assert_close(*found, atol=1e-5, rtol=0)
for (name, a), (_, b) in zip(merged.named_parameters(), by_peft.named_parameters(), strict=True):
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6, msg=name)
torch.save(found[0], {str(checkpoint / 'logits.pt')!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    plain, _ = load_model(checkpoint)
    from_adapter, _ = load_model(checkpoint / "adapter")
    assert {name for name, _ in from_adapter.named_parameters()} == {name for name, _ in plain.named_parameters()}
    for model in (plain, from_adapter):
        torch.testing.assert_close(torch.load(checkpoint / "logits.pt"), logits(model, ids), atol=1e-5, rtol=0)


def test_train_02_a_run_from_an_adapter_folder_is_taught_by_the_merged_model(run, tiny_model_dir, tmp_path):  # noqa: F811
    first = run("first", **LORA) / "checkpoint" / "adapter"
    for name, flags in (("full", {}), ("again", LORA)):
        folder = run(name, model=str(first), control="empty", **flags)
        assert all(row["reverse_kl"] == row["loss"] == 0 for row in read_jsonl(folder / "metrics.jsonl"))  # not the bare base's policy
        assert not same_weights(folder / "checkpoint", tiny_model_dir)
        start, _ = load_model(first)
        end, _ = load_model(folder / "checkpoint")
        assert all(torch.equal(a, b) for a, b in zip(start.parameters(), end.parameters()))
    hinted = run("hinted", model=str(first), steps=3, save_every=1, **LORA)
    assert read_jsonl(hinted / "metrics.jsonl")[-1]["reverse_kl"] > 0
    load_model(hinted / "checkpoint")


def test_train_02_teacher_of_the_public_case(case):
    case = case("TRAIN-02")
    base, delta = (torch.tensor(case["input"][name]) for name in ("base_logits", "start_adapter_delta"))
    kl = lambda student, teacher: float(train_opsd.chunked_kl(student[None], torch.eye(3), teacher[None], torch.eye(3)))
    assert kl(base + delta, base + delta) == case["expected"]["kl_step0_snapshot_teacher_eval_mode"]
    assert kl(base + delta, base) == pytest.approx(case["expected"]["faulty_kl_adapter_disabled"], abs=1e-6)


def test_train_04_broken_adapters_are_refused_by_name(case, tiny_model_dir, tmp_path):
    case = case("TRAIN-04")
    with pytest.raises(ValueError) as error:
        train_opsd.check_adapter(case["input"]["lora_tensors"])
    assert "v.lora_A (1-D, 0 values)" in str(error.value) and "v.lora_B (1-D, 128 values)" in str(error.value)
    assert "q.lora" not in str(error.value)
    whole = {name: shape for name, shape in case["input"]["lora_tensors"].items() if name.startswith("q.")}
    train_opsd.check_adapter(whole)
    for name in whole:
        with pytest.raises(ValueError, match=f"broken: {name}$"):
            train_opsd.check_adapter({name: whole[name]})
    model, _ = adapted(tiny_model_dir)
    train_opsd.save_adapter(model, tmp_path / "good")
    assert json.loads((tmp_path / "good" / "adapter_config.json").read_text())["r"] == 4
    layer = model.model.layers[0].self_attn.q_proj.lora_A["default"]
    layer.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.lora_A.weight \(1-D, 0 values\)"):
        train_opsd.save_adapter(model, tmp_path / "bad")


def test_train_04_tied_weights_stay_one(case, tiny_model_dir):
    case = case("TRAIN-04")["expected"]
    model, _ = adapted(tiny_model_dir, 0.1)
    pushed = dict(plain_weights(model))
    assert torch.equal(pushed["lm_head.weight"], pushed["model.embed_tokens.weight"])  # an engine needs both names
    plain, _ = load_model(tiny_model_dir)
    assert pushed.keys() == plain.state_dict().keys()
    plain.load_state_dict(pushed)
    same_storage = plain.lm_head.weight.data_ptr() == plain.model.embed_tokens.weight.data_ptr()
    assert same_storage is case["after_load_same_storage"]
    with torch.no_grad():
        plain.model.embed_tokens.weight[3, 0] = 77
    assert (float(plain.lm_head.weight[3, 0]) == 77) is case["after_load_edit_visible_in_both"]
    plain, _ = load_model(tiny_model_dir)
    plain.load_state_dict(pushed)
    torch.testing.assert_close(logits(plain, [1, 2, 3]), logits(model, [1, 2, 3]), atol=1e-4, rtol=1e-4)
