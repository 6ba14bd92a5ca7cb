"""How fast the training step is, beside the floor that the arithmetic sets. A bench, not a test: it needs a GPU.

    python tests/bench_speed.py --shape qwen3_4b
    python tests/bench_speed.py --shape qwen3_0.6b --row_tokens 16896 --parts step rollouts whole grow
    python tests/bench_speed.py --lora_rank 16 --gradient_checkpointing --row_tokens 2304 --vllm_memory 0.072 --parts whole  # 24 GiB

Models have random weights in the shape's sizes; a step is 8 tasks x 8 rollouts, prefix 1024 (and 64 tokens of hint for the
teacher), completion 128. Each line: seconds, floor in seconds, their ratio, GiB at the peak. The floor counts products of
matrices alone, at the rate that this GPU reaches on one large product (printed first).

kernel   the loss of 4096 tokens, forward and backward, and its gradients against float64
step     teacher, student forward and backward, AdamW; and the gradients against those of unpacked rows
rollouts sampling with vLLM, through our engine and bare; the push of new weights
whole    rollouts + step + push
grow     the step with 1 to 16 rollouts a task, prefixes of 256 to 8192, 2 to 16 tasks
"""
import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import train_opsd  # noqa: E402
from common import attention, check_sync, pack_rows, plain_weights  # noqa: E402

SHAPES = {
    "qwen3_4b": dict(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=9728),
    "qwen3_0.6b": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072),
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=96),
}
VOCAB = 151936
TASKS, ROLLOUTS, PREFIX, HINT, COMPLETION = 8, 8, 1024, 64, 128


def model_config(shape):
    from transformers import Qwen3Config
    return Qwen3Config(vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=40960, architectures=["Qwen3ForCausalLM"], **SHAPES[shape])


def random_model(shape, seed=0):
    """A model of the shape in bfloat16 on the GPU, with our attention."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.masking_utils import sdpa_mask
    AttentionInterface.register("nanoopsd", attention)
    AttentionMaskInterface.register("nanoopsd", sdpa_mask)
    torch.manual_seed(seed)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16, attn_implementation="nanoopsd").eval()


def seconds(work, repeats=5, warm=2):
    """Median seconds of work() after `warm` calls that do not count, and GiB that the later calls had at their peak."""
    times = []
    for i in range(warm + repeats):
        if i == warm:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[warm:])[repeats // 2], torch.cuda.max_memory_allocated() / 2**30


def matmul_rate():
    """FLOP/s of one large bfloat16 product of random numbers, over a second of it: the clock falls under load."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    spent, _ = seconds(lambda: [x @ x for _ in range(100)], 3, 1)
    return 100 * 2 * 8192**3 / spent


def line(name, spent, floor=None, gib=None, **more):
    row = {"what": name, "seconds": round(spent, 4)}
    if floor:
        row |= {"floor": round(floor, 4), "ratio": round(spent / floor, 2)}
    if gib:
        row["gib"] = round(gib, 2)
    row |= more
    print(json.dumps(row), flush=True)
    return row


def bench_kernel(rate, tokens=4096, dim=2560):
    """The loss of `tokens` tokens: four products of (tokens, dim) and (VOCAB, dim)."""
    torch.manual_seed(0)
    hidden_s = torch.randn(tokens, dim, device="cuda").bfloat16().requires_grad_()
    hidden_t = (hidden_s.detach().float() + 0.3 * torch.randn(tokens, dim, device="cuda")).bfloat16()
    weight = (0.05 * torch.randn(VOCAB, dim, device="cuda")).bfloat16().requires_grad_()
    gradients = []

    def work():
        grad_weight = torch.zeros_like(weight)
        grad_hidden = train_opsd.loss_and_gradients(train_opsd.dense_loss(), hidden_s.detach(), weight.detach(), hidden_t, weight.detach(),
                                                    grad_weight, chunk=512)[1]
        gradients[:] = grad_hidden, grad_weight

    before = torch.cuda.memory_allocated()
    spent, gib = seconds(work, 20, 5)
    extra = gib - (before + 2 * sum(x.nbytes for x in gradients)) / 2**30  # the gradients of two calls are there at once
    line("loss, forward + backward", spent, 4 * 2 * tokens * dim * VOCAB / rate, extra, errors=kernel_errors(hidden_s, weight, hidden_t, *gradients))


