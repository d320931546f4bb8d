"""Peak memory of each stage of the main job and of the fp32 tie check, beside what is said of it.

    python tests/benchmarks/memory.py [--context 8192]

A random-weight Llama of 1.1B parameters (TinyLlama's shape under the embedded target's tokenizer)
stands in as the target of the code recipe, shortened; 5 GB of disk, 5 to 10 minutes on two cores.
Prints the peak of the resident set of each stage, planning among them, against 1.3x the weights +
1.5 GiB; then what `--dry_run` says of it from the configs, and the device that it asks for; then
how much more than decoding the tie check takes, beside one layer in fp32.
context: the same on prompts of up to so many tokens, sources of the standard library, trained on
one by one and without a plan; an hour.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from align.machine import use_machine
from align.sources import load_tokenizer
from distill import train
from distill.memory import FRAGMENTED, RUNTIME, needs
from distill.models import check_models
from distill.prompt_sets import collect_prompts
from distill.recipe import load_recipe
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.measuring.losslessness import LosslessCheck
from eval.prompts import Prompt

GIB = 2**30
SHAPE = LlamaConfig(
    vocab_size=49152,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=2048,
)
STAGES = {  # of distill/train.py, and as distill/memory.py names them
    "answer_prompts": "answering",
    "measured_costs": "planning",
    "prepare_draft": "preparing",
    "distil_draft": "distilling",
    "export_draft": "exporting",
    "evaluate": "evaluating",
}
SHORT = {
    "minutes": 60,  # not all needed: four steps are all that there is to train on
    "max_train_prompts": 32,
    "num_train_epochs": 1,
    "answer_max_new_tokens": 8,
    "max_eval_prompts": 4,
    "speed_prompts": 2,
    "tuning_prompts": 1,
    "max_gamma": 1,
    "max_new_tokens": 8,
    "fit_tokens": 100,
    "warmup_steps": 1,
    "save_steps": 2,
}
LONG = SHORT | {
    "minutes": "null",
    "instruction": "{prompt}",
    "max_train_prompts": 4,
    "max_eval_prompts": 2,
    "answer_batch_size": 16,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "activation_checkpointing": "true",
    "save_steps": 1,
}
# modules of the standard library, and which share of the context their prompts take
TRAINED = {"argparse": 1, "typing": 1, "tarfile": 0.5, "subprocess": 0.05}
EVALUATED = {"turtle": 1, "doctest": 0.05}
TEXT = list(range(100, 400))  # a prompt, and so many tokens after it
TOKENS = 4


def peak(since_now=False):
    """Bytes of the largest resident set so far; since_now: from here on the next one counts."""
    with open("/proc/self/status") as status:
        found = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    if since_now:
        Path("/proc/self/clear_refs").write_text("5")
    return found * 1024


def watched(name, stage):
    def run(*args, **options):
        peak(since_now=True)
        clock = time.time()
        made = stage(*args, **options)
        print(f"@ {name} {peak()} {time.time() - clock:.0f}", flush=True)
        return made

    return run


def arguments(folder, output):
    """Of the main job, shortened; on long prompts where the folder has some."""
    keys = {"target": folder, "output_dir": output}
    prompts = {f"{part}_prompts": Path(folder, f"{part}.jsonl") for part in ("train", "eval")}
    keys |= LONG | prompts if prompts["train_prompts"].exists() else SHORT
    flags = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return ["--recipe", "code", *flags]


def write_prompts(folder, tokenizer, context):
    """Sources of the standard library, cut to a share of the context."""
    for part, shares in {"train": TRAINED, "eval": EVALUATED}.items():
        with Path(folder, f"{part}.jsonl").open("w") as file:
            for name, share in shares.items():
                source = Path(importlib.util.find_spec(name).origin).read_text("utf-8")
                # what the template and the answer take
                ids = tokenizer(source)["input_ids"][: round(share * context) - 128]
                print(json.dumps({"prompt": tokenizer.decode(ids)}), file=file)


def run_recipe(folder, output):
    """The main job in this process, a line of its peak after each stage."""
    for name, stage in STAGES.items():
        setattr(train, name, watched(stage, getattr(train, name)))
    return train.main(arguments(folder, output))


def said(folder, output):
    """What `--dry_run` says of each stage with the longest prompt that there is, in bytes."""
    recipe = load_recipe(arguments(folder, output))
    target = check_models(recipe).target
    prompts = collect_prompts(recipe, target)
    longest = max(map(len, prompts.training.ids + prompts.evaluation.ids))
    found = needs(recipe, AutoConfig.from_pretrained(folder), None, longest)
    print(f"prompts of up to {longest} tokens", flush=True)
    return {stage.name: stage.peak for stage in found.stages}


def check_ties(folder):
    """Peaks of decoding in bf16, then of decoding in fp32."""
    use_machine()
    target = load_target(folder, torch.bfloat16, "cpu", 512)
    how = Decoding(Sampling(), target.stops, TOKENS)
    peak(since_now=True)
    for name in ("decoding", "ties"):
        clock = time.time()
        decoder = target.decoder if name == "decoding" else LosslessCheck(target, how).exact
        decode(decoder, None, [Prompt("0", prompt="")], [TEXT], how, DraftLength(0))
        print(f"@ {name} {peak(since_now=True)} {time.time() - clock:.0f}", flush=True)


def measured(bound, *arguments):
    """The peaks in bytes that a process of its own reports, by name, printed as they come."""
    command = [sys.executable, __file__, *arguments]
    peaks = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("@ "):
                name, size, seconds = line.split()[1:]
                peaks[name] = int(size)
                share = peaks[name] / bound
                print(f"{name}: {peaks[name] / GIB:.3f} GiB, {share:.3f} of the bound, {seconds} s")
                sys.stdout.flush()
    if process.returncode:
        sys.exit(f"{arguments[0]} ended with {process.returncode}")
    return peaks


def main(context):
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        SHAPE.max_position_embeddings = max(SHAPE.max_position_embeddings, 2 * (context or 0))
        model = LlamaForCausalLM(SHAPE).to(torch.bfloat16)
        weights = sum(p.nbytes for p in model.parameters())
        layer = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
        model.save_pretrained(f"{folder}/target")
        del model
        tokenizer = load_tokenizer(load_recipe(["--recipe", "code"]).target)
        tokenizer.save_pretrained(f"{folder}/target")
        if context:
            write_prompts(f"{folder}/target", tokenizer, context)
        bound = 1.3 * weights + 1.5 * GIB
        print(f"weights {weights / GIB:.2f} GiB, bound {bound / GIB:.2f} GiB", flush=True)
        peaks = measured(bound, "run", f"{folder}/target", f"{folder}/run")
        for name, size in said(f"{folder}/target", f"{folder}/other").items():
            device = (size + RUNTIME) / (1 - FRAGMENTED)
            print(
                f"{name}: {size / GIB:.2f} GiB said, so a device of {device / GIB:.2f}; measured "
                f"{peaks[name] / device:.2f} of it"
            )
        peaks = measured(bound, "ties", f"{folder}/target")
    more = peaks["ties"] - peaks["decoding"]
    print(f"tie check: {more / 2**20:.0f} MiB more, {more / layer:.2f} of a layer in fp32")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", folder, output]:
            sys.exit(run_recipe(folder, output))
        case ["ties", folder]:
            check_ties(folder)
        case options:
            parser = argparse.ArgumentParser()
            parser.add_argument("--context", type=int)
            main(parser.parse_args(options).context)
