"""Stage 1: find, for every failed step, the hint that makes the frozen teacher recover.

In:  task rows (data/<world>/*.jsonl: the prefix, the tools, the failed step, its public feedback).
Out: out/hints.jsonl (one row per task: its best hint), out/hint_trials.jsonl (every hint and rollout),
     out/writer_calls.jsonl (every answer of the hint writer), out/summary.jsonl (one row for tables over runs), out/config.json;
     with a --gate out/gates.jsonl, with --target hinter_prompt out/prompts.jsonl.

The algorithm ([A], "Scaling On-Policy Self-Distillation with Hint Auto-Optimization"):
  1. The writer sees prefix, tools, failed step, public feedback and all earlier trials, and writes a hint.
  2. The leak check turns hints down that give an answer away or speak of the grader; that costs no rollout.
  3. The hint is appended to the same prefix every time and the teacher continues: one seeded rollout.
  4. The world grades the continuation; a promising hint gets --confirm more rollouts on fresh seeds.
  5. Three successes of three end a task; otherwise the next round, up to --max_rounds.
  6. The best hint by mean reward is kept. Its reward is biased by luck, so fresh seeds measure it again,
     and the same seeds without a hint give the control.
All tasks move together: a round is one set of concurrent writer calls, then batches for the engine until new hints are wanted.
What [A] compares with this: other spreads of the rollouts (--search), other things to search by (--objective), what else a hint must
keep to (--gate), one prompt that writes all hints (--target hinter_prompt). A leak audit: --siblings.
A killed run goes on when started again: what is on disk is never computed or paid a second time.

    python optimize_hints.py
"""
import itertools
import json
import math
import re
import time
import unicodedata
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

from tqdm import tqdm

from common import (EngineConfig, InfraError, RowLog, ask_server, at_least, die, grade_completion, head_weight, in_threads, load_demos,
                    load_engine, load_hints, load_tasks, load_world, logits_of, openai_client, opt, pack_rows, packed_hidden, parse_config,
                    parse_tool_calls, read_jsonl, render_prompt, reverse_kl, sample_tasks, seed_note, stable_seed, start_run, torch, world_files,
                    write_jsonl)


@dataclass
class Config(EngineConfig):
    tasks: list[str] = opt(["data/toolworld/train_tool.jsonl", "data/toolworld/train_chat.jsonl"], "task files")
    num_tasks: int = opt(240, "a subset balanced over failure kinds; 0 takes all")
    ids: str = opt("", "a file of rows with id: these tasks and no others, whatever --num_tasks says")
    model: str = opt("data/toolworld/base", "the teacher: a Hugging Face folder")
    out_dir: str = opt("out", "where the results go; a run that was cut goes on there")
    writer: str = opt("scripted", "who writes hints: templates (a stand-in for an LLM; the weak one knows only the tools) | an LLM server | a file",
                      ["scripted", "scripted_weak", "openai", "file"])
    hints_file: str = opt("", "--writer file: JSONL rows with hint and id (or failure_kind)")
    search: str = opt("confidence", "how rollouts are spread over hints; none: the writer's first hint, measured on the fresh seeds only",
                      ["confidence", "fixed3", "sequential", "best_of_n", "batch", "halving", "beam", "ucb", "agent", "none"])
    max_rounds: int = opt(15, "hints written per task at most")
    budget: int = opt(0, "teacher rollouts per task at most, the fresh ones apart; 0 = max_rounds * (1 + confirm)")
    target: str = opt("hint", "optimize every task's hint | one prompt that writes the hints of all", ["hint", "hinter_prompt"])
    prompt_batch: int = opt(16, "--target hinter_prompt: failed steps between two reflections")
    minimal_change: bool = opt(False, "--target hinter_prompt: a reflection changes as little as it can")
    objective: str = opt("rerollout", "a hint is searched by: the teacher's fresh step | its revision of the failed step | its new likeliest "
                         "tokens on the failed step", ["rerollout", "edit", "token_shift"])
    gate: str = opt("none", "what else a hint must keep to: natural wording | a response like the failed one | a small shift of the logits",
                    ["none", "natural", "embedding", "logit_shift"])
    gate_threshold: float | None = opt(None, "highest cost that passes the gate (default: see THRESHOLDS)")
    gate_model: str = opt("", "--gate natural: the judge, --gate embedding: as in text-embedding-3-large, on the server at --base_url; "
                          "empty = a stand-in, computed with the student")
    siblings: int = opt(0, "tasks of the same failure kind on which every chosen hint is tried: transfer_reward (an answer does not transfer)")
    min_transfer: float = opt(0.0, "chosen hints with a lower transfer_reward are dropped")
    confirm: int = opt(2, "further rollouts for a promising hint")
    fresh: int = opt(4, "rollouts on fresh seeds for the chosen hint, and as many without a hint")
    temperature: float = opt(1.0, "of the teacher's rollouts")
    max_new_tokens: int = opt(96, "of a rollout")
    hint_position: str = opt("end", "the message that takes the hint", ["end", "system", "first_user"])
    seed: int = opt(0, "names every random stream")
    writer_model: str = opt("", "--writer openai: the model's name")
    base_url: str = opt("", "--writer openai, --gate_model: the server, as in http://localhost:8000/v1; the key comes from OPENAI_API_KEY")
    writer_api: str = opt("chat", "chat sends max_tokens, temperature and seed | reasoning sends max_completion_tokens only",
                          ["chat", "reasoning"])
    writer_temperature: float = opt(1.0, "of the writer")
    writer_max_tokens: int = opt(2048, "of one answer of the writer, its reasoning included")
    writer_timeout: float = opt(120.0, "seconds for one request")
    max_retries: int = opt(4, "further attempts when a request fails for a passing reason")
    concurrency: int = opt(8, "writer calls at a time")
    price_in: float | None = opt(None, "USD per million prompt tokens of the writer")
    price_out: float | None = opt(None, "USD per million completion tokens of the writer")


# What does not change a result may differ when a run goes on.
FREE_FIELDS = ("writer_timeout", "max_retries", "concurrency", "price_in", "price_out")
# What the writer and the leak check see of a task. Never `spec`: it holds the answer and is for the grader alone.
VISIBLE = ("id", "world", "failure_kind", "messages", "tools", "failed_completion", "failed_feedback")
MAX_HINT_CHARS = 600


def leaves(value, key=""):
    """Every value in nested JSON as (its key, its text); the text of an object or a list is empty."""
    if isinstance(value, dict):
        yield key, ""
        for name, inner in value.items():
            yield from leaves(inner, name)
    elif isinstance(value, list):
        yield key, ""
        for inner in value:
            yield from leaves(inner, key)
    else:
        yield key, str(value)


# Writers: write(view, round_index, slot) -> {"hint", ...} or None when there is nothing left to propose. A view is the VISIBLE part of
# a task, its `trials` so far and, where the search has beams, the hint to `revise`. The slot tells apart the hints of one round.
# With --search agent the row also has num_rollouts, or no hint when the agent ends the task. All of it is recorded with the call.

MARKER = re.compile(r"@@(.+?)@@")


def fill_markers(template, values):
    """Replaces each @@NAME@@ by values["NAME"] in one pass: text that holds braces or markers stays as it is."""
    return MARKER.sub(lambda match: values[match[1]], template)


GENERIC_RULES = [{"feedback": "", "hints": [
    "Read the policy and the last message again before you choose among @@TOOLS@@.",
    "Use @@OTHER@@ for this step.",
    "Take the @@ARG@@ from the record that the user means.",
    "Check the form and the unit of @@ARG@@ against the schema of @@TOOL@@.",
    "Give @@ARG@@ as well when you call @@TOOL@@.",
    "Follow the policy: @@POLICY@@"]}]


