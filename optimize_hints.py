"""Stage 1: find, for every failed step, the hint that makes the frozen teacher recover.

In:  task rows (data/<world>/*.jsonl: the prefix, the tools, the failed step, its public feedback).
Out: out/hints.jsonl (one row per task: its best hint), out/hint_trials.jsonl (every hint and rollout),
     out/writer_calls.jsonl (every answer of the hint writer), out/config.json.

The algorithm ([A], "Scaling On-Policy Self-Distillation with Hint Auto-Optimization"):
  1. The writer sees prefix, tools, failed step, public feedback and all earlier trials, and writes a hint.
  2. The leak check turns hints down that give an answer away or speak of the grader; that costs no rollout.
  3. The hint is appended to the same prefix every time and the teacher continues: one seeded rollout.
  4. The world grades the continuation; a promising hint gets --confirm more rollouts on fresh seeds.
  5. Three successes of three end a task; otherwise the next round, up to --max_rounds.
  6. The best hint by mean reward is kept. Its reward is biased by luck, so fresh seeds measure it again,
     and the same seeds without a hint give the control.
All tasks move together: a round is one set of concurrent writer calls and two batches for the engine.
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
from pathlib import Path
from statistics import mean

from tqdm import tqdm

from common import (EngineConfig, InfraError, RowLog, ask_server, at_least, die, grade_completion, in_threads, load_demos, load_engine,
                    load_hints, load_tasks, load_world, openai_client, opt, parse_config, parse_tool_calls, read_jsonl, render_prompt,
                    sample_tasks, seed_note, stable_seed, start_run, world_files, write_jsonl)


@dataclass
class Config(EngineConfig):
    tasks: list[str] = opt(["data/toolworld/train_tool.jsonl", "data/toolworld/train_chat.jsonl"], "task files")
    num_tasks: int = opt(240, "a subset balanced over failure kinds; 0 takes all")
    model: str = opt("data/toolworld/base", "the teacher: a Hugging Face folder")
    out_dir: str = opt("out", "where the results go; a run that was cut goes on there")
    writer: str = opt("scripted", "who writes hints: templates (a stand-in for an LLM) | an LLM server | a file",
                      ["scripted", "openai", "file"])
    hints_file: str = opt("", "--writer file: JSONL rows with hint and id (or failure_kind)")
    search: str = opt("confidence", "how rollouts are spread over hints; none: the writer's first hint, measured on the fresh seeds only",
                      ["confidence", "fixed3", "sequential", "best_of_n", "batch", "halving", "beam", "ucb", "agent", "none"])
    max_rounds: int = opt(15, "hints written per task at most")
    budget: int = opt(0, "teacher rollouts per task at most, the fresh ones apart; 0 = max_rounds * (1 + confirm)")
    confirm: int = opt(2, "further rollouts for a promising hint")
    fresh: int = opt(4, "rollouts on fresh seeds for the chosen hint, and as many without a hint")
    temperature: float = opt(1.0, "of the teacher's rollouts")
    max_new_tokens: int = opt(96, "of a rollout")
    hint_position: str = opt("end", "the message that takes the hint", ["end", "system", "first_user"])
    seed: int = opt(0, "names every random stream")
    writer_model: str = opt("", "--writer openai: the model's name")
    base_url: str = opt("", "--writer openai: the server, as in http://localhost:8000/v1; the key comes from OPENAI_API_KEY")
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
        self.seed, self.agent, self.rules = cfg.seed, cfg.search == "agent", {}
        for world in {view["world"] for view in views}:
            path = Path(load_world(world).__file__).with_name("writer_rules.jsonl")
            self.rules[world] = read_jsonl(path, ("feedback", "hints")) if path.exists() else GENERIC_RULES
        print("writer: scripted templates, a stand-in for an LLM (--writer openai asks a real one)")

    def write(self, view, round_index, slot=0):
        said = [view.get("failed_feedback", ""), *(t["feedback"] for t in view["trials"] if t.get("reward", 1) < 1)]
        rules, values = self.rules[view["world"]], marker_values(view)
        matching = [(rule, match.groups()) for rule in rules for text in said if (match := re.search(rule["feedback"], text))]
        hints = {hint for rule, groups in matching or [(rule, ()) for rule in rules]
                 for template in rule["hints"] for hint in self.expand(template, values, groups)}
        hints -= {trial["hint"] for trial in view["trials"]}
        words = set(view.get("revise", "").split())  # a revision shares words with its parent
        order = sorted(hints, key=lambda hint: (-len(words & set(hint.split())), stable_seed("scripted", self.seed, view["id"], hint)))
        if self.agent and view["trials"] and view["trials"][-1].get("reward", 0) >= 1:
            order = [view["trials"][-1]["hint"]]
        return {"hint": order[slot]} | ({"num_rollouts": 1} if self.agent else {}) if slot < len(order) else None

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
AGENT_RULES = """

