"""Numbers that make no sense are refused in one line, before anything is read or written."""
import subprocess
import sys
from types import SimpleNamespace

import pytest

import common
import evaluate
import kl_diagnostics
import optimize_hints
import train_opsd
from common import ROOT, parse_config


@pytest.mark.parametrize("stage, flag", [(evaluate, "seeds"), (evaluate, "batch_tasks"), (evaluate, "max_new_tokens"), (kl_diagnostics, "rollouts"),
                                         (kl_diagnostics, "chunk"), (train_opsd, "kl_chunk"), (train_opsd, "row_tokens"), (train_opsd, "eval_seeds")])
@pytest.mark.parametrize("value", [0, -1])
def test_a_count_below_one_is_refused(stage, flag, value, tmp_path):
    cfg = stage.Config(out_dir=str(tmp_path / "out"), **{flag: value})
    with pytest.raises(SystemExit, match=rf"^error: .*--{flag}.* at least 1$"):
        stage.main(cfg)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    from common import load_model
    with pytest.raises(SystemExit, match=f"cannot load model {tmp_path}"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("flag, value", [("grad_clip", -1.0), ("grad_clip", 0.0), ("lr", -1.0), ("warmup_steps", -1), ("top_k", -1), ("ema_decay", 2.0),
                                         ("weight_decay", -1.0), ("temperature", -1.0)])
def test_training_numbers_out_of_range_are_refused(flag, value, tmp_path):
    with pytest.raises(SystemExit, match=rf"^error: .*--{flag}"):
        train_opsd.main(train_opsd.Config(out_dir=str(tmp_path / "out"), **{flag: value}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_float_that_is_no_number_is_refused(value):
    with pytest.raises(SystemExit, match="--grad_clip"):
        common.parse_config(train_opsd.Config, ["--grad_clip", value])


@pytest.mark.parametrize("stage", [evaluate, kl_diagnostics, optimize_hints])
def test_a_negative_temperature_is_refused(stage, tmp_path):
    with pytest.raises(SystemExit, match="temperature"):
        stage.main(stage.Config(out_dir=str(tmp_path / "out"), temperature=-1.0))


def test_a_negative_number_of_tasks_is_refused():
    with pytest.raises(SystemExit, match="--num_tasks"):
        common.load_tasks(["data/toolworld/eval_tool.jsonl"], -1)


def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
    code = f"import common; common.lock_folder({str(tmp_path)!r}); print('in', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], cwd=common.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "in\n"
        with pytest.raises(SystemExit, match="another process works in"):
            common.lock_folder(tmp_path)
        first.communicate("\n")
    common.lock_folder(tmp_path)  # free again when that process has ended


def test_a_start_that_failed_does_not_refuse_the_corrected_command(tmp_path):
    command = [sys.executable, "optimize_hints.py", "--num_tasks", "1", "--out_dir", str(tmp_path)]
    first = subprocess.run([*command, "--model", "no/such/model"], cwd=common.ROOT, capture_output=True, text=True)
    assert first.returncode == 1 and "no/such/model" in first.stderr
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("reward, action", [(2.0, "intended"), (-1.0, "intended"), (float("nan"), "intended"), (1.0, "abandoned"), (1.0, "hacked")])
def test_a_grade_outside_the_contract_is_refused(reward, action):
    with pytest.raises(ValueError, match="a world gave"):
        common.Grade(reward, action, "")


def test_half_a_surrogate_pair_survives_the_record(tmp_path):
    common.append_jsonl(tmp_path / "rows.jsonl", {"id": "a", "hint": "x \ud800 y"})
    assert common.read_jsonl(tmp_path / "rows.jsonl") == [{"id": "a", "hint": "x \ud800 y"}]


def test_what_was_thought_is_not_graded():
    task = next(t for t in common.load_tasks(["data/toolworld/eval_chat.jsonl"]) if t["failure_kind"] == "chat_amount")
    right = task["spec"]["chat"]["must"][0].split("(?!")[0].replace("\\", "")
    assert common.grade_completion(task, f"It is {right}.").passed
    assert not common.grade_completion(task, f"<think>it is {right}</think>\nNo idea.").passed
    assert not common.grade_completion(task, f"<think>it is {right}").passed


@pytest.mark.parametrize("message", [None, {"role": "assistant", "content": None}, {"role": "assistant", "content": [{"type": "text", "text": "Hint."}]}])
def test_an_answer_of_the_writer_without_text_is_an_empty_hint(message):
    writer = object.__new__(optimize_hints.WRITERS["openai"])
    writer.cfg = optimize_hints.Config()
    usage = SimpleNamespace(prompt_tokens="3", completion_tokens=None)
    choice = SimpleNamespace(message=message and SimpleNamespace(**message), finish_reason="stop")
    writer.send = lambda messages, seed: SimpleNamespace(choices=[choice], usage=usage, model="m")
    task = common.load_tasks(["data/toolworld/train_tool.jsonl"], 1)[0]
    row = writer.write({key: task[key] for key in optimize_hints.VISIBLE} | {"trials": []}, 0)
    assert row["hint"] == "" and "prompt_tokens" not in row


PRESETS = sorted(ROOT.glob("data/toolworld/*.yaml"))
STAGES = {"full.yaml": (train_opsd, optimize_hints, evaluate), "hard.yaml": (optimize_hints,)}  # the others hold keys that only training knows


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_shipped_presets_serve_the_stages_they_are_for_and_no_other(path):
    for stage in (train_opsd, optimize_hints, evaluate):
        if stage in STAGES.get(path.name, (train_opsd,)):
            cfg = parse_config(stage.Config, [str(path)])
            if stage is train_opsd:
                train_opsd.check(cfg)
        else:
            with pytest.raises(SystemExit, match="unrecognized arguments: --"):
                parse_config(stage.Config, [str(path)])