def marker_values(view):
    """{marker: {what it may stand for: the text that @@MARKER:regex@@ is matched against}}, from what the writer may see."""
    schemas = {tool["function"]["name"]: tool["function"] for tool in view["tools"]}
    calls = parse_tool_calls(view.get("failed_completion", ""))[1]
    tool = calls[0]["name"] if calls else ""
    arguments = schemas.get(tool, {}).get("parameters", {}).get("properties", {})
    text = lambda role: "\n".join(m["content"] for m in view["messages"] if m["role"] == role and m.get("content"))
    records = []
    for message in view["messages"]:
        if message["role"] == "tool":
            try:
                records += leaves(json.loads(message["content"]))
            except ValueError:
                pass  # an error in plain words
    request = set(re.findall(r"\w+", text("user").casefold()))
    return {
        "TOOL": {tool: tool} if tool else {},  # called in the failed step
        "OTHER": {name: f"{name} {schema}" for name, schema in schemas.items() if name != tool},
        "TOOLS": {", ".join(schemas): ""},
        "ARG": {name: f"{name} {schema}" for name, schema in arguments.items()},  # of that tool
        "FIELD": {key: f"{key} {value}" for key, value in records if key},  # of the records in the prefix
        "VALUE": {value: key for key, value in records if value.casefold() in request},  # those that the user mentions
        "POLICY": {sentence: sentence for sentence in re.split(r"(?<=[.!?])\s+", text("system"))},
    }


class ScriptedWriter:
    """A stand-in for an LLM, so that the method runs without a key: fills in templates, and failures only move it on.

    data/<world>/writer_rules.jsonl holds {"feedback": regex, "hints": [templates]}; a rule counts when its
    regex is found in the feedback of the failed step or of a failed trial (all count when none is). A
    template has the markers of marker_values and @@1@@, @@2@@: groups of the regex. A marker with several
    values makes several hints, one without a value none. The order is a seeded shuffle. As an agent
    it gives a hint one rollout after the other while they pass.
    """

    def __init__(self, cfg, views):
        self.seed, self.agent, self.minimal, self.rules = cfg.seed, cfg.search == "agent", cfg.minimal_change, {}
        for world in {view["world"] for view in views}:
            path = Path(load_world(world).__file__).with_name("writer_rules.jsonl")
            self.rules[world] = read_jsonl(path, ("feedback", "hints")) if path.exists() and cfg.writer == "scripted" else GENERIC_RULES
        print("writer: scripted templates, a stand-in for an LLM (--writer openai asks a real one)")

    def write(self, view, round_index, slot=0):
        said = [view.get("failed_feedback", ""), *(t["feedback"] for t in view["trials"] if t.get("reward", 1) < 1)]
        rules, values = self.rules[view["world"]], marker_values(view)
        matching = [(rule, match.groups()) for rule in rules for text in said if (match := re.search(rule["feedback"], text))]
        hints = {hint: template for rule, groups in matching or [(rule, ()) for rule in rules]
                 for template in rule["hints"] for hint in self.expand(template, values, groups)}
        hints = {hint: template for hint, template in hints.items() if hint not in {trial["hint"] for trial in view["trials"]}}
        if "prompt" in view:  # templates, the preferred ones first
            ranks = {template: rank for rank, template in enumerate(view["prompt"].split("\n"))}
            return min(({"hint": hint, "template": template} for hint, template in hints.items()), default=None,
                       key=lambda row: (ranks[row["template"]], stable_seed("scripted", self.seed, view["id"], row["hint"])))
        words = set(view.get("revise", "").split())  # a revision shares words with its parent
        order = sorted(hints, key=lambda hint: (-len(words & set(hint.split())), stable_seed("scripted", self.seed, view["id"], hint)))
        if self.agent and view["trials"] and view["trials"][-1].get("reward", 0) >= 1:
            order = [view["trials"][-1]["hint"]]
        return {"hint": order[slot]} | ({"num_rollouts": 1} if self.agent else {}) if slot < len(order) else None

    def first_prompt(self):
        templates = {template for rules in self.rules.values() for rule in rules for template in rule["hints"]}
        return "\n".join(sorted(templates, key=lambda template: stable_seed("prompt", self.seed, template)))

    def reflect(self, prompt, results, round_index):
        """An LLM's equivalent: templates whose hints failed more often than not go to the end, only the worst for a minimal change."""
        rewards = {}
        for result in results:
            if "template" in result:  # none where the writer had no hint
                rewards.setdefault(result["template"], []).append(result.get("reward", 0.0))
        failed = sorted((template for template in rewards if mean(rewards[template]) < 0.5), key=lambda t: (sum(rewards[t]) - len(rewards[t]), t))
        failed = failed[:1] if self.minimal else failed
        return {"hint": "\n".join([line for line in prompt.split("\n") if line not in failed] + failed)}

    def expand(self, template, values, groups=()):
        """All hints that a template stands for."""
        values = values | {str(number): {group: ""} for number, group in enumerate(groups, 1) if group}
        markers, choices = list(dict.fromkeys(MARKER.findall(template))), []
        for marker in markers:
            name, _, pattern = marker.partition(":")
            if name not in values and not name.isdigit():
                die(f"writer rules: unknown marker @@{marker}@@ in {template!r}")
            choices.append([value for value, about in values.get(name, {}).items() if value and re.search(pattern, about)])
        return [fill_markers(template, dict(zip(markers, chosen))) for chosen in itertools.product(*choices)]


class FileWriter:
    """Hints that somebody wrote before, one per task or per failure kind."""

    def __init__(self, cfg, views):
        self.hints = load_hints(cfg.hints_file, views)

    def write(self, view, round_index, slot=0):
        return {"hint": self.hints[view["id"]]["hint"]} if round_index == slot == 0 and view["id"] in self.hints else None


WRITER_RULES = f"""You write hints for an assistant that works with tools. It is about to take its next step in a \
conversation. You are also shown a step that went wrong at this very point, so that you can tell what the assistant \
needs to be told before it acts.

Rules for a hint:
1. It looks forward: it says how to go about the next step, and everyone who knows only the conversation and the tools can see why.
2. The step that went wrong is for your diagnosis alone. The hint does not mention it, nor any attempt, mistake, grading, score or reward.
3. It gives no answer worked out in hindsight. It says where a value stands and what form it needs. An id, number, \
date, name or quoted text may be written only if the conversation or the tools contain it, never in disguise, and never \
the finished call or reply.
4. It makes the assistant do what the step was for. To give up, hand over or do something else instead is no recovery.
5. It is one to three plain sentences, at most {MAX_HINT_CHARS} characters. Answer with the hint and nothing else."""

WRITER_REQUEST = """Tools:
@@TOOLS@@

Conversation:
@@CONVERSATION@@

The step that went wrong:
@@FAILED@@

What was said about it:
@@FEEDBACK@@

Hints so far, each with what came of it:
@@TRIALS@@

@@ASK@@"""
PROMPT_RULES = """

Advice that has proved good for such hints:
"""
REFLECT_RULES = """You improve the advice that a writer of hints is given. An assistant that works with tools failed at a step; the \
writer wrote a hint for it; the assistant took the step again, with the hint. You see the advice so far and what came of every hint. \
Write better advice: it must hold for failures of many kinds that you have not seen, so it names no id, number, date or name, and it \
gives no answers. At most 2000 characters. Answer with the new advice and nothing else."""
MINIMAL_RULES = " Change as little as you can: keep every sentence that is not at fault, word for word."
AGENT_RULES = """

You work by calling the tool test_hint, with a hint that keeps these rules: the assistant then takes its step with the hint, as \
often as you ask for, and you get the results. Its answers vary, so that one success may be luck. The rollouts are limited. When no \
further test is worth its price, answer without a call: the best hint tested is kept."""
TEST_HINT = {"type": "function", "function": {
    "name": "test_hint",
    "description": "Lets the assistant take its step with a hint. Returns what it did and a reward from 0 to 1, for every rollout.",
    "parameters": {"type": "object", "required": ["hint", "num_rollouts"], "properties": {
        "hint": {"type": "string"}, "num_rollouts": {"type": "integer", "minimum": 1, "description": "fresh rollouts with this hint"}}}}}


def writer_messages(view):
    """The chat messages that ask an LLM for the next hint."""
    lines = lambda rows: "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) or "none"
    ask = "Write the next hint" + (f": a revision of {json.dumps(view['revise'], ensure_ascii=False)}." if "revise" in view else ".")
    request = fill_markers(WRITER_REQUEST, {
        "TOOLS": lines(view["tools"]), "CONVERSATION": lines(view["messages"]),
        "FAILED": view.get("failed_completion", "not recorded"), "FEEDBACK": view.get("failed_feedback", "nothing"),
        "TRIALS": lines(map(shown, view["trials"])), "ASK": ask})
    advice = PROMPT_RULES + view["prompt"] if view.get("prompt") else ""
    return [{"role": "system", "content": WRITER_RULES + advice}, {"role": "user", "content": request}]


