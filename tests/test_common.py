"""common.py without a model: config, run folders, records, tasks, hints, tool calls, rendering, metrics."""
import fcntl
import itertools
import json
import math
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import common
from common import (Grade, InfraError, Refusal, RowLog, append_jsonl, bootstrap_ci, calls_match, grade_completion, load_hints, load_tasks, load_world, new_folder,
                    opt, paired_ci, parse_config, parse_tool_calls, pass_at_k, place_hint, read_jsonl, render_prompt, reverse_kl, sample_tokens, spearman,
                    stable_seed, start_run, stop_ids, torch, write_text)

ROOT = Path(common.__file__).parent


# Config.

@dataclass
class Config:
    """A stage's config in small."""
    lr: float = opt(1e-3, "peak learning rate, 10% at the end")
    steps: int = opt(5, "optimizer steps")
    tasks: list[str] = opt(["a.jsonl"], "task files")
    ks: list[int] = opt([1], "k of pass@k")
    loss: str = opt("dense", "which loss", choices=["dense", "policy_gradient"])
    clip: float | None = opt(None, "clip, off by default")
    thinking: bool = opt(False, "thinking")
    cache: bool | None = opt(None, "a yes-or-no flag that may stay open")
    out_dir: str = opt("out", "folder")
    device: str = opt("cpu", "device")


def preset(tmp_path, text):
    path = tmp_path / "preset.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_then_presets_then_flags(tmp_path):
    assert parse_config(Config, []) == Config()
    path = preset(tmp_path, "lr: 2e-4\nsteps: 7\ntasks: [x, y]\nthinking: true\nclip: -0.5\n")
    cfg = parse_config(Config, [path, "--steps", "9", "--ks", "1", "4", "--loss", "policy_gradient"])
    assert cfg == Config(2e-4, 9, ["x", "y"], [1, 4], "policy_gradient", -0.5, True)
    assert parse_config(Config, [path, "--no-thinking", "--tasks", "z"]) == Config(2e-4, 7, ["z"], clip=-0.5)
    assert Config().tasks is not Config().tasks


@pytest.mark.parametrize("flag, line, message", [
    (["--lrr", "1"], "lrr: 1", "unrecognized arguments: --lrr"),
    (["--lr", "fast"], "lr: fast", "argument --lr: invalid float value: 'fast'"),
    (["--steps", "2.5"], "steps: 2.5", "argument --steps: invalid int value: '2.5'"),
    (["--loss", "mse"], "loss: mse", "argument --loss: invalid choice: 'mse'"),
    (["--step", "3"], "step: 3", "unrecognized arguments: --step"),  # no abbreviations
    (["--thinking=maybe"], "thinking: maybe", "ignored explicit argument 'maybe'"),
    (["--lr"], "lr: true", "argument --lr: expected one argument"),
    (["--ks", "1", "x"], "ks: [1, x]", "argument --ks: invalid int value: 'x'")])
def test_a_preset_fails_with_the_message_of_the_command_line(tmp_path, flag, line, message):
    for argv in (flag, [preset(tmp_path, line)]):
        with pytest.raises(SystemExit) as error:
            parse_config(Config, argv)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_a_yes_or_no_flag_may_stay_open(tmp_path):
    assert parse_config(Config, []).cache is None
    for value in (True, False):
        path = preset(tmp_path, f"cache: {value}\n")
        flag = "--cache" if value else "--no-cache"
        assert parse_config(Config, [flag]).cache is parse_config(Config, [path]).cache is value
        assert parse_config(Config, [path, "--cache"]).cache is True
    with pytest.raises(SystemExit, match="preset False"):  # a word behind it is not its value
        parse_config(Config, ["--cache", "False"])


@pytest.mark.parametrize("text", ["thinking:", "lr:", "cache:", "thinking: [maybe]", "- lr", "lr: [", "a: b: c"])
def test_a_preset_that_is_no_list_of_flags_is_refused(tmp_path, text):
    with pytest.raises(SystemExit, match="preset.yaml"):
        parse_config(Config, [preset(tmp_path, text)])
    with pytest.raises(SystemExit, match="No such file"):
        parse_config(Config, [str(tmp_path / "none.yaml")])


