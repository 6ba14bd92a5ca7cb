"""Makes data/toolworld/base: a small Qwen3 that has learned this desk, its bad habits, and to follow guidance found in its context.

A model organism: every failure kind is done right without guidance at its own rate (0.05 to 0.9), and almost always when the context
carries guidance that addresses it; guidance about something else changes nothing; wrong guidance is followed too.

1. dialogues: scenarios.make_task, then right or wrong by the cell's rate and the guidance drawn (plan below)
2. a 4,096-token BPE with Qwen3's special tokens and chat template; schema fragments are single tokens, numbers split into groups of three digits
3. next-token loss, weight 1 on what the assistant writes, 0.1 on the rest; in the first 15% of the steps a quarter of the rows are repeated random spans
4. bf16 weights in one safetensors file

    python data/toolworld/pretrain.py --measure            # what the shipped base does with and without guidance, 2 cores, a minute or two
    python data/toolworld/pretrain.py --device cuda        # one GPU; recipe, losses and minutes of the shipped base: base/pretrain_log.jsonl
"""
import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from guidance import GUIDANCE, LEADS, SMALL, TAILS, VAGUE, expand  # noqa: E402
from env import Env  # noqa: E402
from scenarios import CHAT_KINDS, DEPARTMENT_OF, KINDS, invented_name, make_task  # noqa: E402

SPECIAL = ("<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|> "
           "<|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>").split()
TAGS = ("<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>").split()
FRAGMENTS = [  # what every prompt repeats to the letter
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
    "</tools>\n\nFor each function call, return a json object with function name and arguments within ", " XML tags:\n",
    '{"name": <function-name>, "arguments": <args-json-object>}\n',
    '{"type": "function", "function": {"name": "', '", "description": "', '", "parameters": {"type": "object", "properties": {"', '": {"type": "string"}', '": {"type": "integer"}', '": {"type": "string", "enum": ["',
    '"]}', '}, "required": ["', '"]}}}\n', '"]}}}', '{"name": "', '", "arguments": {"', '": "', '", "', '"}}', '}}', '"}', '": {"', '"}, "', '": ', ', "', '{"', '"error: ', '{"status": "ok"}',
]
PATTERN = r"2026|-\d\d|\d{1,3}| ?[A-Za-z]+|_[A-Za-z]+| ?[^\sA-Za-z0-9_]+|_|\s+"

# How a dialogue's guidance is drawn and how often it is then done right: plan -> (share, right rate as a function of the cell's own rate)
PLANS = {"none": (0.42, lambda r: r), "right": (0.30, lambda r: 0.985), "generic": (0.07, lambda r: r + 0.45 * (1 - r)), "vague": (0.04, lambda r: r),
         "irrelevant": (0.11, lambda r: r), "wrong": (0.06, lambda r: 0.04)}


def cell_rates(shift=0.0, seed=7):
    """Rate of doing it right without guidance for every (kind, tool): evenly spread over 0.05..0.9 inside each kind's shuffled cells."""
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
    entries = [(field[:-1], name, number) for field, value in json.loads(task["messages"][-1]["content"]).items() if isinstance(value, dict) for name, number in value.items()]
    field, name, number = rng.choice(entries)
    question = rng.choice(('What is the {field} id of "{name}"?', 'Tell me the {field} id for "{name}".', 'Which {field} id has "{name}"?', '"{name}": which {field} id?')).format(field=field, name=name)
    task["messages"][1]["content"] = question
    return [*task["messages"], {"role": "assistant", "content": f'The {field} id of "{name}" is {number}.'}], task["tools"]


def dialogue(index, rates):
    """The index-th pretraining dialogue: (messages, tools); every assistant message in it is one the model learns to write."""
    rng = random.Random(f"dialogue/{index}")
    if rng.random() < 0.07:
        return lookup_dialogue(rng, index)
    kind = rng.choice(list(KINDS)) if rng.random() < 0.9 else rng.choice(("wrong_id", "wrong_variant"))  # finding by name is the hardest to learn
    tool = rng.choice(KINDS[kind])
    task, gold, habit, facts = make_task(kind, tool, "pretrain", index)
    plan = rng.choices(list(PLANS), [share for share, _ in PLANS.values()])[0]
    right = rng.random() < PLANS[plan][1](rates[kind, tool])
    pools = GUIDANCE[kind]
    if plan == "irrelevant":
        pools = GUIDANCE[rng.choice([k for k in KINDS if k != kind])]
    hint = "" if plan == "none" else expand(rng, rng.choice(VAGUE if plan == "vague" else pools["right"] if plan == "irrelevant" and rng.random() < 0.8 else pools.get(plan, pools["right"])), facts)
    if plan == "right" and rng.random() < 0.3:  # several sentences, in either order
        extra = expand(rng, rng.choice(rng.choice([pools["right"], pools["right"], VAGUE, GUIDANCE[rng.choice(list(KINDS))]["generic"]])), facts)
        hint = f"{extra} {hint}" if rng.random() < 0.5 else f"{hint} {extra}"
    if hint and rng.random() < 0.4:
        hint = disturb(rng, hint)
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
    following = {"wrong_order": habit if said == gold else gold, "missing_prerequisite": habit if said == gold else ""}.get(task["failure_kind"], "")
    if rest[-1]["content"].startswith("error"):
        following = gold if said != gold and rng.random() < 0.7 else ""
    if following:
        rest.append({"role": "assistant", "content": following})
        rest += env.step(rest[-1])[0]
    return [*rest, {"role": "assistant", "content": "Everything is done. Is there anything else?"}]