You work by calling the tool test_hint, with a hint that keeps these rules: the assistant then takes its step with the hint, as \
often as you ask for, and you get the results. Its answers vary, so that one success may be luck. The rollouts are limited. When no \
further test is worth its price, answer without a call: the best hint tested is kept."""
TEST_HINT = {"type": "function", "function": {
    "name": "test_hint", "description": "Lets the assistant take its step with a hint. Returns what it did and a reward from 0 to 1, for every rollout.",
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
    return [{"role": "system", "content": WRITER_RULES}, {"role": "user", "content": request}]


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
        choice = response.choices[0]
        content = getattr(choice.message, "content", None)
        content = content if isinstance(content, str) else ""  # a list or nothing: an empty hint, which the leak check turns down
        row = {"hint": content.split("</think>")[-1].strip(), "model": response.model, "seed": seed,
               "finish_reason": choice.finish_reason or "stop"}
        for field in ("prompt_tokens", "completion_tokens"):
            if isinstance(count := getattr(response.usage, field, None), int):
                row[field] = count
        return row | self.read_call(choice.message) if self.cfg.search == "agent" else row

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


WRITERS = {"scripted": ScriptedWriter, "openai": OpenAIWriter, "file": FileWriter}


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
    """One rollout per hint, revised until one passes."""

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


# Records and rollouts.

def make_hint_id(task_id, hint):
    return f"{stable_seed(task_id, hint):016x}"


def roll_out(cfg, requests, tasks, engine, tokenizer, log):
    """The graded trials of each request (row without results, seeds), from one batch; None where the world gave no verdict."""
    wanted = [[{**row, "seed": seed} for seed in seeds] for row, seeds in requests]
    if not all(log.get(row) for rows in wanted for row in rows):
        # A batch that was cut is generated whole: its shape changes low bits, and so a few samples.
        batch = [tasks[row["id"]] for row, _ in requests]
        prompts = [render_prompt(tokenizer, task["messages"], task["tools"], row["hint"], cfg.hint_position, cfg.enable_thinking,
                                 load_demos(cfg.demos))
                   for task, (row, _) in zip(batch, requests)]
        samples = sample_tasks(engine, tokenizer, batch, prompts, [seeds for _, seeds in requests], cfg.max_new_tokens,
                               cfg.temperature)
        for task, rows, of_task in zip(batch, wanted, samples):
            for row, sample in zip(rows, of_task):
                if log.get(row):
                    continue
                try:
                    grade = grade_completion(task, sample.text)
                except InfraError as error:
                    tqdm.write(f"task {task['id']}: the world broke down ({error})")
                    continue
                log.add({**row, "completion": sample.text, "reward": grade.reward, "action": grade.action,
                         "feedback": grade.feedback, "num_tokens": len(sample.ids), **seed_note(engine)})
    return [[log.get(row) for row in rows] if all(map(log.get, rows)) else None for rows in wanted]


def call_place(task_id, round_index, slot):
    """Where a writer call stands in writer_calls.jsonl; the first of a round has no slot."""
    return {"id": task_id, "round": round_index} | ({"slot": slot} if slot else {})


def write_hints(cfg, writer, wanted, round_index, calls):
    """Adds a writer call for each (view, slot) to the log `calls`. Each is on disk once it is answered; those on disk are not repeated."""
    def write(item):
        row = writer.write(item[0], round_index, item[1])
        if row is not None:
            calls.add(call_place(item[0]["id"], round_index, item[1]) | row)

    asked = [(view, slot) for view, slot in wanted if not calls.get(call_place(view["id"], round_index, slot))]
    in_threads(write, asked, cfg.concurrency)  # answers that are under way when one fails still reach the disk


# The search.

def writer_view(view, strategy, slot):
    """What the writer is shown for a new hint."""
    parent = strategy.parent(slot)
    return view | {"left": strategy.left} | ({"revise": parent} if parent else {})


def search(cfg, tasks, engine, tokenizer):
    """Finds a hint for every task. Returns the rows of hints.jsonl, {task id: its search trials} and the writer's calls.

    Everything in cfg.out_dir counts as done, so running it again with the same cfg resumes. A task without a tested hint has
    no row.
    """
    out_dir, tasks = Path(cfg.out_dir), {task["id"]: task for task in tasks}
    log = RowLog(out_dir / "hint_trials.jsonl", ("id", "hint_id", "phase", "round", "seed"), ("id", "hint_id", "hint", "phase"),
                 finished=lambda row: "reward" in row or "rejected" in row)
    calls = RowLog(out_dir / "writer_calls.jsonl", ("id", "round", "slot"), ("id", "round", "hint"))
    views = {task_id: {key: task[key] for key in VISIBLE if key in task} | {"trials": []} for task_id, task in tasks.items()}
    writer = WRITERS[cfg.writer](cfg, list(views.values()))
    strategies = {task_id: SEARCHES[cfg.search](cfg) for task_id in tasks}
    void = set()  # their world broke down

    def request(task_id, hint, round_index, num):
        """(row, seeds) for the next `num` rollouts of a hint: the seeds go on where its trials end."""
        hint_id = make_hint_id(task_id, hint)
        start = sum(trial["hint_id"] == hint_id and "seed" in trial for trial in views[task_id]["trials"])
        row = {"id": task_id, "hint_id": hint_id, "round": round_index, "hint": hint, "phase": "search"}
        return row, [stable_seed("search", cfg.seed, task_id, hint_id, k) for k in range(start, start + num)]

    orders = {task_id: strategy.orders() for task_id, strategy in strategies.items()}
    for round_index in (bar := tqdm(range(cfg.max_rounds), desc="rounds", disable=None)):
        if not any(orders.values()):
            break
        slots = [(task_id, slot, num) for task_id, wanted in orders.items() for slot, (_, num) in enumerate(wanted)]
        write_hints(cfg, writer, [(writer_view(views[task_id], strategies[task_id], slot), slot) for task_id, slot, _ in slots], round_index, calls)
        requests = []
        for task_id, slot, num in slots:
            call, trials, strategy = calls.get(call_place(task_id, round_index, slot)), views[task_id]["trials"], strategies[task_id]
            ended = call is None or call.get("num_rollouts") == 0  # the writer has nothing left, or the agent is content
            strategy.hints_left = 0 if ended else max(0, strategy.hints_left - 1)
            if ended:
                continue
            num = min(num, call.get("num_rollouts", num))
            row, seeds = request(task_id, call["hint"], round_index, num)
            # An agent may test a hint again; what else comes twice repeats itself, also within a round.
            earlier = [trial["hint"] for trial in trials] + [other["hint"] for other, _ in requests if other["id"] == task_id]
            again = cfg.search == "agent" and call["hint"] in strategy.rewards
            reason = not again and leak_check(call["hint"], views[task_id], earlier, call.get("finish_reason", "stop"))
            if reason:
                trials.append(log.add(row | {"rejected": reason}))
            else:
                requests.append((row, seeds))
        while True:  # the new hints, then those that their strategy wants to see again
            for (row, _), trials in zip(requests, roll_out(cfg, requests, tasks, engine, tokenizer, log)):
                if trials is None:
                    void.add(row["id"])
                else:
                    views[row["id"]]["trials"] += trials
                    strategies[row["id"]].tell(row["hint"], trials)
            orders = {task_id: [] if task_id in void else strategy.orders() for task_id, strategy in strategies.items()}
            requests = [request(task_id, hint, round_index, num) for task_id, wanted in orders.items() for hint, num in wanted if hint is not None]
            if not requests:
                break
        bar.set_postfix_str(f"passed {mean(strategy.passed for strategy in strategies.values()):.0%}")

    chosen = {task_id: strategy.best() for task_id, strategy in strategies.items() if task_id not in void}
    chosen = {task_id: hint for task_id, hint in chosen.items() if hint is not None}
    hints = []
    for task_id, rewards in measure_fresh(cfg, chosen, tasks, engine, tokenizer, log).items():
        if rewards is None:
            void.add(task_id)
        else:
            hints.append(hint_row(cfg, task_id, chosen[task_id], views[task_id]["trials"], rewards, strategies[task_id].passed))
    calls = sorted(calls.rows.values(), key=lambda row: (row["round"], row["id"], row.get("slot", 0)))  # they arrived in any order
    write_jsonl(out_dir / "writer_calls.jsonl", calls)
    write_jsonl(out_dir / "hints.jsonl", hints)
    if void:
        print(f"{len(void)} tasks are left out, their world broke down: {', '.join(sorted(void)[:5])}; run again to retry them")
    return hints, {task_id: view["trials"] for task_id, view in views.items()}, calls


def measure_fresh(cfg, chosen, tasks, engine, tokenizer, log):
    """{task id: (fresh_reward, empty_reward)} of the chosen hints {task id: hint}, None where the world gave no verdict.

    Luck favoured the chosen hints; fresh seeds do not know them. The empty hint gets the very same seeds.
    """
    requests = []
    for task_id, hint in chosen.items():
        seeds = [stable_seed("fresh", cfg.seed, task_id, k) for k in range(cfg.fresh)]
        requests += [({"id": task_id, "hint_id": make_hint_id(task_id, text), "hint": text, "phase": "fresh"}, seeds)
                     for text in (hint, "")]
    means = [trials and mean(trial["reward"] for trial in trials) for trials in roll_out(cfg, requests, tasks, engine, tokenizer, log)]
    return {task_id: None if None in pair else pair for task_id, pair in zip(chosen, zip(means[::2], means[1::2]))}


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
    if cfg.base_url and cfg.writer != "openai":
        die("--base_url needs --writer openai")
    at_least(1, cfg, "max_rounds", "fresh", "concurrency", "max_new_tokens")
    at_least(0, cfg, "confirm", "max_retries", "temperature")
    tasks = load_tasks(cfg.tasks, cfg.num_tasks)
    if not tasks:
        die(f"no tasks in {', '.join(cfg.tasks)}")
    start_run(cfg.out_dir, cfg, inputs=[*cfg.tasks, cfg.hints_file, cfg.demos, cfg.model, *world_files(tasks)], ignore=FREE_FIELDS)
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
    print(f"{time.time() - started:.0f} seconds -> {cfg.out_dir}/hints.jsonl")


if __name__ == "__main__":
    main(parse_config(Config))