def test_a_refusal_is_one_line_on_stderr_and_exit_code_1():
    run = subprocess.run([sys.executable, "-c", "import common; common.die('no')"], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (1, "", "error: no\n")
    with pytest.raises(ValueError):
        common.die("for callers")


def test_importing_common_imports_no_heavy_package():
    heavy = "{'torch', 'transformers', 'yaml', 'openai', 'matplotlib'}"
    subprocess.run([sys.executable, "-c", f"import common, sys; assert not {heavy} & set(sys.modules)"], cwd=ROOT, check=True)


def test_a_run_folder_belongs_to_one_config(tmp_path):
    cfg = Config(out_dir=str(tmp_path / "run"))
    folder = start_run(cfg.out_dir, cfg)
    row = json.loads((folder / "config.json").read_text())
    assert row["config"]["lr"] == 1e-3 and row["stage"] == "test_common" and row["device"] == "cpu" and row["argv"] == sys.argv
    assert {"python", "torch", "transformers"} <= row["versions"].keys() and len(row.get("git_commit", 40 * "0")) == 40
    before = (folder / "config.json").stat().st_mtime_ns
    moved = folder.rename(tmp_path / "moved")
    assert start_run(moved, replace(cfg, out_dir=str(moved))) == moved
    assert (moved / "config.json").stat().st_mtime_ns == before
    with pytest.raises(SystemExit, match=r"lr \(0.001 there, 0.1 now\), steps \(5 there, 6 now\)"):
        start_run(moved, replace(cfg, lr=0.1, steps=6))
    assert start_run(moved, replace(cfg, steps=6), ignore=["steps"]) == moved


def test_a_run_whose_inputs_changed_is_refused(tmp_path):
    cfg, tasks, model = Config(out_dir=str(tmp_path / "run")), tmp_path / "tasks.jsonl", tmp_path / "model"
    model.mkdir()
    tasks.write_text("{}\n"), (model / "model.safetensors").write_bytes(b"1"), (model / "log.txt").write_text("1")
    inputs = [tasks, model, "none", ""]
    start_run(cfg.out_dir, cfg, inputs)
    (model / "log.txt").write_text("2")  # nothing that the model says
    start_run(cfg.out_dir, cfg, inputs)
    for path in (tasks, model / "model.safetensors"):
        before = path.read_bytes()
        path.write_bytes(b"2")
        with pytest.raises(SystemExit, match=f"{tasks if path == tasks else model} has changed since the run in .*run began"):
            start_run(cfg.out_dir, cfg, inputs)
        path.write_bytes(before)
    start_run(cfg.out_dir, cfg, inputs)


def test_a_row_log_keeps_what_is_finished(tmp_path):
    path = tmp_path / "rows.jsonl"
    for row in ({"id": 1, "x": 1}, {"id": 2, "error": "gone"}, {"id": 1, "x": 2}):
        append_jsonl(path, row)
    log = RowLog(path, ("id",), finished=lambda row: "error" not in row)
    assert log.get({"id": 1, "y": 0}) == log.add({"id": 1, "x": 3}) == {"id": 1, "x": 2} and log.get({"id": 2}) is None
    log.add({"id": 2, "x": 4})
    assert read_jsonl(path)[3:] == [{"id": 2, "x": 4}] == [log.get({"id": 2})]
    in_memory = RowLog(None, ("id",))
    assert in_memory.add({"id": 1}) is in_memory.get({"id": 1})


def test_named_random_streams():
    assert stable_seed("search", "t1", 0) == stable_seed("search", "t1", 0) == 8399618846552128983
    seeds = {stable_seed(name, task, k) for name in ("search", "fresh") for task in ("t1", "t2", 1) for k in range(50)}
    assert len(seeds) == 300 and all(0 <= seed < 2 ** 63 for seed in seeds)


# Records.

def test_RUN_01_torn_tails(case, tmp_path):
    data = case("RUN-01")
    for name, content in data["input"]["files_hex"].items():
        path = tmp_path / name
        path.write_bytes(bytes.fromhex(content))
        expected = data["expected"]["ids_before_append"][name]
        if name == "middle_bad":
            with pytest.raises(ValueError, match="line 2"):
                read_jsonl(path)
            continue
        assert [row["id"] for row in read_jsonl(path)] == expected
        append_jsonl(path, data["input"]["append"])
        assert [row["id"] for row in read_jsonl(path)] == data["expected"]["ids_after_append"][name]
        torn = Path(f"{path}.torn")
        assert torn.exists() == ("torn" in name)
        if torn.exists():  # nothing is lost
            assert bytes.fromhex(content) == b'{"id":1}\n' + torn.read_bytes()


def test_RUN_01_parallel_writers(case, tmp_path):
    many = case("RUN-01")["input"]["parallel"]
    code = ("import sys; from common import append_jsonl\n"
            f"for i in range({many['rows_each']}): append_jsonl(sys.argv[1], {{'id': f'{{sys.argv[2]}}-{{i}}', 'pad': sys.argv[2] * {many['row_bytes']}}})")
    path = tmp_path / "rows.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)], cwd=ROOT) for n in range(many["processes"])]
    assert [writer.wait() for writer in writers] == [0, 0]
    rows = read_jsonl(path)
    assert len(rows) == case("RUN-01")["expected"]["parallel_rows_readable"] == len({row["id"] for row in rows})
    assert not Path(f"{path}.torn").exists()


def test_RUN_01_a_writer_waits_for_the_lock(tmp_path):
    path = tmp_path / "rows.jsonl"
    with open(path, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writer = threading.Thread(target=append_jsonl, args=(path, {"id": 1}))
        writer.start()
        writer.join(0.2)
        assert writer.is_alive() and not path.read_bytes()
    writer.join()
    assert read_jsonl(path) == [{"id": 1}]


@pytest.mark.parametrize("cut", [1, 5000, 60000, 70000, 199990])
def test_a_long_row_cut_anywhere_is_mended(tmp_path, cut):
    path, row = tmp_path / "rows.jsonl", {"id": 2, "text": "é" * 100000}
    append_jsonl(path, {"id": 1})
    append_jsonl(path, {})  # an empty row is a row
    append_jsonl(path, row)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_jsonl(path) == [{"id": 1}, {}, row][:3 if cut == 1 else 2]
    append_jsonl(path, {"id": 3})
    assert read_jsonl(path) == [{"id": 1}, {}, *([row] if cut == 1 else []), {"id": 3}]


def test_rows_are_checked_when_written_and_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError):
            append_jsonl(path, {"x": number})
    append_jsonl(path, {"id": "ä\u2028"})
    append_jsonl(path, {"id": "b", "hint": "x"})
    assert path.read_bytes().count(b"\n") == 2 and "ä" in path.read_text("utf-8") and [row["id"] for row in read_jsonl(path)] == ["ä\u2028", "b"]
    with pytest.raises(SystemExit, match="rows.jsonl line 1: missing field 'hint'"):
        read_jsonl(path, ("id", "hint"))
    with pytest.raises(SystemExit, match="cannot read"):
        read_jsonl(tmp_path / "none.jsonl")
    path.write_text("[1]\n{}\n")
    with pytest.raises(SystemExit, match="line 1: not a JSON object"):
        read_jsonl(path)


def test_whole_files_and_folders_are_renamed_into_place(tmp_path):
    write_text(tmp_path / "a.txt", "one")
    write_text(tmp_path / "a.txt", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"] and (tmp_path / "a.txt").read_text() == "two"
    for text in ("one", "two"):
        with new_folder(tmp_path / "run" / "checkpoint") as folder:
            (folder / "x").write_text(text)
    with pytest.raises(RuntimeError), new_folder(tmp_path / "run" / "checkpoint") as folder:
        (folder / "x").write_text("three")
        raise RuntimeError
    assert (tmp_path / "run" / "checkpoint" / "x").read_text() == "two"
    with new_folder(tmp_path / "run" / "checkpoint") as folder:  # what the broken block left is gone
        assert not list(folder.iterdir())


# Tasks, worlds and hints.

def write_tasks(path, kinds):
    for number, kind in enumerate(kinds):
        append_jsonl(path, {"id": f"t{number}", "world": "w", "messages": [], "tools": [], "spec": {}, "failure_kind": kind})
    return path


def test_a_subset_is_balanced_over_kinds(tmp_path):
    path = write_tasks(tmp_path / "tasks.jsonl", "bbbbacab")
    ids = [task["id"] for task in load_tasks([path])]
    assert ids == [f"t{i}" for i in range(8)] == [task["id"] for task in load_tasks([path], 100)]
    assert [task["id"] for task in load_tasks([path], 3)] == ["t0", "t4", "t5"]  # one of each kind, in file order
    assert [task["id"] for task in load_tasks([path], 6)] == ["t0", "t1", "t2", "t4", "t5", "t6"]
    with pytest.raises(SystemExit, match="'t0' occurs twice"):
        load_tasks([path, path])
    append_jsonl(path, {"id": "t9"})
    with pytest.raises(SystemExit, match="line 9: missing field 'world'"):
        load_tasks([path])


def test_a_world_is_a_folder_with_an_env(tiny_tasks, tmp_path, waits):
    tasks = {task["id"]: task for task in load_tasks([tiny_tasks])}
    assert load_world(tasks["tool0"]["world"]) is load_world(tasks["chat0"]["world"])
    with pytest.raises(SystemExit, match="world 'nowhere'"):
        load_world("nowhere")
    right = '<tool_call>\n{"name": "set_timer", "arguments": {"minutes": 5}}\n</tool_call>'
    assert grade_completion(tasks["tool0"], right) == Grade(1.0, "intended", "Done.")
    for task in tasks.values():
        grade = grade_completion(task, task["failed_completion"])
        assert not grade.passed and grade.feedback == task["failed_feedback"]
    for garbage in ("", "<tool_call>", "\udcff", "<tool_call>\n{}\n</tool_call>", "[" * 5000):
        assert not grade_completion(tasks["tool0"], garbage).passed
    assert grade_completion(tasks["chat0"], "8 min").passed
    (tmp_path / "env.py").write_text("from common import InfraError\nclass Env:\n    def reset(self, task): raise InfraError('down')\n")
    with pytest.raises(InfraError):
        grade_completion({"world": str(tmp_path)}, "")
    assert waits == [1, 2]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/env.py").write_text("class Env:\n    def reset(self, task): raise ValueError('another observation')\n")
    with pytest.raises(SystemExit, match="task t1: another observation"):
        grade_completion({"id": "t1", "world": str(tmp_path / "other")}, "")


def test_hints_by_task_and_by_kind_and_the_two_controls(tmp_path):
    tasks, path = load_tasks([write_tasks(tmp_path / "tasks.jsonl", "aabbc")]), tmp_path / "hints.jsonl"
    append_jsonl(path, {"id": "t0", "hint_id": "t0/3", "hint": "of t0", "passed": True})
    append_jsonl(path, {"failure_kind": "a", "hint": "of a"})
    append_jsonl(path, {"failure_kind": "b", "hint": "of b"})
    hints = load_hints(path, tasks)
    assert hints["t0"] == {"id": "t0", "hint_id": "t0/3", "hint": "of t0", "passed": True}
    assert hints["t1"] == {"id": "t1", "hint_id": "kind:a", "hint": "of a", "failure_kind": "a"}
    assert list(hints) == ["t0", "t1", "t2", "t3"]  # t4 has none
    for empty in (load_hints(path, tasks, "empty"), load_hints("none", tasks), load_hints("", tasks)):
        assert list(empty) == [task["id"] for task in tasks] and {row["hint"] for row in empty.values()} == {""}
    kinds = {task["id"]: task["failure_kind"] for task in tasks}
    draws = [load_hints(path, tasks, "shuffled", seed) for seed in range(20)]
    for shuffled in draws:
        assert shuffled.keys() == hints.keys() and all(row["id"] == task_id for task_id, row in shuffled.items())
        assert all((row["hint"] == "of b") != (kinds[task_id] == "b") for task_id, row in shuffled.items())
    assert draws[0] == load_hints(path, tasks, "shuffled", 0) and {draw["t2"]["hint"] for draw in draws} == {"of t0", "of a"}
    with pytest.raises(SystemExit, match="run `python optimize_hints.py` first"):
        load_hints(tmp_path / "none.jsonl", tasks)
    with pytest.raises(SystemExit, match="two failure kinds"):
        load_hints(path, tasks[:2], "shuffled")


# Tool calls.

def test_CALL_01_calls_with_tags_braces_and_company(case):
    data = case("CALL-01")
    for text, expected in zip(data["input"]["rows"], data["expected"]["rows"]):
        assert parse_tool_calls(text) == (expected["status"], expected["calls"])


CALL = '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize("text, status, num_calls", [
    (CALL, "ok", 1), ("<tool_call>" + CALL[12:-13] + "</tool_call>", "ok", 1), (CALL.replace("\n", " \n\t "), "ok", 1),
    (f"<think>\n{CALL}\n</think>\n\nDone.", "no_call", 0), (f"<think>maybe {CALL}</think>{CALL}", "ok", 1),
    (f"<think>cut off {CALL}", "no_call", 0), (f"thought opened by the prompt</think>\n{CALL}", "ok", 1),
    (CALL.replace('"x": 1', '"x": "<think>"') + CALL, "ok", 2),
    (CALL[:-5], "malformed", 0), (CALL[:20], "malformed", 0), (CALL + CALL[:-5], "malformed", 0), ("<tool_call></tool_call>", "malformed", 0),
    ("<tool_call>\n[]\n</tool_call>", "malformed", 0), ('<tool_call>{"name": "a"}</tool_call>', "malformed", 0),
    ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', "malformed", 0), (CALL.replace('{"x": 1}', '"{}"'), "malformed", 0),
    (CALL.replace("1", "NaN"), "malformed", 0), (CALL.replace("1", "-Infinity"), "malformed", 0), (CALL.replace("1", "9" * 5000), "malformed", 0),
    ("<tool_call>" + '{"a":' * 100000, "malformed", 0), ("</tool_call>", "no_call", 0), ("", "no_call", 0)])