def kernel_errors(hidden_s, weight, hidden_t, got_hidden, got_weight):
    """Relative errors of both gradients against float64, and the largest gradient of a student that equals its teacher."""
    h, w, t = hidden_s.detach().double(), weight.detach().double(), hidden_t.double()
    want_hidden, off, norm = torch.empty_like(h), 0.0, 0.0
    gradient = torch.empty(len(h), VOCAB, device="cuda")
    for i in range(0, len(h), 256):
        logp, logq = (torch.log_softmax(x[i:i + 256] @ w.T, -1) for x in (h, t))
        exact = logp.exp() * (logp - logq - (logp.exp() * (logp - logq)).sum(-1, keepdim=True))
        gradient[i:i + 256], want_hidden[i:i + 256] = exact, exact @ w
    for i in range(0, VOCAB, 8192):
        want = gradient[:, i:i + 8192].double().T @ h
        off, norm = off + (got_weight[i:i + 8192].double() - want).square().sum(), norm + want.square().sum()
    same = train_opsd.chunked_loss(train_opsd.dense_loss(), hidden_s, weight, hidden_s.detach(), weight.detach(), chunk=512)[0]
    zeros = torch.autograd.grad(same, (hidden_s, weight))
    return {"hidden": round(float((got_hidden.double() - want_hidden).norm() / want_hidden.norm()), 5), "weight": round(float((off / norm).sqrt()), 5),
            "equal": max(float(x.detach().abs().max()) for x in (same, *zeros))}


class Step:
    """A student, its teacher and AdamW: what train_opsd does between two rollouts."""

    def __init__(self, shape, row_tokens, compile=True, lora_rank=0, checkpointing=False):
        self.cfg = train_opsd.Config(row_tokens=row_tokens, kl_chunk=512, compile=compile, lora_rank=lora_rank, dtype="bfloat16",
                                     gradient_checkpointing=checkpointing, device="cuda")
        self.model = self.teacher = random_model(shape)
        self.adapter = train_opsd.add_adapter(self.model, self.cfg) if lora_rank else None
        if not lora_rank:
            self.teacher = random_model(shape).requires_grad_(False)
        for model in dict.fromkeys((self.model, self.teacher)):
            train_opsd.prepare_layers(model, self.cfg)
        self.weights = train_opsd.trained_weights(self.model)
        self.optimizer = torch.optim.AdamW([master for _, master in self.weights], lr=1e-6, weight_decay=0.0, fused=True)

    def rows(self, tasks, rollouts, prefix, completion=COMPLETION, seed=0):
        """The packed rows of student and teacher for random tokens."""
        draw = torch.Generator().manual_seed(seed)
        ids = lambda length: torch.randint(0, VOCAB - 1000, (length,), generator=draw).tolist()
        items = [(ids(prefix), [ids(completion) for _ in range(rollouts)]) for _ in range(tasks)]
        return pack_rows(items, self.cfg.row_tokens), pack_rows([(ids(HINT) + p, c) for p, c in items], self.cfg.row_tokens), items

    def backward(self, student_rows, teacher_rows):
        hidden_t = train_opsd.teacher_states(self.teacher, teacher_rows, self.cfg, self.adapter)
        return train_opsd.student_pass(self.model, self.teacher, student_rows, hidden_t, lambda span: train_opsd.dense_loss(),
                                       len(hidden_t), self.cfg)

    def step(self, student_rows, teacher_rows):
        result = self.backward(student_rows, teacher_rows)
        train_opsd.update(self.optimizer, self.weights, self.cfg.grad_clip)
        return result


