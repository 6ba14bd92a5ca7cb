"""What others take for the work that bench_speed.py times: Liger's losses, and a whole step of TRL's SDFT trainer.

    python tests/bench_baselines.py --shape tiny                                   # on a CPU, toy lengths
    python tests/bench_baselines.py --shape qwen3_4b --parts loss
    python tests/bench_baselines.py --shape qwen3_4b --parts trl --generation random --folder /tmp/model
    python tests/bench_baselines.py --shape qwen3_4b --parts trl --generation vllm --folder /tmp/model

Needs trl 1.16, datasets and, on a GPU, liger-kernel and vLLM 0.22 or later. TRL is called through its public trainer and
given the fastest of its own settings that fit one H200; each is explained where it is set. One process for one measurement:
memory that an earlier one held would count.
"""
import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

# No reports of use over the network; models and tokenizers come from a local folder
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", VLLM_NO_USAGE_STATS="1", TRL_EXPERIMENTAL_SILENCE="1",
                  TOKENIZERS_PARALLELISM="true")  # 131,000 words a step: 0.2 s on one core, counted against TRL
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402

from bench_speed import COMPLETION, HINT, PREFIX, ROLLOUTS, SHAPES, TASKS, VOCAB, kernel_errors, line, model_config, seconds  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SIZES = {"tiny": dict(tasks=2, rollouts=2, prefix=64, hint=8, completion=16)}  # other shapes: those of bench_speed
FULL = dict(tasks=TASKS, rollouts=ROLLOUTS, prefix=PREFIX, hint=HINT, completion=COMPLETION)


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


# --- losses -------------------------------------------------------------------------------------------------------------------


def liger_losses(hidden_s, weight_s, hidden_t, weight_t, chunk=1024):
    """(name, work) for each other way to the loss. work() -> gradients of hidden_s (T, D) and weight_s (V, D), both bfloat16.

    The loss is the mean over tokens of KL(student || teacher) in nats, the student's logits hidden_s @ weight_s.T and the
    teacher's hidden_t @ weight_t.T, which needs no gradient. `chunk` (tokens) is Liger's default. Liger's
    LigerFusedLinearKLDivLoss is not here: it is the other KL, and the teacher's probabilities must be there already.
    """
    def gradients(loss):
        return torch.autograd.grad(loss, (hidden_s, weight_s))

    def plain():
        logp, logq = (torch.log_softmax((h @ w.T).float(), -1) for h, w in ((hidden_s, weight_s), (hidden_t, weight_t)))
        return gradients((logp.exp() * (logp - logq)).sum(-1).mean())

    yield "loss in plain torch, all logits at once", plain
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
        from liger_kernel.transformers import LigerFusedLinearJSD
    except ImportError as error:
        print(f"no Liger losses: {error}", flush=True)
        return
    # beta 1 is the reverse KL; the hard loss has weight 0, and Liger then leaves it out. Its log-softmax is in bfloat16.
    targets = torch.zeros(len(hidden_s), dtype=torch.long, device=hidden_s.device)  # says which tokens count: all
    for compiled in (True, False) if CUDA else (False,):  # Liger's default is True
        chunked = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, chunk_size=chunk, compiled=compiled)
        yield (f"loss in Liger's LigerFusedLinearJSDLoss (chunked), compiled {compiled}",
               lambda loss=chunked: gradients(loss(hidden_s, weight_s, hidden_t, weight_t, targets)))
    for dtype in (None, torch.float32) if CUDA else ():  # a Triton kernel, logits in float32; dtype: of the weight's gradient as it sums
        fused = LigerFusedLinearJSD(jsd_beta=1.0, accum_dtype=dtype)
        yield (f"loss in Liger's LigerFusedLinearJSD, accum_dtype {dtype}",
               lambda loss=fused: gradients(loss(hidden_s, weight_s, hidden_t, weight_t, None)))  # None: all tokens count