def test_calls_are_parsed_strictly_and_thoughts_skipped(text, status, num_calls):
    got, calls = parse_tool_calls(text)
    assert (got, len(calls)) == (status, num_calls)


def test_CALL_03_comparison_of_calls(case):
    data = case("CALL-03")
    for row in data["input"]["rows"]:
        got = calls_match(row["expected_calls"], row["got_calls"], data["input"]["schema"], data["input"]["order_matters"])
        assert got == data["expected"]["pass"][row["what"]], row["what"]


def test_calls_match_reads_json_schemas_and_order():
    a, b = ({"name": name, "arguments": {}} for name in "ab")
    assert calls_match([a, b], [a, b], {}, order_matters=True) and not calls_match([a, b], [b, a], {}, order_matters=True)
    assert calls_match([], [], {}) and not calls_match([], [a], {}) and not calls_match([a], [], {})

    def same(want, got, schema):
        return calls_match([{"name": "f", "arguments": {"x": want}}], [{"name": "f", "arguments": {"x": got}}], {"x": schema} if schema else {})

    assert same(10 ** 10, 10 ** 10 + 1, "number") and not same(10 ** 10, 10 ** 10 + 1, {"type": "integer"})  # an id is exact
    assert same({"lat": 1.0}, {"lat": 1}, {"type": "object", "properties": {"lat": {"type": "number"}}}) and not same({"a": 1}, {"a": 1, "b": 2}, None)
    assert same([[1]], [[1.0]], {"type": "array", "items": {"type": "array"}}) and same([2], [2.0], "array<integer>") and not same([True], [1], "array<boolean>")
    assert same(None, None, None) and not same(None, 0, None) and not same("1", 1, None)