def shown(trial):
    """What the writer sees of a trial."""
    return {key: trial[key] for key in ("hint", "rejected", "completion", "reward", "action", "feedback") if key in trial}


def agent_messages(view):
    """The same as a conversation with a tool: every round of trials is a call of test_hint and its result."""
    rules, request = writer_messages(view | {"trials": []})
    messages = [rules | {"content": rules["content"] + AGENT_RULES}, request]
    left = view["left"] + sum("reward" in trial for trial in view["trials"])
    request["content"] = request["content"].removesuffix("Write the next hint.") + f"Rollouts left: {left}"
    for round_index, trials in itertools.groupby(view["trials"], key=lambda trial: trial["round"]):
        trials = list(trials)
        call, left = {"hint": trials[0]["hint"], "num_rollouts": len(trials)}, left - sum("reward" in trial for trial in trials)
        messages += [{"role": "assistant", "content": None, "tool_calls": [{"id": f"call_{round_index}", "type": "function", "function": {
            "name": "test_hint", "arguments": json.dumps(call, ensure_ascii=False)}}]},
            {"role": "tool", "tool_call_id": f"call_{round_index}", "content": json.dumps(
                {"results": list(map(shown, trials)), "rollouts_left": left}, ensure_ascii=False)}]
    return messages


def request_body(cfg, seed, refused=()):
    """The request without its messages. Reasoning models refuse max_tokens, a temperature and a seed."""
    limit = "max_completion_tokens" if cfg.writer_api == "reasoning" or "max_tokens" in refused else "max_tokens"
    body = {"model": cfg.writer_model, limit: cfg.writer_max_tokens}
    if cfg.writer_api == "chat":
        body |= {"temperature": cfg.writer_temperature, "seed": seed}
    return {key: value for key, value in body.items() if key not in refused}


class OpenAIWriter:
    """Any server with the chat completions API, through the official client."""

    def __init__(self, cfg, views):
        self.cfg, self.refused, self.client = cfg, set(), openai_client(cfg.base_url, cfg.writer_timeout)

    def write(self, view, round_index, slot=0):
        stream = [slot] if slot else []
        seed = stable_seed("writer", self.cfg.seed, view["id"], round_index, *stream) >> 32  # servers take 31 bits
        if self.cfg.search == "agent":
            response = self.send(agent_messages(view), seed, tools=[TEST_HINT])
        else:
            response = self.send(writer_messages(view), seed)
        row = self.read_answer(response, seed)
        return row | self.read_call(response.choices[0].message) if self.cfg.search == "agent" else row

    def first_prompt(self):
        return ""

    def reflect(self, prompt, results, round_index):
        seed = stable_seed("reflect", self.cfg.seed, round_index) >> 32
        text = "\n".join(json.dumps(result, ensure_ascii=False) for result in results)
        return self.read_answer(self.send([
            {"role": "system", "content": REFLECT_RULES + MINIMAL_RULES * self.cfg.minimal_change},
            {"role": "user", "content": f"The advice so far:\n{prompt or 'none'}\n\nWhat came of it:\n{text}\n\nWrite the new advice."}], seed), seed)

    def read_answer(self, response, seed):
        choice = response.choices[0]
        content = getattr(choice.message, "content", None)
        content = content if isinstance(content, str) else ""  # a list or nothing: an empty hint, which the leak check turns down
        row = {"hint": content.split("</think>")[-1].strip(), "model": response.model, "seed": seed,
               "finish_reason": choice.finish_reason or "stop"}
        for field in ("prompt_tokens", "completion_tokens"):
            if isinstance(count := getattr(response.usage, field, None), int):
                row[field] = count
        return row

    def read_call(self, message):
        """What the agent wants: {"hint", "num_rollouts"}, an empty hint for a call that cannot be read, which costs it a hint; none = the end."""
        calls = getattr(message, "tool_calls", None)
        try:
            arguments = json.loads(calls[0].function.arguments) if calls else None
            return {"hint": str(arguments["hint"]).strip(), "num_rollouts": max(1, int(arguments["num_rollouts"]))} if calls else {
                "hint": "", "num_rollouts": 0}
        except (ValueError, TypeError, KeyError):
            return {"hint": "", "num_rollouts": 1}

    def send(self, messages, seed, **options):
        """One answer. Raises Refusal for what waiting does not mend."""
        body = {}

        def request():
            nonlocal body
            body = request_body(self.cfg, seed, self.refused)
            return self.client.chat.completions.create(messages=messages, **options, **body)

        def mend(error):
            refusal = getattr(error, "status_code", 0) == 400 and error.code in ("unsupported_value", "unsupported_parameter")
            if refusal and error.param in body.keys() - {"model"}:
                self.refused.add(error.param)  # remembered for every later request
                return True

        return ask_server(request, self.cfg.max_retries, f"writer: {self.client.base_url}", mend=mend)


WRITERS = {"scripted": ScriptedWriter, "scripted_weak": ScriptedWriter, "openai": OpenAIWriter, "file": FileWriter}


# The leak check.

# Talk and forms that a forward-looking hint has no use for. What stands in the prefix or the tools word for
# word belongs to the domain ("credit score", "failed login attempts"), and a hint may use it.
FORBIDDEN = {
    "speaks of the grader": r"\bgrad(?:ers?|ing|ed)\b|\brubrics?\b|\brewards?\b|\bscor(?:es?|ed|ing)\b|\bevaluat(?:ors?|ion|ed)\b"
                            r"|\bground[- ]truth\b|\bpass(?:es|ing)? (?:the|this) (?:test|check)\b",
    "speaks of the recorded failure": r"\b(?:previous|earlier|prior|past|recorded|original|failed) (?:\w+ )?"
                                      r"(?:attempt|try|tries|trial|completion|failure|mistake|rollout|trajectory|trace)s?\b"
                                      r"|\b(?:recorded|failed) (?:step|run|turn)s?\b"
                                      r"|\byour (?:previous|earlier|prior|first|last|original) (?:\w+ )?(?:answer|response|reply|output)\b"
                                      r"|\b(?:last|first) (?:attempt|time)\b(?! to)|\bthis time\b|\b(?:your|the) (?:mistake|failure)\b",
    "speaks in hindsight": r"\bhindsight\b|\b(?:should|would|could)(?:n't| not)? have\b|\bturn(?:s|ed) out\b"
                           r"|\b(?:correct|right|expected|gold|reference|true) (?:answer|solution|completion|output)\b"
                           r"|\byou (?:failed|forgot|missed|omitted|tried|made|got|did|didn't|were)\b"
                           r"|\b(?:assistant|model|student|agent) (?:failed|forgot|missed|omitted|used|called|chose|made|gave|did)\b",
    "writes the call itself": r"\{\s*[\"'].*|\w+\(\s*\w+\s*=.*|<\|.*|</?(?:tool_call|tool_response|think)\b.*",
}
VALUE = re.compile(r"""
    (?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)*                # an e-mail address
  | (?<![\w.])\d{1,3}(?:[ ,'_]\d{3})+(?:\.\d+)?(?!\w)       # 12,900 or 12 900 is one number
  | (?<!\w)\d(?:[ ]\d){2,}(?!\w)                            # so is 1 2 9 0 0
  | (?<!\w)(?<!\w-)\d+(?=-[a-z]+\b)                        # the number of "30-day"
  | (?<!\w)(?<!\w-)(?=[\w-]*\d)\w+(?:(?:-|(?<=\d)[.:/](?=\d))\w+)*  # any other word with a digit: number, date, time, id
""", re.VERBOSE)
NUMBER_WORD = (r"\b(?:three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty|seventy|eighty"
               r"|ninety|hundred|thousand|million|dozen)\b")
QUOTED = r"\"([^\"]+)\"|“([^”]+)”|`([^`]+)`|(?<!\w)'([^']+)'(?!\w)"
PLAIN_CAPITALS = re.compile(r"I|IDs?|JSON|API|ISO|USD|[YMDHS]{2,4}")  # the last: YYYY-MM-DD