def bench_losses(tokens=4096, dim=2560, repeats=10):
    """Seconds, GiB above inputs and gradients, and gradient errors of each loss; the numbers are those of bench_speed's kernel part.

    The teacher has the student's weight, detached: one of its own would cost the same. A loss that fails is a line that says so.
    """
    torch.manual_seed(0)
    hidden_s = torch.randn(tokens, dim, device=DEVICE).bfloat16().requires_grad_()
    hidden_t = (hidden_s.detach().float() + 0.3 * torch.randn(tokens, dim, device=DEVICE)).bfloat16()
    weight = (0.05 * torch.randn(VOCAB, dim, device=DEVICE)).bfloat16().requires_grad_()
    for name, work in liger_losses(hidden_s, weight, hidden_t, weight.detach()):
        try:
            bench_loss(name, work, hidden_s, weight, hidden_t, repeats)
        except Exception as error:  # the other lines are worth having
            print(f"{name}: {type(error).__name__}: {error}", flush=True)


def bench_loss(name, work, hidden_s, weight, hidden_t, repeats):
    if not CUDA:
        start = time.perf_counter()
        got = work()
        return line(name, time.perf_counter() - start, norms=[round(float(x.float().norm()), 6) for x in got])
    torch.cuda.empty_cache()
    kept = (torch.cuda.memory_allocated() + hidden_s.nbytes + weight.nbytes) / 2**30  # the inputs, and gradients of their sizes
    spent, gib = seconds(work, repeats, 3)
    tokens = len(hidden_s)
    grad_hidden, grad_weight = (tokens * x for x in work())  # of the sum over tokens; a power of two: exact
    errors = kernel_errors(hidden_s, weight, hidden_t, grad_hidden, grad_weight)
    errors.pop("equal")  # that one is about our own loss
    return line(name, spent, gib=gib - kept, errors=errors)


# --- a step of TRL's trainer --------------------------------------------------------------------------------------------------


def word_tokenizer():
    """A tokenizer of VOCAB words "w0", "w1", ...: a text of n words is n tokens, any token id has a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = [f"w{i}" for i in range(VOCAB - 3)] + ["<unk>", "<pad>", "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", padding_side="left",
                                   model_max_length=40960)


def save_model(shape, folder):
    """Random bfloat16 weights of the shape and the tokenizer, in `folder`, unless they are there already."""
    from transformers import AutoModelForCausalLM
    if (Path(folder) / "config.json").exists():
        return
    torch.manual_seed(0)
    config = model_config(shape)
    config.eos_token_id = config.pad_token_id = None
    with torch.device(DEVICE):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    if CUDA:
        torch.cuda.empty_cache()


def random_words(draw, length):
    return " ".join(f"w{i}" for i in torch.randint(0, VOCAB - 1000, (length,), generator=draw).tolist())


class DeviceMemory:
    """The most memory in use on the device by its own count (every allocator, CUDA's context too), sampled each 20 ms, in GiB."""

    def __enter__(self):
        self.peak, self.done = 0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self):
        while CUDA and not self.done.wait(0.02):
            free, total = torch.cuda.mem_get_info()
            self.peak = max(self.peak, total - free)

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()

    @property
    def gib(self):
        return self.peak / 2**30


