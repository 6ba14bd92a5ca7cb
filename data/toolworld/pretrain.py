"""Makes data/toolworld/base: a small Qwen3 that knows this desk, its bad habits, and to follow guidance in its context.

A model organism: every failure kind is done right without guidance at its own rate (0.05 to 0.9), and almost always
when the context carries guidance that addresses it; guidance about something else changes nothing; wrong guidance is
followed too.

1. dialogues: scenarios.make_task, then right or wrong by the cell's rate and the guidance drawn (PLANS below)
2. a 4,096-token BPE with Qwen3's special tokens and chat template; schema fragments are single tokens, numbers split
   into groups of three digits
3. next-token loss, weight 1 on what the assistant writes, 0.1 on the rest; in the first 15% of the steps a quarter of
   the rows are repeated random spans
4. bf16 weights in one safetensors file

    python data/toolworld/pretrain.py --measure      # the shipped base with and without guidance; 2 cores, minutes
    python data/toolworld/pretrain.py --device cuda  # one GPU; recipe and losses: base/pretrain_log.jsonl
"""
import argparse
import json
import math
import multiprocessing
import os
import random
import re
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHAT_TEMPLATE = HERE / "base" / "chat_template.jinja"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from guidance import GUIDANCE, LEADS, SMALL, TAILS, VAGUE, expand  # noqa: E402
from env import Env  # noqa: E402
from scenarios import CHAT_KINDS, DEPARTMENT_OF, KINDS, invented_name, make_task  # noqa: E402

SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>").split()
TAGS = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>").split()
FRAGMENTS = [  # what every prompt repeats to the letter
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
    "</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    " XML tags:\n",
    '{"name": <function-name>, "arguments": <args-json-object>}\n',
    '{"type": "function", "function": {"name": "', '", "description": "',
    '", "parameters": {"type": "object", "properties": {"', '": {"type": "string"}', '": {"type": "integer"}',
    '": {"type": "string", "enum": ["', '"]}', '}, "required": ["', '"]}}}\n', '"]}}}',
    '{"name": "', '", "arguments": {"', '": "', '", "', '"}}', "}}", '"}', '": {"', '"}, "', '": ', ', "', '{"',
    '"error: ', '{"status": "ok"}',
]
PATTERN = r"2026|-\d\d|\d{1,3}| ?[A-Za-z]+|_[A-Za-z]+| ?[^\sA-Za-z0-9_]+|_|\s+"

# How a dialogue's guidance is drawn and how often it is then done right:
# plan -> (share, right rate as a function of the cell's own rate)
PLANS = {
    "none": (0.42, lambda rate: rate),
    "right": (0.30, lambda rate: 0.985),
    "generic": (0.07, lambda rate: rate + 0.45 * (1 - rate)),
    "vague": (0.04, lambda rate: rate),
    "irrelevant": (0.11, lambda rate: rate),
    "wrong": (0.06, lambda rate: 0.04),
}


def cell_rates(shift=0.0, seed=7):
    """{(kind, tool): rate of doing it right without guidance}, spread evenly over 0.05..0.9 inside every kind."""
    rng, rates = random.Random(seed), {}
    for kind, tools in KINDS.items():
        spread = [0.05 + 0.85 * (i + rng.random()) / len(tools) for i in range(len(tools))]
        rng.shuffle(spread)
        rates.update({(kind, tool): min(0.95, max(0.03, rate + shift)) for tool, rate in zip(tools, spread)})
    return rates


def disturb(rng, text):
    """New words, and small words lost or exchanged, so that guidance works in wordings never seen."""
    words = text.split(" ")
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(words))
        draw = rng.random()
        if draw < 0.4:
            words.insert(at, rng.choice((invented_name(rng).lower(), rng.choice(SMALL))))
        elif words[at] in SMALL and len(words) > 3:
            if draw < 0.7:
                del words[at]
            else:
                words[at] = rng.choice((invented_name(rng).lower(), rng.choice(SMALL)))
    return " ".join(words)


