"""LoRA: only the adapter moves, the teacher is the model with the adapter off, checkpoints are plain folders."""
import json
import subprocess
import sys

import pytest
import torch

import train_opsd
from common import HFEngine, check_sync, head_weight, load_model, pack_rows, packed_hidden, plain_weights, read_jsonl
from train_opsd import Config, add_adapter, check_adapter

peft = pytest.importorskip("peft")


@pytest.fixture
def run(tiny_model_dir, tiny_tasks, tmp_path):
    """run(name, **flags) trains adapters on six tiny tasks into tmp_path/name and returns that folder."""
    tasks = read_jsonl(tiny_tasks)
    for name, rows in (("train", tasks[2:]), ("eval", tasks[:2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "hints.jsonl").write_text("".join(json.dumps({"id": task["id"], "hint_id": task["id"], "hint": "Think of the unit."}) + "\n" for task in tasks))

    def run(name, **flags):
        cfg = dict(tasks=[str(tmp_path / "train.jsonl")], eval_tasks=[str(tmp_path / "eval.jsonl")], hints=str(tmp_path / "hints.jsonl"),
                   model=str(tiny_model_dir), steps=4, tasks_per_step=3, rollouts_per_task=2, max_new_tokens=8, lr=1e-2, warmup_steps=1,
                   row_tokens=600, eval_every=4, save_every=2, lora_rank=4, out_dir=str(tmp_path / name))
        train_opsd.main(Config(**{**cfg, **flags}))
        return tmp_path / name
    return run


def hidden(model):
    prefix, completion = list(range(3, 40)), list(range(50, 60))
    with torch.no_grad():
        return packed_hidden(model, pack_rows([(prefix, [completion])], 100)[0])


def test_the_adapter_alone_moves_and_off_it_is_the_base(tiny_model_dir):
    base, model = (load_model(tiny_model_dir)[0] for _ in range(2))
    adapter = add_adapter(model, Config(lora_rank=4))
    assert all((".lora_" in name) == weight.requires_grad for name, weight in model.named_parameters())
    assert torch.equal(hidden(model), hidden(base))  # one factor is zero
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B" in name:
                weight.normal_()
    assert not torch.allclose(hidden(model), hidden(base), atol=1e-2)
    rows = pack_rows([(list(range(3, 40)), [list(range(50, 60))])], 100)
    cfg = Config(lora_rank=4)
    assert torch.equal(train_opsd.teacher_states(model, rows, cfg, adapter), hidden(base))
    assert not torch.equal(train_opsd.teacher_states(model, rows, Config(lora_rank=4, teacher="live"), adapter), hidden(base))

    merged, _ = load_model(tiny_model_dir)
    merged.load_state_dict(dict(plain_weights(model)))
    torch.testing.assert_close(hidden(merged), hidden(model), atol=2e-4, rtol=1e-3)


def test_an_empty_hint_moves_no_adapter_and_the_lm_head_has_no_gradient(run, tiny_model_dir, monkeypatch):
    heads, student_pass = [], train_opsd.student_pass

    def watched(model, *args):
        result = student_pass(model, *args)
        heads.append(model.get_output_embeddings().weight.grad)
        return result
    monkeypatch.setattr(train_opsd, "student_pass", watched)
    folder = run("empty", control="empty")
    assert [(row["loss"], row["grad_norm"]) for row in read_jsonl(folder / "metrics.jsonl")] == [(0.0, 0.0)] * 4 and heads == [None] * 4
    before, after = (load_model(path)[0].state_dict() for path in (tiny_model_dir, folder / "checkpoint"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_finished_run_is_a_plain_folder_with_the_adapter_beside(run, tiny_model_dir):
    folder = run("lora")
    assert json.loads((folder / "checkpoint" / "config.json").read_text())["model_type"] == "qwen3"
    plain, _ = load_model(folder / "checkpoint")
    merged, _ = load_model(folder / "checkpoint" / "adapter")  # base and adapter, merged as they are read
    assert not any("lora" in name for name in [*plain.state_dict(), *merged.state_dict()])
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(weight, merged.state_dict()[name], atol=1e-6, rtol=1e-5)
    base, _ = load_model(tiny_model_dir)
    assert any(not torch.equal(weight, base.state_dict()[name]) for name, weight in plain.state_dict().items())
    assert plain.get_output_embeddings().weight.data_ptr() == plain.get_input_embeddings().weight.data_ptr()  # still tied

    again = run("again", model=str(folder / "checkpoint" / "adapter"), control="empty", steps=1)  # its teacher is the merged model
    assert read_jsonl(again / "metrics.jsonl")[0]["loss"] == 0.0


def test_a_cut_run_goes_on_to_the_same_adapter(run, monkeypatch):
    unbroken, save = run("unbroken"), train_opsd.save_checkpoint

    def cut(out_dir, step, *args):
        save(out_dir, step, *args)
        raise KeyboardInterrupt
    monkeypatch.setattr(train_opsd, "save_checkpoint", cut)
    with pytest.raises(KeyboardInterrupt):
        run("cut")
    assert not (unbroken.parent / "cut" / "checkpoint-2" / "model.safetensors").exists()  # the adapter is enough
    monkeypatch.setattr(train_opsd, "save_checkpoint", save)
    cut_run = run("cut")
    for name in ("rollouts.jsonl", "eval.jsonl", "checkpoint/model.safetensors", "checkpoint/adapter/adapter_model.safetensors"):
        assert (cut_run / name).read_bytes() == (unbroken / name).read_bytes(), name


def test_train_04_broken_adapters_are_not_saved(case):
    shapes = case("TRAIN-04")["input"]["lora_tensors"]
    with pytest.raises(ValueError, match=r"v.lora_A \(1-D, 0 values\), v.lora_B \(1-D, 128 values\)"):
        check_adapter(shapes)
    whole = {name: shape for name, shape in shapes.items() if name.startswith("q.")}
    check_adapter(whole)
    with pytest.raises(ValueError, match="q.lora_A"):
        check_adapter({"q.lora_A": [8, 16]})


def test_the_probe_sees_the_merged_policy(tiny_model_dir):
    model, tokenizer = load_model(tiny_model_dir)
    add_adapter(model, Config(lora_rank=4))
    sampler, _ = load_model(tiny_model_dir)
    engine, prompts = HFEngine(sampler, tokenizer), [list(range(3 + i, 40)) for i in range(4)]
    assert check_sync(engine, model, prompts) < 1e-4
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B" in name:
                weight.normal_()
    with pytest.raises(SystemExit, match="the engine does not have the trainer's weights"):
        check_sync(engine, model, prompts)
    sampler.load_state_dict(dict(plain_weights(model)))
    assert check_sync(engine, model, prompts) < 1e-3
    assert head_weight(model) is model.get_output_embeddings().weight


def test_a_teacher_pass_that_fails_leaves_the_adapter_on(tiny_model_dir):
    model, _ = load_model(tiny_model_dir)
    adapter = add_adapter(model, Config(lora_rank=4))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B" in name:
                weight.normal_()
    before, rows = hidden(model), pack_rows([(list(range(3, 40)), [list(range(50, 60))])], 100)
    rows[0].predict = torch.tensor([10_000])
    with pytest.raises(IndexError):
        train_opsd.teacher_states(model, rows, Config(lora_rank=4), adapter)
    assert torch.equal(hidden(model), before)


@pytest.mark.parametrize("flags", [{"dtype": "bfloat16", "lr": 1e-3}, {"teacher": "live", "gradient_checkpointing": True}])
def test_train_03_a_run_that_was_cut_within_a_step_goes_on(run, monkeypatch, flags):
    unbroken, append = run("unbroken", **flags), train_opsd.append_jsonl

    def cut(path, row):
        if path.name == "rollouts.jsonl" and row["step"] == 3:
            raise KeyboardInterrupt
        append(path, row)
    monkeypatch.setattr(train_opsd, "append_jsonl", cut)
    with pytest.raises(KeyboardInterrupt):
        run("cut", **flags)
    monkeypatch.setattr(train_opsd, "append_jsonl", append)
    cut_run = run("cut", **flags)
    for name in ("rollouts.jsonl", "eval.jsonl", "checkpoint/model.safetensors", "checkpoint/adapter/adapter_model.safetensors"):
        assert (cut_run / name).read_bytes() == (unbroken / name).read_bytes(), name


def test_train_04_another_process_reads_a_finished_run_without_peft(run, case):
    checkpoint, ids = run("lora", steps=2) / "checkpoint", list(range(5, 25))
    code = f"""
import sys, torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
with safe_open({str(checkpoint / 'model.safetensors')!r}, "pt") as file:
    assert len({{"lm_head.weight", "model.embed_tokens.weight"}} & set(file.keys())) == {case("TRAIN-04")["expected"]["tensors_written_for_tied_pair"]}
plain = AutoModelForCausalLM.from_pretrained({str(checkpoint)!r}, dtype=torch.float32).eval()
assert plain.lm_head.weight.data_ptr() == plain.model.embed_tokens.weight.data_ptr()
with torch.no_grad():
    logits = plain(torch.tensor([{ids}])).logits
assert "peft" not in sys.modules
torch.save(logits, {str(checkpoint / 'logits.pt')!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    model, _ = load_model(checkpoint)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.tensor([ids])).logits, torch.load(checkpoint / "logits.pt"), atol=1e-6, rtol=0)


@pytest.mark.parametrize("rank", [0, 4])
def test_train_02_a_run_from_an_adapter_folder_is_taught_by_the_merged_model(run, case, tiny_model_dir, rank):
    start = run("start", steps=2) / "checkpoint" / "adapter"
    folder = run("again", model=str(start), control="empty", steps=1, lora_rank=rank)
    assert read_jsonl(folder / "metrics.jsonl")[0]["reverse_kl"] == case("TRAIN-02")["expected"]["kl_step0_snapshot_teacher_eval_mode"]
    base, before, after = (load_model(path)[0].state_dict() for path in (tiny_model_dir, start, folder / "checkpoint"))
    assert all(torch.equal(before[name], after[name]) for name in before) and any(not torch.equal(base[name], after[name]) for name in base)
    hinted = run("hinted", model=str(start), steps=2, save_every=1, lora_rank=rank)
    assert read_jsonl(hinted / "metrics.jsonl")[0]["reverse_kl"] > 0
    if rank:  # an adapter on an adapter: both are merged when it is read
        plain, stacked = (load_model(path)[0].state_dict() for path in (hinted / "checkpoint", hinted / "checkpoint" / "adapter"))
        for name in plain:
            torch.testing.assert_close(plain[name], stacked[name], atol=1e-6, rtol=1e-5)


def test_train_04_broken_shapes_are_found_in_the_file(tiny_model_dir, tmp_path):
    model, _ = load_model(tiny_model_dir)
    adapter = add_adapter(model, Config(lora_rank=4))
    train_opsd.save_adapter(adapter, tmp_path / "whole")
    model.model.layers[0].self_attn.q_proj.lora_A["default"].weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.lora_A.weight \(1-D, 0 values\)$"):
        train_opsd.save_adapter(adapter, tmp_path / "broken")
