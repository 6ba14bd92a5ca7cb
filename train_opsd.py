"""Stage 2: distill the hinted teacher into the hint-free student, on the student's own samples.

in   task files, hints.jsonl (stage 1), a Hugging Face model folder
out  <out_dir>/checkpoint (a Hugging Face folder), metrics.jsonl, rollouts.jsonl, eval.jsonl, config.json

1. Take the next tasks; a prompt is the prefix of a failed step. The student never sees the hint.
2. Sample a few completions per prompt from the student and grade them. With --max_turns the student acts in the world until
   it is done; what the world answers is read by both and is in no loss.
3. Pack: a task's prefix is laid down once, its completions follow as branches that do not see each other.
   One packing with the hint in the prefix (teacher), one without (student); the completion tokens are the same.
4. The teacher, the same model with its starting weights, reads its packing without gradient.
5. Loss = mean over all completion tokens of the step of KL(student || teacher), the full vocabulary at a time,
   its gradient written out by hand so that equal distributions give exactly zero.
6. One AdamW step; the learning rate warms up, then decays linearly to a tenth.
7. Every few steps: pass@1 on held-out tasks, always without a hint, and a checkpoint.

Every random draw is a stream named by its seed, step and task, and dropout stays off, so a run that was killed and is
started again by the same command continues from its last checkpoint to the same files.

    python train_opsd.py
"""
import contextlib
import dataclasses
import datetime
import functools
import math
import os
import random
import re
import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

import optimize_hints
from common import (EngineConfig, append_jsonl, at_least, check_sync, die, grade_or_stop, head_weight, load_demos, load_engine, load_hints,
                    load_model, load_tasks, logits_of, new_folder, opt, pack_episodes, packed_hidden, parse_config, plain_weights, play_tasks,
                    read_jsonl, render_prompt, seed_note, stable_seed, start_run, stop_on_breakdown, torch, whole, world_files,
                    write_jsonl, write_text)
from evaluate import evaluate_model, refuse_overlap


@dataclass
class Config(EngineConfig):
    tasks: list[str] = opt(["data/toolworld/train_tool.jsonl", "data/toolworld/train_chat.jsonl"], "task files to train on")
    num_tasks: int = opt(240, "balanced subset over failure kinds; 0 = all")
    hints: str = opt("out/hints.jsonl", "hints file of optimize_hints.py; none = every hint empty")
    control: str = opt("none", "empty = no hints, shuffled = hints of another failure kind", ["none", "empty", "shuffled"])
    filter: str = opt("all", "passed = only tasks whose hint passed the search", ["all", "passed"])
    min_hint_reward: float = opt(0.0, "only tasks whose hint_reward is at least this")
    hint_position: str = opt("end", "where the teacher's hint stands in the prefix", ["end", "system", "first_user"])
    model: str = opt("data/toolworld/base", "Hugging Face folder to start from; the frozen teacher too")
    out_dir: str = opt("out/opsd", "run folder; the same command resumes a run that was cut")
    steps: int = opt(60, "optimizer steps")
    tasks_per_step: int = opt(8, "tasks in one optimizer step")
    rollouts_per_task: int = opt(4, "completions sampled for each of them")
    temperature: float = opt(1.0, "divides the logits of student and teacher, in sampling and in scoring")
    max_new_tokens: int = opt(96, "longest completion; longer ones are cut, graded and trained on as they are")
    max_turns: int = opt(1, "turns that the student acts in the world before it is graded: whole episodes; 1 = the next step alone")
    lr: float = opt(2e-4, "peak learning rate")
    warmup_steps: int = opt(5, "steps of linear warm-up")
    weight_decay: float = opt(0.0, "AdamW weight decay; above 0 even an empty hint moves the weights")
    grad_clip: float = opt(1.0, "largest gradient norm")
    loss: str = opt("dense", "dense = KL over the vocabulary, policy_gradient = sampled tokens", ["dense", "policy_gradient"])
    divergence: str = opt("reverse_kl", "dense loss: reverse_kl = KL(student || teacher), jsd at one half",
                          ["reverse_kl", "forward_kl", "jsd"])
    top_k: int = opt(0, "dense loss on the student's k likeliest tokens and one bucket for the rest; 0 = every token")
    grpo_weight: float = opt(0.0, "policy_gradient: share of the GRPO advantage; 0 = hints only, 1 = rewards only")
    grpo_schedule: str = opt("constant", "course of the hints' share 1 - grpo_weight: linear = falls to 0, "
                             "adaptive = halves after every ten steps without a better training pass rate",
                             ["constant", "linear", "adaptive"])
    advantage_clip: float | None = opt(None, "policy_gradient: largest absolute advantage of a token (biased; off by default)")
    teacher: str = opt("frozen", "frozen = starting weights, ema = running mean, live = current weights",
                       ["frozen", "ema", "live"])
    ema_decay: float = opt(0.99, "share of the old weights that the ema teacher keeps at each step")
    row_tokens: int = opt(512, "tokens of a packed row, the unit of one forward and backward pass")
    kl_chunk: int = opt(256, "completion tokens whose logits exist at a time")
    lora_rank: int = opt(0, "train adapters of this rank on all linear layers, through peft; 0 = train every weight")
    lora_alpha: float = opt(32.0, "an adapter's product is scaled by lora_alpha / lora_rank")
    gradient_checkpointing: bool = opt(False, "keep a layer's input alone for the backward pass: less memory, a third more time")
    parallel: str = opt("replicate", "under torchrun: replicate = every process holds all weights | shard = each holds a part (FSDP2)",
                        ["replicate", "shard"])
    compile: bool = opt(False, "torch.compile the layers: faster on a GPU after a minute or two of compilation")
    refresh_every: int = opt(0, "steps between searches of new hints for the tasks that the student still fails; 0 = hints stay")
    refresh_below: float = opt(0.5, "hint-free pass rate under which a task gets a new hint")
    refresh_rollouts: int = opt(4, "hint-free rollouts of a task that say so")
    refresh_preset: str = opt("", "preset of optimize_hints.py for those searches: its writer, its rounds")
    eval_tasks: list[str] = opt(["data/toolworld/eval_tool.jsonl", "data/toolworld/eval_chat.jsonl"], "held-out task files")
    eval_every: int = opt(10, "optimizer steps between evaluations (also before the first and after the last)")
    eval_seeds: int = opt(1, "samples per held-out task")
    save_every: int = opt(10, "optimizer steps between checkpoints to resume from")
    seed: int = opt(0, "names every random stream of the run")