def canonical(value):
    """12,900 and 12900.00 are the same number, ORD-77 and ord77 the same id; dates are compared as written."""
    try:
        return float(re.sub(r"(?<=\d)[ ,'_](?=\d)", "", value))
    except ValueError:
        return re.sub(r"[-_]", "", value.casefold()) if re.search(r"[^\W\d_]", value) else value


def plain(text):
    """One spelling: full-width digits are digits, and characters that nobody sees (soft hyphen, zero width) separate nothing."""
    return " ".join(re.sub("[\u00ad\u200b-\u200f\u2060\ufeff]", "", unicodedata.normalize("NFKC", text)).split())


def leak_check(hint, task, earlier=(), finish_reason="stop"):
    """Why `hint` must not be tested on `task`, or "" ([A]'s anti-cheating rules, and the form of a hint).

    earlier: the hints already written for the task. finish_reason "length": the writer was cut. Heuristics, on the strict
    side: a wrong refusal costs one hint.
    """
    hint, known = plain(hint), "\n".join(plain(text) for leaf in leaves([task["messages"], task["tools"]]) for text in leaf)
    if not hint:
        return "is empty"
    if finish_reason == "length":
        return "was cut"
    if len(hint) > MAX_HINT_CHARS:
        return f"is longer than {MAX_HINT_CHARS} characters"
    if re.findall(r"\w+", hint.casefold()) in [re.findall(r"\w+", plain(other).casefold()) for other in earlier]:
        return "repeats an earlier hint"
    for reason, pattern in FORBIDDEN.items():
        for match in re.finditer(pattern, hint.casefold()):
            if match[0] not in known.casefold():
                return f"{reason} ({match[0]!r})"
    completions = [task.get("failed_completion", ""), *(trial.get("completion", "") for trial in task.get("trials", []))]
    used = sorted({plain(value).casefold() for text in completions for _, value in leaves(parse_tool_calls(text)[1])})
    leaked = unknown_values(hint, known, used)
    return f"names {leaked[0]!r}, which neither the conversation nor the tools contain" if leaked else ""


def unknown_values(hint, known, used):
    """What `hint` names and the text `known` does not contain; used: the argument values of earlier completions.

    Not seen: a name in small letters, or one that opens a sentence, unless a completion used it.
    """
    lowered, known_lowered = hint.casefold(), known.casefold()
    # Pieces of 100,200 are known too (a compact JSON list), and so is the whole.
    values = {canonical(value) for text in (known, re.sub("[ ,]", "  ", known)) for value in VALUE.findall(text)}
    words = set(re.findall(r"[^\W_]+", known_lowered))
    unknown = [value for value in VALUE.findall(hint) if canonical(value) not in values]
    unknown += [word for word in re.findall(NUMBER_WORD, lowered) if word not in words]
    stands_in = lambda phrase, text: re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text)
    quoted = ["".join(groups).strip(" .,;:!?") for groups in re.findall(QUOTED, lowered)]
    unknown += [phrase for phrase in quoted if not stands_in(phrase, known_lowered)]
    unknown += [value for value in used if re.fullmatch(r"(?!true$|false$|none$)\D{3,}", value)  # numbers: see VALUE
                and stands_in(value, lowered) and not stands_in(value, known_lowered)]
    for match in re.finditer(r"[^\W\d]\w*", hint):
        opens = re.search(r"(?:^|[.!?:][\"')]*\s)$", hint[:match.start()]) and re.match(r"[,:]?\s+\w", hint[match.end():])
        capital = match[0] != match[0].lower() and not opens and not PLAIN_CAPITALS.fullmatch(match[0])
        parts = re.findall(r"[^\W_]+", match[0].casefold())
        if (capital or len(parts) > 1) and not words.issuperset(parts):  # Paris, gold_tier
            unknown.append(match[0])
    return unknown


# Search strategies, one object per task, over the same lockstep rounds. [A] section 5 names them and leaves their details open.

WIDTH = 3  # hints that batch and beam write at once

