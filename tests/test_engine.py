"""Attention, sampling engine and packed rows: every short cut gives what a plain full forward gives."""
import copy
import random
import sys
from types import SimpleNamespace

import pytest

import common
from common import (HFEngine, SharedCache, VLLMEngine, attention, block_mask, head_weight, load_model, pack_rows, packed_hidden, reverse_kl,
                    sample_tasks, stop_ids, torch, visible)


@pytest.fixture(scope="module")
def loaded(tiny_model_dir):
    return load_model(tiny_model_dir)


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture
def engine(loaded):
    return HFEngine(*loaded)


@pytest.fixture(scope="module")
def prompts():
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(10, 400, (length,), generator=draw).tolist() for length in (7, 40, 1, 23, 40, 12)]


SEEDS = [[11, 12, 13], [14], [], [15, 16], [17, 18, 19, 20], [21]]


def full_logprobs(model, prefix, ids, temperature=1.0):
    """Log-probs of `ids` after `prefix` from one plain forward; logits[:, t] predict token t + 1."""
    with torch.no_grad():
        logits = model(torch.tensor([prefix + ids]), use_cache=False).logits[0, len(prefix) - 1:-1]
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def packed_logprobs(model, items, row_tokens, temperature=1.0):
    """The same for all completions of the items, from packed rows."""
    found = []
    for row in pack_rows(items, row_tokens):
        logits = packed_hidden(model, row) @ head_weight(model).T / temperature
        found.append(torch.log_softmax(logits.float(), -1).gather(-1, row.targets[:, None])[:, 0])
    return torch.cat(found)


# The attention function.

def test_without_a_cache_it_is_ordinary_attention(model, tiny_model_dir):
    """The same weights under transformers' own eager attention: plain, and with a 2D mask over padding on the left."""
    from transformers import AutoModelForCausalLM
    eager = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager").eval()
    ids = torch.arange(2 * 9).view(2, 9) + 20
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}):
            ours, theirs = model(ids, **options).logits, eager(ids, **options).logits
            torch.testing.assert_close(ours[:, 4:], theirs[:, 4:], atol=2e-5, rtol=1e-4)
        assert (model(ids).logits - model(ids, attention_mask=mask).logits)[0, 4:].abs().max() > 0.01
        padded = model.generate(ids[:, :5], attention_mask=mask[:, 4:], max_new_tokens=4, do_sample=False)  # with transformers' own cache
    assert padded.shape == (2, 9)


def test_every_model_we_load_has_it_and_others_are_refused(model, tiny_model_dir, tmp_path):
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig
    assert model.config._attn_implementation == "nanoopsd" and AttentionInterface()["nanoopsd"] is attention and not model.training
    assert copy.deepcopy(model).config._attn_implementation == "nanoopsd"  # as the frozen teacher is made
    with pytest.raises(AssertionError):
        common.check_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager"))
    sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    odd = {"windows": Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window=4, layer_types=["sliding_attention", "full_attention"])),
           "softcap": Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=["full_attention"] * 2, final_logit_softcapping=30.0))}
    for name, other in odd.items():
        other.save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / name)
        with pytest.raises(SystemExit, match="gemma3"):
            load_model(tmp_path / name)
    with pytest.raises(SystemExit, match="cannot load model"):
        load_model(tmp_path / "nowhere")


