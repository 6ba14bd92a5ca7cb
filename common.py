"""What two or more stages of nanoOPSD share.

config and run folders / JSONL records / tasks and worlds / hints / tool calls / rendering /
model and attention / the sampling engine / packed rows / metrics. Stages meet in JSONL files only.

torch is imported on first use, so that `--help` answers at once; transformers and yaml are imported
inside the function that needs them.
"""
import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import typing
from dataclasses import dataclass
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
    """Ends a stage with one line on stderr and exit code 1; a Python caller may catch it as ValueError."""


def die(message):
    """Raises Refusal with one line that says what is wrong."""
    raise Refusal(f"error: {message}")


# Config: one flat dataclass per stage. Defaults < YAML presets (positional) < --flags.

def opt(default, help, choices=None):
    """A dataclass field with a help line: `lr: float = opt(2e-4, "peak learning rate")`."""
    metadata = {"help": help, "choices": choices}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse_config(cls, argv=None):
    """An instance of the dataclass `cls` from the command line (`argv` without the program's name).

    A preset is a saved list of flags: its keys and values go through the same parser, so a misspelt
    key or a wrong type in it gives the command line's own message. Raises Refusal.
    """
    parser = argparse.ArgumentParser(description=sys.modules[cls.__module__].__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = die
    parser.add_argument("presets", nargs="*", metavar="preset.yaml", help="saved flags, applied in order before the flags")
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, default = types[field.name], getattr(cls(), field.name)
        help = f"{field.metadata['help']} (default: {default})".replace("%", "%%")
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif typing.get_origin(kind) is list:
            how = {"nargs": "+", "type": typing.get_args(kind)[0], "choices": field.metadata["choices"]}
        else:  # `float | None` is a float that may be left out
            inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
            how = {"type": inner[0] if inner else kind, "choices": field.metadata["choices"]}
        parser.add_argument(f"--{field.name}", default=default, help=help, **how)
    for path in parser.parse_args(argv).presets:
        values = vars(parser.parse_args(_preset_flags(path)))
        if values.pop("presets"):
            die(f"{path}: a yes/no key holds something other than true or false")
        parser.set_defaults(**values)
    values = vars(parser.parse_args(argv))
    del values["presets"]
    return cls(**values)


def _preset_flags(path):
    """The flags that the YAML file at `path` stands for."""
    import yaml
    try:
        values = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        die(f"preset {path}: {' '.join(str(error).split())}")
    if not isinstance(values, dict):
        die(f"preset {path}: expected `key: value` lines")
    flags = []
    for key, value in values.items():
        if isinstance(value, bool):
            flags.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, list):
            flags += [f"--{key}", *map(str, value)]
        else:  # an empty value becomes a flag without its argument, which the parser refuses
            flags.append(f"--{key}" if value is None else f"--{key}={value}")
    return flags


def start_run(out_dir, cfg, ignore=()):
    """Makes `out_dir` and writes its config.json; returns the folder as a Path.

    A folder that holds another run's config.json is refused with the differing fields named (fields
    in `ignore` and out_dir may differ); the same config means resuming, and the file stays as it was.
    """
    out_dir, stage = Path(out_dir), Path(sys.modules[type(cfg).__module__].__file__).stem
    config = json.loads(json.dumps(dataclasses.asdict(cfg)))
    path = out_dir / "config.json"
    if path.exists():
        old = json.loads(path.read_text("utf-8"))
        before, now = ({"stage": s, **c} for s, c in ((old["stage"], old["config"]), (stage, config)))
        differing = [f"{key} ({before.get(key)!r} there, {now.get(key)!r} now)" for key in sorted(before.keys() | now.keys())
                     if key not in {"out_dir", *ignore} and before.get(key) != now.get(key)]
        if differing:
            die(f"{path} is from another run: {', '.join(differing)}; choose another --out_dir")
        return out_dir
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    row = {"stage": stage, "config": config, "argv": sys.argv, "device": config.get("device", "cpu"),
           "versions": {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name)
                                                             for name in ("numpy", "torch", "transformers")}}
    if commit.returncode == 0:
        row["git_commit"] = commit.stdout.strip()
    out_dir.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(row, indent=2) + "\n")
    return out_dir