def step_flops(shape, tasks, rollouts, prefix, completion=COMPLETION):
    """Products of matrices in a step: 6 a weight and token for the student, 2 for the teacher, and the loss; attention left out."""
    size = SHAPES[shape]
    heads = 2 * (size["num_attention_heads"] + size["num_key_value_heads"]) * size["head_dim"]
    layers = size["num_hidden_layers"] * size["hidden_size"] * (heads + 3 * size["intermediate_size"])
    student = tasks * (prefix + rollouts * completion)
    return layers * (6 * student + 2 * (student + tasks * HINT)) + 8 * tasks * rollouts * completion * VOCAB * size["hidden_size"]


def bench_step(shape, rate, row_tokens, **options):
    step = Step(shape, row_tokens, **options)
    student_rows, teacher_rows, items = step.rows(TASKS, ROLLOUTS, PREFIX)
    start = time.perf_counter()
    step.step(student_rows, teacher_rows)
    compiling = time.perf_counter() - start
    spent, gib = seconds(lambda: step.step(student_rows, teacher_rows))
    teaching, _ = seconds(lambda: train_opsd.teacher_states(step.teacher, teacher_rows, step.cfg, step.adapter), 3, 1)
    moving = seconds_of_update(step, student_rows, teacher_rows)
    fill = sum(len(row.input_ids) for row in student_rows) / (len(student_rows) * row_tokens)
    line(f"step without generation, {shape}", spent, step_flops(shape, TASKS, ROLLOUTS, PREFIX) / rate, gib, teacher=round(teaching, 4),
         update=round(moving, 4), rows=len(student_rows), row_fill=round(fill, 3), first_step=round(compiling, 1))
    gradient_check(step, items)
    return step


def seconds_of_update(step, student_rows, teacher_rows):
    times = []
    for _ in range(3):
        step.backward(student_rows, teacher_rows)
        torch.cuda.synchronize()
        start = time.perf_counter()
        train_opsd.update(step.optimizer, step.weights, step.cfg.grad_clip)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def gradient_check(step, items):
    """The gradient of packed rows against that of one row per completion."""
    def gradient(rows, teacher_rows):
        step.backward(rows, teacher_rows)
        grads = [weight.grad for weight, _ in step.weights]
        for weight, _ in step.weights:
            weight.grad = None
        return grads
    draw = torch.Generator().manual_seed(1)
    hint = torch.randint(0, VOCAB - 1000, (HINT,), generator=draw).tolist()
    few = items[:2]
    single = [(p, [c]) for p, completions in few for c in completions]
    packed, alone = (gradient(pack_rows(x, size), pack_rows([(hint + p, c) for p, c in x], size)) for x, size in ((few, step.cfg.row_tokens), (single, 1)))
    off = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(packed, alone)) ** 0.5
    norm = sum(float(b.float().square().sum()) for b in alone) ** 0.5
    line("gradient, packed against unpacked rows", 0, error=round(off / norm, 5))


def bench_grow(step, shape, rate):
    """How cost grows. Compiled code serves new lengths after one more compilation."""
    for tasks, rollouts, prefix in [*((8, n, 1024) for n in (1, 2, 4, 8, 16)), *((8, 8, n) for n in (256, 512, 2048, 4096, 8192)), *((n, 8, 1024) for n in (2, 4, 16))]:
        student_rows, teacher_rows, _ = step.rows(tasks, rollouts, prefix)
        spent, gib = seconds(lambda: step.step(student_rows, teacher_rows), 3, 1)
        line(f"step, {tasks} tasks x {rollouts} rollouts, prefix {prefix}", spent, step_flops(shape, tasks, rollouts, prefix) / rate, gib, rows=len(student_rows))


def vllm_engine(shape, folder, memory):
    """Our engine with weights of its own; those of the student are pushed into it."""
    from common import VLLMEngine
    config = model_config(shape)
    config.eos_token_id = None
    config.save_pretrained(folder)
    return VLLMEngine(folder, [], PREFIX + COMPLETION + 16, memory, "cuda", "bfloat16", load_format="dummy", skip_tokenizer_init=True)


