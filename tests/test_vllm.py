"""common.VLLMEngine against the transformers model whose weights it was given, and the stages with --engine vllm.

Skipped where vllm is not installed; on its CPU build, in an environment of its own with peft and pytest, about two minutes:
    /path/to/venv-with-vllm/bin/python -m pytest tests/test_vllm.py tests/test_vllm_server.py
"""
import importlib.util
import os

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; read when vllm is imported

import evaluate  # noqa: E402
import optimize_hints  # noqa: E402
import train_opsd  # noqa: E402
from common import (ROOT, HFEngine, VLLMEngine, check_sync, load_model, load_tasks, plain_weights, read_jsonl,  # noqa: E402
                    render_prompt, stop_ids, torch)
from test_train import run  # noqa: E402, F401
from test_vllm_server import logprob_gap  # noqa: E402

LIMIT, TOKENS = 1024, 24


@pytest.fixture(scope="module")
def tiny_model_dir(tiny_model_dir, tmp_path_factory):
    """The tiny model with heads of 32 numbers: vLLM's CPU attention knows no smaller ones."""
    from transformers import Qwen3ForCausalLM, set_seed
    model, tokenizer = load_model(tiny_model_dir)
    model.config.head_dim = 32
    set_seed(0)
    wider, folder = Qwen3ForCausalLM(model.config), str(tmp_path_factory.mktemp("wider"))
    wider.generation_config = model.generation_config
    wider.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def untied_dir(tiny_model_dir, tmp_path_factory):
    """The tiny model with an lm_head of its own."""
    model, tokenizer = load_model(tiny_model_dir)
    model.config.tie_word_embeddings = False
    untied = type(model)(model.config)
    untied.load_state_dict(model.state_dict())
    with torch.no_grad():
        untied.lm_head.weight.copy_(model.lm_head.weight.flip(1))
    untied.generation_config = model.generation_config
    folder = tmp_path_factory.mktemp("untied")
    untied.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def make(tiny_model_dir, untied_dir):
    """make(name) = (engine, HFEngine of the folder's weights, prompts); an engine is made once, a model every time."""
    folders = {"tied": tiny_model_dir, "untied": untied_dir, "base": str(ROOT / "data/toolworld/base")}
    engines = {}

    def make(name):
        model, tokenizer = load_model(folders[name])
        if name not in engines:
            engines[name] = VLLMEngine(folders[name], stop_ids(tokenizer, model), LIMIT, device="cpu", dtype="float32")
        tasks = load_tasks([ROOT / "data/toolworld/train_tool.jsonl"], 3)
        limit = LIMIT - TOKENS
        prompts = [render_prompt(tokenizer, task["messages"], task["tools"])[-limit:] for task in tasks]
        prompts += np.random.default_rng(0).integers(model.config.vocab_size, size=(3, 40)).tolist()  # of which no model is sure
        engines[name].push(plain_weights(model), changed=False)
        return engines[name], HFEngine(model, tokenizer), prompts
    return make