def lookup_dialogue(rng, index):
    """A question for one id out of a list: practice in finding a value by the name beside it."""
    kind = rng.choice(("wrong_id", "wrong_variant"))
    task = make_task(kind, rng.choice(KINDS[kind]), "pretrain", index)[0]
    record = json.loads(task["messages"][-1]["content"])
    entries = [(field[:-1], name, number) for field, value in record.items() if isinstance(value, dict)
               for name, number in value.items()]
    field, name, number = rng.choice(entries)
    question = rng.choice((
        'What is the {field} id of "{name}"?', 'Tell me the {field} id for "{name}".',
        'Which {field} id has "{name}"?', '"{name}": which {field} id?')).format(field=field, name=name)
    task["messages"][1]["content"] = question
    answer = {"role": "assistant", "content": f'The {field} id of "{name}" is {number}.'}
    return [*task["messages"], answer], task["tools"]


def draw_guidance(rng, kind, plan, facts):
    """The hint that this plan puts into a dialogue of this kind, before it is placed; "" for none."""
    pools = GUIDANCE[kind]
    if plan == "irrelevant":
        pools = GUIDANCE[rng.choice([k for k in KINDS if k != kind])]
        rng.random()  # decides nothing; without this draw all later ones, hence the dialogues, would be others
    if plan == "none":
        return ""
    wordings = VAGUE if plan == "vague" else pools["right" if plan == "irrelevant" else plan]
    hint = expand(rng, rng.choice(wordings), facts)
    if plan == "right" and rng.random() < 0.3:  # several sentences, in either order
        other_topic = GUIDANCE[rng.choice(list(KINDS))]["generic"]
        extra = expand(rng, rng.choice(rng.choice([pools["right"], pools["right"], VAGUE, other_topic])), facts)
        hint = f"{extra} {hint}" if rng.random() < 0.5 else f"{hint} {extra}"
    return disturb(rng, hint) if rng.random() < 0.4 else hint


def dialogue(index, rates):
    """The index-th pretraining dialogue: (messages, tools). The model learns to write all its assistant messages."""
    rng = random.Random(f"dialogue/{index}")
    if rng.random() < 0.07:
        return lookup_dialogue(rng, index)
    # finding a value by its name is the hardest to learn, so that it has a share of its own
    kind = rng.choice(list(KINDS)) if rng.random() < 0.9 else rng.choice(("wrong_id", "wrong_variant"))
    tool = rng.choice(KINDS[kind])
    task, gold, habit, facts = make_task(kind, tool, "pretrain", index)
    plan = rng.choices(list(PLANS), [share for share, _ in PLANS.values()])[0]
    right = rng.random() < PLANS[plan][1](rates[kind, tool])
    hint = draw_guidance(rng, kind, plan, facts)
    messages = [dict(m) for m in task["messages"]]
    if rng.random() < 0.2:
        messages[1]["content"] = disturb(rng, messages[1]["content"])
    if hint:
        hint = rng.choice(LEADS) + hint + rng.choice(TAILS)
        where = rng.choices((len(messages) - 1, 0, 1), (0.7, 0.15, 0.15))[0]
        messages[where]["content"] += "\n" + hint
    messages.append({"role": "assistant", "content": gold if right else habit})
    if kind not in CHAT_KINDS and rng.random() < 0.25:
        messages += rest_of_episode(rng, task, gold, habit, gold if right else habit)
    return messages, task["tools"]


def rest_of_episode(rng, task, gold, habit, said):
    """What follows the step in a whole episode: the observation, the call that is still open, the closing sentence."""
    env = Env()
    env.reset(task)
    rest, done = env.step({"role": "assistant", "content": said})
    if done:
        return []
    following = ""
    if task["failure_kind"] == "wrong_order":
        following = habit if said == gold else gold
    elif task["failure_kind"] == "missing_prerequisite" and said == gold:
        following = habit
    if rest[-1]["content"].startswith("error"):
        following = gold if said != gold and rng.random() < 0.7 else ""
    if following:
        rest.append({"role": "assistant", "content": following})
        rest += env.step(rest[-1])[0]
    return [*rest, {"role": "assistant", "content": "Everything is done. Is there anything else?"}]