def test_weights_stand_at_even_addresses(model):
    assert all(weight.data_ptr() % 64 == 0 for weight in model.parameters())  # in the mapped file they do not
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_other_architectures_decode_alike(tiny_model_dir, tmp_path):
    """Llama without grouped queries, with untied weights and a bias: decoding equals its own full forward."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed
    set_seed(1)
    LlamaForCausalLM(LlamaConfig(vocab_size=404, hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=3, attention_bias=True,
                                 tie_word_embeddings=False, max_position_embeddings=128, initializer_range=0.3)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path)
    model, tokenizer = load_model(tmp_path)
    prompt = list(range(30, 50))
    (sample, other), = HFEngine(model, tokenizer).generate([prompt], [[1, 2]], 20)
    torch.testing.assert_close(torch.tensor(sample.logprobs), full_logprobs(model, prompt, sample.ids), atol=2e-5, rtol=1e-4)
    items = [(prompt, [sample.ids, other.ids])]
    torch.testing.assert_close(packed_logprobs(model, items, 1), torch.tensor(sample.logprobs + other.logprobs), atol=2e-5, rtol=1e-4)


# The cache.

def test_prefill_and_decode_equal_a_full_forward(model, prompts):
    """Hidden states of prompts of several lengths and of forced continuations, prompts read in one call and in several."""
    ordered, steps, num = sorted(prompts, key=len, reverse=True), 5, 3
    forced = torch.randint(10, 400, (len(ordered), num, steps), generator=torch.Generator().manual_seed(1))
    for prefill_tokens in (1, 60, 4096):
        with torch.no_grad():
            cache = SharedCache(model, ordered, steps, prefill_tokens)
            states = [cache.advance(forced[..., t]) for t in range(steps)]
        for p, prompt in enumerate(ordered):
            for k in range(num):
                with torch.no_grad():
                    plain = model.base_model(torch.tensor([prompt + forced[p, k].tolist()]), use_cache=False).last_hidden_state[0]
                torch.testing.assert_close(cache.last_hidden[p], plain[len(prompt) - 1], atol=2e-5, rtol=1e-4)
                torch.testing.assert_close(torch.stack([state[p, k] for state in states]), plain[len(prompt):], atol=2e-5, rtol=1e-4)


def test_keep_drops_prompts_and_samples(model, prompts):
    ordered = sorted(prompts, key=len, reverse=True)
    forced = torch.randint(10, 400, (len(ordered), 3, 4), generator=torch.Generator().manual_seed(2))
    rows, slots = torch.tensor([1, 4]), torch.tensor([[2, 0], [1, 2]])
    with torch.no_grad():
        whole, cut = SharedCache(model, ordered, 4), SharedCache(model, ordered, 4)
        for t in range(2):
            whole.advance(forced[..., t]), cut.advance(forced[..., t])
        cut.keep(rows, slots)
        for t in range(2, 4):
            expected = whole.advance(forced[..., t])[rows[:, None], slots]
            torch.testing.assert_close(cut.advance(forced[rows[:, None], slots, t]), expected, atol=2e-5, rtol=1e-4)


# The engine.

@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_GEN_02_the_samplers_log_probs_are_the_trainers(engine, model, prompts, temperature):
    groups = engine.generate(prompts, SEEDS, 30, temperature)
    assert [len(group) for group in groups] == [len(seeds) for seeds in SEEDS]
    sampled = torch.tensor([x for group in groups for sample in group for x in sample.logprobs])
    plain = torch.cat([full_logprobs(model, prompt, sample.ids, temperature) for prompt, group in zip(prompts, groups) for sample in group])
    packed = packed_logprobs(model, [(prompt, [sample.ids for sample in group]) for prompt, group in zip(prompts, groups) if group], 200, temperature)
    torch.testing.assert_close(sampled, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(packed, sampled, atol=1e-4, rtol=1e-4)
    assert (packed - sampled).abs().mean() < 0.05  # the case's own bound


def stops_often(engine):
    """Ends a turn on every sixth id, so that samples finish at all lengths and the batch is thinned out again and again."""
    engine.stop_ids = list(range(0, 404, 6))
    return engine


def test_a_sample_does_not_depend_on_its_batch(engine, prompts):
    stops_often(engine)
    groups = engine.generate(prompts, SEEDS, 40)
    lengths = [len(sample.ids) for group in groups for sample in group]
    assert len(set(lengths)) > 4
    alone = [[engine.generate([prompt], [[seed]], 40)[0][0] for seed in seeds] for prompt, seeds in zip(prompts, SEEDS)]
    backwards = engine.generate(prompts[::-1], SEEDS[::-1], 40)[::-1]
    engine.max_batch_tokens = 130
    assert len(list(engine.batches(prompts, SEEDS, 40))) > 2
    small = engine.generate(prompts, SEEDS, 40)
    for other in (alone, backwards, small):
        for group, other_group in zip(groups, other):
            for a, b in zip(group, other_group, strict=True):
                assert (a.ids, a.finish_reason) == (b.ids, b.finish_reason)
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_many_samples_thinned_out_keep_their_log_probs(engine, model, prompts):
    """A long batch: half of the slots go several times over, and every surviving sample stays itself."""
    stops_often(engine)
    seeds = [list(range(100 * p, 100 * p + 12)) for p in range(len(prompts))]
    kept, plain = [], SharedCache.keep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedCache, "keep", lambda self, *which: (kept.append(which), plain(self, *which)))
        groups = engine.generate(prompts, seeds, 30)
    assert len(kept) >= 2
    for prompt, group in zip(prompts, groups):
        for sample in group:
            torch.testing.assert_close(torch.tensor(sample.logprobs), full_logprobs(model, prompt, sample.ids), atol=1e-4, rtol=1e-4)
            stopped = [i for i in sample.ids if i % 6 == 0]
            assert stopped == sample.ids[-1:] if sample.finish_reason == "stop" else not stopped and len(sample.ids) == 30


def test_greedy_takes_the_likeliest_token(engine, model, prompts):
    (sample,), = engine.generate([prompts[1]], [[0]], 6, temperature=0)
    with torch.no_grad():
        logits = model(torch.tensor([prompts[1] + sample.ids])).logits[0, len(prompts[1]) - 1:-1]
    assert logits.argmax(-1).tolist() == sample.ids
    torch.testing.assert_close(torch.tensor(sample.logprobs), torch.log_softmax(logits, -1).max(-1).values, atol=1e-5, rtol=1e-4)


def test_seeds_draw_from_the_models_distribution(engine, model, prompts):
    """4000 seeds of one prompt: first-token frequencies against the probabilities. Seeds that share their low 32 bits differ."""
    groups = engine.generate([prompts[3]], [list(range(4000))], 1)
    counts = torch.bincount(torch.tensor([sample.ids[0] for sample in groups[0]]), minlength=404)
    with torch.no_grad():
        probs = torch.softmax(model(torch.tensor([prompts[3]])).logits[0, -1], -1)
    assert ((counts / 4000 - probs).abs() < 5 * (probs / 4000).sqrt() + 1e-3).all()
    (a, b), = engine.generate([prompts[3]], [[5, 5 + 2 ** 40]], 12)
    assert a.ids != b.ids


def test_TOK_04_stop_tokens_are_kept_and_scored(case, engine, model, loaded, prompts):
    assert engine.stop_ids == stop_ids(loaded[1], model) == [0, 2]  # the tokenizer names one, generation_config two
    (free,), = engine.generate([prompts[0]], [[3]], 8)
    for end in (free.ids[3], free.ids[7]):
        engine.stop_ids = [403, end]
        (sample,), = engine.generate([prompts[0]], [[3]], 8)
        length = free.ids.index(end) + 1
        assert sample.ids == free.ids[:length] and sample.finish_reason == "stop" and sample.logprobs == pytest.approx(free.logprobs[:length], abs=1e-5)
    (cut,), = engine.generate([prompts[0]], [[3]], 3)
    assert cut.ids == free.ids[:3] and cut.finish_reason == "length"  # no end token is added
    assert case("TOK-04")["expected"]["eos_appended"] is False


def test_what_does_not_fit_is_refused_by_index(engine, model, prompts):
    limit = model.config.max_position_embeddings
    with pytest.raises(ValueError, match="prompt 1: 1000 tokens"):
        engine.generate([prompts[0], [9] * 1000], [[1], [1]], limit - 999)
    with pytest.raises(ValueError, match="prompt 0"):
        engine.generate([[]], [[1]], 4)
    assert engine.generate([], [], 4) == [] and engine.generate([prompts[0]], [[]], 4) == [[]]


def test_generating_leaves_the_model_as_it_was(engine, model, prompts, monkeypatch):
    expected = engine.generate(prompts[:1], [[1]], 2)
    for layer in model.base_model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.5)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.train()
    assert engine.generate(prompts[:1], [[1]], 2) == expected  # without the dropout of training
    assert model.training
    with pytest.raises(ValueError):
        engine.generate([[]], [[1]], 2)
    model.eval()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())
    same = [engine.generate(prompts, SEEDS, 8) for _ in range(2)]
    assert same[0] == same[1]  # bit for bit, log-probs too


# Packed rows.

def items_of(prompts, seed=3):
    draw = torch.Generator().manual_seed(seed)
    return [(prompt, [torch.randint(0, 404, (length,), generator=draw).tolist() for length in (1 + p, 6, 3)]) for p, prompt in enumerate(prompts)]


def test_rows_keep_order_and_never_split_a_task():
    items = [([1, 2, 3], [[4, 5], [6]]), ([7], [[8, 9, 10]]), ([11] * 9, [[12]]), ([13], [[14]])]
    rows = pack_rows(items, 10)
    assert [row.input_ids.tolist() for row in rows] == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [11] * 9 + [12], [13, 14]]
    first = rows[0]
    assert first.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2, 3]
    assert first.task.tolist() == [0] * 6 + [1] * 4 and first.branch.tolist() == [0, 0, 0, 1, 1, 2, 0, 1, 1, 1]
    assert first.predict.tolist() == [2, 3, 2, 6, 7, 8] and first.targets.tolist() == [4, 5, 6, 8, 9, 10]
    assert torch.cat([row.owner for row in rows]).tolist() == [0, 0, 1, 2, 2, 2, 3, 4]
    alone = pack_rows(items, 1)
    assert len(alone) == 4 and torch.equal(torch.cat([row.targets for row in alone]), torch.cat([row.targets for row in rows]))


def test_KL_04_rows_of_student_and_teacher_start_one_before_the_completion(case):
    data = case("KL-04")
    for role, length in (("student", data["input"]["student_prompt_len"]), ("teacher", data["input"]["teacher_prompt_len"])):
        other = ([9] * 4, [[1, 2, 3, 4]])  # a row of other lengths beside it changes nothing
        for items in ([([9] * length, [data["input"]["completion_ids"]])], [([9] * length, [data["input"]["completion_ids"]]), other]):
            row = pack_rows(items, 100)[0]
            mine = row.predict[row.owner == 0]
            assert mine.tolist() == data["expected"][f"{role}_rows"]
            logits = torch.tensor(data["input"][f"{role}_logits"])[mine]
            picked = torch.log_softmax(logits, -1).gather(-1, row.targets[row.owner == 0, None]).sum()
            assert float(picked) == pytest.approx(data["expected"][f"sampled_logprob_sum_{role}"], abs=1e-6)
    rows = [torch.tensor(data["input"][f"{role}_logits"])[data["expected"][f"{role}_rows"]] for role in ("student", "teacher")]
    assert float(reverse_kl(*rows).mean()) == data["expected"]["mean_reverse_kl"]


@pytest.mark.parametrize("seed", range(8))
def test_block_mask_skips_what_nobody_sees_and_leaves_nothing_out(seed):
    draw = random.Random(seed)
    items = [([1] * draw.randint(1, 500), [[2] * draw.randint(0, 300) for _ in range(draw.randint(0, 6))]) for _ in range(5)]
    for row in pack_rows(items, 2048):
        fill = (0, -len(row.input_ids) % 128)
        row.task, row.branch = torch.nn.functional.pad(row.task, fill, value=2**20), torch.nn.functional.pad(row.branch, fill)
        mask, index, blocks = block_mask(row), torch.arange(len(row.task)), len(row.task) // 128
        entries = visible(row)(0, 0, index[:, None], index).view(blocks, 128, blocks, 128)
        listed = {"kv": torch.zeros(blocks, blocks, dtype=torch.bool), "full_kv": torch.zeros(blocks, blocks, dtype=torch.bool)}
        for kind, there in listed.items():
            numbers, indices = getattr(mask, f"{kind}_num_blocks")[0, 0], getattr(mask, f"{kind}_indices")[0, 0]
            for query in range(blocks):
                there[query, indices[query, :numbers[query]].long()] = True
        assert not (listed["kv"] & listed["full_kv"]).any()
        assert torch.equal(listed["kv"] | listed["full_kv"], entries.any(3).any(1))
        assert entries.all(3).all(1)[listed["full_kv"]].all()


def test_packed_hidden_states_and_gradients_equal_unpacked_ones(model, prompts):
    items = items_of(prompts)
    weights = torch.randn(sum(len(ids) for _, completions in items for ids in completions), model.config.hidden_size,
                          generator=torch.Generator().manual_seed(4))

    def gradients(hidden):
        (hidden * weights).sum().backward()
        flat = torch.cat([weight.grad.flatten() for weight in model.base_model.parameters()])
        model.zero_grad()
        return hidden.detach(), flat

    plain, expected = gradients(torch.cat([model.base_model(torch.tensor([prefix + ids]), use_cache=False).last_hidden_state[0, len(prefix) - 1:-1]
                                           for prefix, completions in items for ids in completions]))
    for row_tokens in (1, 100, 10_000):
        rows = pack_rows(items, row_tokens)
        hidden, flat = gradients(torch.cat([packed_hidden(model, row) for row in rows]))
        torch.testing.assert_close(hidden, plain, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(flat, expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-3)


def test_a_branch_sees_neither_its_siblings_nor_other_tasks(model, prompts):
    items = items_of(prompts[:3])
    before = packed_hidden(model, pack_rows(items, 1000)[0])
    items[1][1][1] = [5] * 6  # one completion of the second task changes
    row = pack_rows(items, 1000)[0]
    after, changed = packed_hidden(model, row), row.owner == 4
    assert torch.equal(before[~changed], after[~changed]) and not torch.equal(before[changed], after[changed])


def test_an_empty_hint_packed_alike_gives_the_same_bits(model, prompts):
    """With and without gradients, student and teacher being two copies: nothing for a KL to see."""
    teacher = copy.deepcopy(model).requires_grad_(False)
    for row in pack_rows(items_of(prompts), 100):
        with torch.no_grad():
            frozen = packed_hidden(teacher, row)
        hidden = packed_hidden(model, row)
        assert hidden.requires_grad and torch.equal(hidden, frozen)
        assert not reverse_kl(hidden @ head_weight(model).T, frozen @ head_weight(teacher).T).any()


def test_TOK_01_sampled_ids_are_trained_on_as_sampled(case, engine, loaded, prompts):
    data = case("TOK-01")
    row = pack_rows([(data["expected"]["prompt_ids"], [data["input"]["sampled_completion_ids"]])], 100)[0]
    assert row.input_ids.tolist() == data["expected"]["training_row"] and len(row.targets) == data["expected"]["completion_len"]
    tokenizer, seen = loaded[1], 0
    for sample in engine.generate(prompts, [[1, 2, 3, 4]] * len(prompts), 20)[0]:
        seen += tokenizer(tokenizer.decode(sample.ids), add_special_tokens=False)["input_ids"] != sample.ids
        assert pack_rows([([5], [sample.ids])], 100)[0].targets.tolist() == sample.ids and len(sample.ids) == len(sample.logprobs)
    assert seen  # encoding the text again would have given other ids


def test_a_checkpoint_that_lacks_weights_is_refused(model, loaded, tmp_path):
    model.save_pretrained(tmp_path), loaded[1].save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SystemExit, match="lacks weights: model.layers.1.mlp.up_proj.weight"):
        load_model(tmp_path)


# Sampling for tasks.

def test_samples_of_tasks_have_their_text_and_a_prompt_that_does_not_fit_names_its_task(engine, loaded, prompts):
    tasks, finished = [{"id": f"t{p}"} for p in range(len(prompts))], []
    plain = engine.generate(prompts, SEEDS, 9, progress=finished.append)
    assert sum(finished) == sum(map(len, SEEDS)) and len(finished) > 1  # a bar moves while a batch is under way
    samples = sample_tasks(engine, loaded[1], tasks, prompts, SEEDS, 9, 1.0)
    for of_prompt, of_task in zip(plain, samples):
        assert [sample.ids for sample in of_prompt] == [sample.ids for sample in of_task]
        assert all(sample.text == loaded[1].decode(sample.ids, skip_special_tokens=True) for sample in of_task)
    with pytest.raises(SystemExit, match="error: task t1: prompt 1: 1000 tokens"):
        sample_tasks(engine, loaded[1], tasks[:2], [prompts[0], [9] * 1000], [[1], [1]], 999, 1.0)
    engine.generate = lambda *args, **options: int("x")
    with pytest.raises(ValueError, match="invalid literal"):  # another error stays what it is
        sample_tasks(engine, loaded[1], tasks, prompts, SEEDS, 9, 1.0)


class CachingLLM:
    """What of vllm.LLM a push uses: scores stay cached until reset_prefix_cache."""

    def __init__(self):
        self.calls, self.weight, self.cache = [], -1.0, {}

    def collective_rpc(self, method, kwargs):
        self.calls.append("load_weights")
        (_, weight), = kwargs["weights_iterator"]
        self.weight = float(weight[0])

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        self.cache.clear()
        return True

    def generate(self, prompts, params, use_tqdm):
        self.calls.append("generate")
        score = self.cache.setdefault("x", self.weight)
        completion = SimpleNamespace(index=0, token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=score)}], finish_reason="length")
        return [SimpleNamespace(outputs=[completion])]


def test_gen_03_a_push_empties_the_prefix_cache_and_must_change_something(case, monkeypatch):
    expected = case("GEN-03")["expected"]
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **params: params))
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.llm, engine.on_gpu, engine.stops, engine.max_length, engine.marks = CachingLLM(), False, [], 100, None

    def score():
        return engine.generate([[1]], [[0]], 1)[0][0].logprobs[0]
    weights = [("x", torch.tensor([-2.0]))]
    scores = [score()]
    engine.push(iter(weights))
    assert [*scores, score()] == expected["scores"]
    assert engine.llm.calls[1:] == expected["call_order"]
    with pytest.raises(RuntimeError, match=expected["second_fault_outcome"].split(": ")[1]):
        engine.push(iter(weights))
    engine.push(iter(weights), changed=False)  # an empty hint moves nothing