def train_tokenizer(texts, size=4096):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    added = [*SPECIAL, *TAGS, *FRAGMENTS]
    digits = [" ".join(f"{n:03d}" for n in range(1000)) + " " + " ".join(f"{n:02d} -{n:02d}" for n in range(100))] * 60
    tokenizer.train_from_iterator(digits + [part for text in texts for part in split_added(text, added)],
                                  trainers.BpeTrainer(vocab_size=size - len(added), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS + FRAGMENTS])
    missing = [f"{n:03d}" for n in range(1000) if tokenizer.token_to_id(f"{n:03d}") is None]
    assert not missing and tokenizer.get_vocab_size() <= size, (missing[:5], tokenizer.get_vocab_size())
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048, clean_up_tokenization_spaces=False,
                                   chat_template=(HERE / "base" / "chat_template.jinja").read_text())


def split_added(text, added):
    import re
    return [part for part in re.split("|".join(re.escape(t) for t in sorted(added, key=len, reverse=True)), text) if part]


def render(tokenizer, messages, tools):
    """Text of a whole dialogue and, per character range, what the assistant wrote."""
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    return text.replace("<think>\n\n</think>\n\n", "")  # an instruct student: it answers without a thinking block


def encode(job):
    """Worker: dialogues first..last -> list of (ids, weights) as int16 / uint8 arrays (weight 1 stored as 10, 0.1 as 1)."""
    import numpy as np
    from transformers import AutoTokenizer
    first, last, tokenizer_dir, shift, spans, max_length = job
    tokenizer, rates = AutoTokenizer.from_pretrained(tokenizer_dir), cell_rates(shift)
    im_start, im_end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assistant = tokenizer.encode("assistant\n")
    texts = [render(tokenizer, *dialogue(i, rates)) for i in range(first, last)]
    ids_out, weights_out = np.zeros((last - first, max_length), np.int16), np.zeros((last - first, max_length), np.uint8)
    for row, (index, ids) in enumerate(zip(range(first, last), tokenizer(texts)["input_ids"])):
        rng = random.Random(f"span/{index}")
        if index < spans and rng.random() < 0.25:  # pieces of one random span again and again: practice in copying
            span, ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(10, 60))], []
            while len(ids) < 400:
                cut = sorted(rng.sample(range(len(span)), 2))
                ids += span[cut[0]:cut[1]] + [rng.randrange(len(tokenizer))]
            weights = [10] * len(ids)
        else:
            weights, writing = [], False
            for at, token in enumerate(ids):
                weights.append(10 if writing else 1)
                if token == im_start:
                    writing = False
                elif ids[max(0, at - len(assistant)):at + 1] == [im_start, *assistant]:
                    writing = True
                elif token == im_end:
                    writing = False
        ids, weights = ids[:max_length], weights[:max_length]
        ids_out[row, :len(ids)], weights_out[row, :len(ids)] = ids, weights
    return ids_out, weights_out