# Rendering.

@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def test_TOK_02_the_hint_inside_the_last_tool_response_changes_nothing_else(case, tokenizer):
    data = case("TOK-02")
    step, hint, expected = data["input"]["replayed_step"], data["input"]["hint"], data["expected"]
    student, teacher = (tokenizer.decode(render_prompt(tokenizer, step, [], h)) for h in ("", hint))
    assert (student, teacher) == (expected["student_prompt"], expected["teacher_prompt"])
    assert teacher.replace("\n" + hint, "") == student
    new_turn = tokenizer.decode(render_prompt(tokenizer, [*step, {"role": "user", "content": hint}], []))
    assert new_turn.count("<think>") == expected["faulty_teacher_hint_as_new_user_turn_think_blocks"]
    second = tokenizer.decode(render_prompt(tokenizer, data["input"]["messages"], []))
    assert second.count("<think>") == expected["think_blocks_in_second_prompt"]


@pytest.mark.parametrize("position", ["end", "system", "first_user"])
def test_deleting_the_hint_gives_the_students_prompt_back(tokenizer, tiny_tasks, position):
    hint, seen = "Use the word HINT:\n{braces} & <tags>", 0
    for task in load_tasks([tiny_tasks]):
        plain = tokenizer.decode(render_prompt(tokenizer, task["messages"], task["tools"]))
        assert render_prompt(tokenizer, task["messages"], task["tools"], "", position) == render_prompt(tokenizer, task["messages"], task["tools"])
        if position == "system" and task["messages"][0]["role"] != "system":
            with pytest.raises(SystemExit, match="no system message"):
                place_hint(task["messages"], hint, position)
            continue
        hinted = tokenizer.decode(render_prompt(tokenizer, task["messages"], task["tools"], hint, position))
        assert hinted.count(hint) == 1 and hinted.replace("\n" + hint, "") == plain
        after = {"end": "\n</tool_response><|im_end|>" if task["tools"] else "<|im_end|>", "system": "\n\n# Tools", "first_user": "<|im_end|>"}[position]
        assert hinted.split(hint)[1].startswith(after)
        seen += 1
    assert seen >= 4