def check(cfg):
    """Refuses contradictory flags."""
    gradient, mixes = cfg.loss == "policy_gradient", cfg.grpo_weight > 0 or cfg.grpo_schedule != "constant"
    for wrong, message in [
        (not gradient and (mixes or cfg.advantage_clip is not None),
         "--grpo_weight, --grpo_schedule and --advantage_clip need --loss policy_gradient"),
        (gradient and (cfg.divergence != "reverse_kl" or cfg.top_k), "--divergence and --top_k need --loss dense"),
        (not 0 <= cfg.grpo_weight <= 1, "--grpo_weight lies between 0 and 1"),
        (mixes and cfg.rollouts_per_task < 2, "GRPO compares a task's rollouts: --rollouts_per_task 2 or more"),
        (cfg.temperature <= 0, "--temperature is above 0: at 0 there is no distribution to distill"),
        (min(cfg.lr, cfg.grad_clip) <= 0, "--lr and --grad_clip are above 0"),
        (not 0 <= cfg.ema_decay <= 1, "--ema_decay lies between 0 and 1"),
        (cfg.advantage_clip is not None and cfg.advantage_clip <= 0, "--advantage_clip is above 0"),
        (cfg.teacher == "ema" and cfg.dtype != "float32", "--teacher ema needs --dtype float32: a bfloat16 mean would stand still"),
        (cfg.lora_rank and cfg.teacher == "ema", "--teacher ema averages every weight: it goes with --lora_rank 0"),
        (cfg.engine == "openai", "--engine openai serves frozen weights: train with hf or vllm"),
        (cfg.parallel == "shard" and (cfg.lora_rank or cfg.teacher == "ema"), "--parallel shard goes with --lora_rank 0 and not with --teacher ema"),
        (cfg.parallel == "shard" and world() == 1, "--parallel shard cuts the weights over several processes: start it with torchrun"),
        (cfg.tasks_per_step < world(), f"--tasks_per_step {cfg.tasks_per_step}: each of the {world()} processes needs a task"),
        (cfg.lora_alpha <= 0, "--lora_alpha is above 0"),
        (cfg.refresh_every and cfg.max_turns > 1, "--refresh_every searches hints for single steps: it goes with --max_turns 1"),
    ]:
        if wrong:
            die(message)
    at_least(1, cfg, "steps", "tasks_per_step", "rollouts_per_task", "max_new_tokens", "max_turns", "eval_every", "save_every",
             "eval_seeds", "row_tokens", "kl_chunk", "refresh_rollouts")
    at_least(0, cfg, "warmup_steps", "weight_decay", "top_k", "lora_rank", "refresh_every")


def select_tasks(tasks, hints, cfg):
    """The tasks that have a hint which passes --filter and --min_hint_reward."""
    tasks = [task for task in tasks if task["id"] in hints]
    for field, least in [("passed", cfg.filter == "passed"), ("hint_reward", cfg.min_hint_reward)]:
        lacking = [task["id"] for task in tasks if least and field not in hints[task["id"]]]
        if lacking:
            die(f"cannot filter: the hint of task {lacking[0]} has no field {field!r}")
        tasks = [task for task in tasks if not least or hints[task["id"]][field] >= least]
    return tasks or die("no task is left to train on")


def latest_checkpoint(out_dir, steps):
    """(folder, step) to resume from, (None, 0) in a fresh run; removes what is older or half written.

    `checkpoint` is the finished run, `checkpoint-<step>` a run under way.
    """
    ours = {path: re.fullmatch(r"checkpoint(?:-(\d+))?(\.tmp)?", path.name) for path in Path(out_dir).glob("checkpoint*")}
    found = {path: int(name[1] or steps) for path, name in ours.items() if name and not name[2]}
    latest = max(found, key=found.get, default=None)
    for path, name in ours.items():
        if name and path != latest:  # other folders, such as a copy kept by hand, are left alone
            shutil.rmtree(path)
    return latest, found.get(latest, 0)


def drop_rows_after(path, step):
    """Cuts a record file back to the rows up to `step`, byte for byte; the rows after it are going to be made again."""
    if path.exists():
        kept = sum(row["step"] <= step for row in read_jsonl(path))
        write_text(path, "".join(line + "\n" for line in path.read_bytes().decode("utf-8", "replace").split("\n")[:kept]))


# More than one GPU: torchrun starts N processes, and each trains on its share of a step's tasks. Alone, a process is rank 0 of 1.

def join_ranks(cfg):
    """Joins the processes that torchrun has started, if it has, each with a GPU of its own."""
    if "WORLD_SIZE" not in os.environ or torch.distributed.is_initialized():
        return
    if cfg.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    patience = datetime.timedelta(hours=6)  # while the first rank evaluates
    torch.distributed.init_process_group("nccl" if cfg.device == "cuda" else "gloo", timeout=patience)


def world():
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def gathered(items):
    """The items of all ranks in one list, on each of them."""
    if world() == 1:
        return items
    lists = [None] * world()
    torch.distributed.all_gather_object(lists, items)
    return [item for of_rank in lists for item in of_rank]


def wait_for_ranks():
    if world() > 1:
        torch.distributed.barrier()


def shard(model):
    """Cuts all weights over the ranks (FSDP2): a layer's are whole only while it computes. Gradients are summed over ranks."""
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh, trunk, head = torch.distributed.init_device_mesh(model.device.type, (world(),)), model.base_model, model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    for module in [*trunk.layers, trunk]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in trunk.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    cut = model.get_input_embeddings().weight if tied else distribute_tensor(head.weight.detach(), mesh, [Shard(0)])
    head.weight = torch.nn.Parameter(cut, head.weight.requires_grad) if not tied else cut


def spread(tensor, like):
    """`tensor`, which every rank has whole, cut as `like` is."""
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def idle_passes(rows, cfg):
    """Passes that this rank makes for company: sharded layers compute on all ranks at once, and another may have more rows."""
    return max(gathered([len(rows)])) - len(rows) if cfg.parallel == "shard" else 0


def sum_gradients(weights, cfg):
    """Sums the gradients over the ranks. FSDP2 has done so for sharded weights. DistributedDataParallel would want one forward of
    the whole model per step; here a step is several passes through its trunk."""
    if world() > 1 and cfg.parallel == "replicate":
        for weight, _ in weights:
            torch.distributed.all_reduce(weight.grad)


def add_adapter(model, cfg, folder=None):
    """Freezes the model and puts LoRA adapters on its linear layers, new ones or those saved in `folder`. Returns peft's handle:
    it switches them off and saves them, while the model itself is used as before."""
    try:
        import peft  # optional: the adapters and their file format
    except ImportError:
        die("--lora_rank needs the package peft: pip install peft")
    if folder:
        return peft.PeftModel.from_pretrained(model, folder, is_trainable=True, autocast_adapter_dtype=False)
    torch.manual_seed(stable_seed("adapter", cfg.seed))  # one factor starts at random, the other at zero
    return peft.get_peft_model(model, peft.LoraConfig(r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, target_modules="all-linear",
                                                      task_type="CAUSAL_LM"), autocast_adapter_dtype=False)