class TRLStep:
    """TRL's SDFT trainer at the work of bench_speed's Step: full fine-tuning, frozen teacher that sees a hint, reverse KL over the
    whole vocabulary, AdamW.

    generation: "random" draws completions beforehand (the step without generation), "transformers" samples with model.generate,
    "vllm" with a vLLM engine in this process. liger: Liger's RMSNorm, RoPE and SwiGLU kernels in the model. per_device: rows of a
    forward, 0 for the shape's own. folder: where save_model() put the model. Lengths are in tokens.
    """

    # Rows of one forward, the rest by gradient accumulation: the largest that should fit one H200 (139 GiB) beside vLLM without
    # checkpointing, which costs another forward. At 4B: 37 GiB of weights, gradients, AdamW and teacher, about 37 GiB of
    # activations and 6 to 10 of logits with 8 rows, and vLLM's 28. --per_device tries others.
    PER_DEVICE = {"qwen3_4b": 8, "qwen3_0.6b": 16, "tiny": 2}
    # vLLM's share of the device: the weights, keys and values of 64 sequences (10.5 and 7.7 GiB), and what its profile run needs.
    VLLM_SHARE = {"qwen3_4b": 0.2, "qwen3_0.6b": 0.13, "tiny": 0.1}

    def __init__(self, shape, folder, generation="random", liger=CUDA, per_device=0, checkpointing=False, compile=False, steps=3, warm=2):
        from datasets import Dataset
        from trl.experimental.sdft import SDFTConfig
        self.size, self.generation, self.warm = SIZES.get(shape, FULL), generation, warm
        tasks, rollouts, prefix, hint, completion = (self.size[x] for x in ("tasks", "rollouts", "prefix", "hint", "completion"))
        per_device = per_device or self.PER_DEVICE[shape]
        self.settings = dict(per_device=per_device, liger=liger, checkpointing=checkpointing, compile=compile)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # vLLM forms a process group of one; TRL sets the other variables
        draw = torch.Generator().manual_seed(0)
        self.completions = torch.randint(0, VOCAB - 1000, (tasks * rollouts, completion), generator=draw).tolist()
        rows = [dict(prompt=random_words(draw, prefix), privileged_context=random_words(draw, hint)) for _ in range(tasks * (warm + steps))]
        exact = {"vllm": {"ignore_eos": True, "detokenize": False}, "transformers": {"min_new_tokens": completion}, "random": {}}[generation]
        args = SDFTConfig(
            output_dir=str(Path(folder) / "out"), report_to="none", save_strategy="no", logging_steps=1000, disable_tqdm=True, seed=0,
            max_steps=warm + steps, use_cpu=not CUDA,
            # bfloat16 weights, gradients and AdamW states, half the memory traffic of float32 ones: TRL keeps no float32 masters then,
            # ours does. Autocast on top (bf16, TRL's default) keeps the softmax of the loss float32, as the full KL needs.
            model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa"},  # rows have one length: sdpa takes its flash path
            bf16=True,
            per_device_train_batch_size=per_device, gradient_accumulation_steps=tasks * rollouts // per_device,
            gradient_checkpointing=checkpointing,  # TRL's default is True; all fits without
            use_liger_kernel=liger,  # of the layers alone: SDFT has no fused loss
            torch_compile=compile,  # the whole model, minutes of compilation; accelerate's compilation by layers leaves SDFT in eval mode
            optim="adamw_torch_fused", learning_rate=1e-6, weight_decay=0.0, max_grad_norm=1.0, lr_scheduler_type="constant",
            # one generation serves the whole batch (steps_per_generation is the accumulation); then no old log-probabilities either
            num_generations=rollouts, num_iterations=1, distillation_is_clip=None,
            max_prompt_length=prefix + hint, max_completion_length=completion, temperature=1.0, generation_kwargs=exact,
            distillation_mode="full_logits", distillation_alpha=1.0,  # KL(student || teacher) over the whole vocabulary
            teacher_model_kind="base", teacher_prompt_template="{privileged_context} {prompt}",
            use_vllm=generation == "vllm", vllm_mode="colocate", vllm_gpu_memory_utilization=self.VLLM_SHARE[shape],
            vllm_max_model_length=prefix + completion + 16, vllm_enable_sleep_mode=False,  # sleeping would move weights in each step
        )
        self.times = {"step": [], "generation": [], "push": [], "tokenize": []}  # seconds, in the order of the steps
        self.trainer = self.build(str(folder), args, Dataset.from_list(rows))

    def build(self, folder, args, rows):
        from transformers import TrainerCallback
        from trl.experimental.sdft import SDFTTrainer
        bench = self

        class Trainer(SDFTTrainer):
            def _generate(self, prompt_ids):  # the push of weights to vLLM is inside
                if bench.generation == "random":
                    return prompt_ids, bench.completions
                return bench.timed("generation", lambda: super(Trainer, self)._generate(prompt_ids))

            def _tokenize_prompts(self, prompts):
                return bench.timed("tokenize", lambda: super(Trainer, self)._tokenize_prompts(prompts))

        class Clock(TrainerCallback):
            """Seconds from one step's end to the next: data, generation, passes, optimizer, logging."""

            def on_train_begin(self, *_, **__):
                synchronize()
                self.last = time.perf_counter()

            def on_step_end(self, args, state, *_, **__):
                synchronize()
                now = time.perf_counter()
                bench.times["step"].append(now - self.last)
                print(f"  step {state.global_step}: {now - self.last:.3f} s", flush=True)
                if state.global_step == bench.warm and CUDA:
                    torch.cuda.reset_peak_memory_stats()
                    bench.memory.peak = 0
                self.last = time.perf_counter()

            def on_self_distillation_batch_prepared(self, prompt_ids, completion_ids, teacher_input_ids, **_):
                """The work is as announced: rows, and tokens of prompt, completion and teacher's input."""
                s = bench.size
                rows, got = s["tasks"] * s["rollouts"], tuple(tuple(x.shape) for x in (prompt_ids, completion_ids, teacher_input_ids))
                want = (rows, s["prefix"]), (rows, s["completion"]), (rows, s["hint"] + s["prefix"] + s["completion"])
                assert got == want, (got, want)

        trainer = Trainer(model=folder, args=args, train_dataset=rows, processing_class=word_tokenizer(), callbacks=[Clock()])
        if self.generation == "vllm":
            push = trainer.vllm_generation.sync_weights
            trainer.vllm_generation.sync_weights = lambda: self.timed("push", push)
        return trainer

    def timed(self, name, work):
        synchronize()
        start = time.perf_counter()
        result = work()
        synchronize()
        self.times[name].append(time.perf_counter() - start)
        return result

    def run(self):
        """Train for the warm-up and the counted steps. -> medians in seconds (step without generation, tokenizing inside it, generation,
        push of weights inside that, whole) and peaks in GiB over the counted steps, by torch and by the device's own count."""
        with DeviceMemory() as self.memory:
            result = self.trainer.train()
        whole = self.times["step"][self.warm:]
        generation = self.times["generation"][self.warm:] or [0.0] * len(whole)
        tokenize = [sum(self.times["tokenize"][2 * i:2 * i + 2]) for i in range(self.warm, len(self.times["step"]))]  # student's and teacher's
        row = dict(without_generation=[a - b for a, b in zip(whole, generation)], tokenize=tokenize, generation=generation,
                   push=self.times["push"][self.warm:], whole=whole)
        row = {name: round(statistics.median(values), 4) for name, values in row.items() if values}
        row |= dict(gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if CUDA else None, device_gib=round(self.memory.gib, 2),
                    loss=round(result.training_loss, 6), warm=round(self.times["step"][0], 2))
        return row


