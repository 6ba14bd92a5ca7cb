"""The README's "Your own failures", taken from there as it stands and run with a real HTTP server as the writer."""
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from common import Grade, ROOT, grade_completion, load_tasks, read_jsonl
from test_readme import blocks, section

HINTS = ["Count on from the day that the user names, by what the policy says.", "Renew the loan with renew_loan.", "Take the loan_id from the user."]


class Handler(BaseHTTPRequestHandler):
    """Answers every chat completion with the next of HINTS."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, request))
        hint = HINTS[len(self.server.requests) % len(HINTS)]
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": request["model"], "usage":
                  {"prompt_tokens": 500, "completion_tokens": 12, "total_tokens": 512},
                  "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": hint}}]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the three files of the README, under the names that it gives them."""
    folder, text = tmp_path_factory.mktemp("own"), section("Your own failures")
    (folder / "my_world").mkdir()
    for language in ("jsonl", "python"):
        for block in blocks(text, language):
            name = re.findall(r"`(my_world/\w+\.\w+)`", text[:text.index(block)])[-1]
            (folder / name).write_text(block)
    assert sorted(path.name for path in (folder / "my_world").iterdir()) == ["env.py", "eval.jsonl", "train.jsonl"]
    return folder


def test_the_world_of_the_readme_grades(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert len((folder / "my_world/env.py").read_text().splitlines()) <= 40
    tasks = load_tasks(["my_world/train.jsonl"])
    for task in tasks:
        failed = grade_completion(task, task["failed_completion"])
        assert not failed.passed and failed.feedback == task["failed_feedback"]

        def call(name="renew_loan", **arguments):
            return grade_completion(task, f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")

        assert call(**task["spec"]) == Grade(1.0, "intended", "Correct.")
        assert call(**task["spec"], note="x").feedback == "An argument does not belong there."
        assert call(loan_id=task["spec"]["loan_id"]).action == "intended" and not call(loan_id=task["spec"]["loan_id"]).passed
        assert call("close_loan", **task["spec"]).action == "substituted"
        assert grade_completion(task, "<tool_call>{</tool_call>").action == "malformed"


def test_the_commands_of_the_readme_run(folder, server):
    """What is replaced: the server's address, the model (the small base), and the sizes."""
    commands, = blocks(section("Your own failures"), "bash")
    for old, new in [("http://localhost:8000/v1", f"http://127.0.0.1:{server.server_port}/v1"),
                     ("models/Qwen3-4B", str(ROOT / "data/toolworld/base")), ("--writer openai", "--writer openai --max_rounds 3 --fresh 2 --max_new_tokens 32"),
                     ("--hints out", "--steps 2 --max_new_tokens 32 --hints out"), ("--base ", "--seeds 2 --max_new_tokens 32 --base ")]:
        assert old in commands, f"README.md no longer has {old!r}"
        commands = commands.replace(old, new)
    commands = re.sub(r"python (\w+\.py)", rf"{sys.executable} {ROOT}/\1", commands)
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "OPENAI_API_KEY": "sk-of-nobody"}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}"

    assert {path for path, _ in server.requests} == {"/v1/chat/completions"}
    asked = json.dumps([request for _, request in server.requests])
    assert "my-writer" in asked and "L204" in asked and "The value of `due` is wrong." in asked
    assert not re.search(r"2026-03-16|2026-05-22|spec", asked), "the answer is for the grader alone"
    calls, out = read_jsonl(folder / "out/mine/writer_calls.jsonl", ("id", "hint", "prompt_tokens")), folder / "out/mine"
    assert len(calls) == len(server.requests)
    hints = read_jsonl(out / "hints.jsonl", ("id", "hint_id", "hint", "fresh_reward", "empty_reward", "num_rollouts", "passed"))
    assert [row["id"] for row in hints] == ["loan-1", "loan-2"] and {row["hint"] for row in hints} <= set(HINTS)
    assert f"{500 * len(calls)} + {12 * len(calls)} tokens, USD unknown" in done.stdout

    metrics = read_jsonl(out / "opsd/metrics.jsonl", ("step", "loss", "reverse_kl"))
    assert [row["step"] for row in metrics] == [1, 2] and metrics[0]["reverse_kl"] > 0
    assert (out / "opsd/checkpoint/model.safetensors").exists()
    assert {row["id"] for row in read_jsonl(out / "opsd/rollouts.jsonl")} <= {"loan-1", "loan-2"}
    rows = read_jsonl(out / "eval/eval.jsonl", ("id", "seed", "passed", "action"))
    assert len(rows) == 2 and {row["id"] for row in rows} == {"loan-9"}
    assert len(read_jsonl(out / "eval/base/eval.jsonl")) == 2 and (out / "eval/table.md").exists()