def prepare_layers(model, cfg):
    """Applies --compile and --gradient_checkpointing to the model's layers. Sampling, which has a cache, goes on as it was."""
    for layer in model.base_model.layers:
        plain = forward = layer.forward
        if cfg.compile:
            forward = torch.compile(forward, dynamic=False)  # rows have one length on a GPU
        if cfg.gradient_checkpointing:
            forward = functools.partial(torch.utils.checkpoint.checkpoint, forward, use_reentrant=False)
        if forward is not plain:
            layer.forward = lambda *args, forward=forward, plain=plain, **kwargs: (
                plain if kwargs.get("shared_cache") else forward)(*args, **kwargs)


def load_teacher(cfg, student, state):
    """The model that scores: the student itself (live), its weights without the adapter (LoRA), or a second copy of the starting
    weights without gradient.

    `state` is the training state to resume from, {} in a fresh run.
    """
    if cfg.teacher == "live" or cfg.lora_rank:
        return student
    teacher, _ = load_model(cfg.model, cfg.device, cfg.dtype)
    if "teacher" in state:
        teacher.load_state_dict(state["teacher"])
    return teacher.requires_grad_(False)


def teacher_states(teacher, rows, cfg, adapter=None):
    """(T, D): the teacher's hidden states that predict the rows' completion tokens. A frozen teacher has the adapter off."""
    off = adapter.disable_adapter() if adapter and cfg.teacher == "frozen" else contextlib.nullcontext()
    with torch.no_grad(), off:
        states = [packed_hidden(teacher, row) for row in [*rows, *rows[-1:] * idle_passes(rows, cfg)]]
        return torch.cat(states[:len(rows)])


def update_ema(teacher, student, decay):
    """teacher = decay * teacher + (1 - decay) * student, weight by weight; equal weights stay equal to the bit."""
    with torch.no_grad():
        for old, new in zip(teacher.parameters(), student.parameters()):
            old.lerp_(new, 1 - decay)


def trained_weights(model):
    """[(weight, master)]: what the optimizer moves. The master of a bfloat16 weight is a float32 copy, since an update is
    often smaller than the distance between two bfloat16 numbers; a float32 weight is its own."""
    return [(weight, weight if weight.dtype == torch.float32 else torch.nn.Parameter(weight.detach().float()))
            for weight in model.parameters() if weight.requires_grad]


def update(optimizer, weights, grad_clip, bucket=2**28):
    """One optimizer step from the weights' gradients, which it clears. Returns their norm before it was clipped to grad_clip.

    Float32 gradients exist for about `bucket` numbers at a time. Raises RuntimeError when the norm is not finite.
    """
    gradients = [weight.grad for weight, _ in weights]
    norm = whole(torch.nn.utils.get_total_norm(gradients))
    if not norm.isfinite():
        raise RuntimeError(f"the gradient norm is {float(norm)}")
    if norm > grad_clip:
        torch.nn.utils.clip_grads_with_norm_([weight for weight, _ in weights], grad_clip, norm)
    for weight, _ in weights:
        weight.grad = None
    first = 0
    while first < len(weights):
        last, size = first, 0
        while last < len(weights) and (last == first or size + gradients[last].numel() <= bucket):
            size, last = size + gradients[last].numel(), last + 1
        for i in range(first, last):
            weights[i][1].grad, gradients[i] = gradients[i].float(), None
        optimizer.step()  # moves the masters that have a gradient
        for weight, master in weights[first:last]:
            master.grad = None
            if master is not weight:
                weight.data.copy_(master.data)
        first = last
    return norm


def resume(optimizer, weights, state):
    """Puts the saved training state back: optimizer and float32 masters."""
    masters = [master for _, master in weights]
    for index, moments in state["optimizer"]["state"].items():
        state["optimizer"]["state"][index] = {name: spread(x, masters[index]) if x.ndim else x for name, x in moments.items()}
    optimizer.load_state_dict(state["optimizer"])
    for (_, master), saved in zip([pair for pair in weights if pair[0] is not pair[1]], state["masters"]):
        master.data.copy_(spread(saved, master))


def save_checkpoint(out_dir, step, cfg, model, tokenizer, optimizer, weights, teacher, adapter):
    """Writes a Hugging Face folder under a temporary name, renames it, then removes the one before.

    Before the last step it also holds training_state.pt, and with LoRA the adapter in place of the weights; the finished
    run's has the adapter merged in, and beside it in `adapter`. Step and seed name the data position and every random
    stream, so no generator state is needed.
    """
    kept = {"optimizer": optimizer.state_dict(), "masters": [master.data for weight, master in weights if master is not weight]}
    kept = torch.utils._pytree.tree_map(whole, kept)  # as are the weights: any number of processes can resume
    plain = dict(plain_weights(model)) if cfg.parallel == "shard" or step == cfg.steps else None
    if rank() == 0:
        with new_folder(out_dir / ("checkpoint" if step == cfg.steps else f"checkpoint-{step}")) as folder:
            tokenizer.save_pretrained(folder)
            if cfg.lora_rank:
                save_adapter(adapter, folder / "adapter" if step == cfg.steps else folder)
            if plain:
                saved, _ = load_model(cfg.model, "cpu", cfg.dtype)  # a model in one piece: transformers knows which weights are tied
                saved.load_state_dict(plain)
                saved.save_pretrained(folder)
            elif not cfg.lora_rank:
                model.save_pretrained(folder)
            if step < cfg.steps:
                if cfg.teacher == "ema":
                    kept["teacher"] = teacher.state_dict()
                torch.save(kept, folder / "training_state.pt")
        latest_checkpoint(out_dir, cfg.steps)
    wait_for_ranks()


def save_adapter(adapter, folder):
    """Writes peft's adapter files; raises ValueError when a tensor in them is not a matrix (a shard looks fine until it is loaded)."""
    from safetensors import safe_open
    adapter.save_pretrained(folder)
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    check_adapter(shapes)


def check_adapter(shapes):
    """Raises ValueError unless the adapter tensors {name: shape} are matrices without an empty side, in pairs lora_A, lora_B."""
    wrong = [f"{name} ({len(shape)}-D, {math.prod(shape)} values)" for name, shape in shapes.items() if len(shape) != 2 or not math.prod(shape)]
    other = {"lora_A": "lora_B", "lora_B": "lora_A"}
    alone = [name for name in shapes if not any(name.replace(a, b) in shapes for a, b in other.items() if a in name)]
    if wrong or alone:
        raise ValueError(f"an adapter would be saved broken: {', '.join(wrong + alone)}")


def render(tokenizer, task, hint, cfg, later=()):
    """The ids of a task's prompt, after the messages `later` of an episode: the teacher's, the student's with hint ""."""
    return render_prompt(tokenizer, task["messages"], task["tools"], hint, cfg.hint_position, cfg.enable_thinking, load_demos(cfg.demos), later)