def test_a_prompt_is_rendered_once_as_it_is(tokenizer, tiny_tasks):
    task = load_tasks([tiny_tasks])[0]
    with_none = [{**message, "content": message["content"] or None} for message in task["messages"]]  # OpenAI's spelling of a bare call
    ids = render_prompt(tokenizer, with_none, task["tools"])
    text = tokenizer.decode(ids)
    assert text.endswith("<|im_start|>assistant\n") and '"set_timer"' in text and ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(render_prompt(tokenizer, task["messages"], task["tools"], enable_thinking=False)) == text + "<think>\n\n</think>\n\n"
    before = json.dumps(task["messages"])
    assert place_hint(task["messages"], "") == task["messages"] and place_hint(task["messages"], "x") != task["messages"]
    assert json.dumps(task["messages"]) == before
    with pytest.raises(SystemExit, match="ends in neither"):
        place_hint(task["messages"][:3], "x")


def test_TOK_01_no_second_start_token(case):
    """A tokenizer that puts a start token before whatever it encodes, and a template that writes one too."""
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast
    toy = case("TOK-01")["input"]["toy_vocab"]
    bpe = Tokenizer(models.BPE({**toy, "h": 0, "e": 2, "l": 3, "o": 4, "ll": 9}, [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]))
    bpe.add_special_tokens(["<s>"])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", chat_template="<s>{{ messages[0]['content'] }}")
    assert tokenizer("hello")["input_ids"] == case("TOK-01")["expected"]["prompt_ids"]
    assert render_prompt(tokenizer, [{"role": "user", "content": "hello"}], []) == case("TOK-01")["expected"]["prompt_ids"]


