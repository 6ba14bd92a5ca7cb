"""Fixtures: a server on loopback, a random two-layer Qwen3 with the embedded world's chat template, eight tasks of a kitchen timer, the public fault cases."""
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch loads: threads that wait leave their core to others
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import pytest  # noqa: E402

from common import call_text, load_world, read_jsonl  # noqa: E402

TEMPLATE = HERE.parent / "data/toolworld/base/chat_template.jinja"


class LetterTokenizer:
    """One id per character; its template knows tools and writes nothing but contents."""
    added_tokens_decoder = {}

    def apply_chat_template(self, messages, tools=None, tokenize=True, **options):
        if not tokenize:  # what knows_tools looks for
            calls = [call_text(call) for message in messages for call in message.get("tool_calls", [])]
            return "".join([str(tools), *calls, *(f"[{m['role'] == 'tool'}]{m['content']}" for m in messages)])
        return {"input_ids": [ord(letter) for message in messages for letter in message["content"]]}

    def decode(self, ids, **options):
        return "".join(map(chr, ids))


class Server(ThreadingHTTPServer):
    """Answers POSTs with self.reply(body) = (status, headers, JSON), and remembers them. A GET gets the list of models."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies, self.busy, self.most_busy, self.lock = [], 0, 0, threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address):
        pass  # a client that timed out


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body, server = json.loads(self.rfile.read(int(self.headers["content-length"]))), self.server
        with server.lock:
            server.bodies.append(body)
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
        try:
            status, headers, answer = server.reply(body)
        finally:
            with server.lock:
                server.busy -= 1
        self.answer(status, headers, answer)

    def do_GET(self):
        self.answer(200, {}, {"object": "list", "data": [{"id": name, "object": "model"} for name in ("m", "other")]})

    def answer(self, status, headers, answer):
        data = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", "content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def error_body(code, param=None):
    return {"error": {"message": f"no: {code}", "type": code, "code": code, "param": param}}


@pytest.fixture
def server():
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def waits(monkeypatch):
    """What time.sleep was asked for; nobody waits."""
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


@pytest.fixture(scope="session")
def case():
    """case(id): the public fault case with this id."""
    cases = {row["id"]: row for row in read_jsonl(HERE / "cases.jsonl")}
    return cases.__getitem__


def make_tasks():
    """Eight rows of two failure kinds, their prefix ending in a tool message (wrong_unit) or a user message (too_long)."""
    world, tasks = str(HERE / "tiny_world"), []
    for i in range(4):
        minutes = 5 + 7 * i
        call = {"type": "function", "function": {"name": "set_timer", "arguments": {"minutes": minutes * 60}}}
        failed = f'<tool_call>\n{{"name": "set_timer", "arguments": {{"minutes": {minutes * 60}}}}}\n</tool_call>'
        tasks.append({"id": f"tool{i}", "world": world, "failure_kind": "wrong_unit", "spec": {"minutes": minutes}, "tools": load_world(world).TOOLS,
                      "messages": [{"role": "system", "content": "You run a kitchen timer."}, {"role": "user", "content": f"Wake me in {minutes} minutes."},
                                   {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "error: at most 120"}],
                      "failed_completion": failed, "failed_feedback": "The timer is wrong."})
        tasks.append({"id": f"chat{i}", "world": world, "failure_kind": "too_long", "spec": {"max_letters": 8 + 4 * i}, "tools": [],
                      "messages": [{"role": "user", "content": f"How long do {i + 2} eggs take? Be brief."}],
                      "failed_completion": "Well, that depends on many things.", "failed_feedback": f"A reply has 1 to {8 + 4 * i} letters."})
    return tasks


@pytest.fixture(scope="session")
def tiny_tasks(tmp_path_factory):
    """Path of a task file with eight rows."""
    path = tmp_path_factory.mktemp("tasks") / "tiny.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in make_tasks()))
    return path


def make_tokenizer(chat_template, texts):
    """A byte-level BPE of about 400 tokens that keeps Qwen3's special tokens whole."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False,
                                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    bpe.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=chat_template)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """A Hugging Face folder (a str): weights large enough that attention and hints change the distribution."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed
    folder, template = str(tmp_path_factory.mktemp("model")), TEMPLATE.read_text()
    tokenizer = make_tokenizer(template, [template, *map(json.dumps, make_tasks())])
    set_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                         num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, max_position_embeddings=1024,
                                         initializer_range=0.3, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def logprob_gap(model, prompts, samples, temperature):
    """Mean |difference| in nats a token between the samples' log-probs and those of `model` on the same ids."""
    import numpy as np
    import torch
    gaps = []
    for prompt, of_prompt in zip(prompts, samples):
        for sample in of_prompt:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + sample.ids])).logits[0, len(prompt) - 1:-1]  # logits[t] predict token t + 1
            logprobs = torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(sample.ids)[:, None])[:, 0]
            gaps += (logprobs - torch.tensor(sample.logprobs)).abs().tolist()
    return float(np.mean(gaps))
