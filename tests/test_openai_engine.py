"""common.OpenAIEngine against a real HTTP server on loopback. tests/test_vllm_server.py asks a real vLLM the same things."""
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import OpenAIEngine
from conftest import error_body

STOP, LIMIT = 9, 64
PROMPTS = [[5, 6], [7], [1, 2, 3]]
SEEDS = [[11, 2**62 + 1, 13], [], [11, 12]]


def tokenizer(text, add_special_tokens):
    return {"input_ids": [ord(letter) for letter in text]}


def expected(prompt, seed, max_new_tokens):
    """(ids, logprobs) of the server's model: it draws digits, 9 ends a turn."""
    ids = np.random.default_rng([*prompt, seed]).integers(10, size=max_new_tokens).tolist()
    ids = ids[:ids.index(STOP) + 1] if STOP in ids else ids
    return ids, [-0.125 * (token + 1) for token in ids]


def answer(body, mode="processed"):
    """A completion as vLLM gives it; `mode` is that of its log-probs."""
    prompt = tokenizer(body["prompt"], False)["input_ids"] if isinstance(body["prompt"], str) else body["prompt"]
    ids, logprobs = expected(prompt, body["seed"], body["max_tokens"])
    scale = 1 if mode == "raw" else body["temperature"] or 1
    top = [{f"token_id:{token}": -float(token) / scale for token in (*range(body["logprobs"]), drawn)} for drawn in ids]
    return {"id": "1", "object": "text_completion", "created": 0, "model": body["model"], "choices": [{
        "index": 0, "text": "", "finish_reason": "stop" if ids[-1] == STOP else "length", "token_ids": ids, "prompt_token_ids": prompt,
        "logprobs": {"token_logprobs": logprobs, "tokens": [f"token_id:{token}" for token in ids], "top_logprobs": top, "text_offset": []}}]}


@pytest.fixture
def engine(server):
    server.reply = lambda body: (200, {}, answer(body))
    engine = OpenAIEngine(server.url, "m", tokenizer, [STOP], LIMIT, concurrency=3, max_retries=3, timeout=0.5)
    server.bodies.clear()
    return engine


def check(samples, max_new_tokens=8):
    assert [len(of_prompt) for of_prompt in samples] == [3, 0, 2]
    for prompt, seeds, of_prompt in zip(PROMPTS, SEEDS, samples):
        for seed, sample in zip(seeds, of_prompt):
            assert (sample.ids, sample.logprobs) == expected(prompt, seed, max_new_tokens)
            assert sample.finish_reason == ("stop" if sample.ids[-1] == STOP else "length")