def test_TOK_04_stop_ids_are_the_union(case):
    class Named:
        def __init__(self, **names):
            self.__dict__.update(names)

    ends = case("TOK-04")["input"]["two_end_tokens"]
    model = Named(config=Named(eos_token_id=ends["config_eos"]), generation_config=Named(eos_token_id=ends["generation_config_eos"]))
    assert stop_ids(Named(eos_token_id=7), model) == [7, 151643, 151645]
    assert stop_ids(Named(eos_token_id=None), Named(config=Named(eos_token_id=None), generation_config=None)) == []


# Sampling and metrics.

def test_GEN_02_log_probs_are_those_of_the_tempered_distribution(case):
    data = case("GEN-02")
    logits, temperature = torch.tensor(data["input"]["logits"]), data["input"]["temperature"]
    probs = torch.softmax(logits / temperature, -1)
    ids, logprobs = sample_tokens(logits, (probs[0] + probs[1] / 2).double(), temperature)
    assert int(ids) == data["input"]["sampled_id"] and float(logprobs) == pytest.approx(data["expected"]["logprob_tempered"], abs=1e-6)
    ids, logprobs = sample_tokens(logits, torch.tensor(0.99), 0)
    assert int(ids) == 0 and float(logprobs) == pytest.approx(float(torch.log_softmax(logits, -1)[0]))


def test_sampling_follows_the_distribution_and_never_draws_the_impossible():
    logits = torch.tensor([-torch.inf, 0.3, -torch.inf, 1.2, -0.7, -torch.inf])
    uniforms = torch.linspace(0, 1 - 2 ** -53, 100001, dtype=torch.float64)
    ids, logprobs = sample_tokens(logits.expand(len(uniforms), -1), uniforms, 1.0)
    torch.testing.assert_close(torch.bincount(ids, minlength=6) / len(uniforms), torch.softmax(logits, -1), atol=2e-5, rtol=0)
    assert torch.isfinite(logprobs).all()


