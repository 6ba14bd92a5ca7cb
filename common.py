"""What two or more stages of nanoOPSD share, in this order: config and run folders, JSONL records, tasks, worlds and hints,
tool calls, rendering, model and attention, requests to servers, the sampling engines, episodes, packed rows, metrics.

torch is imported at first use, so that `--help` answers at once; transformers and yaml inside the functions that need them.
"""
import argparse
import atexit
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
import typing
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import compress
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent


class LazyModule:
    """The module `name`, imported at its first attribute access (torch alone takes over a second)."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        return getattr(importlib.import_module(self._name), attribute)


torch = LazyModule("torch")


class Refusal(SystemExit, ValueError):
    """Ends a stage with one line on stderr and exit code 1; a Python caller may catch it as a ValueError."""


def die(message):
    """Raises Refusal with one line that says what is wrong."""
    raise Refusal(f"error: {message}")


# Config: one flat dataclass per stage. Defaults < YAML presets (positional arguments) < --flags.

def opt(default, help, choices=None):
    """A dataclass field with its help line: `lr: float = opt(2e-4, "peak learning rate")`."""
    metadata = {"help": help, "choices": choices}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse_config(cls, argv=None):
    """An instance of the dataclass `cls` from the command line (`argv` holds no program name). Raises Refusal.

    A preset is only a saved list of flags: it goes through the same parser, so that a misspelt key or a wrong type in it
    gives the message that the command line would give.
    """
    parser = argparse.ArgumentParser(description=sys.modules[cls.__module__].__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = die
    parser.add_argument("presets", nargs="*", metavar="preset.yaml", help="saved flags, applied before those of the command line")
    kinds, defaults = typing.get_type_hints(cls), cls()
    for field in dataclasses.fields(cls):
        default, kind = getattr(defaults, field.name), kinds[field.name]
        inner = (typing.get_args(kind) or (kind,))[0]  # of `float | None` and of list[float]: float
        how = {"type": finite if inner is float else inner, "choices": field.metadata["choices"]}
        if inner is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif typing.get_origin(kind) is list:
            how["nargs"] = "+"
        text = f"{field.metadata['help']} (default: {default})".replace("%", "%%")
        parser.add_argument(f"--{field.name}", default=default, help=text, **how)
    for path in parser.parse_args(argv).presets:
        values = vars(parser.parse_args(preset_flags(path)))
        if values.pop("presets"):
            die(f"preset {path}: a yes-or-no key takes true or false")
        parser.set_defaults(**values)
    values = vars(parser.parse_args(argv))
    del values["presets"]
    return cls(**values)


def finite(text):
    """A float flag's value; nan and inf are numbers to float() and to nobody else."""
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"invalid float value: {text!r}")
    return value


finite.__name__ = "float"  # the word in argparse's own messages


@dataclass
class EngineConfig:
    """The flags that every stage shares: how prompts are rendered, who samples, and where. A stage's Config adds its own."""
    enable_thinking: bool | None = opt(None, "passed to the chat template where it is set")
    demos: str = opt("", "JSONL file of solved examples that stand before every conversation")
    engine: str = opt("hf", "who samples: hf = transformers | vllm = vLLM in this process | openai = a server at --engine_url",
                      ["hf", "vllm", "openai"])
    engine_url: str = opt("", "--engine openai: the server, as in http://localhost:8000/v1")
    engine_model: str = opt("", "--engine openai: the name that the server gives the model")
    vllm_memory: float = opt(0.3, "--engine vllm: share of the GPU's memory for its weights and its cache")
    max_length: int = opt(0, "longest prompt with its completion, for which vLLM reserves memory; 0 = what the model can read")
    device: str = opt("cpu", "cpu | cuda")
    dtype: str = opt("float32", "of weights and arithmetic; losses are float32 in any case", ["float32", "bfloat16"])

    def __post_init__(self):
        if not (self.engine == "openai") == bool(self.engine_url) == bool(self.engine_model):
            die("--engine openai, --engine_url and --engine_model go together")
        if not 0 < self.vllm_memory <= 1:
            die(f"--vllm_memory {self.vllm_memory}: it is a share, above 0 and at most 1")
        at_least(0, self, "max_length")


def at_least(minimum, cfg, *fields):
    """Refuses the first of the cfg's `fields` that lies below `minimum`."""
    for field in fields:
        if getattr(cfg, field) < minimum:
            die(f"--{field} {getattr(cfg, field)}: it is at least {minimum}")


def preset_flags(path):
    """The command line that the YAML file at `path` stands for."""
    import yaml
    try:
        values = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        die(f"preset {path}: {' '.join(str(error).split())}")
    if not isinstance(values, dict):
        die(f"preset {path}: expected lines of the form `key: value`")
    flags = []
    for key, value in values.items():
        if value is None:
            die(f"preset {path}: {key} has no value")
        elif isinstance(value, bool):
            flags.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, list):
            flags += [f"--{key}", *map(str, value)]
        else:
            flags.append(f"--{key}={value}")
    return flags


def start_run(out_dir, cfg, inputs=(), ignore=()):
    """Makes `out_dir` with its config.json and returns it as a Path.

    A folder of another run is refused with the differing fields named; fields in `ignore` and out_dir may differ. So is one
    whose `inputs`, files and model folders, have changed since. The same config means to resume, and its file stays as it was.
    """
    out_dir, module = Path(out_dir), sys.modules[type(cfg).__module__]
    row = {"stage": Path(module.__file__).stem, "config": json.loads(json.dumps(dataclasses.asdict(cfg))), "argv": sys.argv,
           "device": getattr(cfg, "device", "cpu"),
           "versions": {name: importlib.metadata.version(name) for name in ("numpy", "torch", "transformers")}
           | {"python": sys.version.split()[0]},
           "inputs": {str(path): fingerprint(path) for path in inputs}}
    lock_folder(out_dir)
    path = out_dir / "config.json"
    if path.exists():
        earlier = json.loads(path.read_text("utf-8"))
        there, now = ({"stage": r["stage"], **r["config"]} for r in (earlier, row))
        differing = [f"{key} ({there.get(key)!r} there, {now.get(key)!r} now)" for key in sorted(there.keys() | now.keys())
                     if there.get(key) != now.get(key) and key not in {"out_dir", *ignore}]
        if differing:
            die(f"{path} is of another run: {', '.join(differing)}; choose another --out_dir")
        for name, digest in earlier.get("inputs", {}).items():
            if row["inputs"].get(name) != digest:
                die(f"{name} has changed since the run in {out_dir} began; choose another --out_dir")
        return out_dir
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    if commit.returncode == 0:
        row["git_commit"] = commit.stdout.strip()
    write_text(path, json.dumps(row, indent=2) + "\n")
    atexit.register(forget_empty_run, out_dir)
    return out_dir


_locks = {}  # (device, inode) of a folder -> its open descriptor: the lock lasts as long as the process


def lock_folder(folder):
    """Makes the folder and keeps every other process from working in it until this one ends."""
    try:
        os.makedirs(folder, exist_ok=True)
        status = os.stat(folder)
        if (place := (status.st_dev, status.st_ino)) not in _locks:
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locks[place] = descriptor
    except BlockingIOError:
        die(f"another process works in {folder}: wait for it, or choose another --out_dir")
    except OSError as error:
        die(f"cannot work in {folder}: {error.strerror}; choose another --out_dir")


def forget_empty_run(out_dir):
    """A start that failed before it made anything leaves no config.json behind, which would refuse the corrected command."""
    if [path.name for path in out_dir.glob("*")] == ["config.json"]:
        (out_dir / "config.json").unlink()