def render_prompts(tokenizer, tasks, hints, cfg, max_length):
    """{task id: (student ids, teacher ids)}: the same prefix without and with the hint."""
    prompts = {}
    for task in tasks:
        student, teacher = (render(tokenizer, task, hint, cfg) for hint in ("", hints[task["id"]]["hint"]))
        if max(len(student), len(teacher)) + cfg.max_new_tokens > max_length:
            die(f"task {task['id']}: {max(len(student), len(teacher))} tokens of prompt and {cfg.max_new_tokens} new ones "
                f"do not fit the model's {max_length}")
        prompts[task["id"]] = student, teacher
    return prompts


def task_order(num_tasks, seed, start, count):
    """The task indices at positions start .. start + count - 1 of an endless stream of shuffled epochs."""
    order = []
    for position in range(start, start + count):
        epoch, offset = divmod(position, num_tasks)
        order.append(random.Random(stable_seed("epoch", seed, epoch)).sample(range(num_tasks), num_tasks)[offset])
    return order


def lr_at(step, cfg):
    """Learning rate of step 1 .. steps: up to lr in warmup_steps, then down to a tenth of it at the last step."""
    if step <= cfg.warmup_steps:
        return cfg.lr * step / cfg.warmup_steps
    return cfg.lr * (1 - 0.9 * (step - cfg.warmup_steps) / (cfg.steps - cfg.warmup_steps))


def grpo_weight_at(step, cfg, pass_rates, window=10):
    """Share of the GRPO advantage at step 1 .. steps; pass_rates are those of the steps before it.

    linear and adaptive lower the hints' share 1 - weight: hints speed up early learning, later they hold the student
    back [B]. adaptive halves it for every full window of steps whose mean pass rate is not above the best one before.
    [B] names no formula for either.
    """
    hint_share = 1 - cfg.grpo_weight
    if cfg.grpo_schedule == "linear":
        hint_share *= (cfg.steps - step) / max(1, cfg.steps - 1)
    if cfg.grpo_schedule == "adaptive":
        means = [sum(pass_rates[i:i + window]) / window for i in range(0, len(pass_rates) - window + 1, window)]
        hint_share *= 0.5 ** sum(mean <= max(means[:i]) for i, mean in enumerate(means) if i > 0)
    return 1 - hint_share