def train_tokenizer(texts, size=4096):
    """BPE over the texts in which special tokens, tags, fragments and all groups of three digits are single tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    added = [*SPECIAL, *TAGS, *FRAGMENTS]
    numbers = " ".join(f"{n:03d}" for n in range(1000)) + " " + " ".join(f"{n:02d} -{n:02d}" for n in range(100))
    trainer = trainers.BpeTrainer(vocab_size=size - len(added), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    # 60 times: often enough that every number is merged into one token
    parts = [part for text in texts for part in split_added(text, added)]
    tokenizer.train_from_iterator([numbers] * 60 + parts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS + FRAGMENTS])
    missing = [f"{n:03d}" for n in range(1000) if tokenizer.token_to_id(f"{n:03d}") is None]
    assert not missing and tokenizer.get_vocab_size() <= size, (missing[:5], tokenizer.get_vocab_size())
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048,
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE.read_text())


def split_added(text, added):
    """What stands between the added tokens; the longest one wins where several begin."""
    longest_first = sorted(added, key=len, reverse=True)
    return [part for part in re.split("|".join(map(re.escape, longest_first)), text) if part]


def render(tokenizer, messages, tools):
    """Text of a whole dialogue."""
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    return text.replace("<think>\n\n</think>\n\n", "")  # an instruct student: it answers without a thinking block


def load_or_train_tokenizer(out, rates):
    """The tokenizer in the folder out; trained on 20,000 dialogues of its own when there is none yet."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    if not (out / "tokenizer.json").exists():
        template = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()),
                                           chat_template=CHAT_TEMPLATE.read_text())
        texts = [render(template, *dialogue(-1 - i, rates)) for i in range(20_000)]
        train_tokenizer(texts).save_pretrained(out)
    return AutoTokenizer.from_pretrained(out)


def repeated_span(rng, vocabulary):
    """Pieces of one random span again and again: practice in copying."""
    span, ids = [rng.randrange(vocabulary) for _ in range(rng.randrange(10, 60))], []
    while len(ids) < 400:
        first, last = sorted(rng.sample(range(len(span)), 2))
        ids += span[first:last] + [rng.randrange(vocabulary)]
    return ids


def token_weights(ids, opening, im_start, im_end):
    """10 on what the assistant writes, up to and with <|im_end|>, 1 on the rest. opening: ids before such a message."""
    weights, writing = [], False
    for at, token in enumerate(ids):
        weights.append(10 if writing else 1)
        if token in (im_start, im_end):
            writing = False
        elif ids[max(0, at + 1 - len(opening)):at + 1] == opening:
            writing = True
    return weights


def encode(job):
    """Worker: dialogues first..last -> (ids, weights), int16 and uint8, both (last - first, max_length), 0 = padding.

    A weight is stored in tenths. The first `spans` dialogues are partly replaced by repeated spans.
    """
    import numpy as np
    from transformers import AutoTokenizer
    first, last, tokenizer_dir, shift, spans, max_length = job
    tokenizer, rates = AutoTokenizer.from_pretrained(tokenizer_dir), cell_rates(shift)
    im_start, im_end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    opening = [im_start, *tokenizer.encode("assistant\n")]
    texts = [render(tokenizer, *dialogue(i, rates)) for i in range(first, last)]
    all_ids = np.zeros((last - first, max_length), np.int16)
    all_weights = np.zeros((last - first, max_length), np.uint8)
    for row, ids in enumerate(tokenizer(texts)["input_ids"]):
        index = first + row
        rng = random.Random(f"span/{index}")
        if index < spans and rng.random() < 0.25:
            ids = repeated_span(rng, len(tokenizer))
            weights = [10] * len(ids)
        else:
            weights = token_weights(ids, opening, im_start, im_end)
        length = min(len(ids), max_length)
        all_ids[row, :length], all_weights[row, :length] = ids[:length], weights[:length]
    return all_ids, all_weights