def stable_seed(*parts):
    """A 63-bit seed from JSON-able parts; it names a random stream: stable_seed("search", task_id, 3)."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 1


# Records: one UTF-8 JSON object per line.

def read_jsonl(path, required=()):
    """The rows of a JSONL file. A torn last line (a killed writer) is left out.

    Raises Refusal, naming file and line, for a bad line elsewhere or a missing `required` field.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        die(f"cannot read {path}: {error.strerror}")
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    rows = []
    for number, line in filled:
        row = _decode_row(line)
        if row is None:
            if number == filled[-1][0]:
                break
            die(f"{path} line {number}: not a JSON object")
        missing = [field for field in required if field not in row]
        if missing:
            die(f"{path} line {number}: missing field {missing[0]!r}")
        rows.append(row)
    return rows


def _decode_row(line):
    """The JSON object in the bytes `line`, or None."""
    try:
        row = json.loads(line)
    except ValueError:  # UnicodeDecodeError is one too
        return None
    return row if isinstance(row, dict) else None


def append_jsonl(path, row):
    """Appends one row in one write under an exclusive lock, after mending a torn tail.

    The bytes cut from the tail go to `path`.torn. NaN and infinities raise ValueError.
    """
    line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    with open(path, "a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _mend_tail(file, path):
            line = b"\n" + line
        if file.write(line) != len(line):
            raise OSError(f"{path}: the disk took only a part of the row")


def _mend_tail(file, path):
    """Cuts a torn last line off; True when the last row is whole and only its newline is missing."""
    size, block, start, body = file.seek(0, os.SEEK_END), 1 << 16, 1, b""
    while start and b"\n" not in body:  # read backwards until the last filled line is in view
        start = max(0, size - block)
        file.seek(start)
        tail = file.read()
        body, block = tail.rstrip(), block * 4
    cut = body.rfind(b"\n") + 1
    if not body or _decode_row(body[cut:]) is not None:
        return bool(body) and not tail.endswith(b"\n")
    with open(f"{path}.torn", "ab") as torn:
        torn.write(tail[cut:])
    file.truncate(start + cut)
    return False


def write_text(path, text):
    """Writes a whole file under a temporary name, then renames it: never half a file."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


@contextlib.contextmanager
def new_folder(path):
    """Yields a temporary folder that takes the name `path` once the block has ended well."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    if path.exists():
        shutil.rmtree(path)
    os.replace(temporary, path)


# Tasks, worlds and hints.

@dataclass
class Grade:
    """What a world says about a completion."""
    reward: float  # in [0, 1]
    action: str  # intended | substituted | abandoned | malformed
    feedback: str  # public: never the gold values

    @property
    def passed(self):
        return self.reward >= 1


class InfraError(Exception):
    """A world broke down: void in search, retried and then a failure in evaluation."""


def load_tasks(paths, num_tasks=0):
    """The rows of the task files, in file order.

    num_tasks > 0 keeps a balanced subset: kind after kind in sorted order gives its next task until
    there are enough. Raises Refusal for a missing field or an id that occurs twice.
    """
    tasks = [task for path in paths for task in read_jsonl(path, ("id", "world", "messages", "tools", "spec"))]
    seen = set()
    for task in tasks:
        if task["id"] in seen:
            die(f"task id {task['id']!r} occurs twice in {', '.join(map(str, paths))}")
        seen.add(task["id"])
    if not 0 < num_tasks < len(tasks):
        return tasks
    turn, ranks = {}, {}
    for task in tasks:
        kind = task.get("failure_kind", "")
        turn[kind] = turn.get(kind, -1) + 1
        ranks[task["id"]] = (turn[kind], kind)
    kept = set(sorted(ranks, key=ranks.get)[:num_tasks])
    return [task for task in tasks if task["id"] in kept]


_worlds = {}


def load_world(world):
    """The module data/<world>/env.py, or <world>/env.py where `world` is a folder."""
    if world not in _worlds:
        folders = [ROOT / "data" / world, Path(world)]
        path = next((folder / "env.py" for folder in folders if (folder / "env.py").is_file()), None)
        if path is None:
            die(f"world {world!r}: neither {folders[0]}/env.py nor {folders[1]}/env.py exists")
        spec = importlib.util.spec_from_file_location(f"world_{len(_worlds)}_{path.parent.name}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _worlds[world] = module
    return _worlds[world]


def grade_completion(task, text):
    """Grade of the assistant message `text` played in a fresh environment. An InfraError passes through."""
    env = load_world(task["world"]).Env()
    env.reset(task)
    env.step({"role": "assistant", "content": text})
    return env.grade()


def load_hints(path, tasks, control="none", seed=0):
    """{task id: hint row with `hint` and `hint_id`} for the tasks that have a hint.

    A row with `failure_kind` in place of `id` serves every task of that kind. control: "empty" gives
    every task the empty hint (so does path "" or "none"); "shuffled" gives each task the hint of a
    task of another failure kind, drawn by `seed`.
    """
    if control == "empty" or path in ("", "none"):
        return {task["id"]: {"id": task["id"], "hint": "", "hint_id": "empty"} for task in tasks}
    rows = read_jsonl(path, ("hint",))
    by_id = {row["id"]: row for row in rows if "id" in row}
    by_kind = {row["failure_kind"]: row for row in rows if "id" not in row and "failure_kind" in row}
    hints, kinds = {}, {}
    for task in tasks:
        kind = task.get("failure_kind", "")
        row = by_id.get(task["id"]) or by_kind.get(kind)
        if row:
            kinds[task["id"]] = kind
            hints[task["id"]] = {"hint_id": f"kind:{kind}"} | row | {"id": task["id"]}
    if control != "shuffled":
        return hints
    shuffled = {}
    for task_id, kind in kinds.items():
        donors = [other for other in hints if kinds[other] != kind]
        if not donors:
            die("shuffled hints need tasks of at least two failure kinds")
        donor = donors[stable_seed("shuffled", seed, task_id) % len(donors)]
        shuffled[task_id] = hints[donor] | {"id": task_id}
    return shuffled


# Tool calls.

_SKIP_OR_CALL = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>\s*", re.DOTALL)
_CALL_END = re.compile(r"\s*</tool_call>")


def _refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_tool_calls(text):
    """(status, calls): status ok | no_call | malformed, calls [{"name", "arguments"}].

    One JSON value is decoded after each opening tag, so that a string argument may hold braces or the
    closing tag; then only blanks may stand before the closing tag. One bad call makes the whole
    message malformed, as it does in serving parsers. <think> text is skipped.
    """
    calls, position = [], 0
    while tag := _SKIP_OR_CALL.search(text, position):
        position = tag.end()
        if tag[0].startswith("<think>"):
            continue
        try:
            call, position = _decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return "malformed", []
        end = _CALL_END.match(text, position)
        if not (end and isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)):
            return "malformed", []
        calls.append({"name": call["name"], "arguments": call["arguments"]})
        position = end.end()
    return ("ok", calls) if calls else ("no_call", [])


def calls_match(expected, got, schema, order_matters=False):
    """True when the two lists of calls are the same up to JSON spelling, and order unless it matters.

    schema: {argument: JSON type, or "array<type>", or JSON schema}. Names, strings and argument sets
    must be equal; integers are exact; other numbers have relative tolerance 1e-9; a bool is no number.
    """
    def same(want, call):
        return want["name"] == call["name"] and _same_value(want["arguments"], call["arguments"], {"properties": schema})

    if order_matters:
        return len(expected) == len(got) and all(map(same, expected, got))
    left = list(got)
    for want in expected:
        match = next((call for call in left if same(want, call)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _same_value(want, got, schema):
    if isinstance(schema, str):
        inner = re.fullmatch(r"array<(.*)>", schema)
        schema = {"type": "array", "items": inner[1]} if inner else {"type": schema}
    if isinstance(want, bool) or isinstance(got, bool):
        return want is got
    if isinstance(want, (int, float)) and isinstance(got, (int, float)):
        return want == got if schema.get("type") == "integer" else math.isclose(want, got, rel_tol=1e-9)
    if isinstance(want, list) and isinstance(got, list):
        return len(want) == len(got) and all(_same_value(w, g, schema.get("items", {})) for w, g in zip(want, got))
    if isinstance(want, dict) and isinstance(got, dict):
        inner = schema.get("properties", {})
        return want.keys() == got.keys() and all(_same_value(want[key], got[key], inner.get(key, {})) for key in want)
    return type(want) is type(got) and want == got


# Rendering.

def place_hint(messages, hint, position="end"):
    """The messages with "\\n" + hint appended to one of them: the last (end), the system or the first user message.

    At the end it stands inside the closing tag of a tool response and adds no turn, so templates that
    look for the last user turn render the rest unchanged: deleting it gives the old prompt back.
    """
    if not hint:
        return list(messages)
    role = {"end": None, "system": "system", "first_user": "user"}[position]
    index = len(messages) - 1 if role is None else next((i for i, m in enumerate(messages) if m["role"] == role), None)
    if index is None:
        die(f"hint position {position}: the prefix has no {role} message")
    if messages[index]["role"] not in ("system", "user", "tool"):
        die("a prefix must end in a tool or a user message to take a hint at its end")
    hinted = {**messages[index], "content": messages[index]["content"] + "\n" + hint}
    return [*messages[:index], hinted, *messages[index + 1:]]


def render_prompt(tokenizer, messages, tools, hint="", hint_position="end", enable_thinking=None):
    """Token ids of the prompt up to the assistant's turn; student (hint "") and teacher both come from here."""
    messages = [{**message, "content": message.get("content") or ""} for message in messages]
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    rendered = tokenizer.apply_chat_template(place_hint(messages, hint, hint_position), tools=tools or None,
                                             add_generation_prompt=True, tokenize=True, return_dict=True, **options)
    return list(rendered["input_ids"])


# Model and attention.

def load_model(path, device="cpu", dtype="float32"):
    """(model in eval mode, tokenizer) of a Hugging Face folder, with `attention` below in every layer.

    Raises Refusal for a checkpoint with missing weights or a model that our attention cannot serve.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.masking_utils import sdpa_mask
    from transformers.utils import logging
    logging.disable_progress_bar()
    AttentionInterface.register("nanoopsd", attention)
    AttentionMaskInterface.register("nanoopsd", sdpa_mask)  # without it transformers hands over no 2D mask at all
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype, attn_implementation="nanoopsd",
            output_loading_info=True)
    except OSError as error:
        die(f"cannot load model {path}: {str(error).splitlines()[0]}")
    if info["missing_keys"]:
        die(f"model {path} lacks weights: {', '.join(sorted(info['missing_keys'])[:3])}")
    model = model.to(device).eval()
    check_model(model)
    return model, tokenizer


def check_model(model):
    """Refuses a model whose layers are not all plain full attention through `attention` below."""
    config = model.config
    assert config._attn_implementation == "nanoopsd", config._attn_implementation
    with torch.no_grad():
        reached = len(SharedCache(model, [[0, 0]], 1).prefix)
    windowed = getattr(config, "sliding_window", None) or set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if reached != config.num_hidden_layers or windowed:
        die(f"{config.model_type}: not every layer is plain full attention that transformers lets us replace")
    head_weight(model)


def head_weight(model):
    """The (V, D) matrix that turns final hidden states into logits, tied or not."""
    head = model.get_output_embeddings()
    scaled = [name for name in ("final_logit_softcapping", "logits_scaling", "logit_scale") if getattr(model.config, name, None)]
    if getattr(head, "bias", None) is not None or scaled:
        die(f"{model.config.model_type}: logits are not a plain matrix product ({scaled or 'bias'})")
    return head.weight


def stop_ids(tokenizer, model):
    """Ids that end a turn: the union of what tokenizer, config and generation_config name."""
    named = [tokenizer.eos_token_id, getattr(model.config, "eos_token_id", None),
             getattr(getattr(model, "generation_config", None), "eos_token_id", None)]
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
            padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in called], batch_first=True)  # causal: no mask needed
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
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    if shared_cache is not None:
        if shared_cache.num_own is not None:
            return shared_cache.attend(module.layer_idx, query, key, value, attention_mask, scaling), None
        shared_cache.store_prompts(module.layer_idx, key, value)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


# The sampling engine.

@dataclass
class Sample:
    ids: list  # as sampled, the stop token included
    logprobs: list  # nats, under the tempered distribution the ids were drawn from
    finish_reason: str  # stop | length


def sample_tokens(logits, uniforms, temperature):
    """Draws by inverse CDF. logits (..., V), uniforms (...) in [0, 1) -> ids (...), logprobs (...).

    Both come from softmax(logits / temperature) in float32. temperature 0 takes the most likely token
    and its log-prob at temperature 1.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
    if temperature == 0:
        ids = logprobs.argmax(-1)
    else:
        cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
        target = uniforms[..., None] * cdf[..., -1:]  # rounding leaves the last value beside 1
        ids = torch.searchsorted(cdf, target, right=True)[..., 0].clamp(max=logits.shape[-1] - 1)
    return ids, logprobs.gather(-1, ids[..., None])[..., 0]


class HFEngine:
    """Samples from a transformers model: a prompt is read once, all samples of a batch are decoded together.

    max_batch_tokens bounds the tokens whose keys and values a batch holds, prompts and new tokens.
    """

    def __init__(self, model, tokenizer, max_batch_tokens=65536):
        self.model, self.max_batch_tokens = model, max_batch_tokens
        self.stop_ids = stop_ids(tokenizer, model)

    def generate(self, prompts, seeds, max_new_tokens, temperature=1.0):
        """For each prompt (list of ids) a list of Samples, one for each of its seeds (ints).

        A sample is fixed by its prompt and seed: up to float rounding it does not depend on its batch. Raises ValueError
        naming the index of a prompt that is empty or does not fit the model together with max_new_tokens.
        """
        limit = self.model.config.max_position_embeddings
        for index, ids in enumerate(prompts):
            if not 0 < len(ids) <= limit - max_new_tokens:
                raise ValueError(f"prompt {index}: {len(ids)} tokens + {max_new_tokens} new ones do not fit the model's {limit}")
        samples, training = [[] for _ in prompts], self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                for batch in self.batches(prompts, seeds, max_new_tokens):
                    done = self.decode([prompts[i] for i in batch], [seeds[i] for i in batch], max_new_tokens, temperature)
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

    def decode(self, prompts, seeds, max_new_tokens, temperature):
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
        logits = (cache.last_hidden @ head.T)[:, None].expand(-1, num, -1)  # (P, n, V)
        for step in range(max_new_tokens):
            tokens, token_logprobs = sample_tokens(logits, uniforms[..., step], temperature)  # (P, n)
            ids[index[live], step], logprobs[index[live], step], lengths[index[live]] = tokens[live], token_logprobs[live], step + 1
            live = live & ~torch.isin(tokens, stops)
            if step + 1 == max_new_tokens or not live.any():
                break
            alive, most = live.any(1).nonzero()[:, 0], int(live.sum(1).max())
            if 2 * len(alive) * most <= live.numel():  # half of the slots can go
                slots = live[alive].int().argsort(1, descending=True, stable=True)[:, :most]  # (P', n'), live ones first
                cache.keep(alive, slots)
                tokens, live, index, uniforms = (x[alive[:, None], slots] for x in (tokens, live, index, uniforms))
            logits = cache.advance(tokens) @ head.T
        ends = set(self.stop_ids)
        return [[Sample(kept := ids[i, :lengths[i]].tolist(), logprobs[i, :lengths[i]].tolist(), "stop" if kept[-1] in ends else "length")
                 for i in range(p * num, p * num + len(of_prompt))] for p, of_prompt in enumerate(seeds)]


# Packed rows: a task's prefix once, then its completions as branches that do not see each other.

@dataclass
class Row:
    """L input tokens and the T completion tokens among them; all are long tensors."""
    input_ids: object  # (L,)
    position_ids: object  # (L,) restart with every task; a branch goes on where its prefix ends
    task: object  # (L,) index of the item
    branch: object  # (L,) 0 = prefix, 1.. = completions
    predict: object  # (T,) index in the row of the hidden state that predicts each completion token
    targets: object  # (T,) the completion tokens
    owner: object  # (T,) number of the completion, counted through all items in order

    def to(self, device):
        return Row(*(getattr(self, field.name).to(device) for field in dataclasses.fields(self)))


def pack_rows(items, row_tokens):
    """Rows of at most `row_tokens` input tokens from items (prefix_ids, [completion_ids, ...]), in order.

    A task never splits over rows; a longer task gets a row of its own. The T completion tokens, read
    row after row, are those of the items in order, whatever the rows are: student and teacher tokens
    correspond one to one although their prefixes differ.
    """
    rows, columns, owner = [], None, 0
    for number, (prefix, completions) in enumerate(items):
        size = len(prefix) + sum(map(len, completions))
        if columns is None or len(columns["input_ids"]) + size > row_tokens:
            columns = {field.name: [] for field in dataclasses.fields(Row)}
            rows.append(columns)
        start = len(columns["input_ids"])
        for branch, ids in enumerate([prefix, *completions]):
            here = len(columns["input_ids"])
            first = 0 if branch == 0 else len(prefix)
            columns["input_ids"] += ids
            columns["position_ids"] += range(first, first + len(ids))
            columns["task"] += [number] * len(ids)
            columns["branch"] += [branch] * len(ids)
            if branch:  # the prefix's last state predicts token 0, the state of token t predicts token t + 1
                columns["predict"] += [start + len(prefix) - 1, *range(here, here + len(ids) - 1)][:len(ids)]
                columns["targets"] += ids
                columns["owner"] += [owner] * len(ids)
                owner += 1
    return [Row(**{name: torch.tensor(values, dtype=torch.long) for name, values in row.items()}) for row in rows]


def packed_hidden(model, row):
    """(T, D): the final hidden states (after the last norm) that predict the row's completion tokens."""
    row = row.to(model.device)
    visible = (row.task[:, None] == row.task) & ((row.branch == 0) | (row.branch[:, None] == row.branch))
    mask = visible.tril()[None, None]  # (1, 1, L, L), query x key
    hidden = model.base_model(row.input_ids[None], position_ids=row.position_ids[None], attention_mask=mask,
                              use_cache=False).last_hidden_state
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
    """Rank correlation with average ranks for ties; None when undefined (fewer than 2 pairs, a constant side)."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values against {len(y)}")
    ranks = []
    for values in (np.asarray(x, float), np.asarray(y, float)):
        below = (values[:, None] > values).sum(1)
        equal = (values[:, None] == values).sum(1)
        ranks.append(below + (equal - 1) / 2)
    if len(x) < 2 or any(np.ptp(rank) == 0 for rank in ranks):
        return None
    return float(np.corrcoef(ranks)[0, 1])


def _by_task(rows):
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
    tasks = list(_by_task(rows).values())
    if not tasks:
        raise ValueError("no rows")
    sums, counts = np.array([sum(task) for task in tasks], float), np.array([len(task) for task in tasks])
    picks = np.random.default_rng(seed).integers(len(tasks), size=(num, len(tasks)))
    means = sums[picks].sum(1) / counts[picks].sum(1)
    return float(sums.sum() / counts.sum()), *(float(q) for q in np.quantile(means, [0.025, 0.975]))


def paired_ci(rows_a, rows_b, num=10000, seed=0):
    """(difference, low, high) of b - a over the same tasks, from the per-task differences of means."""
    a, b = _by_task(rows_a), _by_task(rows_b)
    if a.keys() != b.keys():
        raise ValueError(f"not the same tasks: {len(a.keys() - b.keys())} only in the first, {len(b.keys() - a.keys())} only in the second")
    return bootstrap_ci([[np.mean(b[task]) - np.mean(a[task])] for task in a], num, seed)