def bench_rollouts(engine, step, rate, shape):
    """64 tasks x 8 rollouts through our engine and bare, each time without cached prefixes, and the push of weights."""
    from vllm import SamplingParams
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCAB - 1000, (PREFIX,), generator=draw).tolist() for _ in range(64)]

    def ours():
        engine.llm.reset_prefix_cache()
        engine.generate(prompts, [range(ROLLOUTS)] * len(prompts), COMPLETION)

    def bare(**options):
        engine.llm.reset_prefix_cache()
        engine.llm.generate([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False, sampling_params=SamplingParams(
            n=ROLLOUTS, temperature=1.0, max_tokens=COMPLETION, ignore_eos=True, detokenize=False, **options))
    tokens = len(prompts) * ROLLOUTS * COMPLETION
    ways = {"bare": bare, "bare, with log-probs": lambda: bare(logprobs=0), "ours": ours}
    times = {name: [] for name in ways}
    for _ in range(4):  # in turns: whatever slows the machine down for a while slows all of them
        for name, work in ways.items():
            times[name].append(seconds(work, 1, 0)[0])
    for name, spent in times.items():
        spent = sorted(spent[1:])[1]
        line(f"rollouts, {shape}, vLLM {name}", spent, tokens_per_second=round(tokens / spent))
    spent, _ = seconds(lambda: engine.push(plain_weights(step.model), changed=False), 5, 1)
    line(f"push of weights and reset, {shape}", spent, gap=round(check_sync(engine, step.model, prompts[:8]), 4))


def bench_whole(engine, step, shape):
    """Rollouts of new prompts, teacher, student, AdamW, push with its probe: seconds of each part, medians over the steps."""
    draw = torch.Generator().manual_seed(3)
    ids = lambda length: torch.randint(0, VOCAB - 1000, (length,), generator=draw).tolist()
    times = []
    for number in range(6):
        prompts, hint = [ids(PREFIX) for _ in range(TASKS)], ids(HINT)
        clock = [tick()]
        samples = engine.generate(prompts, [range(ROLLOUTS)] * TASKS, COMPLETION)
        clock.append(tick())
        items = [(prompt, [sample.ids for sample in group]) for prompt, group in zip(prompts, samples)]
        student_rows, teacher_rows = (pack_rows(x, step.cfg.row_tokens) for x in (items, [(hint + p, c) for p, c in items]))
        step.step(student_rows, teacher_rows)
        clock.append(tick())
        engine.push(plain_weights(step.model))
        check_sync(engine, step.model, prompts)
        clock.append(tick())
        times.append([b - a for a, b in zip(clock, clock[1:])])
    parts = [sorted(column)[2] for column in zip(*times[1:])]
    free, total = torch.cuda.mem_get_info()
    line(f"whole step, {shape}", sum(parts), gib=torch.cuda.max_memory_allocated() / 2**30, rollouts=round(parts[0], 4), step=round(parts[1], 4),
         push=round(parts[2], 4), gib_of_device=round((total - free) / 2**30, 2))


def tick():
    torch.cuda.synchronize()
    return time.perf_counter()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_4b")
    parser.add_argument("--parts", nargs="+", default=["kernel", "step"])
    parser.add_argument("--row_tokens", type=int, default=4224)
    parser.add_argument("--vllm_memory", type=float, default=0.2)
    parser.add_argument("--lora_rank", type=int, default=0)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--no_compile", action="store_true")
    args = parser.parse_args()
    rate = matmul_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {rate / 1e12:.0f} TFLOP/s on a product of 8192 x 8192", flush=True)
    if "kernel" in args.parts:
        bench_kernel(rate)
    if set(args.parts) - {"kernel"}:
        step = bench_step(args.shape, rate, args.row_tokens, compile=not args.no_compile, lora_rank=args.lora_rank,
                          checkpointing=args.gradient_checkpointing)
    if {"rollouts", "whole"} & set(args.parts):
        with tempfile.TemporaryDirectory() as folder:
            engine = vllm_engine(args.shape, folder, args.vllm_memory)
        bench_rollouts(engine, step, rate, args.shape)
        bench_whole(engine, step, args.shape)
    if "grow" in args.parts:
        bench_grow(step, args.shape, rate)


if __name__ == "__main__":
    main()