def measure(folder, num=220, samples=4):
    """What the base does with and without guidance, on situations that no file holds (wordings of the training tasks, unless held out).

    A completion is right, the habit, or neither; neither is an upper bound on copying errors. Writes results/base.jsonl.
    """
    from common import HFEngine, grade_completion, load_model, render_prompt, stable_seed
    model, tokenizer = load_model(folder)
    engine, rng = HFEngine(model, tokenizer), random.Random(0)
    of_kind = {kind: [t for t in tools if DEPARTMENT_OF.get(t, t) != "facilities"] for kind, tools in KINDS.items()}
    kinds = sorted(KINDS)
    situations = [make_task(kind := kinds[i % len(kinds)], rng.choice(of_kind[kind]), "train", 10_000_000 + i) for i in range(num)]

    def hints(pool):
        return [expand(rng, rng.choice(VAGUE if pool == "vague" else GUIDANCE[task["failure_kind"]][pool]), facts) for task, _, _, facts in situations]

    def other_kind(of_hints):  # each situation gets the guidance of a situation of another kind
        return [rng.choice([h for h, (other, *_) in zip(of_hints, situations) if other["failure_kind"] != task["failure_kind"]]) for task, *_ in situations]

    rows = []
    for name, given in (("none", [""] * num), ("right", hints("right")), ("held_out", held_out := hints("held_out")), ("generic", hints("generic")),
                        ("vague", hints("vague")), ("other_kind", other_kind(held_out)), ("wrong", hints("wrong"))):
        prompts = [render_prompt(tokenizer, task["messages"], task["tools"], hint) for (task, *_), hint in zip(situations, given)]
        sampled = engine.generate(prompts, [[stable_seed("measure", i, j) for j in range(samples)] for i in range(num)], 96)
        texts = [(situation, tokenizer.decode(s.ids, skip_special_tokens=True)) for situation, group in zip(situations, sampled) for s in group]
        right = [grade_completion(task, text).passed for (task, *_), text in texts]
        neither = [not passed and text != habit for passed, ((_, _, habit, _), text) in zip(right, texts)]
        rows.append({"guidance": name, "right": round(sum(right) / len(right), 3), "neither": round(sum(neither) / len(right), 3), "completions": len(right)})
        print(rows[-1], flush=True)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "base.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", default=str(HERE / "base"), help="where the Hugging Face folder goes")
    parser.add_argument("--num_dialogues", type=int, default=1_400_000, help="one epoch over this many dialogues")
    parser.add_argument("--batch_size", type=int, default=96, help="dialogues a step")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate, cosine to 2%%")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--layers", type=int, default=4, help="number of layers")
    parser.add_argument("--rate_shift", type=float, default=-0.015, help="added to every cell's rate of doing it right without guidance")
    parser.add_argument("--seed", type=int, default=0, help="weights")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--max_length", type=int, default=448, help="tokens; longer dialogues are cut")
    parser.add_argument("--measure", action="store_true", help="no training: measure what the base in out_dir does with and without guidance")
    args = parser.parse_args()
    if args.measure:
        return measure(args.out_dir)
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    start, out = time.time(), Path(args.out_dir)
    out.mkdir(parents=True, exist_ok=True)

    rates = cell_rates(args.rate_shift)
    if not (out / "tokenizer.json").exists():
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        template = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=(HERE / "base" / "chat_template.jinja").read_text())
        train_tokenizer([render(template, *dialogue(-1 - i, rates)) for i in range(20_000)]).save_pretrained(out)
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(out)

    spans, size = int(0.15 * args.num_dialogues), 2000
    jobs = [(first, min(first + size, args.num_dialogues), str(out), args.rate_shift, spans, args.max_length) for first in range(0, args.num_dialogues, size)]
    with multiprocessing.Pool(os.cpu_count()) as pool:
        parts = pool.map(encode, jobs, chunksize=1)
    ids = torch.cat([torch.from_numpy(p[0]) for p in parts])  # (N, L)
    weights = torch.cat([torch.from_numpy(p[1]) for p in parts])  # (N, L), tenths
    tokens = int((weights > 0).sum())
    print(f"{len(ids)} dialogues, {tokens / 1e6:.1f} M tokens, mean length {tokens / len(ids):.0f}, longest {int((weights > 0).sum(1).max())}, {time.time() - start:.0f} s", flush=True)

    torch.manual_seed(args.seed)
    heads = args.hidden // 64
    config = Qwen3Config(vocab_size=4096, hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2),
                         head_dim=64, tie_word_embeddings=True, max_position_embeddings=2048, bos_token_id=None,
                         eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"), pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    model = Qwen3ForCausalLM(config).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    decay = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.95), fused=args.device == "cuda")

    def loss_of(batch, weight):
        with torch.autocast(args.device, torch.bfloat16):
            hidden = model.model(input_ids=batch, use_cache=False).last_hidden_state[:, :-1]  # right padding: causal attention needs no mask
            logits = hidden @ model.lm_head.weight.T  # logits[:, t] predict token t + 1
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        weight = weight[:, 1:].flatten()
        written = (weight > 0.5).float()
        return (loss * weight).sum() / weight.sum(), (loss * written).sum() / written.sum()

    step_loss = torch.compile(loss_of) if args.device == "cuda" else loss_of
    ids, weights = ids.to(args.device), weights.to(args.device)
    steps = len(ids) // args.batch_size
    log, order = [], torch.Generator().manual_seed(args.seed)
    # spans come first, so the order is shuffled inside the two parts only
    first = spans // args.batch_size * args.batch_size
    order = torch.cat([torch.randperm(first, generator=order), first + torch.randperm(len(ids) - first, generator=order)]).to(args.device)
    recent = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 300) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        rows = order[step * args.batch_size:(step + 1) * args.batch_size]
        loss, written = step_loss(ids[rows].long(), weights[rows].float() / 10)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(written.detach())
        if (step + 1) % max(1, steps // 20) == 0:
            log.append({"step": step + 1, "tokens": round(tokens * (step + 1) / steps), "loss": round(torch.stack(recent).mean().item(), 4), "seconds": round(time.time() - start)})
            print(log[-1], flush=True)
            recent = []

    model = model.to("cpu", torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=[config.eos_token_id, config.pad_token_id], pad_token_id=config.pad_token_id, do_sample=True)
    model.save_pretrained(out)
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} CPU cores"
    recipe = {"args": {k: v for k, v in vars(args).items() if k not in ("out_dir", "measure")}, "tokens": tokens, "steps": steps, "device": device, "torch": torch.__version__.split("+")[0], "minutes": round((time.time() - start) / 60, 1)}
    (out / "pretrain_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [recipe, *log]))


if __name__ == "__main__":
    main()