def grpo_advantages(rewards):
    """(reward - mean) / population std of the group: rewards (..., n), n rollouts of one task on the last axis.

    Float64 of the same shape. A group without spread (std under 1e-8, or one rollout) gives exact zeros.
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    centred = rewards - rewards.mean(-1, keepdim=True)
    std = centred.square().mean(-1, keepdim=True).sqrt()
    return torch.where(std < 1e-8, 0.0, centred / std.clamp(min=1e-8))


def mix_advantages(grpo, opsd, weight):
    """weight * grpo + (1 - weight) * opsd, per token; a side with weight 0 does not count, not even as NaN."""
    if weight == 1:
        return grpo
    return opsd if weight == 0 else weight * grpo + (1 - weight) * opsd


def divergence_and_gradient(logp, logq, divergence):
    """Divergence of each row (n,) in nats and p * dD/dp centred to the softmax's tangent (n, V).

    logp, logq (n, V): student and teacher log-probabilities. Where they are equal both results are exactly zero; autograd
    would leave rounding noise there, which Adam scales up to full steps.
    """
    p = logp.exp()
    if divergence == "forward_kl":  # KL(teacher || student)
        q = logq.exp()
        return (q * (logq - logp)).sum(-1), p - q
    if divergence == "jsd":  # halves of KL(student || m) and KL(teacher || m), m the mean of the two probabilities
        logm = torch.maximum(logp, logq) + torch.log1p(torch.expm1(-(logp - logq).abs()) / 2)
        kl = (p * (logp - logm)).sum(-1, keepdim=True)
        return (kl[:, 0] + (logq.exp() * (logq - logm)).sum(-1)) / 2, p * (logp - logm - kl) / 2
    ratio = logp - logq
    kl = (p * ratio).sum(-1, keepdim=True)
    return kl[:, 0], p * (ratio - kl)


def reverse_kl_loss(logp, logq, span):
    """Token loss of chunked_loss: KL(student || teacher). On a GPU fused_reverse_kl stands in for it."""
    return divergence_and_gradient(logp, logq, "reverse_kl")


def dense_loss(divergence="reverse_kl", top_k=0):
    """Token loss of chunked_loss: the divergence of student and teacher over the vocabulary.

    With top_k it is that of the student's k likeliest tokens and one bucket that holds the rest: a coarser view of the
    same two distributions, so between 0 and the full value. The bucket's mass is a logsumexp over the rest (1 - sum of
    the others is noise in float32). top_k of the vocabulary's size or more is the full divergence.
    """
    if (divergence, top_k) == ("reverse_kl", 0):
        return reverse_kl_loss

    def token_loss(logp, logq, span):
        if not 0 < top_k < logp.shape[-1]:
            return divergence_and_gradient(logp, logq, divergence)
        index = logp.topk(top_k, -1).indices  # (n, k)
        tail_p, tail_q = (x.scatter(-1, index, -torch.inf) for x in (logp, logq))  # (n, V)
        mass_p, mass_q = (x.logsumexp(-1, keepdim=True) for x in (tail_p, tail_q))  # (n, 1)
        coarse_p, coarse_q = (torch.cat([x.gather(-1, index), mass], -1) for x, mass in ((logp, mass_p), (logq, mass_q)))
        loss, gradient = divergence_and_gradient(coarse_p, coarse_q, divergence)  # (n,), (n, k + 1)
        spread = gradient[:, top_k:] * (tail_p - mass_p).exp()  # the bucket's share goes to its tokens by their probability
        return loss, spread.scatter(-1, index, gradient[:, :top_k])
    return token_loss


def policy_gradient_loss(targets, sampler_logprobs, grpo, weight, clip=None):
    """Token loss of chunked_loss: -advantage * importance ratio, with the gradient of -advantage * ratio * log p(target).

    targets, sampler_logprobs, grpo: (T,) sampled ids, their log-probs when sampled, the rollout's GRPO advantage.
    The hints' advantage is log teacher(y) - log student(y): positive where the teacher likes the token better, and in
    expectation over y its gradient is that of the reverse KL. Advantage and ratio are constants here; the ratio to the
    sampling policy is clipped at 2.
    """
    def token_loss(logp, logq, span):
        index = targets[span, None]  # (n, 1)
        student = logp.gather(-1, index)[:, 0]
        opsd = logq.gather(-1, index)[:, 0] - student
        advantage = mix_advantages(grpo[span], opsd, weight)
        if clip is not None:
            advantage = advantage.clamp(-clip, clip)
        loss = -advantage * (student - sampler_logprobs[span]).exp().clamp(max=2)  # (n,)
        gradient = -loss[:, None] * logp.exp()
        return loss, gradient.scatter_add(-1, index, loss[:, None])  # loss * (onehot - p)
    return token_loss


@functools.cache
def reverse_kl_kernel():
    """The Triton kernel of fused_reverse_kl, made at its first use: Triton comes with the CUDA builds of torch only."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(s_ptr, t_ptr, gradient_ptr, kl_ptr, lse_ptr, parts_ptr, arrived_ptr, vocab, num_parts, scale, weight,
               block: tl.constexpr, max_parts: tl.constexpr):
        # A row is split over num_parts programs. Each holds its part in registers, leaves five sums, waits for the others
        # (programs start in order, so that those it waits for are running), and goes on with the sums of the whole row:
        # every logit is read once.
        row, part = (tl.program_id(0) // num_parts).to(tl.int64), tl.program_id(0) % num_parts
        column = part * block + tl.arange(0, block)
        inside = column < vocab
        s = tl.load(s_ptr + row * vocab + column, mask=inside, other=-float("inf")).to(tl.float32) * scale
        t = tl.load(t_ptr + row * vocab + column, mask=inside, other=-float("inf")).to(tl.float32) * scale
        gap = tl.where(inside, s - t, 0.0)
        max_s, max_t = tl.max(s, 0), tl.max(t, 0)  # one reduction for both was measured to be slower
        p = tl.exp(s - max_s)
        mine = parts_ptr + row * 5 * max_parts + part
        tl.store(mine, max_s)
        tl.store(mine + max_parts, max_t)
        tl.store(mine + 2 * max_parts, tl.sum(p, 0))
        tl.store(mine + 3 * max_parts, tl.sum(p * gap, 0))
        tl.store(mine + 4 * max_parts, tl.sum(tl.exp(t - max_t), 0))
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") + 1
        while arrived < num_parts:
            arrived = tl.atomic_add(arrived_ptr + row, 0, sem="acq_rel")

        each = tl.arange(0, max_parts)
        there, parts = each < num_parts, parts_ptr + row * 5 * max_parts + each
        maxs_s = tl.load(parts, mask=there, other=-float("inf"), cache_modifier=".cg")
        maxs_t = tl.load(parts + max_parts, mask=there, other=-float("inf"), cache_modifier=".cg")
        sums_s = tl.load(parts + 2 * max_parts, mask=there, other=0.0, cache_modifier=".cg")
        sums_gap = tl.load(parts + 3 * max_parts, mask=there, other=0.0, cache_modifier=".cg")
        sums_t = tl.load(parts + 4 * max_parts, mask=there, other=0.0, cache_modifier=".cg")
        max_s, max_t = tl.max(maxs_s, 0), tl.max(maxs_t, 0)
        share = tl.exp(maxs_s - max_s)
        sum_s, sum_gap, sum_t = tl.sum(share * sums_s, 0), tl.sum(share * sums_gap, 0), tl.sum(tl.exp(maxs_t - max_t) * sums_t, 0)
        lse_s, lse_t = max_s + tl.log(sum_s), max_t + tl.log(sum_t)
        kl = sum_gap / sum_s - (lse_s - lse_t)
        # p * (log p - log q - KL), times what scaled the logits: the gradient with respect to the logits as they came
        gradient = tl.exp(s - lse_s) * (gap - (lse_s - lse_t) - kl) * (scale * weight)
        tl.store(gradient_ptr + row * vocab + column, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)
        if part == 0:
            tl.store(kl_ptr + row, kl)
            tl.store(lse_ptr + row, lse_s)
    return kernel


def fused_reverse_kl(s, t, gradient, temperature=1.0, weight=1.0, block=8192):
    """(KL(student || teacher) (n,), student's logsumexp (n,)) of float32 logits (n, V) on a GPU; fills `gradient` (n, V).

    One kernel and one read of the logits, where the plain code makes several passes over float32 copies. The logits are
    divided by the temperature; the gradient is that of weight * KL with respect to those given.
    """
    num, vocab = s.shape
    num_parts = -(-vocab // block)
    max_parts = 1 << (num_parts - 1).bit_length()
    kl, lse = s.new_empty(2, num, dtype=torch.float32)
    parts, arrived = s.new_empty(num, 5, max_parts, dtype=torch.float32), s.new_zeros(num, dtype=torch.int32)
    reverse_kl_kernel()[(num * num_parts,)](s, t, gradient, kl, lse, parts, arrived, vocab, num_parts, 1 / temperature, weight,
                                            block=block, max_parts=max_parts, num_warps=8)
    return kl, lse


def loss_and_gradients(token_loss, hidden_s, weight_s, hidden_t, weight_t, grad_weight=None, targets=None, scale=1.0, chunk=256,
                       temperature=1.0, weight_tokens=1408):
    """(summed loss, gradient (T, D) of scale * loss in hidden_s, log student(target) (T,), KL(student || teacher) (T,)), in nats.

    token_loss(logp (n, V), logq (n, V), span) -> loss (n,), gradient (n, V) with respect to the student's logits over the
    temperature. Logits exist for `chunk` tokens at a time and are float32; a chunk's loss and gradient are made together, so
    that (T, V) never exists whole. The gradient of scale * loss in weight_s (V, D) is added to grad_weight; without one, as for
    a frozen lm_head, it costs nothing. The logits' gradients of `weight_tokens` tokens are kept, in the dtype of the hidden
    states, for one product that is added there: few additions, few rounding errors. Nothing here is recorded by autograd.
    """
    fused = token_loss is reverse_kl_loss and hidden_s.is_cuda
    num, vocab = len(hidden_s), len(weight_s)
    total = torch.zeros((), dtype=torch.float64, device=hidden_s.device)  # the sum must not depend on the chunks
    logprobs, kls = torch.zeros(2, num, device=hidden_s.device)
    grad_hidden = torch.empty_like(hidden_s)
    kept = hidden_s.new_empty(min(weight_tokens, num), vocab)
    buffers = [hidden_s.new_empty(min(chunk, num), vocab, dtype=torch.float32) for _ in range(2)] if fused else []
    for first in range(0, num, weight_tokens):
        last = min(first + weight_tokens, num)
        for start in range(first, last, chunk):
            span = slice(start, min(start + chunk, last))
            gradient = kept[start - first:span.stop - first]
            if fused:
                s, t = (logits_of(h[span], w, out=buffer[:len(gradient)])
                        for h, w, buffer in zip((hidden_s, hidden_t), (weight_s, weight_t), buffers))
                loss, lse = fused_reverse_kl(s, t, gradient, temperature, scale)
                kl, logprob = loss, lambda index: s.gather(-1, index)[:, 0] / temperature - lse
            else:
                logp, logq = (torch.log_softmax(logits_of(h[span], w) / temperature, -1)
                              for h, w in ((hidden_s, weight_s), (hidden_t, weight_t)))
                loss, exact = token_loss(logp, logq, span)
                gradient.copy_(exact * (scale / temperature))
                kl, logprob = (logp.exp() * (logp - logq)).sum(-1), lambda index: logp.gather(-1, index)[:, 0]
            total += loss.sum()
            kls[span] = kl
            if targets is not None:
                logprobs[span] = logprob(targets[span, None])
        gradient = kept[:last - first]
        torch.mm(gradient, weight_s, out=grad_hidden[first:last])
        if grad_weight is not None:
            grad_weight.addmm_(gradient.T, hidden_s[first:last])
    return total.float(), grad_hidden, logprobs, kls


def chunked_loss(token_loss, hidden_s, weight_s, hidden_t, weight_t, targets=None, chunk=256, temperature=1.0):
    """(summed loss, log student(target) (T,), KL(student || teacher) (T,)): loss_and_gradients as a function that autograd knows.

    Differentiable in hidden_s and weight_s, the loss alone.
    """
    class ChunkedLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight):
            grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
            loss, grad_hidden, logprobs, kls = loss_and_gradients(token_loss, hidden, weight, hidden_t, weight_t, grad_weight, targets,
                                                                  1.0, chunk, temperature)
            ctx.gradients = grad_hidden, grad_weight
            ctx.mark_non_differentiable(logprobs, kls)
            return loss, logprobs, kls

        @staticmethod
        def backward(ctx, scale, *_):
            return tuple(None if x is None else x * scale for x in ctx.gradients)

    return ChunkedLoss.apply(hidden_s, weight_s)


def chunked_kl(hidden_s, weight_s, hidden_t, weight_t, chunk=256, divergence="reverse_kl", top_k=0, temperature=1.0):
    """Summed divergence (nats) between the student's and the teacher's next-token distributions.

    hidden (T, D) are final hidden states, weight (V, D) the lm_head; both logits are divided by the temperature.
    Differentiable in hidden_s and weight_s, one chunk of logits at a time.
    """
    return chunked_loss(dense_loss(divergence, top_k), hidden_s, weight_s, hidden_t, weight_t, None, chunk, temperature)[0]


def sample_episodes(engine, tokenizer, places, prompts, cfg):
    """The student's graded episodes: a list for each of `places`, (position, task). The position counts the tasks trained on
    before it and names the random stream.

    The text is for world and grader only: training goes on with the sampled ids.
    """
    seeds = [[stable_seed("rollout", cfg.seed, position, k) for k in range(cfg.rollouts_per_task)] for position, _ in places]
    groups = play_tasks(engine, tokenizer, [task for _, task in places], seeds,
                        lambda task, later: render(tokenizer, task, "", cfg, later) if later else prompts[task["id"]][0],
                        cfg.max_turns, cfg.max_new_tokens, cfg.temperature,
                        room=max(len(teacher) - len(student) for student, teacher in prompts.values()))
    for episode in [episode for group in groups for episode in group if episode.error]:
        stop_on_breakdown(episode.task, episode.error)
    return groups


def pack_roles(groups, tokenizer, prompts, hints, cfg):
    """(student rows, teacher rows): the same sampled tokens in the same order, after prompts without and with the hint."""
    def teacher_prompt(task, turn):
        return render(tokenizer, task, hints[task["id"]]["hint"], cfg, turn.before) if turn.before else prompts[task["id"]][1]
    return [pack_episodes([[[(prompt_of(episode.task, turn), turn.sample.ids) for turn in episode.turns] for episode in group]
                           for group in groups], cfg.row_tokens) for prompt_of in (lambda task, turn: turn.prompt, teacher_prompt)]


def rollout_rows(places, groups, kl, step, hints, note):
    """[(position, row of rollouts.jsonl)], a row for each turn. kl (T,): KL(student || teacher) of the sampled tokens.

    `turn` counts the turns before this one, `messages` are those of them that the episode itself has made.
    """
    rows, start = [], 0
    for (position, task), group in zip(places, groups):
        first = sum(message["role"] == "assistant" for message in task["messages"])
        for episode in group:
            for k, turn in enumerate(episode.turns):
                sample, of_turn = turn.sample, kl[start:(start := start + len(turn.sample.ids))]
                rows.append((position, {
                    "step": step, "id": task["id"], "hint_id": hints[task["id"]]["hint_id"], "turn": first + k, "seed": episode.seed,
                    "weight_version": step - 1, "completion": sample.text, "completion_ids": sample.ids, "logprobs": sample.logprobs,
                    "reward": episode.grade.reward, "finish_reason": sample.finish_reason, "reverse_kl": float(of_turn.mean()), **note,
                    **({"messages": turn.before} if turn.before else {})}))
    return rows


def token_means(num_tokens, **values):
    """{name: mean} of (T,) values over the step's tokens, those of all ranks."""
    sums = torch.stack([value.double().sum() for value in values.values()])
    if world() > 1:
        torch.distributed.all_reduce(sums)
    return dict(zip(values, (sums / num_tokens).tolist()))


def step_metrics(rows, packed, kl, log_ratio, num_tokens, weight, cfg):
    """What metrics.jsonl says of a step's rollouts. Silent groups have equal rewards: no GRPO.

    rows: of rollouts.jsonl; packed: the student's Rows; kl and log_ratio (T,): KL(student || teacher) and the log-prob of the
    trainer less that of the sampler, nats.
    """
    rewards = torch.tensor([row["reward"] for row in rows if "messages" not in row]).view(-1, cfg.rollouts_per_task)  # one of an episode
    ratio = log_ratio.exp()
    metrics = {"reward_mean": float(rewards.mean()), "pass_rate": float((rewards >= 1).float().mean()),
               "truncated_frac": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
               "silent_groups_frac": float((rewards.std(-1, correction=0) < 1e-8).float().mean()),
               "row_fill": sum(len(row.input_ids) for row in packed) / (len(packed) * cfg.row_tokens),
               **token_means(num_tokens, reverse_kl=kl, logprob_gap=log_ratio.abs(), sampler_kl_k3=ratio - 1 - log_ratio)}
    if cfg.loss == "policy_gradient":
        metrics |= {"grpo_weight": weight, **token_means(num_tokens, ratio_mean=ratio, ratio_clipped_frac=ratio > 2)}
    return metrics


def student_pass(model, teacher, rows, hidden_t, loss_of, num_tokens, cfg):
    """Forward and backward, row by row: adds the gradient of the step's mean loss to the weights' gradients.

    loss_of(span) is the token loss of the completion tokens `span`, hidden_t (T, D) what the teacher made of them, num_tokens
    the tokens of the whole step. Returns (mean loss, log student(target) (T,), KL(student || teacher) (T,)).
    """
    losses, logprobs, kls, start, idle = [], [], [], 0, idle_passes(rows, cfg)
    head, head_t, weight = head_weight(model).detach(), head_weight(teacher).detach(), model.get_output_embeddings().weight
    if weight.requires_grad and weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    grad_head = torch.zeros_like(head) if cfg.parallel == "shard" else weight.grad
    for row in rows:
        span = slice(start, start := start + len(row.targets))
        hidden = packed_hidden(model, row)  # (tokens of the row, D)
        loss, gradient, logprob, kl = loss_and_gradients(loss_of(span), hidden.detach(), head, hidden_t[span], head_t, grad_head,
                                                         row.targets.to(hidden.device), 1 / num_tokens, cfg.kl_chunk, cfg.temperature)
        hidden.backward(gradient)
        for found, value in ((losses, loss), (logprobs, logprob), (kls, kl)):
            found.append(value)
    for _ in range(idle):
        hidden = packed_hidden(model, rows[-1])
        hidden.backward(torch.zeros_like(hidden))
    if cfg.parallel == "shard":
        torch.distributed.all_reduce(grad_head)
        weight.grad += spread(grad_head, weight)
    return token_means(num_tokens, loss=torch.stack(losses))["loss"], torch.cat(logprobs), torch.cat(kls)


def open_run(cfg, inputs):
    """(run folder, checkpoint to resume from or None, its step), after the first rank has cut the records back to that step."""
    if rank() == 0:
        out_dir = start_run(cfg.out_dir, cfg, inputs, ignore=("parallel",))  # another number of processes may go on
        _, done = latest_checkpoint(out_dir, cfg.steps)
        for name in ("metrics.jsonl", "rollouts.jsonl", "eval.jsonl") if done < cfg.steps else ():
            drop_rows_after(out_dir / name, done)
    wait_for_ranks()
    return Path(cfg.out_dir), *latest_checkpoint(cfg.out_dir, cfg.steps)


def refresh_hints(cfg, out_dir, step, engine, tokenizer, tasks, hints):
    """The hints after `step`, those of the tasks that the student fails too often searched anew ([A] section 2, "refreshed").

    Hint-free rollouts give the pass rates and the new failures; the search runs with the current student as its model, while
    the teacher of the loss stays the frozen one. All of it is kept in <out_dir>/refresh-<step>, and not made again on resuming.
    """
    folder = out_dir / f"refresh-{step}"
    if rank() == 0 and not (folder / "refreshed.jsonl").exists():
        folder.mkdir(exist_ok=True)
        rows = evaluate_model(engine, tokenizer, tasks, cfg.refresh_rollouts, folder / "eval.jsonl", None, stable_seed("refresh", cfg.seed, step),
                              cfg.temperature, cfg.max_new_tokens, enable_thinking=cfg.enable_thinking, demos=load_demos(cfg.demos))
        failing = []
        for task in tasks:
            of_task = [row for row in rows if row["id"] == task["id"]]
            if sum(row["passed"] for row in of_task) < cfg.refresh_below * len(of_task):
                failed = next(row["completion"] for row in of_task if not row["passed"])
                failing.append(task | {"failed_completion": failed, "failed_feedback": grade_or_stop(task, failed).feedback})
        found, trials = [], {}
        if failing:
            search_cfg = parse_config(optimize_hints.Config, [cfg.refresh_preset] if cfg.refresh_preset else [])
            shared = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(EngineConfig)}
            search_cfg = dataclasses.replace(search_cfg, **shared, out_dir=str(folder), seed=stable_seed("refresh", cfg.seed, step),
                                             temperature=cfg.temperature, max_new_tokens=cfg.max_new_tokens, hint_position=cfg.hint_position)
            found, trials, _ = optimize_hints.search(search_cfg, failing, engine, tokenizer)
        num_rollouts = len(rows) + sum("seed" in trial for of_task in trials.values() for trial in of_task)
        tqdm.write(f"step {step}: {len(failing)} of {len(tasks)} tasks under {cfg.refresh_below:g}, {len(found)} new hints, "
                   f"{num_rollouts / len(tasks):.1f} rollouts a task")
        write_jsonl(folder / "refreshed.jsonl", found)
    wait_for_ranks()
    return hints | {row["id"]: row for row in read_jsonl(folder / "refreshed.jsonl")}