def test_KL_01_direction(case):
    data = case("KL-01")
    student, teacher = (torch.tensor(data["input"][f"{role}_probs"]).log() for role in ("student", "teacher"))
    assert float(reverse_kl(student, teacher)) == pytest.approx(data["expected"]["reverse_kl_student_teacher"], abs=1e-6)
    assert float(reverse_kl(teacher, student)) == pytest.approx(data["expected"]["forward_kl_teacher_student"], abs=1e-6)


def test_KL_06_the_whole_vocabulary_is_summed(case):
    data = case("KL-06")
    student, teacher = (torch.tensor(data["input"][f"{role}_probs"]).log() for role in ("student", "teacher"))
    assert float(reverse_kl(student, teacher)) == pytest.approx(data["expected"]["full_reverse_kl"], abs=1e-6)


def test_KL_07_bfloat16_logits_are_cast_first(case):
    data = case("KL-07")
    student, teacher = (torch.tensor(data["input"][f"{role}_logits_bf16"], dtype=torch.bfloat16) for role in ("student", "teacher"))
    assert float(reverse_kl(student, teacher)) == pytest.approx(data["expected"]["reverse_kl"], abs=1e-6)
    assert float(reverse_kl(student, student)) == 0.0
    assert reverse_kl(torch.stack([student, teacher])[None], torch.stack([teacher, teacher])[None]).shape == (1, 2)


def test_pass_at_k():
    draws = list(itertools.combinations([1, 1, 0, 0, 0], 3))  # enumerated: 2 passes among 5 samples
    assert pass_at_k(5, 2, 3) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))
    assert pass_at_k(4, 3, 1) == 0.75 and pass_at_k(4, 0, 4) == 0 and pass_at_k(4, 1, 4) == 1
    for n, c, k in ((3, 1, 4), (3, 1, 0), (3, 4, 1)):
        with pytest.raises(ValueError):
            pass_at_k(n, c, k)


def test_spearman():
    assert spearman([1, 2, 3], [10, 20, 400]) == pytest.approx(1) and spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))  # ranks 1 2.5 2.5 4 against 1 3 2 4
    assert spearman([1, 1, 1], [1, 2, 3]) is None and spearman([1], [2]) is None and spearman([], []) is None
    assert spearman([1, math.nan, 2], [1, 2, 3]) is None
    with pytest.raises(ValueError):
        spearman([1, 2], [1])


def test_EVAL_04_intervals_resample_tasks(case):
    data = case("EVAL-04")
    rewards = data["input"]["rewards_tasks_by_seed"]
    mean, low, high = bootstrap_ci(rewards)
    assert (mean, low, high) == (data["expected"]["mean"], *data["expected"]["task_bootstrap_exact_27_min_max"])
    rows = [{"id": f"t{i}", "seed": k, "reward": reward, "passed": reward >= 1} for i, task in enumerate(rewards) for k, reward in enumerate(task)]
    assert bootstrap_ci(rows) == bootstrap_ci(rows[::-1]) == (mean, low, high)
    wide, narrow = bootstrap_ci([[1.0] * 8, [0.0] * 8] * 25), bootstrap_ci([[0.0, 1.0] * 4] * 50)
    assert narrow == (0.5, 0.5, 0.5) and wide[2] - wide[1] == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(50), rel=0.1)
    assert bootstrap_ci([[1.0, 1.0, 1.0], [0.0]])[0] == 0.75  # the mean over rows
    with pytest.raises(ValueError):
        bootstrap_ci([])


def test_two_runs_are_compared_task_by_task():
    rng = np.random.default_rng(0)
    level = rng.random(100)  # tasks differ far more than the two runs do
    a = [{"id": f"t{i}", "reward": x} for i, x in enumerate(level)]
    b = [{"id": f"t{i}", "reward": x + 0.05 + 0.01 * rng.standard_normal()} for i, x in enumerate(level)][::-1]
    difference, low, high = paired_ci(a, b)
    assert difference == pytest.approx(0.05, abs=0.005) and 0.04 < low < difference < high < 0.06
    assert paired_ci(b, a)[0] == pytest.approx(-difference)
    with pytest.raises(ValueError, match="not the same tasks"):
        paired_ci(a, b[1:])