def measure(folder, num=220, samples=4):
    """What the base does with and without guidance, on situations that no file holds (training wordings).

    A completion is right, the habit, or neither (an upper bound on copying errors). Writes results/base.jsonl.
    """
    from common import HFEngine, grade_completion, load_model, render_prompt, sample_tasks, stable_seed, write_jsonl
    model, tokenizer = load_model(folder)
    engine, rng = HFEngine(model, tokenizer), random.Random(0)
    of_kind = {kind: [t for t in tools if DEPARTMENT_OF.get(t, t) != "facilities"] for kind, tools in KINDS.items()}
    kinds, situations = sorted(KINDS), []
    for i in range(num):
        kind = kinds[i % len(kinds)]
        situations.append(make_task(kind, rng.choice(of_kind[kind]), "train", 10_000_000 + i))

    rows = []
    for name, hints in draw_conditions(rng, situations).items():
        prompts = [render_prompt(tokenizer, task["messages"], task["tools"], hint)
                   for (task, *_), hint in zip(situations, hints)]
        seeds = [[stable_seed("measure", i, j) for j in range(samples)] for i in range(num)]
        sampled = sample_tasks(engine, tokenizer, [task for task, *_ in situations], prompts, seeds, 96, 1.0)
        right = neither = 0
        for (task, _, habit, _), group in zip(situations, sampled):
            for sample in group:
                passed = grade_completion(task, sample.text).passed
                right += passed
                neither += not passed and sample.text != habit
        total = num * samples
        rows.append({"guidance": name, "right": round(right / total, 3), "neither": round(neither / total, 3),
                     "completions": total})
        print(rows[-1], flush=True)
    (HERE / "results").mkdir(exist_ok=True)
    write_jsonl(HERE / "results" / "base.jsonl", rows)


def draw_conditions(rng, situations):
    """{kind of guidance: a hint for every situation}"""
    def hints(pool):
        return [expand(rng, rng.choice(VAGUE if pool == "vague" else GUIDANCE[task["failure_kind"]][pool]), facts)
                for task, _, _, facts in situations]

    drawn = {"none": [""] * len(situations)}
    drawn |= {pool: hints(pool) for pool in ("right", "held_out", "generic", "vague")}
    drawn["other_kind"] = []  # each situation gets the guidance of a situation of another kind
    for task, *_ in situations:
        others = [hint for hint, (other, *_) in zip(drawn["held_out"], situations)
                  if other["failure_kind"] != task["failure_kind"]]
        drawn["other_kind"].append(rng.choice(others))
    drawn["wrong"] = hints("wrong")
    return drawn


def encode_all(args, out, spans):
    """Every dialogue of the epoch: ids and weights in tenths, both (N, L); one process per core."""
    import torch
    starts = range(0, args.num_dialogues, 2000)
    jobs = [(first, min(first + 2000, args.num_dialogues), str(out), args.rate_shift, spans, args.max_length)
            for first in starts]
    with multiprocessing.Pool(os.cpu_count()) as pool:
        parts = pool.map(encode, jobs, chunksize=1)
    ids, weights = zip(*parts)
    return torch.cat([torch.from_numpy(part) for part in ids]), torch.cat([torch.from_numpy(part) for part in weights])


def new_model(args, tokenizer):
    from transformers import Qwen3Config, Qwen3ForCausalLM
    heads = args.hidden // 64
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=4096, hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), head_dim=64, tie_word_embeddings=True,
        max_position_embeddings=2048, bos_token_id=None, eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>")))