def moved(model, size=0.05):
    """Every weight a little different."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += size * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


@pytest.mark.parametrize("name", ["tied", "untied", "base"])
def test_samples_and_their_log_probs_are_those_of_the_model(make, name):
    engine, ours, prompts = make(name)
    for temperature in (1.0, 0.6):
        samples = engine.generate(prompts, [range(8)] * len(prompts), TOKENS, temperature)
        assert [len(of_prompt) for of_prompt in samples] == [8] * len(prompts)
        assert logprob_gap(ours.model, prompts, samples, temperature) < 1e-4  # the public case allows 0.05
        assert logprob_gap(ours.model, prompts, samples, 1.6 - temperature) > 0.05  # the other temperature would be seen
        flat = [sample for of_prompt in samples for sample in of_prompt]
        assert all(len({tuple(sample.ids) for sample in of_prompt}) > 4 for of_prompt in samples[3:])
        for sample in flat:
            assert len(sample.ids) == len(sample.logprobs) and not set(sample.ids[:-1]) & set(ours.stop_ids)
            ended = sample.ids[-1] in ours.stop_ids
            assert sample.finish_reason == ("stop" if ended else "length") and (ended or len(sample.ids) == TOKENS)
        assert {sample.finish_reason for sample in flat} == {"stop", "length"} or name != "base"


@pytest.mark.parametrize("name", ["tied", "untied", "base"])
def test_temperature_0_gives_the_ids_of_transformers(make, name):
    engine, ours, prompts = make(name)
    seeds = [[1]] * len(prompts)
    for [sample], [expected] in zip(engine.generate(prompts, seeds, TOKENS, 0), ours.generate(prompts, seeds, TOKENS, 0)):
        assert (sample.ids, sample.finish_reason) == (expected.ids, expected.finish_reason)
        assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-3)  # of the untempered distribution


def test_every_stop_token_ends_a_sample_and_stays_in_it(make):
    engine, ours, prompts = make("tied")
    assert len(engine.stops) == 2
    for stop in engine.stops:
        with torch.no_grad():  # the direction that every final state shares makes this token all but certain
            ours.model.model.norm.weight.zero_()
            ours.model.model.norm.weight[0] = 1
            for prompt in prompts[:1]:
                state = ours.model.model(torch.tensor([prompt])).last_hidden_state[0, -1, 0]
                ours.model.lm_head.weight[:, 0] = 0
                ours.model.lm_head.weight[stop, 0] = 60 * state.sign()
        engine.push(plain_weights(ours.model), changed=False)
        [[sample]] = engine.generate(prompts[:1], [[0]], TOKENS)
        [[expected]] = ours.generate(prompts[:1], [[0]], TOKENS, 0)
        assert (sample.ids[-1], sample.finish_reason) == (expected.ids[-1], expected.finish_reason) == (stop, "stop")


def test_requests_that_cannot_be_served_name_the_prompt(make):
    engine, _, prompts = make("tied")
    for bad in ([], [5] * (LIMIT - TOKENS + 1)):
        with pytest.raises(ValueError, match=f"^prompt 1: {len(bad)} tokens"):
            engine.generate([prompts[0], bad], [[0], [0]], TOKENS)
    seen = []
    samples = engine.generate([prompts[0], prompts[1], [5] * (LIMIT - 2)], [[0, 1], [], [0]], 2, progress=seen.append)
    assert [len(of_prompt) for of_prompt in samples] == [2, 0, 1] and sum(seen) == 3
    assert engine.generate([prompts[0]], [[]], 2) == [[]]


@pytest.mark.parametrize("name", ["tied", "untied", "base"])
def test_gen_03_pushed_weights_are_the_ones_that_sample(make, case, name):
    engine, ours, prompts = make(name)
    before = engine.generate(prompts, [[0]] * len(prompts), 4, 0)  # fills the prefix cache with the old weights' keys
    assert check_sync(engine, ours.model, prompts) < 1e-4
    moved(ours.model)
    with pytest.raises(SystemExit, match="sampler and trainer disagree"):
        check_sync(engine, ours.model, prompts, tolerance=1e-3)
    engine.push(plain_weights(ours.model))
    assert check_sync(engine, ours.model, prompts) < 1e-4
    samples = engine.generate(prompts, [range(4)] * len(prompts), TOKENS)
    assert logprob_gap(ours.model, prompts, samples, 1.0) < 1e-4
    after = engine.generate(prompts, [[0]] * len(prompts), 4, 0)
    assert [s.logprobs for [s] in after] != [s.logprobs for [s] in before]
    with pytest.raises(RuntimeError, match=case("GEN-03")["expected"]["second_fault_outcome"].removeprefix("raise: ")):
        engine.push(plain_weights(ours.model))
    engine.push(plain_weights(ours.model), changed=False)
    assert check_sync(engine, ours.model, prompts) < 1e-4


def test_a_change_far_from_the_start_of_one_tensor_is_a_change(make):
    engine, ours, prompts = make("untied")
    with torch.no_grad():
        ours.model.lm_head.weight[-1] *= 1.01
    engine.push(plain_weights(ours.model))
    assert check_sync(engine, ours.model, prompts) < 1e-4


def test_gen_03_prefixes_of_the_old_weights_would_be_seen(make, monkeypatch):
    engine, ours, prompts = make("base")
    engine.generate(prompts, [[0]] * len(prompts), 1)
    moved(ours.model, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
        engine.push(plain_weights(ours.model))
    samples = engine.generate(prompts, [range(4)] * len(prompts), 1)
    stale = logprob_gap(ours.model, prompts, samples, 1.0)
    engine.push(plain_weights(ours.model), changed=False)
    samples = engine.generate(prompts, [range(4)] * len(prompts), 1)
    assert logprob_gap(ours.model, prompts, samples, 1.0) < 1e-4 < 0.05 < stale


def test_a_push_that_forgets_the_tied_head_is_caught(make):
    engine, ours, prompts = make("base")
    moved(ours.model, 0.5)
    engine.push((name, weight) for name, weight in plain_weights(ours.model) if name != "lm_head.weight")
    with pytest.raises(SystemExit, match="the engine does not have the trainer's weights"):
        check_sync(engine, ours.model, prompts)
    engine.push(plain_weights(ours.model), changed=False)
    assert check_sync(engine, ours.model, prompts) < 1e-4


@pytest.mark.parametrize("name", ["tied", "base"])
def test_an_adapted_model_samples_merged(make, name):
    pytest.importorskip("peft")
    engine, ours, prompts = make(name)
    train_opsd.add_adapter(ours.model, train_opsd.Config(lora_rank=4))
    engine.push(plain_weights(ours.model), changed=False)  # one factor is zero: still the base
    with torch.no_grad():
        for weight_name, weight in ours.model.named_parameters():
            if ".lora_B" in weight_name:
                weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(SystemExit, match="sampler and trainer disagree"):
        check_sync(engine, ours.model, prompts)
    engine.push(plain_weights(ours.model))
    assert check_sync(engine, ours.model, prompts) < 1e-4
    samples = engine.generate(prompts, [range(4)] * len(prompts), TOKENS)
    assert logprob_gap(ours.model, prompts, samples, 1.0) < 1e-4
    ours.model.disable_adapters()
    assert logprob_gap(ours.model, prompts, samples, 1.0) > 0.05


# The stages.

@pytest.mark.parametrize("flags", [{}, {"lora_rank": 4, "lora_alpha": 8.0}, {"temperature": 0.6, "teacher": "ema"}, {"control": "empty"},
                                   {"dtype": "bfloat16", "eval_every": 3}])
def test_training_samples_with_vllm(run, flags):  # noqa: F811
    if "lora_rank" in flags:
        pytest.importorskip("peft")
    folder = run("vllm", engine="vllm", max_length=LIMIT, steps=3, **flags)
    metrics, rollouts = (read_jsonl(folder / f"{name}.jsonl") for name in ("metrics", "rollouts"))
    assert [row["step"] for row in metrics] == [1, 2, 3]
    for row in metrics:
        assert all(np.isfinite(value) for value in row.values())
        assert row["logprob_gap"] < (0.05 if "dtype" in flags else 1e-4)
        assert (row["grad_norm"] > 0) == (flags.get("control") != "empty")
    assert rollouts and all(row["seeded"] is False and row["weight_version"] == row["step"] - 1 for row in rollouts)
    assert all(row["seeded"] is False for row in read_jsonl(folder / "eval.jsonl"))


def test_a_run_that_was_cut_goes_on(run, monkeypatch):  # noqa: F811
    append = train_opsd.append_jsonl

    def cut(path, row):
        if row.get("step") == 3:
            raise KeyboardInterrupt
        append(path, row)
    monkeypatch.setattr(train_opsd, "append_jsonl", cut)
    with pytest.raises(KeyboardInterrupt):
        run("cut", engine="vllm", max_length=LIMIT, steps=4)
    monkeypatch.setattr(train_opsd, "append_jsonl", append)
    folder = run("cut", engine="vllm", max_length=LIMIT, steps=4)
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4] and max(row["logprob_gap"] for row in metrics) < 1e-4


def test_evaluation_and_search_sample_with_vllm(tiny_model_dir, untied_dir, tiny_tasks, tmp_path):
    shared = dict(model=tiny_model_dir, tasks=[str(tiny_tasks)], num_tasks=4, max_new_tokens=8, engine="vllm", max_length=LIMIT)
    evaluate.main(evaluate.Config(**shared, base=untied_dir, seeds=2, out_dir=str(tmp_path / "eval")))  # two engines in one process
    rows = [row for path in (tmp_path / "eval").rglob("eval.jsonl") for row in read_jsonl(path)]
    assert len(rows) == 2 * 8 and len({tuple(sorted(row.items())) for row in rows}) > 8 and all(row["seeded"] is False for row in rows)
    optimize_hints.main(optimize_hints.Config(**shared, max_rounds=2, out_dir=str(tmp_path / "search")))
    hints, trials = (read_jsonl(tmp_path / "search" / f"{name}.jsonl") for name in ("hints", "hint_trials"))
    assert hints and any("completion" in row for row in trials)
    assert all(row["seeded"] is False for row in trials if "completion" in row)