def report(out_dir):
    """Prints the result of a finished run from its record files."""
    scores = {}
    for row in read_jsonl(out_dir / "eval.jsonl"):
        scores.setdefault(row["step"], []).append(row["passed"])
    curve = {step: sum(passed) / len(passed) for step, passed in scores.items()}  # step -> pass@1
    steps = list(curve)
    best = max(steps, key=curve.get)
    windows = {tuple(steps[i:i + 3]): sum(curve[step] for step in steps[i:i + 3]) / 3 for i in range(len(steps) - 2)}
    metrics = read_jsonl(out_dir / "metrics.jsonl")
    seconds = sum(value for row in metrics for name, value in row.items() if name.startswith("seconds_"))
    print(f"held-out hint-free pass@1: {curve[steps[0]]:.3f} -> {curve[steps[-1]]:.3f}, step {steps[0]} -> {steps[-1]}")
    print(f"best step: {curve[best]:.3f}, step {best} (chosen on the evaluation tasks)")
    if windows:
        window = max(windows, key=windows.get)
        print(f"best three-checkpoint window: {windows[window]:.3f}, steps {window[0]} to {window[-1]} "
              "(chosen on the evaluation tasks)")
    print(f"KL(student || teacher) in nats per token: {metrics[0]['reverse_kl']:.4f} -> {metrics[-1]['reverse_kl']:.4f}")
    print(f"{len(metrics)} steps in {seconds:.0f} s, evaluations not counted; weights in {out_dir / 'checkpoint'}")


