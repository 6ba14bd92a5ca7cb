"""Two processes under torchrun train as one does: same losses, same records, same weights; and take over from each other."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import load_model, read_jsonl, torch

ROOT = Path(__file__).resolve().parent.parent
SHARED = ["step", "loss", "reverse_kl", "num_tokens", "grad_norm", "lr", "reward_mean", "pass_rate", "truncated_frac", "silent_groups_frac"]


def train(processes, tasks, model, out_dir, *flags, kill_at=None):
    """Runs train_opsd.py with as many processes; returns its exit code and what it printed. kill_at: a folder of out_dir that
    it does not outlive."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"] if processes > 1 else [sys.executable]
    command = [*start, "train_opsd.py", "--tasks", tasks, "--eval_tasks", tasks.with_name("other.jsonl"), "--num_tasks", 0, "--hints", tasks.with_name("hints.jsonl"),
               "--model", model, "--out_dir", out_dir, "--steps", 5, "--tasks_per_step", 3, "--rollouts_per_task", 2, "--max_new_tokens", 12,
               "--warmup_steps", 1, "--eval_every", 5, "--save_every", 2, "--row_tokens", 200, "--lr", 1e-3, *flags]
    with open(f"{out_dir}.log", "w+") as log:
        child = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                                 env={**os.environ, "OMP_NUM_THREADS": "1"})
        while kill_at and child.poll() is None and not (out_dir / kill_at).exists():
            time.sleep(0.02)
        if kill_at:
            child.send_signal(signal.SIGTERM if processes > 1 else signal.SIGKILL)  # torchrun takes its workers along
        child.wait(120)
        log.seek(0)
        return child.returncode, log.read()


def same(folder, other):
    for a, b in zip(read_jsonl(folder / "metrics.jsonl"), read_jsonl(other / "metrics.jsonl"), strict=True):
        assert {name: a[name] for name in SHARED} == pytest.approx({name: b[name] for name in SHARED}, rel=2e-4, abs=1e-7)
    rows, others = read_jsonl(folder / "rollouts.jsonl"), read_jsonl(other / "rollouts.jsonl")
    assert [(row["step"], row["id"], row["seed"], row["completion_ids"]) for row in rows] == [(row["step"], row["id"], row["seed"], row["completion_ids"]) for row in others]
    ours, theirs = (load_model(folder_ / "checkpoint")[0].state_dict() for folder_ in (folder, other))
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module", params=["tied", "untied"])
def setting(request, tiny_tasks, tiny_model_dir, tmp_path_factory):
    """(task file, model folder, folder of a run with one process)"""
    folder = tmp_path_factory.mktemp(request.param)
    rows = read_jsonl(tiny_tasks)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    (folder / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[6:]))
    (folder / "hints.jsonl").write_text("".join(json.dumps({"id": row["id"], "hint_id": row["id"], "hint": "Think of the unit " * (1 + 9 * i)}) + "\n"
                                                for i, row in enumerate(rows)))
    model_dir = tiny_model_dir
    if request.param == "untied":
        model, tokenizer = load_model(tiny_model_dir)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.05 * torch.randn_like(model.lm_head.weight))
        model_dir = folder / "model"
        model.save_pretrained(model_dir)
        tokenizer.save_pretrained(model_dir)
    code, said = train(1, folder / "tasks.jsonl", model_dir, folder / "one")
    assert code == 0, said
    return folder / "tasks.jsonl", model_dir, folder / "one"


@pytest.mark.parametrize("parallel", ["shard", "replicate"])
def test_two_processes_are_one(setting, parallel, tmp_path):
    tasks, model_dir, one = setting
    if parallel == "replicate" and model_dir != tasks.with_name("model"):
        pytest.skip("nothing there knows of ties")
    code, said = train(2, tasks, model_dir, tmp_path / "two", "--parallel", parallel)
    assert code == 0, said
    same(tmp_path / "two", one)


def test_another_number_of_processes_takes_over(setting, tmp_path):
    tasks, model_dir, one = setting
    if model_dir != tasks.with_name("model"):
        pytest.skip("once is enough")
    for processes, parallel, kill_at in ((2, "shard", "checkpoint-2"), (1, "replicate", "checkpoint-4"), (2, "shard", None)):
        code, said = train(processes, tasks, model_dir, tmp_path / "run", "--parallel", parallel, kill_at=kill_at)
        assert (code != 0) == bool(kill_at), said
    same(tmp_path / "run", one)


def test_shards_need_torchrun(setting, tmp_path):
    code, said = train(1, *setting[:2], tmp_path / "run", "--parallel", "shard")
    assert code == 1 and said == "error: --parallel shard cuts the weights over several processes: start it with torchrun\n"