def trl_sdft_step(shape, folder, generation="random", **settings):
    """Print and return the seconds and GiB of TRLStep.run(); seconds: the step without generation, or the whole step if it has one."""
    save_model(shape, folder)
    step = TRLStep(shape, folder, generation, **settings)
    row = step.run()
    return line(f"TRL SDFT, {shape}, generation {generation}", row["without_generation" if generation == "random" else "whole"], **row, **step.settings)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_4b")
    parser.add_argument("--parts", nargs="+", choices=["loss", "trl"], default=["loss", "trl"])
    parser.add_argument("--generation", choices=["random", "transformers", "vllm"], default="random")
    parser.add_argument("--folder", help="where the model is, or is to be saved; by default a temporary folder")
    parser.add_argument("--liger", type=int, default=int(CUDA), help="1: Liger's layer kernels in TRL's model")
    parser.add_argument("--per_device", type=int, default=0)
    parser.add_argument("--checkpointing", type=int, default=0)
    parser.add_argument("--compile", type=int, default=0, help="1: TrainingArguments.torch_compile")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    if "loss" in args.parts:
        bench_losses(**({} if CUDA else dict(tokens=64, dim=64)))
    if "trl" in args.parts:
        with tempfile.TemporaryDirectory() as temporary:
            trl_sdft_step(args.shape, args.folder or temporary, args.generation, liger=bool(args.liger), per_device=args.per_device,
                      checkpointing=bool(args.checkpointing), compile=bool(args.compile), steps=args.steps)


if __name__ == "__main__":
    main()