class Search:
    """What the strategies share. ask() -> [(hint, number of rollouts)]: hint None for new ones from the writer, or hints that were
    tested before, never both; it changes nothing. tell() takes the graded rollouts. `passed`: all rollouts of a hint, 1 + confirm
    or more, have passed, which ends every strategy alike.
    """

    def __init__(self, cfg):
        self.confirm, self.hints_left, self.left = cfg.confirm, cfg.max_rounds, rollout_budget(cfg)
        self.num_arms = min(cfg.max_rounds, max(1, self.left // (1 + cfg.confirm)))  # of those that write all hints at once
        self.rewards, self.passed = {}, False

    def orders(self):
        """ask() within the budgets of hints and rollouts; [] when the task is at its end."""
        orders, left, hints = [], self.left, self.hints_left
        for hint, num in [] if self.passed else self.ask():
            if (hint is not None or hints > 0) and (left > 0 or not num):
                orders.append((hint, min(num, left)))
                left, hints = left - num, hints - (hint is None)
        return orders

    def tell(self, hint, trials):
        self.left -= len(trials)
        rewards = self.rewards.setdefault(hint, [])
        rewards += [trial["reward"] for trial in trials]
        self.passed = self.passed or len(rewards) > self.confirm and min(rewards) >= 1

    def rank(self, hint):
        """Best mean, then more rollouts; of equals max and sorted keep the earliest."""
        return mean(self.rewards[hint]), len(self.rewards[hint])

    def best(self):
        return max(self.rewards, key=self.rank, default=None)

    def fill(self):
        """One rollout for each new hint that is missing from num_arms, while there are hints."""
        return [(None, 1)] * min(self.num_arms - len(self.rewards), self.hints_left)

    def parent(self, slot):
        """The tested hint that the writer is to revise for its slot-th new one; None: it may start anew."""


class Confidence(Search):
    """One rollout per hint, `confirm` more for a promising one."""

    again = None

    def ask(self):
        return [(None, 1)] if self.again is None else [(self.again, self.confirm)]

    def tell(self, hint, trials):
        incumbent = mean(self.rewards[self.best()]) if self.rewards else 0.0
        first = hint not in self.rewards
        super().tell(hint, trials)
        reward = self.rewards[hint][0]
        promising = reward >= 1 or reward > incumbent  # the second for graded rewards
        self.again = hint if first and promising and self.confirm else None


class Sequential(Confidence):
    """One rollout per hint, revised until one passes: its `passed` is one success, and luck may be all of it."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.confirm = 0


class Fixed(Search):
    """1 + confirm rollouts for every hint, one hint after the other."""

    def ask(self):
        return [(None, 1 + self.confirm)]


class Batch(Search):
    """1 + confirm rollouts for every hint, WIDTH hints at once: the writer learns from whole batches."""

    def ask(self):
        return [(None, 1 + self.confirm)] * WIDTH


class BestOfN(Search):
    """All hints at once, 1 + confirm rollouts for each: the writer learns nothing."""

    def ask(self):
        return [(None, 1 + self.confirm) for _ in self.fill()]


class Halving(Search):
    """As many hints, one rollout for each; the better half goes on, with an even share of the budget for each further rung."""

    def ask(self):
        most = max(map(len, self.rewards.values()), default=0)
        if most < 2 and self.fill():
            return self.fill()
        arms = [hint for hint, rewards in self.rewards.items() if len(rewards) == most]  # those of the last rung
        arms = sorted(arms, key=self.rank, reverse=True)[:(len(arms) + 1) // 2]
        if len(arms) < 2:
            return []
        num = max(1, self.left // math.ceil(math.log2(len(arms))) // len(arms))
        return [(hint, min(num, self.left // len(arms))) for hint in arms] if self.left >= len(arms) else []

    def rank(self, hint):
        return len(self.rewards[hint]), mean(self.rewards[hint])  # one that was dropped at 1 of 1 does not beat a survivor's 6 of 7


class Beam(Search):
    """WIDTH hints, then again and again: one more rollout for the best WIDTH so far, and a revision of each of them."""

    checked = 0  # hints tested when the beam had its last rollouts

    def beam(self):
        return sorted(self.rewards, key=self.rank, reverse=True)[:WIDTH]

    def ask(self):
        again = self.checked < len(self.rewards) or not self.hints_left
        return [(hint, 1) for hint in self.beam()] if again else [(None, 1)] * WIDTH

    def tell(self, hint, trials):
        if hint in self.rewards:
            self.checked = len(self.rewards)
        super().tell(hint, trials)

    def parent(self, slot):
        beam = self.beam()
        return beam[slot % len(beam)] if beam else None


class UCB(Search):
    """As many hints as best_of_n, one rollout for each; then one at a time for the highest upper confidence bound (UCB1)."""

    def ask(self):
        return self.fill() or [(hint, 1) for hint in [max(self.rewards, key=self.bound, default=None)] if hint is not None]

    def bound(self, hint):
        total = sum(map(len, self.rewards.values()))
        return mean(self.rewards[hint]) + math.sqrt(2 * math.log(total) / len(self.rewards[hint]))


class Agent(Search):
    """The writer decides: with every call of its tool test_hint it names a hint, new or not, and how many rollouts it gets."""

    def ask(self):
        return [(None, self.left)] if self.left else []  # an upper bound


class NoSearch(Search):
    """Takes the first hint that passes the leak check."""

    def ask(self):
        return [] if self.rewards else [(None, 0)]

    def best(self):
        return next(iter(self.rewards), None)


SEARCHES = {"confidence": Confidence, "fixed3": Fixed, "sequential": Sequential, "best_of_n": BestOfN, "batch": Batch, "halving": Halving,
            "beam": Beam, "ucb": UCB, "agent": Agent, "none": NoSearch}


def rollout_budget(cfg):
    """Teacher rollouts per task in the search; by default what confidence cannot exceed."""
    return cfg.budget or cfg.max_rounds * (1 + cfg.confirm)


# Objectives: objective(cfg, batch, seeds, engine, tokenizer) -> for every (task, hint) of the batch one function per seed, which gives what
# a trial came to, or raises InfraError. Fresh rewards are those of `rerollout` whatever a hint was searched by.

def prompt_ids(cfg, tokenizer, task, hint, messages=None):
    return render_prompt(tokenizer, messages or task["messages"], task["tools"], hint, cfg.hint_position, cfg.enable_thinking, load_demos(cfg.demos))


def rerollout(cfg, batch, seeds, engine, tokenizer, revised=False):
    """The teacher takes the step; the world grades it."""
    asks = [{"role": "user", "content": "Look at your last answer again and write it anew, whole and as it should be."}]
    messages = [[*task["messages"], {"role": "assistant", "content": task["failed_completion"]}, *asks] if revised else None for task, _ in batch]
    prompts = [prompt_ids(cfg, tokenizer, task, hint, of_task) for (task, hint), of_task in zip(batch, messages)]
    samples = sample_tasks(engine, tokenizer, [task for task, _ in batch], prompts, seeds, cfg.max_new_tokens, cfg.temperature)

    def graded(task, sample):
        grade = grade_completion(task, sample.text)
        return {"completion": sample.text, "reward": grade.reward, "action": grade.action, "feedback": grade.feedback,
                "num_tokens": len(sample.ids), **seed_note(engine)}
    return [[partial(graded, task, sample) for sample in of_task] for (task, _), of_task in zip(batch, samples)]


def edit(*args):
    """The teacher sees the failed step and revises it under the hint; the world grades the revision, played from the prefix."""
    return rerollout(*args, revised=True)


def token_shift(cfg, batch, seeds, engine, tokenizer):
    """On the 10% of the failed step's tokens with the highest KL(student || teacher): the share where the teacher now prefers another one.

    No tokens are sampled: a trial is one forward pass, the same for every seed.
    differs from [A] section "Teacher Rollout Reward Proxies": [A] leaves the score to the agent that reads the new tokens; here they
    are the trial's feedback to the writer, and the share is its reward.
    """
    results = []
    for student, teacher, ids in failed_logits(cfg, batch, engine, tokenizer):
        top = reverse_kl(student, teacher).topk(math.ceil(len(ids) / 10)).indices.sort().values.tolist()
        new = {at: int(teacher[at].argmax()) for at in top}
        changes = [f"{tokenizer.decode([ids[at]])!r} -> {tokenizer.decode([new[at]])!r}" for at in top if new[at] != ids[at]]
        results.append({"reward": len(changes) / len(top), "feedback": f"tokens that became likeliest: {', '.join(changes) or 'none'}"})
    return [[partial(dict, result) for _ in of_task] for result, of_task in zip(results, seeds)]


OBJECTIVES = {"rerollout": rerollout, "edit": edit, "token_shift": token_shift}


def hidden_states(engine, items):
    """Per (prefix ids, completion ids) the (T, D) final hidden states of the engine's model that predict the completion's tokens."""
    with torch.no_grad():
        rows = pack_rows([(prefix, [ids]) for prefix, ids in items], 1024)  # tokens of a row: a CPU computes whole squares
        return torch.cat([packed_hidden(engine.model, row) for row in rows]).split([len(ids) for _, ids in items])


def failed_logits(cfg, batch, engine, tokenizer):
    """For every (task, hint) the student's and the teacher's logits (T, V) on the failed step, and its T token ids."""
    traces = [text_ids(tokenizer, task["failed_completion"]) for task, _ in batch]
    states = [hidden_states(engine, [(prompt_ids(cfg, tokenizer, task, hint * hinted), ids) for (task, hint), ids in zip(batch, traces)])
              for hinted in (False, True)]
    for student, teacher, ids in zip(*states, traces):
        yield *(logits_of(hidden, head_weight(engine.model).detach()) for hidden in (student, teacher)), ids


def text_ids(tokenizer, text):
    """Token ids of recorded text. The failed step is on record as text, so these may differ from the ids that were sampled."""
    return tokenizer(text or " ", add_special_tokens=False)["input_ids"]


# Gates: gate(cfg, items, engine, tokenizer) -> the cost of every (task, hint, the teacher's response); above the threshold the hint is out.

# Highest costs that pass. Those of the stand-ins turn a quarter of the first hints down: the upper quartile on 44 tasks of the embedded world.
THRESHOLDS = {"natural": 5.8,  # nats per token
              "embedding": 0.18,  # 1 - cosine
              "logit_shift": 0.07,  # nats per token
              "natural server": 0.5,  # the judge says yes (0) or no (1)
              "embedding server": 0.3}  # 1 - cosine; two texts on one subject have about 0.5


def natural(cfg, items, engine, tokenizer):
    """How unnatural the correction is that a hint asks for.

    differs from [A] section 4: judged by the hint, before a rollout is spent, where [A] judges the corrected response. The stand-in is
    the student's mean surprisal at the hint's tokens, where they stand in the teacher's prompt.
    """
    if cfg.gate_model:
        return [float(not judge(cfg, task, hint)) for task, hint, _ in items]
    places = []
    for task, hint, _ in items:
        without, ids = (prompt_ids(cfg, tokenizer, task, text) for text in ("", hint))
        start = next(i for i, (a, b) in enumerate(zip(without, ids)) if a != b)
        places.append((ids[:start], ids[start:start + len(ids) - len(without)]))
    head = head_weight(engine.model).detach()
    return [float(torch.nn.functional.cross_entropy(logits_of(hidden, head), torch.tensor(ids, device=hidden.device)))
            for hidden, (_, ids) in zip(hidden_states(engine, places), places)]


JUDGE_REQUEST = """An assistant that works with tools took this step in a conversation, and gets a hint for taking it again.

Conversation:
@@CONVERSATION@@

Step:
@@FAILED@@

Hint:
@@HINT@@

Would a step that follows the hint be natural: the same task, the same plan, and nothing changed that need not be? Answer yes or no \
and nothing else."""


def judge(cfg, task, hint):
    """Whether an LLM finds the correction natural."""
    client = openai_client(cfg.base_url, cfg.writer_timeout)
    request = fill_markers(JUDGE_REQUEST, {"CONVERSATION": json.dumps(task["messages"], ensure_ascii=False),
                                           "FAILED": task["failed_completion"], "HINT": hint})
    answer = ask_server(lambda: client.chat.completions.create(model=cfg.gate_model, messages=[{"role": "user", "content": request}]),
                        cfg.max_retries, f"judge: {client.base_url}")
    return bool(re.match(r"\W*yes\b", (answer.choices[0].message.content or "").split("</think>")[-1].strip().casefold()))


def embedding(cfg, items, engine, tokenizer):
    """1 - cosine of the embeddings of the teacher's response and the failed one. The stand-in: the student's hidden states, averaged."""
    pairs = [(task, text or " ") for task, _, completion in items for text in (completion, task["failed_completion"])]
    if cfg.gate_model:
        client = openai_client(cfg.base_url, cfg.writer_timeout)
        answer = ask_server(lambda: client.embeddings.create(model=cfg.gate_model, input=[text for _, text in pairs], encoding_format="float"),
                            cfg.max_retries, f"embeddings: {client.base_url}", "data")
        vectors = torch.tensor([row.embedding for row in sorted(answer.data, key=lambda row: row.index)])
    else:
        states = hidden_states(engine, [(prompt_ids(cfg, tokenizer, task, ""), text_ids(tokenizer, text)) for task, text in pairs])
        vectors = torch.stack([hidden.float().mean(0) for hidden in states])
    return (1 - torch.cosine_similarity(vectors[::2], vectors[1::2])).tolist()


def logit_shift(cfg, items, engine, tokenizer):
    """Mean KL(student || teacher) over the tokens of the failed step: how far the hint moves the logits from what the student decoded."""
    return [float(reverse_kl(student, teacher).mean()) for student, teacher, _ in
            failed_logits(cfg, [(task, hint) for task, hint, _ in items], engine, tokenizer)]


GATES = {"natural": natural, "embedding": embedding, "logit_shift": logit_shift}
AFTER = ("embedding",)  # needs a response: a hint that it turns down has cost its first rollouts


def gate_refusals(run, rows, completions):
    """{(task id, hint_id): reason} of the hints (rows as in requests) that the gate turns down. Paid answers are on disk."""
    cfg, items = run.cfg, [(run.tasks[row["id"]], row["hint"], completion) for row, completion in zip(rows, completions)]
    log = lambda row, cost: run.gates.add({"id": row["id"], "hint_id": row["hint_id"], "gate": cfg.gate, "cost": cost})
    measure = lambda some: GATES[cfg.gate](cfg, some, run.engine, run.tokenizer)
    if cfg.gate_model:
        asked = [(row, item) for row, item in zip(rows, items) if not run.gates.get(row)]
        in_threads(lambda pair: log(pair[0], measure([pair[1]])[0]), asked, cfg.concurrency)
    elif not all(map(run.gates.get, rows)):  # whole batches, as in roll_out
        for row, cost in zip(rows, measure(items)):
            log(row, cost)
    highest = gate_threshold(cfg)
    costs = {(row["id"], row["hint_id"]): run.gates.get(row)["cost"] for row in rows}
    return {place: f"is turned down by the gate {cfg.gate}: {cost:.3f}, above {highest:g}" for place, cost in costs.items() if cost > highest}


def gate_threshold(cfg):
    return THRESHOLDS[cfg.gate + " server" * bool(cfg.gate_model)] if cfg.gate_threshold is None else cfg.gate_threshold


# Records and rollouts.

def make_hint_id(task_id, hint):
    return f"{stable_seed(task_id, hint):016x}"


def roll_out(run, requests, objective="rerollout"):
    """The finished trials of each request (row without results, seeds), from one batch; None where the world gave no verdict."""
    wanted = [[{**row, "seed": seed} for seed in seeds] for row, seeds in requests]
    if not all(run.log.get(row) for rows in wanted for row in rows):
        # A batch that was cut is generated whole: its shape changes low bits, and so a few samples.
        batch = [(run.tasks[row["id"]], row["hint"]) for row, _ in requests]
        trials = OBJECTIVES[objective](run.cfg, batch, [seeds for _, seeds in requests], run.engine, run.tokenizer)
        for row, finish in ((row, finish) for rows, of_row in zip(wanted, trials) for row, finish in zip(rows, of_row)):
            if not run.log.get(row):
                try:
                    run.log.add({**row, **finish()})
                except InfraError as error:
                    tqdm.write(f"task {row['id']}: the world broke down ({error})")
    return [[run.log.get(row) for row in rows] if all(map(run.log.get, rows)) else None for rows in wanted]


def call_place(task_id, round_index, slot):
    """Where a writer call stands in writer_calls.jsonl; the first of a round has no slot."""
    return {"id": task_id, "round": round_index} | ({"slot": slot} if slot else {})


def write_hints(run, wanted, round_index):
    """Adds a writer call for each (view, slot) to the log. Each is on disk once it is answered; those on disk are not repeated."""
    def write(item):
        row = run.writer.write(item[0], round_index, item[1])
        if row is not None:
            run.calls.add(call_place(item[0]["id"], round_index, item[1]) | row)

    asked = [(view, slot) for view, slot in wanted if not run.calls.get(call_place(view["id"], round_index, slot))]
    in_threads(write, asked, run.cfg.concurrency)  # answers that are under way when one fails still reach the disk


# The search.

def search(cfg, tasks, engine, tokenizer):
    """Finds a hint for every task. Returns the rows of hints.jsonl, {task id: its search trials} and the writer's calls.

    Everything in cfg.out_dir counts as done, so running it again with the same cfg resumes. A task without a tested hint has
    no row.
    """
    out_dir, tasks = Path(cfg.out_dir), {task["id"]: task for task in tasks}
    log = RowLog(out_dir / "hint_trials.jsonl", ("id", "hint_id", "phase", "round", "seed"), ("id", "hint_id", "hint", "phase"),
                 finished=lambda row: "reward" in row or "rejected" in row)
    calls = RowLog(out_dir / "writer_calls.jsonl", ("id", "round", "slot"), ("id", "round", "hint"))
    gates = RowLog(out_dir / "gates.jsonl", ("id", "hint_id"), ("id", "hint_id", "cost"))
    views = {task_id: {key: task[key] for key in VISIBLE if key in task} | {"trials": []} for task_id, task in tasks.items()}
    writer = WRITERS[cfg.writer](cfg, list(views.values()))
    run = SimpleNamespace(cfg=cfg, tasks=tasks, views=views, writer=writer, engine=engine, tokenizer=tokenizer, log=log, calls=calls,
                          gates=gates, void=set())  # void: tasks whose world broke down
    chosen, passed = search_hints(run) if cfg.target == "hint" else search_prompt(run)
    chosen = {task_id: hint for task_id, hint in chosen.items() if hint is not None and task_id not in run.void}
    hints, transfer = [], measure_transfer(run, chosen)
    for task_id, rewards in measure_fresh(run, chosen).items():
        if rewards is None:
            run.void.add(task_id)
        elif transfer.get(task_id, 1.0) < cfg.min_transfer:
            row = {"id": task_id, "hint_id": make_hint_id(task_id, chosen[task_id]), "hint": chosen[task_id], "phase": "search"}
            views[task_id]["trials"].append(log.add(row | {"rejected": f"does not transfer: {transfer[task_id]:.3f} on sibling tasks"}))
        else:
            row = hint_row(cfg, task_id, chosen[task_id], views[task_id]["trials"], rewards, passed[task_id])
            hints.append(row | ({"transfer_reward": transfer[task_id]} if task_id in transfer else {}))
    calls = sorted(calls.rows.values(), key=lambda row: (row["round"], row["id"], row.get("slot", 0)))  # they arrived in any order
    write_jsonl(out_dir / "writer_calls.jsonl", calls)
    write_jsonl(out_dir / "hints.jsonl", hints)
    if run.void:
        print(f"{len(run.void)} tasks are left out, their world broke down: {', '.join(sorted(run.void)[:5])}; run again to retry them")
    return hints, {task_id: view["trials"] for task_id, view in views.items()}, calls


def search_hints(run):
    """({task id: its best hint}, {task id: passed}) by the strategy of --search."""
    cfg, views = run.cfg, run.views
    strategies = {task_id: SEARCHES[cfg.search](cfg) for task_id in run.tasks}

    def request(task_id, hint, round_index, num):
        """(row, seeds) for the next `num` rollouts of a hint: the seeds go on where its trials end."""
        hint_id = make_hint_id(task_id, hint)
        start = sum(trial["hint_id"] == hint_id and "seed" in trial for trial in views[task_id]["trials"])
        row = {"id": task_id, "hint_id": hint_id, "round": round_index, "hint": hint, "phase": "search"}
        return row, [stable_seed("search", cfg.seed, task_id, hint_id, k) for k in range(start, start + num)]

    def view(task_id, slot):
        parent = strategies[task_id].parent(slot)
        return views[task_id] | {"left": strategies[task_id].left} | ({"revise": parent} if parent else {})

    def reject(row, reason):
        views[row["id"]]["trials"].append(run.log.add(row | {"rejected": reason}))

    orders = {task_id: strategy.orders() for task_id, strategy in strategies.items()}
    for round_index in (bar := tqdm(range(cfg.max_rounds), desc="rounds", disable=None)):
        if not any(orders.values()):
            break
        slots = [(task_id, slot, num) for task_id, wanted in orders.items() for slot, (_, num) in enumerate(wanted)]
        write_hints(run, [(view(task_id, slot), slot) for task_id, slot, _ in slots], round_index)
        requests = []
        for task_id, slot, num in slots:
            call, strategy = run.calls.get(call_place(task_id, round_index, slot)), strategies[task_id]
            ended = call is None or call.get("num_rollouts") == 0  # the writer has nothing left, or the agent is content
            strategy.hints_left = 0 if ended else max(0, strategy.hints_left - 1)
            if ended:
                continue
            row, seeds = request(task_id, call["hint"], round_index, min(num, call.get("num_rollouts", num)))
            again = cfg.search == "agent" and call["hint"] in strategy.rewards  # an agent may test a hint once more
            earlier = [trial["hint"] for trial in views[task_id]["trials"]] + [other["hint"] for other, _ in requests if other["id"] == task_id]
            reason = not again and leak_check(call["hint"], views[task_id], earlier, call.get("finish_reason", "stop"))
            if reason:
                reject(row, reason)
            else:
                requests.append((row, seeds))
        if cfg.gate in GATES and cfg.gate not in AFTER and requests:
            refused = gate_refusals(run, [row for row, _ in requests], [""] * len(requests))
            for row, _ in requests:
                if (row["id"], row["hint_id"]) in refused:
                    reject(row, refused[row["id"], row["hint_id"]])
            requests = [(row, seeds) for row, seeds in requests if (row["id"], row["hint_id"]) not in refused]
        while True:  # the new hints, then those that their strategy wants to see again
            results = [(row, trials) for (row, _), trials in zip(requests, roll_out(run, requests, cfg.objective))]
            run.void |= {row["id"] for row, trials in results if trials is None}
            new = [(row, trials[0]["completion"]) for row, trials in results if trials and row["hint"] not in strategies[row["id"]].rewards
                   ] if cfg.gate in AFTER else []
            refused = gate_refusals(run, *zip(*new)) if new else {}
            for row, trials in results:
                if trials is not None:
                    views[row["id"]]["trials"] += trials
                    if (row["id"], row["hint_id"]) in refused:
                        reject(row, refused[row["id"], row["hint_id"]])
                        strategies[row["id"]].left -= len(trials)
                    else:
                        strategies[row["id"]].tell(row["hint"], trials)
            orders = {task_id: [] if task_id in run.void else strategy.orders() for task_id, strategy in strategies.items()}
            requests = [request(task_id, hint, round_index, num) for task_id, wanted in orders.items() for hint, num in wanted if hint is not None]
            if not requests:
                break
        bar.set_postfix_str(f"passed {mean(strategy.passed for strategy in strategies.values()):.0%}")
    return ({task_id: strategy.best() for task_id, strategy in strategies.items()},
            {task_id: strategy.passed for task_id, strategy in strategies.items()})


def search_prompt(run):
    """The same for one prompt that writes all hints ([A] section 2, "a singular hinter prompt").

    Batches of prompt_batch failed steps, every task in one batch only. After each batch the writer reflects on its trials and
    proposes a prompt; both prompts write hints for the next batch, which get one rollout each on the same seeds, and the proposal
    is accepted when its mean reward is higher. The last prompt writes every task's hint, which gets 1 + confirm rollouts.
    """
    cfg, num = run.cfg, run.cfg.prompt_batch
    order = sorted(run.tasks, key=lambda task_id: stable_seed("batches", cfg.seed, task_id))
    spare = (rollout_budget(cfg) - 1 - cfg.confirm) * len(order) - num  # after the first batch and the last hints
    num_rounds = min(cfg.max_rounds, len(order) // num - 1, spare // (2 * num))
    if num_rounds < 1:
        die(f"--target hinter_prompt: {len(order)} tasks at {rollout_budget(cfg)} rollouts are too few for two batches of {num} and the last hints")

    def try_out(prompts, round_index, batch, num_rollouts):
        """Per prompt {task id: what its hint came to}; equal hints of two prompts are one."""
        views = [(run.views[task_id] | {"prompt": prompt, "trials": []}, slot) for slot, prompt in enumerate(prompts) for task_id in batch]
        write_hints(run, views, round_index)
        requests, results = [], [{} for _ in prompts]
        for view, slot in views:
            call = run.calls.get(call_place(view["id"], round_index, slot)) or {"hint": ""}
            row = {"id": view["id"], "hint_id": make_hint_id(view["id"], call["hint"]), "round": round_index, "hint": call["hint"], "phase": "search"}
            reason = leak_check(call["hint"], view, (), call.get("finish_reason", "stop"))
            results[slot][view["id"]] = {"call": call, "row": row, "trials": [run.log.add(row | {"rejected": reason})] if reason else []}
            if not reason and row not in [other for other, _ in requests]:
                requests.append((row, [stable_seed("search", cfg.seed, view["id"], round_index, k) for k in range(num_rollouts)]))
        tested = {(row["id"], row["hint_id"]): trials for (row, _), trials in zip(requests, roll_out(run, requests, cfg.objective))}
        run.void |= {task_id for (task_id, _), trials in tested.items() if trials is None}
        for result in (result for of_prompt in results for result in of_prompt.values()):
            result["trials"] = result["trials"] or tested[result["row"]["id"], result["row"]["hint_id"]] or []
            seen = run.views[result["row"]["id"]]["trials"]
            seen += [trial for trial in result["trials"] if trial not in seen]
        return [{task_id: result for task_id, result in of_prompt.items() if task_id not in run.void} for of_prompt in results]

    score = lambda results: mean([mean(trial.get("reward", 0.0) for trial in result["trials"]) for result in results.values()] or [0.0])
    prompt, records = run.writer.first_prompt(), []
    for round_index in tqdm(range(num_rounds + 1), desc="batches", disable=None):
        proposal = prompt
        if round_index:
            place = call_place("hinter_prompt", round_index, 0)
            shown_rows = [{"last_message": run.views[task_id]["messages"][-1]["content"], **shown(result["trials"][0]),
                           **{key: value for key, value in result["call"].items() if key == "template"}} for task_id, result in results.items()]
            proposal = (run.calls.get(place) or run.calls.add(place | run.writer.reflect(prompt, shown_rows, round_index)))["hint"]
        prompts = list(dict.fromkeys([prompt, proposal]))
        tried = dict(zip(prompts, try_out(prompts, round_index, order[round_index * num:(round_index + 1) * num], 1)))
        records.append({"round": round_index, "prompt": proposal, "reward": score(tried[proposal]), "incumbent_reward": score(tried[prompt])})
        prompt = max(prompts, key=lambda text: score(tried[text]))  # the incumbent where they are equal
        results = tried[prompt]
    write_jsonl(Path(cfg.out_dir) / "prompts.jsonl", records)
    accepted = sum(record["reward"] > record["incumbent_reward"] for record in records)
    print(f"hinter prompt: {accepted} of {num_rounds} proposals accepted, see {cfg.out_dir}/prompts.jsonl")
    last, = try_out([prompt], num_rounds + 1, list(run.tasks), 1 + cfg.confirm)
    rewards = {task_id: [trial.get("reward", 0.0) for trial in result["trials"]] for task_id, result in last.items()}
    return ({task_id: result["row"]["hint"] for task_id, result in last.items() if "reward" in result["trials"][0]},
            {task_id: min(of_task) >= 1 for task_id, of_task in rewards.items()})


def measure_fresh(run, chosen):
    """{task id: (fresh_reward, empty_reward)} of the chosen hints {task id: hint}, None where the world gave no verdict.

    Luck favoured the chosen hints; fresh seeds do not know them. The empty hint gets the very same seeds.
    """
    requests = []
    for task_id, hint in chosen.items():
        seeds = [stable_seed("fresh", run.cfg.seed, task_id, k) for k in range(run.cfg.fresh)]
        requests += [({"id": task_id, "hint_id": make_hint_id(task_id, text), "hint": text, "phase": "fresh"}, seeds)
                     for text in (hint, "")]
    means = [trials and mean(trial["reward"] for trial in trials) for trials in roll_out(run, requests)]
    return {task_id: None if None in pair else pair for task_id, pair in zip(chosen, zip(means[::2], means[1::2]))}


def measure_transfer(run, chosen):
    """{task id: mean reward of its hint on `siblings` other tasks of its failure kind, one rollout each}, where there are any."""
    requests, owners = [], []
    for task_id, hint in chosen.items() if run.cfg.siblings else ():
        kind = run.tasks[task_id].get("failure_kind", "")
        others = [other for other, task in run.tasks.items() if other != task_id and task.get("failure_kind", "") == kind]
        for other in sorted(others, key=lambda other: stable_seed("sibling", run.cfg.seed, task_id, other))[:run.cfg.siblings]:
            row = {"id": other, "hint_id": make_hint_id(task_id, hint), "hint": hint, "phase": "transfer"}
            requests.append((row, [stable_seed("transfer", run.cfg.seed, task_id, other)]))
            owners.append(task_id)
    rewards = {}
    for owner, trials in zip(owners, roll_out(run, requests)):
        if trials:
            rewards.setdefault(owner, []).append(trials[0]["reward"])
    return {task_id: mean(of_task) for task_id, of_task in rewards.items()}


def hint_row(cfg, task_id, hint, trials, fresh_rewards, passed):
    """A row of hints.jsonl. hint_reward is the mean over the hint's search rollouts; num_rollouts and rounds are the whole search's."""
    hint_id = make_hint_id(task_id, hint)
    rewards = [trial["reward"] for trial in trials if trial["hint_id"] == hint_id and "reward" in trial]
    searched = {"hint_reward": mean(rewards)} if rewards else {}
    return {"id": task_id, "hint_id": hint_id, "hint": hint, "writer": cfg.writer, **searched, "fresh_reward": fresh_rewards[0],
            "empty_reward": fresh_rewards[1], "num_rollouts": sum("reward" in trial for trial in trials),
            "rounds": len({trial["round"] for trial in trials}), "passed": passed}


def cost(cfg, calls):
    """(prompt tokens, completion tokens, USD as text) of the writer."""
    used = [sum(row.get(field, 0) for row in calls) for field in ("prompt_tokens", "completion_tokens")]
    if cfg.writer != "openai":
        return *used, "0"
    if cfg.price_in is None or cfg.price_out is None or any("prompt_tokens" not in row for row in calls):
        return *used, "unknown"
    return *used, f"{(used[0] * cfg.price_in + used[1] * cfg.price_out) / 1e6:.4f}"


def main(cfg):
    started = time.time()
    for writer, field in (("file", "hints_file"), ("openai", "writer_model")):
        if (cfg.writer == writer) != bool(getattr(cfg, field)):
            die(f"--writer {writer} and --{field} go together")
    if cfg.base_url and cfg.writer != "openai" and not cfg.gate_model:
        die("--base_url needs --writer openai or --gate_model")
    if cfg.gate_model and cfg.gate not in ("natural", "embedding"):
        die("--gate_model needs --gate natural or embedding")
    if cfg.gate_threshold is not None and cfg.gate == "none":
        die("--gate_threshold needs a --gate")
    if cfg.engine != "hf" and (cfg.objective == "token_shift" or cfg.gate != "none" and not cfg.gate_model):
        die(f"--objective token_shift and gates without --gate_model read hidden states: --engine hf, not {cfg.engine}")
    if cfg.objective == "token_shift" and (cfg.confirm or cfg.gate in AFTER):
        die("--objective token_shift samples nothing: it needs --confirm 0 and no --gate embedding")
    if cfg.min_transfer and not cfg.siblings:
        die("--min_transfer needs --siblings")
    if cfg.target == "hint" and cfg.minimal_change:
        die("--minimal_change needs --target hinter_prompt")
    if cfg.target == "hinter_prompt" and (cfg.writer == "file" or cfg.search != "confidence" or cfg.gate != "none"):
        die("--target hinter_prompt has a search of its own: no --search, no --gate and no --writer file")
    if cfg.search == "agent" and cfg.writer == "file":
        die("--search agent needs a writer that decides: --writer openai or scripted")
    at_least(1, cfg, "max_rounds", "fresh", "concurrency", "max_new_tokens", "prompt_batch")
    at_least(0, cfg, "confirm", "max_retries", "temperature", "budget", "siblings")
    tasks = load_tasks(cfg.tasks, 0 if cfg.ids else cfg.num_tasks)
    if cfg.ids:
        wanted = {row.get("id") for row in read_jsonl(cfg.ids)}
        for unknown in sorted(wanted - {task["id"] for task in tasks}, key=str):
            die(f"{cfg.ids}: {unknown} is in none of {', '.join(cfg.tasks)}")
        tasks = [task for task in tasks if task["id"] in wanted]
    if not tasks:
        die(f"no tasks in {', '.join(cfg.tasks)}")
    if cfg.objective != "rerollout" or cfg.gate != "none":
        for task in tasks:
            if not task.get("failed_completion"):
                die(f"task {task['id']} has no failed_completion, which --objective {cfg.objective} and --gate {cfg.gate} read")
    start_run(cfg.out_dir, cfg, inputs=[*cfg.tasks, cfg.ids, cfg.hints_file, cfg.demos, cfg.model, *world_files(tasks)], ignore=FREE_FIELDS)
    if cfg.gate != "none" and cfg.gate != "logit_shift" and not cfg.gate_model:
        print(f"gate {cfg.gate}: a stand-in computed with the student (--gate_model asks a server)")
    hints, trials, calls = search(cfg, tasks, *load_engine(cfg, cfg.model))

    values = lambda field: [row[field] for row in hints if field in row]
    average = lambda field: f"{mean(values(field)):.3f}" if values(field) else "-"
    tried = [trial for rows in trials.values() for trial in rows]
    tokens_in, tokens_out, usd = cost(cfg, calls)
    print(f"tasks {len(tasks)}: {sum(row['passed'] for row in hints)} passed, {len(tasks) - len(hints)} without a hint")
    print(f"mean reward: {average('hint_reward')} in the search that chose the hints, {average('fresh_reward')} on fresh seeds, "
          f"{average('empty_reward')} without a hint")
    tested = [trial["hint_id"] for trial in tried if "reward" in trial]
    print(f"search: {len(tested)} rollouts, {len(set(tested))} hints tested, {len(tried) - len(tested)} rejected")
    print(f"writer {cfg.writer}: {len(calls)} calls, {tokens_in} + {tokens_out} tokens, USD {usd}")
    rewards = {field: mean(values(field)) for field in ("hint_reward", "fresh_reward", "empty_reward", "transfer_reward") if values(field)}
    spent = {} if usd == "unknown" else {"usd": float(usd), "usd_per_hint": float(usd) / max(1, len(set(tested)))}
    write_jsonl(Path(cfg.out_dir) / "summary.jsonl", [{  # a row for tables over several runs
        **{field: getattr(cfg, field) for field in ("search", "target", "objective", "gate", "writer", "writer_model", "seed")},
        "budget": rollout_budget(cfg), "tasks": len(tasks), "hints": len(hints), "passed": sum(row["passed"] for row in hints), **rewards,
        "num_rollouts": len(tested), "hints_tested": len(set(tested)), "hints_rejected": sum("rejected" in trial for trial in tried),
        "prompt_tokens": tokens_in, "completion_tokens": tokens_out, **spent}])
    print(f"{time.time() - started:.0f} seconds -> {cfg.out_dir}/hints.jsonl")


if __name__ == "__main__":
    main(parse_config(Config))