def set_up(cfg, resumed):
    """(model, tokenizer, adapter, teacher, weights, optimizer, engine) at the start, or as the checkpoint `resumed` left them."""
    model, tokenizer = load_model(cfg.model if cfg.lora_rank else resumed or cfg.model, cfg.device, cfg.dtype)
    adapter = add_adapter(model, cfg, resumed) if cfg.lora_rank else None
    state = torch.load(resumed / "training_state.pt", map_location="cpu") if resumed else {}
    teacher = load_teacher(cfg, model, state)
    for one in dict.fromkeys((model, teacher)):  # one, when they are the same; in one order on all ranks
        prepare_layers(one, cfg)
        if cfg.parallel == "shard":
            shard(one)
    weights = trained_weights(model)
    optimizer = torch.optim.AdamW([master for _, master in weights], lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
    if resumed:
        resume(optimizer, weights, state)
    engine, _ = load_engine(cfg, cfg.model, () if cfg.parallel == "shard" else (model, tokenizer))
    return model, tokenizer, adapter, teacher, weights, optimizer, engine


def sync(engine, model, prompts, cfg, changed=True):
    """Gives an engine with weights of its own the model's; transformers samples from the weights in training."""
    if cfg.engine == "vllm":
        engine.push(plain_weights(model), changed)
        check_sync(engine, model, [student for student, _ in list(prompts.values())[:8]], cfg.temperature,
                   0.05 if cfg.dtype == "float32" else 0.15)  # in bfloat16 equal weights were seen 0.06 apart
    elif cfg.parallel == "shard":
        engine.model.load_state_dict(dict(plain_weights(model)))


def main(cfg):
    join_ranks(cfg)
    check(cfg)
    started = time.time()
    tasks, eval_tasks = load_tasks(cfg.tasks, cfg.num_tasks), load_tasks(cfg.eval_tasks)
    refuse_overlap(tasks, eval_tasks)
    hints = load_hints(cfg.hints, tasks, cfg.control, cfg.seed)
    trained = select_tasks(tasks, hints, cfg)
    out_dir, resumed, done = open_run(cfg, [*cfg.tasks, *cfg.eval_tasks, cfg.hints, cfg.demos, cfg.model,
                                            *world_files([*tasks, *eval_tasks])])
    if done == cfg.steps:
        return rank() or report(out_dir)

    model, tokenizer, adapter, teacher, weights, optimizer, engine = set_up(cfg, resumed)
    prompts = render_prompts(tokenizer, trained, hints, cfg, model.config.max_position_embeddings)
    refreshes = range(cfg.refresh_every, cfg.steps, cfg.refresh_every) if cfg.refresh_every else ()  # steps after which hints are searched
    pass_rates = [row["pass_rate"] for row in read_jsonl(out_dir / "metrics.jsonl")] if resumed else []
    if rank() == 0:
        print(f"{len(trained)} of {len(tasks)} tasks to train on, {len(eval_tasks)} held out, {done} of {cfg.steps} steps done")
    bar = tqdm(total=cfg.steps, initial=done, desc="train", unit="step", disable=rank() > 0 or None)

    def evaluate(step):
        if rank() == 0:
            evaluate_model(engine, tokenizer, eval_tasks, cfg.eval_seeds, out_dir / "eval.jsonl", {"step": step}, cfg.seed,
                           cfg.temperature, cfg.max_new_tokens, enable_thinking=cfg.enable_thinking, demos=load_demos(cfg.demos),
                           max_turns=cfg.max_turns)
        wait_for_ranks()

    sync(engine, model, prompts, cfg, changed=False)
    if done == 0:
        evaluate(0)
    for step in range(done + 1, cfg.steps + 1):
        for earlier in [s for s in refreshes if s == step - 1 or step == done + 1 and s < step]:  # on resuming, all so far
            hints = refresh_hints(cfg, out_dir, earlier, engine, tokenizer, trained, hints)
            prompts = render_prompts(tokenizer, trained, hints, cfg, model.config.max_position_embeddings)
        # The student acts without a hint and is graded.
        clock = [time.time()]
        position = (step - 1) * cfg.tasks_per_step
        order = task_order(len(trained), cfg.seed, position, cfg.tasks_per_step)
        places = [(position + i, trained[task]) for i, task in enumerate(order)][rank()::world()]  # all of them, when alone
        groups = sample_episodes(engine, tokenizer, places, prompts, cfg)
        clock.append(time.time())

        # Pack twice. Every (T,) tensor from here on lists the sampled tokens in one order: task, episode, turn, token.
        student_rows, teacher_rows = pack_roles(groups, tokenizer, prompts, hints, cfg)
        samples = [[turn.sample for turn in episode.turns] for group in groups for episode in group]  # per episode
        lengths = torch.tensor([sum(len(sample.ids) for sample in of_episode) for of_episode in samples])
        num_tokens = sum(gathered(lengths.tolist()))  # of the whole step; T is the share of this rank, so all of them when it is alone
        targets = torch.cat([row.targets for row in student_rows]).to(model.device)
        sampler_logprobs = torch.tensor([x for of_episode in samples for sample in of_episode for x in sample.logprobs], device=model.device)
        rewards = torch.tensor([[episode.grade.reward for episode in group] for group in groups])  # (tasks, per task)
        grpo = grpo_advantages(rewards).flatten().float().repeat_interleave(lengths).to(model.device)
        weight = grpo_weight_at(step, cfg, pass_rates)

        # Teacher: the hidden states that predict the same tokens with the hint in the prefix.
        hidden_t = teacher_states(teacher, teacher_rows, cfg, adapter)  # (T, D)
        clock.append(time.time())

        # Student: loss and gradient row by row, divided once by the tokens of the whole step, then the update.
        def loss_of(span):
            return dense_loss(cfg.divergence, cfg.top_k) if cfg.loss == "dense" else policy_gradient_loss(
                targets[span], sampler_logprobs[span], grpo[span], weight, cfg.advantage_clip)
        loss, logprobs, kl = student_pass(model, teacher, student_rows, hidden_t, loss_of, num_tokens, cfg)
        sum_gradients(weights, cfg)
        optimizer.param_groups[0]["lr"] = lr_at(step, cfg)
        grad_norm = update(optimizer, weights, cfg.grad_clip)
        if cfg.teacher == "ema":
            update_ema(teacher, model, cfg.ema_decay)
        clock.append(time.time())
        sync(engine, model, prompts, cfg, changed=bool(grad_norm > 0))
        clock.append(time.time())

        # Records, held-out evaluation, checkpoint: in this order, so that a checkpoint vouches for all rows up to its step.
        placed = gathered(rollout_rows(places, groups, kl, step, hints, seed_note(engine)))
        rows = [row for _, row in sorted(placed, key=lambda placed: placed[0])]
        metrics = {"step": step, "loss": loss, "num_tokens": num_tokens, "grad_norm": float(grad_norm), "lr": lr_at(step, cfg),
                   **step_metrics(rows, student_rows, kl, logprobs - sampler_logprobs, num_tokens, weight, cfg),
                   **{f"seconds_{name}": b - a for name, a, b in zip(("sample", "teacher", "student", "push"), clock, clock[1:])}}
        pass_rates.append(metrics["pass_rate"])
        if rank() == 0:
            append_jsonl(out_dir / "metrics.jsonl", metrics)
            for row in rows:
                append_jsonl(out_dir / "rollouts.jsonl", row)
        bar.update()
        bar.set_postfix_str(f"reverse KL {metrics['reverse_kl']:.3f}, training pass rate {metrics['pass_rate']:.2f}")
        if step % cfg.eval_every == 0 or step == cfg.steps:
            evaluate(step)
        if step % cfg.save_every == 0 or step == cfg.steps:
            save_checkpoint(out_dir, step, cfg, model, tokenizer, optimizer, weights, teacher, adapter)
    bar.close()
    if rank() > 0:
        return
    report(out_dir)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    on_device = f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB on the GPU" if model.device.type == "cuda" else ""
    print(f"{time.time() - started:.0f} s in this process, peak memory {peak:.2f} GiB{on_device}")


if __name__ == "__main__":
    main(parse_config(Config))