def train(args, model, ids, weights, spans, start):
    """One epoch; returns twenty rows of the log: the loss, nats per token, is that of what the assistant writes."""
    import torch

    def loss_of(batch, weight):
        with torch.autocast(args.device, torch.bfloat16):
            # right padding: causal attention needs no mask
            hidden = model.model(input_ids=batch, use_cache=False).last_hidden_state[:, :-1]
            logits = hidden @ model.lm_head.weight.T  # logits[:, t] predict token t + 1
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        weight = weight[:, 1:].flatten()
        written = (weight > 0.5).float()
        return (losses * weight).sum() / weight.sum(), (losses * written).sum() / written.sum()

    step_loss = torch.compile(loss_of) if args.device == "cuda" else loss_of
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
         {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95), fused=args.device == "cuda")
    tokens, steps = int((weights > 0).sum()), len(ids) // args.batch_size
    ids, weights = ids.to(args.device), weights.to(args.device)
    # spans come first, so the order is shuffled inside the two parts only
    generator = torch.Generator().manual_seed(args.seed)
    first = spans // args.batch_size * args.batch_size
    order = torch.cat([torch.randperm(first, generator=generator),
                       first + torch.randperm(len(ids) - first, generator=generator)]).to(args.device)
    log, recent = [], []
    for step in range(steps):
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 300) * cosine
        rows = order[step * args.batch_size:(step + 1) * args.batch_size]
        loss, written = step_loss(ids[rows].long(), weights[rows].float() / 10)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(written.detach())
        if (step + 1) % max(1, steps // 20) == 0:
            log.append({"step": step + 1, "tokens": round(tokens * (step + 1) / steps),
                        "loss": round(torch.stack(recent).mean().item(), 4), "seconds": round(time.time() - start)})
            print(log[-1], flush=True)
            recent = []
    return log


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", default=str(HERE / "base"), help="where the Hugging Face folder goes")
    parser.add_argument("--num_dialogues", type=int, default=1_400_000, help="one epoch over this many dialogues")
    parser.add_argument("--batch_size", type=int, default=96, help="dialogues a step")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate, cosine to 2%%")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--layers", type=int, default=4, help="number of layers")
    parser.add_argument("--rate_shift", type=float, default=-0.015,
                        help="added to every cell's rate of doing it right without guidance")
    parser.add_argument("--seed", type=int, default=0, help="weights")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--max_length", type=int, default=448, help="tokens; longer dialogues are cut")
    parser.add_argument("--measure", action="store_true",
                        help="no training: measure what the base in out_dir does with and without guidance")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.measure:
        return measure(args.out_dir)
    import torch
    from transformers import GenerationConfig
    start, out = time.time(), Path(args.out_dir)
    out.mkdir(parents=True, exist_ok=True)

    tokenizer = load_or_train_tokenizer(out, cell_rates(args.rate_shift))
    spans = int(0.15 * args.num_dialogues)
    ids, weights = encode_all(args, out, spans)
    lengths = (weights > 0).sum(1)
    tokens = int(lengths.sum())
    print(f"{len(ids)} dialogues, {tokens / 1e6:.1f} M tokens, mean length {tokens / len(ids):.0f}, "
          f"longest {int(lengths.max())}, {time.time() - start:.0f} s", flush=True)

    torch.manual_seed(args.seed)
    model = new_model(args, tokenizer).to(args.device)
    print(f"{model.num_parameters() / 1e6:.2f} M parameters", flush=True)
    log = train(args, model, ids, weights, spans, start)

    model = model.to("cpu", torch.bfloat16)
    end, pad = model.config.eos_token_id, model.config.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad, do_sample=True)
    model.save_pretrained(out)
    recipe = {
        "args": {key: value for key, value in vars(args).items() if key not in ("out_dir", "measure")},
        "tokens": tokens, "steps": len(ids) // args.batch_size,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} CPU cores",
        "torch": torch.__version__.split("+")[0], "minutes": round((time.time() - start) / 60, 1),
    }
    (out / "pretrain_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [recipe, *log]))


if __name__ == "__main__":
    main()