def fingerprint(path):
    """sha256 of a file, or of the weights, configs and tokenizer in a model folder; a name that is neither stands for itself."""
    if not path or not Path(path).exists():
        return str(path)
    parts, digest = [path], hashlib.sha256()
    if Path(path).is_dir():
        parts = sorted(part for part in Path(path).iterdir() if part.suffix in (".safetensors", ".json", ".jinja"))
    for part in parts:
        with open(part, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def stable_seed(*parts):
    """A 63-bit seed from JSON-able parts. It names a random stream: stable_seed("search", task_id, 3)."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 1


# Records: one UTF-8 JSON object per line.

def read_jsonl(path, required=(), torn=True):
    """The rows of a JSONL file; a torn last line, left by a killed writer, is not one, or an error with torn=False.

    Raises Refusal that names file and line, for a bad line elsewhere and for a row without a `required` field.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        die(f"cannot read {path}: {error.strerror}")
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    rows = [(number, decode_row(line)) for number, line in filled]
    if torn and rows and rows[-1][1] is None:
        rows.pop()
    for number, row in rows:
        if row is None:
            die(f"{path} line {number}: not a JSON object")
        for field in required:
            if field not in row:
                die(f"{path} line {number}: missing field {field!r}")
    return [row for _, row in rows]


def decode_row(line):
    """The JSON object in the bytes `line`, or None."""
    try:
        row = json.loads(line)
    except ValueError:  # cut inside a character, it is a UnicodeDecodeError, a ValueError too
        return None
    return row if isinstance(row, dict) else None


def append_jsonl(path, row):
    """Appends a row in one write under an exclusive lock, after mending a torn tail. NaN and infinities raise ValueError."""
    # half a surrogate pair, which UTF-8 cannot hold, becomes its JSON escape
    line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
    with open(path, "a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.write(mend_tail(file, path) + line) < len(line):
            raise OSError(f"{path}: no room for the whole row")


def mend_tail(file, path):
    """Moves a torn last line to `path`.torn. Returns what must stand before the next row: a newline that is missing, or b""."""
    start = size = file.seek(0, os.SEEK_END)
    tail = b""
    while start and b"\n" not in tail.rstrip():  # backwards, until the last filled line is in sight
        start = max(0, start - 65536)
        file.seek(start)
        tail = file.read(size - start)
    body = tail.rstrip()
    cut = body.rfind(b"\n") + 1
    if not body or decode_row(body[cut:]) is not None:
        return b"\n" if body and not tail.endswith(b"\n") else b""
    with open(f"{path}.torn", "ab") as torn:
        torn.write(tail[cut:])
    file.truncate(start + cut)
    return b""


class RowLog:
    """A record file as rows by their `key` fields. What stands on disk is looked up instead of being made again.

    Rows that are not `finished` do not count; of finished rows with the same key the last one does. Without a path the rows
    are in memory only.
    """

    def __init__(self, path, key, required=(), finished=lambda row: True):
        self.path, self.key = path, key
        on_disk = read_jsonl(path, required) if path and Path(path).exists() else []
        self.rows = {self.place(row): row for row in on_disk if finished(row)}

    def place(self, row):
        return tuple(row.get(field) for field in self.key)

    def get(self, row):
        """The row that has the key fields of `row`, or None."""
        return self.rows.get(self.place(row))

    def add(self, row):
        """Appends the row unless its place is taken; returns the one that counts."""
        if self.place(row) not in self.rows:
            if self.path:
                append_jsonl(self.path, row)
            self.rows[self.place(row)] = row
        return self.get(row)


def write_text(path, text):
    """Writes a whole file under a temporary name, then renames it: never half a file."""
    Path(f"{path}.tmp").write_text(text, "utf-8", "backslashreplace")
    os.replace(f"{path}.tmp", path)


def write_jsonl(path, rows):
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


@contextlib.contextmanager
def new_folder(path):
    """Yields a temporary folder, which takes the name `path` when the block has ended well."""
    temporary = Path(f"{path}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)


# Tasks, worlds and hints.

@dataclass
class Grade:
    """What a world says about a completion."""
    reward: float  # in [0, 1]
    action: str  # intended | substituted | abandoned | malformed
    feedback: str  # public: never the gold values

    def __post_init__(self):
        if self.action not in ("intended", "substituted", "abandoned", "malformed"):
            raise ValueError(f"a world gave the action {self.action!r}: it is intended, substituted, abandoned or malformed")
        self.reward = float(self.reward)  # numpy's numbers and bools are no JSON
        if not 0 <= self.reward <= 1 or (self.action != "intended" and self.passed):
            raise ValueError(f"a world gave the reward {self.reward} for {self.action}: it lies in [0, 1], and 1 is for intended only")

    @property
    def passed(self):
        return self.reward >= 1


class InfraError(Exception):
    """A world broke down: no verdict on the completion, which is not the same as a reward of 0."""


def load_tasks(paths, num_tasks=0):
    """The rows of the task files, in order. Raises Refusal for a missing field and for an id that occurs twice.

    num_tasks > 0 keeps a subset balanced over failure kinds: every kind's first task, then every kind's second, and so on,
    kinds in sorted order; the file order stays.
    """
    if num_tasks < 0:
        die("--num_tasks is 0 for all, or a positive number")
    tasks = [task for path in paths for task in read_jsonl(path, ("id", "world", "messages", "tools", "spec"), torn=False)]
    ranks, per_kind = {}, {}  # id -> (its number within its kind, kind)
    for task in tasks:
        if task["id"] in ranks:
            die(f"task id {task['id']!r} occurs twice in {', '.join(map(str, paths))}")
        kind = task.get("failure_kind", "")
        per_kind[kind] = per_kind.get(kind, -1) + 1
        ranks[task["id"]] = per_kind[kind], kind
    kept = set(sorted(ranks, key=ranks.get)[:num_tasks or None])
    return [task for task in tasks if task["id"] in kept]


_THOUGHTS = re.compile(r"\A\s*<think>.*?(?:</think>|\Z)\s*", re.DOTALL)


def world_files(tasks):
    """The files that decide how the tasks are graded and which templates the scripted writer has: inputs of a run."""
    folders = sorted({Path(load_world(task["world"]).__file__).parent for task in tasks})
    return [path for folder in folders for name in ("env.py", "writer_rules.jsonl") if (path := folder / name).exists()]


@functools.cache
def load_world(world):
    """The module data/<world>/env.py, or <world>/env.py where `world` is a folder."""
    paths = ROOT / "data" / world / "env.py", Path(world) / "env.py"
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        die(f"world {world!r}: there is no {paths[0]} and no {paths[1]}")
    spec = importlib.util.spec_from_file_location("world_" + re.sub(r"\W", "_", str(path)), path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def play_turn(task, texts, last, env=None):
    """(Env, its answers, None) after the last of `texts`, the assistant messages so far; (None, [], Grade) when the episode is over,
    because the world says so or with last=True.

    `env` is the one of the message before. Without it, and after a breakdown, all of them are played in a fresh one.
    Raises InfraError when the world has broken down three times, Refusal when the task's prefix cannot be replayed.
    """
    world = load_world(task["world"])
    for pause in (1, 2, None):  # seconds until the next attempt
        try:
            to_play = texts[-1:]
            if env is None:
                env, to_play = world.Env(), texts
                env.reset(task)
            for text in to_play:
                answer = env.step({"role": "assistant", "content": _THOUGHTS.sub("", text)})  # what was thought was not said
            if last or answer[1]:
                return None, [], env.grade()
            return env, answer[0], None
        except InfraError:
            if pause is None:
                raise
            env = None
            time.sleep(pause)
        except ValueError as error:
            die(f"task {task['id']}: {error}")


def grade_completion(task, text):
    """The Grade of the assistant message `text`, played in a fresh environment. Raises as play_turn does."""
    return play_turn(task, [text], last=True)[2]


def stop_on_breakdown(task, error):
    die(f"task {task['id']}: its world broke down ({error}); the same command goes on from there")


def grade_or_stop(task, text):
    """grade_completion for a stage that cannot go on without a verdict."""
    try:
        return grade_completion(task, text)
    except InfraError as error:
        stop_on_breakdown(task, error)


def load_hints(path, tasks, control="none", seed=0):
    """{task id: row with `hint` and `hint_id`}, without the tasks that have no hint.

    A row with `failure_kind` in place of `id` serves every task of that kind. Path "" or "none" and control "empty" give every
    task the empty hint; control "shuffled" gives each the hint of a task of another failure kind, drawn by `seed`.
    """
    if control == "empty" or str(path) in ("", "none"):
        return {task["id"]: {"id": task["id"], "hint_id": "empty", "hint": ""} for task in tasks}
    if not Path(path).exists():
        die(f"there are no hints in {path} (no such file): run `python optimize_hints.py` first, or name another file")
    rows = {row.get("id", ("kind", row.get("failure_kind"))): row for row in read_jsonl(path, ("hint",))}
    kinds = {task["id"]: task.get("failure_kind", "") for task in tasks}
    hints = {}
    for task_id, kind in kinds.items():
        row = rows.get(task_id) or rows.get(("kind", kind))
        if row:
            hints[task_id] = {"hint_id": f"kind:{kind}", **row, "id": task_id}
    if control != "shuffled":
        return hints
    shuffled = {}
    for task_id in hints:
        donors = [other for other in hints if kinds[other] != kinds[task_id]]
        if not donors:
            die("shuffled hints need tasks of two failure kinds or more")
        shuffled[task_id] = {**hints[donors[stable_seed("shuffled", seed, task_id) % len(donors)]], "id": task_id}
    return shuffled


# Tool calls.

SKIP_OR_CALL = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>\s*", re.DOTALL)
CALL_END = re.compile(r"\s*</tool_call>")
STRICT_JSON = json.JSONDecoder(parse_constant=int)  # int("NaN") raises: NaN and the infinities are not JSON


def parse_tool_calls(text):
    """(status, calls): status ok | no_call | malformed, calls [{"name", "arguments"}]. <think> text is skipped.

    One JSON value is decoded after each opening tag, since a string in it may hold braces or the closing tag; then only
    blanks may stand before the closing tag. One bad call makes the message malformed, as it does for serving parsers.
    """
    calls, position = [], 0
    while tag := SKIP_OR_CALL.search(text, position):
        position = tag.end()
        if tag[0].startswith("<think>"):
            continue
        try:
            call, position = STRICT_JSON.raw_decode(text, position)
        except (ValueError, RecursionError):
            return "malformed", []
        end = CALL_END.match(text, position)
        if not end or not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
            return "malformed", []
        calls.append({"name": call["name"], "arguments": call["arguments"]})
        position = end.end()
    return "ok" if calls else "no_call", calls


def calls_match(expected, got, schema, order_matters=False):
    """True when two lists of calls say the same, in any order unless order_matters.

    schema: {argument: JSON type or "array<type>" or JSON schema}. Names, strings and sets of arguments are compared exactly,
    integers too; other numbers to a relative 1e-9; true and false are not numbers.
    """
    def same(want, call):
        return want["name"] == call["name"] and same_value(want["arguments"], call["arguments"], {"properties": schema})

    if order_matters:
        return len(expected) == len(got) and all(map(same, expected, got))
    left = list(got)
    for want in expected:
        position = next((i for i, call in enumerate(left) if same(want, call)), None)
        if position is None:
            return False
        del left[position]
    return not left


def same_value(want, got, schema):
    """The comparison of calls_match for one value; a part that the schema does not name is judged by the expected value."""
    if isinstance(schema, str):
        items = re.fullmatch(r"array<(.*)>", schema)
        schema = {"items": items[1]} if items else {"type": schema}
    if isinstance(want, bool) or isinstance(got, bool):
        return want is got
    if isinstance(want, (int, float)) and isinstance(got, (int, float)):
        return want == got or schema.get("type") != "integer" and math.isclose(want, got, rel_tol=1e-9)
    if isinstance(want, list) and isinstance(got, list):
        return len(want) == len(got) and all(same_value(w, g, schema.get("items", {})) for w, g in zip(want, got))
    if isinstance(want, dict) and isinstance(got, dict):
        inner = schema.get("properties", {})
        return want.keys() == got.keys() and all(same_value(want[key], got[key], inner.get(key, {})) for key in want)
    return type(want) is type(got) and want == got


# Rendering.

def place_hint(messages, hint, position="end"):
    """The messages with "\\n" + hint added to one of them: the last (end), the system or the first user message.

    At the end it stands inside the closing tag of a tool response. It adds no turn: templates that drop thoughts before the
    last user turn render the rest as before, and the prompt without the hint text is the student's byte for byte.
    """
    if not hint:
        return list(messages)
    role = {"end": None, "system": "system", "first_user": "user"}[position]
    places = [i for i, message in enumerate(messages) if message["role"] == role] if role else [len(messages) - 1]
    if not places:
        die(f"hint position {position}: the prefix has no {role} message")
    at = messages[places[0]]
    if at["role"] not in ("system", "user", "tool"):
        die("a hint goes at the end of a tool or a user message, and this prefix ends in neither")
    return [*messages[:places[0]], {**at, "content": at["content"] + "\n" + hint}, *messages[places[0] + 1:]]


# What a template that knows no tools cannot say, in the tags that parse_tool_calls reads: schemas, calls, tool responses.
TOOLS_TEXT = """# Tools

You can use these tools:
{schemas}

To use a tool, answer with its name and arguments as one JSON object between these tags and nothing else:
<tool_call>
{"name": "<tool name>", "arguments": {"<argument>": "<value>"}}
</tool_call>
When no tool is needed, answer in plain words."""


def call_text(call):
    """A recorded tool call as a model writes it. Arguments that are a string already are JSON text."""
    call = call.get("function", call)
    arguments = call["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(call["name"], ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'


def tools_as_text(messages, tools):
    """The messages for a template that knows no tools: schemas in the system message, calls as text of the assistant, tool
    responses, of which several in a row make one message, as text of the user.
    """
    said, before = [], ""
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = "Tool response:\n" + content  # small models copy a <tool_response> tag into their own turns
            if before == "tool":
                content = said.pop()["content"] + "\n" + content
            said.append({"role": "user", "content": content})
        else:
            said.append({"role": role, "content": "\n".join(filter(None, [content, *map(call_text, message.get("tool_calls") or [])]))})
        before = role
    if tools:
        schemas = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        system = said.pop(0)["content"] + "\n\n" if said[0]["role"] == "system" else ""
        said.insert(0, {"role": "system", "content": system + TOOLS_TEXT.replace("{schemas}", schemas)})
    return said


@functools.cache
def knows_tools(tokenizer):
    """True when the chat template shows tool schemas, writes a call as parse_tool_calls reads it, and sets a tool's response
    apart from the message of any other role. Where it does not, says so, once; render_prompt then puts all of it into text.
    """
    def render(messages, tools=None):
        try:
            return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        except Exception:  # whatever a template raises: it does not take these messages
            return ""

    call = {"name": "probe_call", "arguments": {"probe_argument": "probe value"}}
    asked = [{"role": "user", "content": "probe question"}]
    called = [*asked, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}]
    tool, stranger = (render([*called, {"role": role, "content": "probe response"}]) for role in ("tool", "probe_role"))
    function = {"name": "probe_schema", "description": "-", "parameters": {"type": "object", "properties": {}}}
    missing = [what for what, is_there in (
        ("tool schemas", "probe_schema" in render(asked, [{"type": "function", "function": function}])),
        ("tool calls between <tool_call> tags", parse_tool_calls(tool) == ("ok", [call])),
        ("tool responses", "probe response" in tool and tool != stranger.replace("probe_role", "tool"))) if not is_there]
    if missing:
        print(f"note: this model's chat template has no {', no '.join(missing)}: schemas go into the system message as text, calls and "
              "responses into the turns of assistant and user")
    return not missing


@functools.cache  # a stage renders hundreds of prompts with them
def load_demos(path):
    """The messages of a file of solved examples, one after the other; none for path "".

    A row's `messages` begin with a user message and end with an assistant's. Raises Refusal that names the row.
    """
    rows = read_jsonl(path, ("messages",), torn=False) if path else []
    for number, row in enumerate(rows, 1):
        roles = [message.get("role") for message in row["messages"]]
        if not roles or roles[0] != "user" or roles[-1] != "assistant" or not set(roles) <= {"user", "assistant", "tool"}:
            die(f"{path} row {number}: a demonstration begins with a user message, ends with an assistant's and has no system message")
    return [message for row in rows for message in row["messages"]]


def render_prompt(tokenizer, messages, tools, hint="", hint_position="end", enable_thinking=None, demos=(), later=()):
    """Token ids of the prompt up to the assistant's turn, the student's (hint "") as well as the teacher's.

    demos: messages of solved examples (load_demos); they stand after the system message, before the conversation. later: the
    messages of an episode that began after `messages`; the hint stays where it stood at its first turn. Blanks at
    the end of a message are cut, since some templates cut them and a hint would bring them back; not those of an assistant.
    Raises Refusal for a model without a chat template, and with what the template itself objects to.
    """
    def plain(message):
        content = message.get("content") or ""
        return {**message, "content": content if message["role"] == "assistant" else content.rstrip()}

    messages = [*place_hint(list(map(plain, messages)), hint, hint_position), *map(plain, later)]
    after_system = int(messages[0]["role"] == "system")
    messages[after_system:after_system] = map(plain, demos)
    uses_tools = tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
    if uses_tools and not knows_tools(tokenizer):
        messages, tools = tools_as_text(messages, tools), None
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    from jinja2 import TemplateError
    try:
        return list(tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=True, add_generation_prompt=True,
                                                  return_dict=True, **options)["input_ids"])
    except (ValueError, TypeError, TemplateError) as error:
        die(f"the model's chat template cannot render a prompt: {(str(error).strip() or type(error).__name__).splitlines()[0]}")


def completion_text(tokenizer, prompt, ids):
    """The text of the sampled ids, for the grader: special tokens are left out, the tags of calls and thoughts are not.

    Some tokenizers call these tags special too. A thought that the prompt has opened gets its opening tag back.
    """
    tags = {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    left_out = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special and token.content not in tags}
    opened = tokenizer.decode(prompt[-4:]).rstrip().endswith("<think>")
    kept = [i for i in ids if i not in left_out]
    return "<think>" * opened + tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# Model and attention.

def load_engine(cfg, path, loaded=()):
    """(engine, tokenizer) that sample from the model folder `path`, as the EngineConfig `cfg` says.

    The hf engine samples from the model in `loaded`, (model, tokenizer), or loads one; the others need no weights in transformers.
    """
    if cfg.engine == "hf":
        model, tokenizer = loaded or load_model(path, cfg.device, cfg.dtype)
        return HFEngine(model, tokenizer), tokenizer
    from types import SimpleNamespace
    from transformers import AutoConfig, GenerationConfig
    tokenizer = load_tokenizer(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:  # such as the folder of an adapter alone
        die(f"cannot load model {path}: it has no config.json that transformers knows ({str(error).splitlines()[0]})")
    generation = GenerationConfig.from_pretrained(path) if (Path(path) / "generation_config.json").exists() else None
    stops = stop_ids(tokenizer, SimpleNamespace(config=config, generation_config=generation))
    limit = min(cfg.max_length or config.max_position_embeddings, config.max_position_embeddings)
    if cfg.engine == "openai":
        return OpenAIEngine(cfg.engine_url, cfg.engine_model, tokenizer, stops, limit), tokenizer
    # Under torchrun an engine each. vLLM joins a group of one by itself, and a second engine in this process finds it there.
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    ranks = {"distributed_executor_backend": "external_launcher"} if several else {}
    return VLLMEngine(path, stops, limit, cfg.vllm_memory, cfg.device, cfg.dtype, **ranks), tokenizer


def load_tokenizer(path):
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        die(f"cannot load model {path}: no tokenizer is to be had from it ({str(error).splitlines()[0]})")


def check_device(device):
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        die(f"--device {device}: torch finds no GPU here; leave the flag out, or install a build of torch for your GPU")


def load_model(path, device="cpu", dtype="float32"):
    """(model in eval mode, tokenizer) of a Hugging Face folder, with `attention` below in every layer; an adapter's is merged into
    the model that it was made for.

    Raises Refusal for a checkpoint that lacks weights and for a model that our attention cannot serve.
    """
    check_device(device)
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.masking_utils import sdpa_mask
    from transformers.utils import logging
    logging.disable_progress_bar()
    AttentionInterface.register("nanoopsd", attention)
    AttentionMaskInterface.register("nanoopsd", sdpa_mask)  # without it transformers would hand over no 2D mask at all
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if (adapter := Path(path) / "adapter_config.json").exists():
        from peft import PeftModel
        model, tokenizer = load_model(json.loads(adapter.read_text("utf-8"))["base_model_name_or_path"], device, dtype)
        model = PeftModel.from_pretrained(model, path).merge_and_unload().eval().requires_grad_(True)  # peft froze it
        model.name_or_path = str(path)  # an adapter that is trained on top names this one as its base
        return model, tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="nanoopsd", output_loading_info=True)
    except (OSError, ValueError, KeyError) as error:  # no such folder, no tokenizer in it, a kind of model that is unknown
        what = "it is no Hugging Face folder of a causal LM" if Path(path).is_dir() else "there is no such folder, nor a model hub that has it"
        die(f"cannot load model {path}: {what} ({str(error).splitlines()[0]})")
    if info["missing_keys"]:
        die(f"model {path} lacks weights: {', '.join(sorted(info['missing_keys'])[:3])}")
    model = model.to(device).eval()
    for weight in model.parameters():
        # Weights mapped straight from a file stand at odd addresses, where a matrix product of one row rounds differently: a
        # resumed run would leave the unbroken one, and an empty hint would no longer score exactly as the student does.
        weight.data = weight.data.clone()
    check_model(model)
    return model, tokenizer


def check_model(model):
    """Refuses a model whose layers are not all plain full attention through `attention`, or whose logits are scaled."""
    config = model.config
    assert config._attn_implementation == "nanoopsd", config._attn_implementation
    with torch.no_grad():
        num_reached = len(SharedCache(model, [[0, 0]], 1).prefix)
    windowed = getattr(config, "sliding_window", None) or set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if num_reached != config.num_hidden_layers or windowed:
        die(f"{config.model_type}: not every layer is plain full attention that transformers lets us replace")
    head_weight(model)


def head_weight(model):
    """The (V, D) matrix that turns final hidden states into logits, tied or not."""
    scaled = [name for name in ("final_logit_softcapping", "logits_scaling", "logit_scale") if getattr(model.config, name, None)]
    head = model.get_output_embeddings()
    if scaled or getattr(head, "bias", None) is not None:
        die(f"{model.config.model_type}: its logits are more than a matrix product ({', '.join(scaled) or 'bias'})")
    return whole(head.weight)


def whole(tensor):
    """The full tensor of one that is cut over several processes; all of them must call it together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def logits_of(hidden, weight, out=None):
    """hidden (..., D) @ weight.T (V, D) in float32: a bfloat16 logit of 20 is off by up to 0.06, more than two models may differ.

    On a GPU the product itself is float32, into `out` where it is given (for hidden (n, D)); a CPU has no such product.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        flat = torch.mm(hidden.reshape(-1, hidden.shape[-1]), weight.T, out_dtype=torch.float32, out=out)
        return flat.view(*hidden.shape[:-1], len(weight))
    return (hidden @ weight.T).float()


def plain_weights(model):
    """(Hugging Face name, tensor) of every weight: adapters merged into theirs, tied ones under both names."""
    modules = dict(model.named_modules())
    for name, weight in model.state_dict().items():
        weight = whole(weight)
        owner, adapted, last = name.partition(".base_layer.")
        if adapted and last == "weight":
            weight = (weight.float() + modules[owner].get_delta_weight("default").float()).to(weight.dtype)
        if ".lora_" not in name:
            yield f"{owner}.{last}" if adapted else name, weight


def stop_ids(tokenizer, model):
    """The ids that end a turn: those of tokenizer, config and generation_config together."""
    named = [getattr(owner, "eos_token_id", None) for owner in (tokenizer, model.config, getattr(model, "generation_config", None))]
    return sorted({i for ids in named if ids is not None for i in (ids if isinstance(ids, (list, tuple)) else [ids])})


class SharedCache:
    """Keys and values of P prompts and of the n samples that continue each of them.

    A prompt's samples stand side by side where the model expects a sequence: it is called on (P, n) newest tokens,
    its layers see ordinary shapes, and a prompt's keys are read once for all of its samples.
    """

    def __init__(self, model, prompts, max_new_tokens, prefill_tokens=4096):
        """Reads the prompts (lists of ids, longest first), about `prefill_tokens` a call: small calls stay in the CPU's cache."""
        self.model, self.max_new_tokens = model, max_new_tokens
        self.lengths = torch.tensor([len(ids) for ids in prompts], device=model.device)  # (P,)
        self.prefix = {}  # layer -> keys and values, both (P, Hkv, L, D)
        self.own = {}  # layer -> keys and values, both (P, Hkv, n, max_new_tokens, D)
        self.num_own = None  # tokens cached of every sample; None while the prompts are read
        states, per_call = [], max(1, prefill_tokens // len(prompts[0]))
        for start in range(0, len(prompts), per_call):
            called = prompts[start:start + per_call]
            self.reading = slice(start, start + len(called))
            # Padded on the right: causal attention never looks there, so that no mask is needed.
            padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in called], batch_first=True)
            hidden = model.base_model(padded.to(model.device), use_cache=False, shared_cache=self).last_hidden_state
            states.append(hidden[range(len(called)), [len(ids) - 1 for ids in called]])
        self.last_hidden = torch.cat(states)  # (P, D), predicts the first new token
        self.num_own = 0

    def advance(self, tokens):
        """Final hidden states (P, n, D) after one more token (P, n) of every sample."""
        positions = (self.lengths + self.num_own)[:, None].expand_as(tokens)
        length = next(iter(self.prefix.values()))[0].shape[2]
        mask = (torch.arange(length, device=tokens.device) < self.lengths[:, None])[:, None, None]  # (P, 1, 1, L)
        hidden = self.model.base_model(tokens, position_ids=positions, attention_mask=mask, use_cache=False,
                                       shared_cache=self).last_hidden_state
        self.num_own += 1
        return hidden

    def keep(self, prompts, slots):
        """Keeps the prompts with indices `prompts` (P',) and, of each, the samples `slots` (P', n')."""
        self.lengths = self.lengths[prompts]
        for layer, pair in self.prefix.items():
            self.prefix[layer] = tuple(x[prompts] for x in pair)
        for layer, pair in self.own.items():
            self.own[layer] = tuple(x[prompts[:, None], :, slots].transpose(1, 2).contiguous() for x in pair)

    def store_prompts(self, layer, key, value):
        """key and value (called prompts, Hkv, L', D)."""
        if layer not in self.prefix:  # the first call holds the longest prompt; zeros, since a NaN would pass a weight of 0
            shape = (len(self.lengths), *key.shape[1:])
            self.prefix[layer] = key.new_zeros(shape), value.new_zeros(shape)
        for kept, new in zip(self.prefix[layer], (key, value)):
            kept[self.reading, :, :key.shape[2]] = new

    def attend(self, layer, query, key, value, prefix_mask, scaling):
        """Attention of the newest tokens. query (P, H, n, D), key and value (P, Hkv, n, D) -> (P, n, H, D)."""
        num_prompts, heads, num, dim = query.shape
        groups, steps = key.shape[1], self.num_own + 1
        if layer not in self.own:
            shape = (num_prompts, groups, num, self.max_new_tokens, dim)
            self.own[layer] = key.new_empty(shape), value.new_empty(shape)
        for kept, new in zip(self.own[layer], (key, value)):
            kept[:, :, :, self.num_own] = new
        own_key, own_value = (x[:, :, :, :steps] for x in self.own[layer])
        prefix_key, prefix_value = self.prefix[layer]

        query = (query * scaling).view(num_prompts, groups, -1, num, dim).transpose(2, 3)  # (P, Hkv, n, G, D)
        flat = query.reshape(num_prompts, groups, -1, dim)  # (P, Hkv, n*G, D)
        on_prefix = (flat @ prefix_key.transpose(-1, -2)).masked_fill(~prefix_mask, -torch.inf)  # (P, Hkv, n*G, L)
        on_own = query @ own_key.transpose(-1, -2)  # (P, Hkv, n, G, steps)
        scores = torch.cat([on_prefix, on_own.reshape(*flat.shape[:3], steps)], -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)  # (P, Hkv, n*G, L + steps), one softmax over both
        from_prefix = weights[..., :-steps] @ prefix_value
        from_own = weights[..., -steps:].view(on_own.shape) @ own_value
        mixed = from_prefix.view(query.shape) + from_own  # (P, Hkv, n, G, D)
        return mixed.permute(0, 2, 1, 3, 4).reshape(num_prompts, num, heads, dim)


def attention(module, query, key, value, attention_mask, scaling=None, shared_cache=None, **kwargs):
    """The attention of every model we load. query (B, H, S, D), key and value (B, Hkv, S, D) -> (B, S, H, D), None.

    Without a cache it is transformers' SDPA attention: causal, or under the 2D or 4D boolean mask it is given.
    """
    if shared_cache is not None:
        if shared_cache.num_own is not None:
            return shared_cache.attend(module.layer_idx, query, key, value, attention_mask, scaling), None
        shared_cache.store_prompts(module.layer_idx, key, value)
    from torch.compiler import is_compiling
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    if isinstance(attention_mask, BlockMask):
        attend = flex_attention if is_compiling() else compiled(flex_attention)
        return attend(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True,
                      kernel_options=BACKWARD_BLOCKS).transpose(1, 2), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


# Sizes of flex_attention's backward pass: 15% faster than its own choice at a head dimension of 128 on an H200.
BACKWARD_BLOCKS = {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32, "bwd_num_warps": 4, "bwd_num_stages": 3}


@functools.cache
def compiled(function):
    """torch.compile of a function, made once."""
    return torch.compile(function)


# Requests to servers with the OpenAI API.

def openai_client(url, timeout):
    """The official client; `url` "" means OpenAI's own, `timeout` is in seconds for one request. The key comes from OPENAI_API_KEY."""
    import openai
    # Retries are ours alone: the SDK's would multiply them, and its timeout is ten minutes.
    return openai.OpenAI(base_url=url or None, api_key=os.environ.get("OPENAI_API_KEY") or "none", max_retries=0, timeout=timeout)


def retry_after(error):
    """Seconds that the server asks to wait, given as a number or as a date; 0 where it says nothing."""
    value = error.response.headers.get("retry-after", "") if hasattr(error, "response") else ""
    try:
        return float(value) if value[:1].isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except ValueError:
        return 0.0


def ask_server(request, max_retries, who, field="choices", mend=lambda error: False):
    """The answer of `request()`, a call of the openai client, in 1 + max_retries requests at most.

    An answer with an empty `field` is none. `mend(error)` says whether it changed the request so that the next one need not
    wait. Raises Refusal, which begins with `who`, for what waiting does not mend and after the last request.
    """
    import openai
    for attempt in range(max_retries + 1):
        try:
            response = request()
            if getattr(response, field, None):
                return response
            reason, pause = f"an answer without {field}", 0.0
        except openai.APIError as error:
            status = getattr(error, "status_code", 0)  # 0: no answer came
            reason, pause = "timeout" if isinstance(error, openai.APITimeoutError) else str(error), retry_after(error)
            if "insufficient_quota" in (error.code, error.type):  # a 429 that no waiting mends
                die(f"{who}: quota exhausted: {reason}")
            if mend(error):
                continue
            if 400 <= status < 500 and status not in (408, 409, 429):
                die(f"{who}: bad request: {reason}")
        if attempt < max_retries:
            time.sleep(max(pause, 2 ** attempt * (1 + random.random())))  # the server's wish is a lower bound
    die(f"{who}: {reason} after {attempt + 1} attempts")


def in_threads(function, items, concurrency, progress=lambda num_finished: None):
    """[function(item) for item in items], at most `concurrency` at a time; `progress` is told how many more are finished.

    After a failure or Ctrl-C none is begun any more, those under way are waited for, and the failure is raised.
    """
    with ThreadPoolExecutor(concurrency) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
                progress(1)
        finally:
            for future in futures:
                future.cancel()
    return [future.result() for future in futures]


# The sampling engines.

@dataclass
class Sample:
    ids: list  # as sampled, the stop token included
    logprobs: list  # nats, under the tempered distribution the ids were drawn from
    finish_reason: str  # stop | length
    text: str = ""  # for the grader; sample_tasks fills it in


def sample_tokens(logits, uniforms, temperature):
    """Draws by inverse CDF. logits (..., V), uniforms (...) in [0, 1) -> ids (...), logprobs (...).

    Both come from softmax(logits / temperature) in float32. temperature 0 takes the likeliest token, log-prob at temperature 1.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
    if temperature == 0:
        ids = logprobs.argmax(-1)
    else:
        cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
        target = uniforms[..., None] * cdf[..., -1:]  # rounding leaves the last value beside 1
        ids = torch.searchsorted(cdf, target, right=True)[..., 0].clamp(max=logits.shape[-1] - 1)
    return ids, logprobs.gather(-1, ids[..., None])[..., 0]


def check_lengths(prompts, max_new_tokens, limit):
    """Raises ValueError that names the index of a prompt which is empty or does not fit `limit` tokens with its completion."""
    for index, ids in enumerate(prompts):
        if not 0 < len(ids) <= limit - max_new_tokens:
            raise ValueError(f"prompt {index}: {len(ids)} tokens + {max_new_tokens} new ones do not fit the model's {limit}")


class HFEngine:
    """Samples from a transformers model: a prompt is read once, all samples of a batch are decoded together.

    It samples from the very weights that are in training: nothing is pushed. max_batch_tokens bounds the tokens whose keys and
    values a batch holds, prompts and new tokens.
    """

    seeded = True  # a sample is fixed by its prompt and seed

    def __init__(self, model, tokenizer, max_batch_tokens=65536):
        self.model, self.max_batch_tokens, self.max_length = model, max_batch_tokens, model.config.max_position_embeddings
        self.stop_ids = stop_ids(tokenizer, model)

    def generate(self, prompts, seeds, max_new_tokens, temperature=1.0, progress=lambda num_finished: None):
        """For each prompt (list of ids) a list of Samples, one for each of its seeds (ints).

        A sample is fixed by its prompt and seed: up to float rounding it does not depend on its batch. `progress` is told
        how many more samples are finished. Raises ValueError naming the index of a prompt that is empty or does not fit the
        model together with max_new_tokens.
        """
        check_lengths(prompts, max_new_tokens, self.max_length)
        samples, training = [[] for _ in prompts], self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                for batch in self.batches(prompts, seeds, max_new_tokens):
                    done = self.decode([prompts[i] for i in batch], [seeds[i] for i in batch], max_new_tokens, temperature, progress)
                    for i, of_prompt in zip(batch, done):
                        samples[i] = of_prompt
        finally:
            self.model.train(training)
        return samples

    def batches(self, prompts, seeds, max_new_tokens):
        """Lists of prompt indices, longest prompt first, so that a batch holds similar lengths."""
        batch, used = [], 0
        for i in sorted((i for i in range(len(prompts)) if seeds[i]), key=lambda i: -len(prompts[i])):
            cost = len(prompts[batch[0] if batch else i]) + len(seeds[i]) * max_new_tokens
            if batch and used + cost > self.max_batch_tokens:
                yield batch
                batch, used = [], 0
            batch.append(i)
            used += cost
        if batch:
            yield batch

    def decode(self, prompts, seeds, max_new_tokens, temperature, progress):
        """The Samples of one batch: P prompts, longest first, with n slots each (n = the most seeds of a prompt)."""
        device, head = self.model.device, head_weight(self.model)
        cache = SharedCache(self.model, prompts, max_new_tokens)
        num, stops = max(map(len, seeds)), torch.tensor(self.stop_ids, device=device)
        uniforms = torch.zeros(len(prompts), num, max_new_tokens, dtype=torch.float64)
        for p, of_prompt in enumerate(seeds):
            for k, seed in enumerate(of_prompt):  # numpy's generator: torch's CPU one drops a seed's upper 32 bits
                uniforms[p, k] = torch.from_numpy(np.random.default_rng(seed).random(max_new_tokens))
        uniforms = uniforms.to(device)
        live = torch.tensor([[k < len(of_prompt) for k in range(num)] for of_prompt in seeds], device=device)  # (P, n)
        index = torch.arange(live.numel(), device=device).view(live.shape)  # (P, n) where a slot's tokens are written
        ids = torch.zeros(live.numel(), max_new_tokens, dtype=torch.long, device=device)
        logprobs = torch.zeros(live.numel(), max_new_tokens, device=device)
        lengths = torch.zeros(live.numel(), dtype=torch.long, device=device)
        unfinished = sum(map(len, seeds))
        logits = logits_of(cache.last_hidden, head)[:, None].expand(-1, num, -1)  # (P, n, V)
        for step in range(max_new_tokens):
            tokens, token_logprobs = sample_tokens(logits, uniforms[..., step], temperature)  # (P, n)
            ids[index[live], step], logprobs[index[live], step], lengths[index[live]] = tokens[live], token_logprobs[live], step + 1
            live = live & ~torch.isin(tokens, stops)
            before, unfinished = unfinished, int(live.sum()) if step + 1 < max_new_tokens else 0
            progress(before - unfinished)
            if not unfinished:
                break
            alive, most = live.any(1).nonzero()[:, 0], int(live.sum(1).max())
            if 2 * len(alive) * most <= live.numel():  # half of the slots can go
                slots = live[alive].int().argsort(dim=1, descending=True, stable=True)[:, :most]  # (P', n'), live ones first
                cache.keep(alive, slots)
                tokens, live, index, uniforms = (x[alive[:, None], slots] for x in (tokens, live, index, uniforms))
            logits = logits_of(cache.advance(tokens), head)
        ends = set(self.stop_ids)
        return [[Sample(kept := ids[i, :lengths[i]].tolist(), logprobs[i, :lengths[i]].tolist(), "stop" if kept[-1] in ends else "length")
                 for i in range(p * num, p * num + len(of_prompt))] for p, of_prompt in enumerate(seeds)]


class OpenAIEngine:
    """Samples from a frozen model behind an OpenAI-compatible server that returns token ids, as vLLM's does.

    Every sample is a request of its own: so vLLM honours its seed (with n samples in a request it would make the seeds of the
    later ones up itself), a failed request costs one sample, and the prompt is still read once, by the server's prefix cache.
    vLLM's CPU build breaks down on a seed and a chunked prompt: start it with --no-enable-chunked-prefill.
    """
    seeded = True  # on vLLM, as far as its log-probs do not depend on the batch

    def __init__(self, url, model, tokenizer, stop_ids, max_length, concurrency=32, max_retries=4, timeout=600.0):
        """url: as in http://localhost:8000/v1; model: its name there; tokenizer: ours, which must be the server's; stop_ids: the
        ids that end a turn; max_length: tokens of prompt and sample together; timeout: seconds for one request.

        Raises Refusal when the server does not serve the model, returns no token ids or has another tokenizer.
        """
        self.client, self.model, self.stop_ids, self.max_length = openai_client(url, timeout), model, stop_ids, max_length
        self.concurrency, self.max_retries, self.who = concurrency, max_retries, f"engine: {url}"
        self.checked = {0, 1}  # temperatures whose log-probs are known to be those of the distribution that was drawn from
        served = [row.id for row in ask_server(self.client.models.list, max_retries, self.who, field="data").data]
        if model not in served:
            die(f"{self.who} does not serve {model!r}: it serves {', '.join(served)}")
        text = "Ünïcode, <tool_call>\n{\"amount_cents\": 12900, \"days\": [1, 2]}\n</tool_call> for i in range(10):\n    print(i)"
        ours = tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.complete(text, 0, 1, 1.0, add_special_tokens=False).prompt_token_ids != ours:
            die(f"{self.who}: {model!r} has another tokenizer than the model folder: it reads the same text as other token ids")

    def generate(self, prompts, seeds, max_new_tokens, temperature=1.0, progress=lambda num_finished: None):
        """As HFEngine.generate. Raises Refusal as well, for a server whose answers nothing could be learned from."""
        check_lengths(prompts, max_new_tokens, self.max_length)
        asked = [(prompt, seed) for prompt, of_prompt in zip(prompts, seeds) for seed in of_prompt]
        if asked and temperature not in self.checked:
            self.check_temperature(asked[0][0], temperature)
        done = iter(in_threads(lambda one: self.sample(*one, max_new_tokens, temperature), asked, self.concurrency, progress))
        return [[next(done) for _ in of_prompt] for of_prompt in seeds]

    def complete(self, prompt, seed, max_new_tokens, temperature, logprobs=0, **options):
        """The one choice of a completion of `prompt`, text or ids. Only temperature shapes the distribution: what a server or the
        model's generation_config.json sets by default is switched off."""
        choice = ask_server(lambda: self.client.completions.create(
            model=self.model, prompt=prompt, seed=seed, max_tokens=max_new_tokens, temperature=temperature, logprobs=logprobs,
            top_p=1, presence_penalty=0, frequency_penalty=0,
            extra_body={"top_k": 0, "min_p": 0, "repetition_penalty": 1, "stop_token_ids": self.stop_ids, "ignore_eos": True,
                        "return_token_ids": True, "return_tokens_as_token_ids": True, **options}), self.max_retries, self.who).choices[0]
        if not getattr(choice, "token_ids", None) or not getattr(choice, "prompt_token_ids", None):
            die(f"{self.who} returns no token ids (vLLM does, by return_token_ids): without the exact ids there is nothing to train on")
        values = choice.logprobs.token_logprobs if choice.logprobs else []
        if len(values) != len(choice.token_ids) or not all(value is not None and value < 1e-3 for value in values):  # 0 and rounding
            die(f"{self.who}: its log-probs are missing or above 0; vLLM needs --logprobs-mode processed_logprobs")
        return choice

    def sample(self, prompt, seed, max_new_tokens, temperature):
        """The Sample of one request."""
        choice = self.complete(prompt, seed, max_new_tokens, temperature)
        if choice.prompt_token_ids != prompt:
            die(f"{self.who} changed the prompt: {len(prompt)} token ids were sent, it read {len(choice.prompt_token_ids)} or other ones")
        ids, ended = choice.token_ids, choice.token_ids[-1] in self.stop_ids
        if choice.finish_reason != ("stop" if ended else "length") or not ended and len(ids) < max_new_tokens:
            die(f"{self.who}: a sample ended with {choice.finish_reason!r} after {len(ids)} of {max_new_tokens} tokens, "
                f"its last one {'a' if ended else 'no'} stop token")
        return Sample(ids, choice.logprobs.token_logprobs, choice.finish_reason)

    def check_temperature(self, prompt, temperature):
        """Refuses a server whose log-probs ignore the temperature: those of raw logits are not what the ids were drawn from.

        Divided by the temperature, the logits of two tokens and so their log-probs lie 1 / temperature times as far apart.
        """
        flat, tempered = (self.complete(prompt, 0, 1, t, logprobs=5).logprobs.top_logprobs[0] for t in (1, temperature))
        both = flat.keys() & tempered.keys()  # the five likeliest, and the one that was drawn if it is another
        spread, seen = (max(row[token] for token in both) - min(row[token] for token in both) for row in (flat, tempered))
        if abs(seen - spread) < abs(seen - spread / temperature):
            die(f"{self.who} gives log-probs at temperature 1 for samples at {temperature:g}: "
                "start vLLM with --logprobs-mode processed_logprobs, or sample at temperature 1")
        self.checked.add(temperature)


class VLLMEngine:
    """Samples with vLLM in this process: prefix caching, CUDA graphs, new weights pushed in place. Also on vLLM's CPU build.

    Its samples have no seed of their own: vLLM would keep a generator for each request, which is slow, and its CPU build
    breaks down on them. The seeds of a batch name one random stream for the whole of it, so that a run that was cut draws
    nothing twice, and a batch that is made again comes out the same, up to rounding.
    """
    seeded = False

    def __init__(self, path, stops, max_length, memory=0.3, device="cuda", dtype="bfloat16", **options):
        """path: a Hugging Face folder; stops: ids that end a turn; memory: share of the GPU's. Further options go to vllm.LLM."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, so that weights go over without a copy
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self.on_gpu, self.stops, self.max_length = str(device).startswith("cuda"), stops, max_length
        if not self.on_gpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
            options["enforce_eager"] = True
        try:
            from vllm import LLM
        except ImportError as error:
            die(f"--engine vllm needs the package vllm, or vllm-cpu without a GPU ({error})")
        check_device(device)
        try:
            self.llm = LLM(model=str(path), dtype=dtype, max_model_len=max_length, gpu_memory_utilization=memory,
                           enable_prefix_caching=True, logprobs_mode="processed_logprobs", disable_log_stats=True, **options)
        except ValueError as error:  # too little memory for max_length, a kind of model that it does not know
            die(f"vLLM does not start with {path}: {' '.join(str(error).split())}")
        if self.on_gpu:  # vLLM has turned torch.compile's other threads off, for the whole process
            from torch._inductor import config
            config.compile_threads = min(32, os.cpu_count())
        self.marks = None  # of the weights pushed last

    def generate(self, prompts, seeds, max_new_tokens, temperature=1.0, progress=lambda num_finished: None):
        """As HFEngine.generate, but that a sample depends on its whole batch: prompts, seeds and their order."""
        from vllm import SamplingParams
        check_lengths(prompts, max_new_tokens, self.max_length)
        stream = stable_seed("vllm", [list(of_prompt) for of_prompt in seeds])
        torch.manual_seed(stream)  # vLLM draws from torch's generators, or takes seeds from numpy's, by version and model
        np.random.seed(stream % 2**32)
        asked = [i for i in range(len(prompts)) if seeds[i]]
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompts[i]} for i in asked],
            [SamplingParams(n=len(seeds[i]), temperature=temperature, max_tokens=max_new_tokens, logprobs=0, detokenize=False,
                            stop_token_ids=self.stops, ignore_eos=True) for i in asked], use_tqdm=False)
        samples = [[] for _ in prompts]
        for i, output in zip(asked, outputs):
            for completion in sorted(output.outputs, key=lambda completion: completion.index):
                ids = list(completion.token_ids)
                samples[i].append(Sample(ids, [entry[token].logprob for token, entry in zip(ids, completion.logprobs)],
                                         completion.finish_reason))
        progress(sum(map(len, samples)))
        return samples

    def push(self, weights, changed=True):
        """Loads the (Hugging Face name, tensor) pairs in place, a tied lm_head under its own name too (the CPU build keeps the
        old one otherwise), and then forgets the cached prefixes, which are the old weights' work.

        Raises RuntimeError when they are those of the last push although the caller says that they have `changed`.
        """
        marks = []

        def watched():
            for name, weight in weights:
                marks.append(torch.linalg.vector_norm(weight.detach(), dtype=torch.float64))
                yield name, weight
        if self.on_gpu:
            self.llm.apply_model(lambda model: model.load_weights(watched()))
        else:  # the CPU build has repacked its weights
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(watched())})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache after a push of weights")
        marks = torch.stack(marks)
        if changed and self.marks is not None and torch.equal(marks, self.marks):
            raise RuntimeError("weights unchanged since last sync")
        self.marks = marks


def check_sync(engine, model, prompts, temperature=1.0, tolerance=0.05):
    """Stops the run unless engine and trainer agree on the log-probs of a few sampled tokens. Returns their mean difference in nats.

    prompts: lists of ids; four first tokens are drawn after each, read backwards. After a prompt as it is, a model is often sure
    of its next token, whatever its weights. 256 ids fill a block of vLLM's prefix cache (16 on a GPU, 128 on the CPU), so that
    one left from older weights is seen; scoring the prompts (prompt_logprobs) would read none.
    """
    prompts = sorted((ids[::-1][:256] for ids in prompts), key=len, reverse=True)
    samples = engine.generate(prompts, [range(4)] * len(prompts), 1, temperature)
    with torch.no_grad():
        logits = logits_of(SharedCache(model, prompts, 1).last_hidden, head_weight(model))
        logprobs = torch.log_softmax(logits / temperature, -1)  # (P, V)
    ids = torch.tensor([[sample.ids[0] for sample in group] for group in samples], device=logits.device)
    said = torch.tensor([[sample.logprobs[0] for sample in group] for group in samples], device=logits.device)
    gap = float((logprobs.gather(-1, ids) - said).abs().mean())
    if not gap <= tolerance:
        die(f"sampler and trainer disagree by {gap:.3f} nats a token, more than {tolerance}: the engine does not have the trainer's weights")
    return gap


def seed_note(engine):
    """What the rows of samples say when their seed did not fix them: {"seeded": False}, else nothing."""
    return {} if getattr(engine, "seeded", True) else {"seeded": False}


def sample_tasks(engine, tokenizer, tasks, prompts, seeds, max_new_tokens, temperature):
    """engine.generate on one prompt for each task: per task a list of Samples with their text, one for each of its seeds.

    Shows a bar when it takes long. Raises Refusal that names the task whose prompt does not fit the model.
    """
    from tqdm import tqdm
    with tqdm(total=sum(map(len, seeds)), desc="sample", unit="rollout", leave=False, delay=2, disable=None) as bar:
        try:
            samples = engine.generate(prompts, seeds, max_new_tokens, temperature, progress=bar.update)
        except ValueError as error:
            found = re.match(r"prompt (\d+):", str(error))
            if not found:
                raise
            die(f"task {tasks[int(found[1])]['id']}: {error}")
    for prompt, of_task in zip(prompts, samples):
        for sample in of_task:
            sample.text = completion_text(tokenizer, prompt, sample.ids)
    return samples


# Episodes: the model acts in the world until it is done.

@dataclass
class Turn:
    """One assistant message of an episode."""
    before: list  # the episode's messages that came before it, after those of the task
    prompt: list  # ids that it was sampled after
    sample: Sample


@dataclass
class Episode:
    """What the model makes of a task from one seed. When it is over it has the Grade of all its turns, or the world's `error`."""
    task: dict
    seed: int
    turns: list = dataclasses.field(default_factory=list)
    messages: list = dataclasses.field(default_factory=list)  # what was said and observed, after the task's messages
    env: object = None
    grade: Grade | None = None
    error: str = ""

    def play(self, last):
        """Plays the newest turn in the world, after which the episode is over if it is the `last` one."""
        try:
            self.env, answers, self.grade = play_turn(self.task, [turn.sample.text for turn in self.turns], last, self.env)
            self.messages += answers
        except InfraError as error:
            self.error = str(error) or "InfraError"


def play_tasks(engine, tokenizer, tasks, seeds, render, max_turns, max_new_tokens, temperature, room=0):
    """The Episodes of at most max_turns turns: a list for each task, one for each of its seeds.

    All of them advance together, one call of the engine for each turn. render(task, later) gives the ids of a prompt, as
    render_prompt does. An episode ends early, as a cut one, when its next prompt and turn would leave fewer than `room` tokens of
    what the model can read. Raises as sample_tasks does.
    """
    groups = [[Episode(task, seed) for seed in of_task] for task, of_task in zip(tasks, seeds)]
    waiting = [(group, render(task, [])) for task, group in zip(tasks, groups)]  # a first prompt is read once for all its seeds
    for turn in range(max_turns):
        streams = [[stable_seed(episode.seed, turn) if turn else episode.seed for episode in group] for group, _ in waiting]
        sampled = sample_tasks(engine, tokenizer, [group[0].task for group, _ in waiting], [prompt for _, prompt in waiting], streams,
                               max_new_tokens, temperature)
        for (group, prompt), samples in zip(waiting, sampled):
            for episode, sample in zip(group, samples):
                episode.turns.append(Turn(list(episode.messages), prompt, sample))
                episode.messages.append({"role": "assistant", "content": sample.text})
                episode.play(last=turn + 1 == max_turns)
        waiting = []
        for episode in [episode for group in groups for episode in group if not (episode.grade or episode.error)]:
            prompt = render(episode.task, episode.messages)
            if len(prompt) + max_new_tokens + room <= engine.max_length:
                waiting.append(([episode], prompt))
            else:
                episode.turns[-1].sample.finish_reason, episode.env = "length", None
                episode.play(last=True)
        if not waiting:
            break
    return groups


# Packed rows: a task's prefix once, then its completions as branches that do not see each other.

@dataclass
class Row:
    """L input tokens and the T completion tokens among them that were sampled; all are long tensors."""
    input_ids: object  # (L,)
    position_ids: object  # (L,) restart with every task; a branch goes on where its prefix ends
    task: object  # (L,) index of the item
    branch: object  # (L,) 0 = prefix, 1.. = completions
    predict: object  # (T,) index in the row of the hidden state that predicts each completion token
    targets: object  # (T,) the completion tokens
    owner: object  # (T,) number of the completion, counted through all items in order
    room: object  # (), tokens that a row was allowed

    def to(self, device):
        def moved(tensor):  # a copy from pinned memory does not wait for the GPU, which has other rows to do
            return tensor.pin_memory().to(device, non_blocking=True) if str(device).startswith("cuda") else tensor.to(device)
        return Row(*(moved(getattr(self, field.name)) for field in dataclasses.fields(self)[:-1]), self.room)


def pack_rows(items, row_tokens, masks=None):
    """Rows of at most `row_tokens` input tokens from items (prefix_ids, [completion_ids, ...]), in order.

    masks: a loss_mask for each completion, counted through all items; without them every token of a completion is sampled.
    A task never splits over rows; one that is longer gets a row of its own. Read row after row, the T completion tokens are
    those of the items in order, however they fell into rows: tokens of student and teacher correspond one to one.
    """
    rows, columns, owner = [], None, 0
    for number, (prefix, completions) in enumerate(items):
        size = len(prefix) + sum(map(len, completions))
        if columns is None or len(columns["input_ids"]) + size > row_tokens:
            columns = {field.name: [] for field in dataclasses.fields(Row)} | {"room": row_tokens}
            rows.append(columns)
        start = len(columns["input_ids"])
        for branch, ids in enumerate([prefix, *completions]):
            here, position = len(columns["input_ids"]), len(prefix) if branch else 0
            columns["input_ids"] += ids
            columns["position_ids"] += range(position, position + len(ids))
            columns["task"] += [number] * len(ids)
            columns["branch"] += [branch] * len(ids)
            if branch:  # the prefix's last state predicts token 0, that of token t predicts token t + 1
                mask = masks[owner] if masks else [1] * len(ids)
                columns["predict"] += compress([start + len(prefix) - 1, *range(here, here + len(ids) - 1)], mask)
                columns["targets"] += compress(ids, mask)
                columns["owner"] += [owner] * sum(mask)
                owner += 1
    return [Row(**{name: torch.tensor(values, dtype=torch.long) for name, values in row.items()}) for row in rows]


def pack_episodes(groups, row_tokens):
    """pack_rows of episodes: per task a list of them, each a list of (prompt ids, sampled ids), one for each turn.

    An episode is one branch as long as every prompt begins with all that was read and sampled before; what the world said in
    between is context and no target. Where a template rewrites history (Qwen3's drops thoughts once the user speaks again), or
    sampled ids are not what their text is encoded as, the turn is an item of its own, after the prompt that it was sampled
    after. The sampled tokens come in the order task, episode, turn, token in any case.
    """
    items, masks = [], []
    for group in groups:
        begun = len(items)
        for turns in group:
            read = None
            for prompt, ids in turns:
                if read and prompt[:len(read)] == read:
                    between = prompt[len(read):]
                    items[-1][1][-1] += between + ids
                    masks[-1] += [0] * len(between) + [1] * len(ids)
                else:
                    if len(items) == begun or items[-1][0] != prompt:
                        items.append((prompt, []))
                    items[-1][1].append(list(ids))
                    masks.append([1] * len(ids))
                read = prompt + ids
    return pack_rows(items, row_tokens, masks)


def visible(row):
    """The mask rule of a packed row, for indices of a query and a key: same task, not later, in the prefix or the same branch."""
    def rule(batch, head, query, key):
        same_task = row.task[query] == row.task[key]
        return same_task & (query >= key) & ((row.branch[key] == 0) | (row.branch[query] == row.branch[key]))
    return rule


def block_mask(row, size=128):
    """flex_attention's BlockMask of a row whose length is a multiple of `size`.

    A block of the mask, size x size, is skipped, full, or has its entries worked out by the rule. Which one follows from the
    first and the last token of its queries and keys, since tasks and branches stand in order: (L, L) never exists.
    """
    from torch.nn.attention.flex_attention import BlockMask
    task, branch = row.task.view(-1, size), row.branch.view(-1, size)
    first, last = (task[:, i] * (branch.max() + 1) + branch[:, i] for i in (0, -1))  # (blocks,) one number for task and branch
    prefix = torch.where(branch == 0, task, -1).amax(1)  # the last task whose prefix reaches into the block
    number = torch.arange(len(task), device=task.device)
    before = number[:, None] > number  # (blocks, blocks), query x key
    seen = before & ((last >= first[:, None]) | (prefix >= task[:, :1])) | (number[:, None] == number)
    same_task = (task[:, 0] == task[:, -1, None]) & (task[:, 0, None] == task[:, -1])
    same_branch = (first == last[:, None]) & (first[:, None] == last)
    full = before & same_task & (same_branch | (branch[:, -1] == 0))
    kinds = []
    for blocks in (seen & ~full, full):
        kinds += [blocks.sum(-1, dtype=torch.int32)[None, None], blocks.int().argsort(dim=-1, descending=True, stable=True).int()[None, None]]
    return BlockMask.from_kv_blocks(*kinds, BLOCK_SIZE=size, mask_mod=visible(row))


def packed_hidden(model, row):
    """(T, D): the final hidden states (after the last norm) that predict the row's completion tokens.

    On CUDA the mask is a BlockMask: blocks of 128 x 128 that nobody may see are skipped, and a row is filled up to the room that
    rows have. Elsewhere the mask is a boolean (L, L).
    """
    row = row.to(model.device)
    ids, positions = row.input_ids, row.position_ids
    if ids.is_cuda:
        whole_blocks = 128 * -(-int(row.room) // 128)
        fill = (0, -len(ids) % whole_blocks)  # rows of one length: one compilation. What fills them up is a task of its own
        ids, positions = (torch.nn.functional.pad(x, fill) for x in (ids, positions))
        row.task = torch.nn.functional.pad(row.task.int(), fill, value=2**20)
        row.branch = torch.nn.functional.pad(row.branch.int(), fill)
        mask = block_mask(row)
    else:
        index = torch.arange(len(ids), device=ids.device)
        mask = visible(row)(0, 0, index[:, None], index)[None, None]  # (1, 1, L, L), query x key
    hidden = model.base_model(ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False).last_hidden_state
    return hidden[0, row.predict]


# Metrics.

def reverse_kl(student_logits, teacher_logits):
    """KL(student || teacher) in nats, computed in float32. (..., V), (..., V) -> (...)."""
    student = torch.log_softmax(student_logits.float(), -1)
    teacher = torch.log_softmax(teacher_logits.float(), -1)
    return (student.exp() * (student - teacher)).sum(-1)


def pass_at_k(n, c, k):
    """Unbiased chance that one of k samples passes, from c passes among n. ValueError when k > n."""
    if not 0 < k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} of {c} passes in {n} samples is not defined")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def spearman(x, y):
    """Rank correlation, ties at their average rank. None when undefined: under two pairs, a NaN, all of one side equal."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values against {len(y)}")
    ranks = []
    for values in (x, y):
        _, place, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum() - (counts + 1) / 2)[place])
    if len(x) < 2 or np.isnan([x, y]).any() or any(np.ptp(rank) == 0 for rank in ranks):
        return None
    return float(np.corrcoef(ranks)[0, 1])


def scores_by_task(rows):
    """{task: its scores} from rows with id and passed (or reward), or from a list of per-task lists."""
    if rows and not isinstance(rows[0], dict):
        return dict(enumerate(rows))
    scores = {}
    for row in rows:
        scores.setdefault(row["id"], []).append(float(row["passed"] if "passed" in row else row["reward"]))
    return scores


def bootstrap_ci(rows, num=10000, seed=0):
    """(mean, low, high): the mean over all rows and its 95% interval from resampled tasks.

    A task's seeds move together: repeated samples of one task are not independent.
    """
    tasks = list(scores_by_task(rows).values())
    if not tasks:
        raise ValueError("no rows")
    sums, counts = np.array([sum(task) for task in tasks], float), np.array([len(task) for task in tasks])
    picks = np.random.default_rng(seed).integers(len(tasks), size=(num, len(tasks)))
    means = sums[picks].sum(1) / counts[picks].sum(1)
    return float(sums.sum() / counts.sum()), *(float(q) for q in np.quantile(means, [0.025, 0.975]))


def paired_ci(rows_a, rows_b, num=10000, seed=0):
    """(difference, low, high) of b - a over the same tasks, from the per-task differences of means."""
    a, b = scores_by_task(rows_a), scores_by_task(rows_b)
    if a.keys() != b.keys():
        raise ValueError(f"not the same tasks: {len(a.keys() - b.keys())} only in the first, {len(b.keys() - a.keys())} only in the second")
    return bootstrap_ci([[np.mean(b[task]) - np.mean(a[task])] for task in a], num, seed)