def test_ids_and_logprobs_are_exact_and_in_order(server, engine):
    delays = iter([0.2, 0.1, 0, 0.05, 0])  # later requests overtake earlier ones

    def reply(body):
        time.sleep(next(delays))
        return 200, {}, answer(body)
    server.reply, finished = reply, []
    samples = engine.generate(PROMPTS, SEEDS, 8, 1.0, finished.append)
    check(samples)
    assert {sample.finish_reason for of_prompt in samples for sample in of_prompt} == {"stop", "length"}
    assert 1 < server.most_busy <= 3 and sum(finished) == 5 and len(finished) > 1 and engine.seeded
    sent = {(tuple(body.pop("prompt")), body.pop("seed")) for body in server.bodies}
    assert sent == {(tuple(prompt), seed) for prompt, seeds in zip(PROMPTS, SEEDS) for seed in seeds}
    assert all(body == {"model": "m", "max_tokens": 8, "temperature": 1.0, "logprobs": 0, "top_p": 1, "top_k": 0, "min_p": 0,
                        "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "stop_token_ids": [STOP],
                        "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True} for body in server.bodies)
    assert engine.generate([], [], 8) == [] and engine.generate([[1]], [[]], 8) == [[]]


@pytest.mark.parametrize("prompt, message", [
    ([], "prompt 1: 0 tokens"), ([1] * 57, "prompt 1: 57 tokens [+] 8 new ones do not fit the model's 64")])
def test_a_prompt_that_does_not_fit_is_named_before_anything_is_asked(server, engine, prompt, message):
    with pytest.raises(ValueError, match=message):
        engine.generate([[1], prompt], [[1], [2]], 8)
    assert server.bodies == []


def test_passing_failures_are_retried(server, engine, waits):
    todo = [(429, {"retry-after": "7"}, error_body("rate")), (500, {}, error_body("server")), "timeout", (200, {}, {"choices": []})]

    def reply(body):
        failure = todo.pop() if todo else (200, {}, answer(body))
        if failure == "timeout":
            threading.Event().wait(1)
            failure = 200, {}, answer(body)
        return failure
    server.reply = reply
    check(engine.generate(PROMPTS, SEEDS, 8))
    assert len(server.bodies) == 5 + 4 and len(waits) == 4 and 7 <= max(waits) < 17


def test_a_failure_that_stays_ends_the_run_after_so_many_requests(server, engine, waits):
    server.reply = lambda body: (500, {}, error_body("server"))
    with pytest.raises(SystemExit, match="server after 4 attempts"):
        engine.generate([[1]], [[1]], 8)
    assert len(server.bodies) == 4  # the SDK adds none


def test_after_a_refusal_nothing_new_is_asked(server, engine):
    server.reply = lambda body: (400, {}, error_body("max_model_len is 32"))
    with pytest.raises(SystemExit, match="engine: http.*: bad request: .*max_model_len is 32"):
        engine.generate([[1]], [range(200)], 8)
    assert len(server.bodies) < 100


def change(**fields):
    def changed(body):
        whole = answer(body)
        whole["choices"][0].update(fields)
        return whole
    return changed


@pytest.mark.parametrize("reply, message", [
    (change(token_ids=None), "returns no token ids"), (change(prompt_token_ids=None), "returns no token ids"),
    (change(prompt_token_ids=[0, 5, 6]), "changed the prompt: 2 token ids were sent, it read 3"),
    (change(prompt_token_ids=[5, 7]), "changed the prompt"), (change(logprobs=None), "log-probs are missing"),
    (change(token_ids=[1, STOP], finish_reason="stop", logprobs={"token_logprobs": [-1.0]}), "log-probs are missing"),
    (change(token_ids=[1, STOP], finish_reason="stop", logprobs={"token_logprobs": [-1.0, 12.5]}), "above 0"),  # logits
    (change(token_ids=[1], finish_reason="stop", logprobs={"token_logprobs": [-1.0]}), "'stop' after 1 of 8 tokens, its last one no stop"),
    (change(token_ids=[1], finish_reason="length", logprobs={"token_logprobs": [-1.0]}), "'length' after 1 of 8"),  # a limit of its own
    (change(token_ids=[1] * 8, finish_reason="abort", logprobs={"token_logprobs": [-1.0] * 8}), "'abort'")])
def test_answers_that_nothing_could_be_learned_from_are_refused(server, engine, reply, message):
    server.reply = lambda body: (200, {}, reply(body))
    with pytest.raises(SystemExit, match=message) as refusal:
        engine.generate([[5, 6]], [[1]], 8)
    assert "\n" not in str(refusal.value)


def test_another_model_and_another_tokenizer_are_refused(server):
    server.reply = lambda body: (200, {}, answer(body))
    with pytest.raises(SystemExit, match="does not serve 'base': it serves m, other"):
        OpenAIEngine(server.url, "base", tokenizer, [STOP], LIMIT)
    with pytest.raises(SystemExit, match="'m' has another tokenizer"):
        OpenAIEngine(server.url, "m", lambda text, add_special_tokens: {"input_ids": [1, 2]}, [STOP], LIMIT)
    server.reply = lambda body: (200, {}, change(token_ids=None)(body))
    with pytest.raises(SystemExit, match="returns no token ids"):
        OpenAIEngine(server.url, "m", tokenizer, [STOP], LIMIT)


def test_logprobs_that_ignore_the_temperature_are_refused(server, engine):
    check(engine.generate(PROMPTS, SEEDS, 8, 0.6))
    assert [body["temperature"] for body in server.bodies if body["logprobs"] == 5] == [1, 0.6]
    engine.generate(PROMPTS, SEEDS, 8, 0.6)
    assert len(server.bodies) == 2 + 2 * 5  # asked once for each temperature
    server.reply = lambda body: (200, {}, answer(body, "raw"))
    check(engine.generate(PROMPTS, SEEDS, 8, 1.0))
    check(engine.generate(PROMPTS, SEEDS, 8, 0))  # greedy: the log-probs are those at temperature 1
    for temperature in (0.8, 1.2):
        with pytest.raises(SystemExit, match="temperature 1 for samples at .*--logprobs-mode processed_logprobs"):
            engine.generate(PROMPTS, SEEDS, 8, temperature)
