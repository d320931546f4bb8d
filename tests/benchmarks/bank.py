"""Adapters of two domains on one base, from nothing to the matrix, on the embedded pair.

    python tests/benchmarks/bank.py outputs/bank
    python tests/benchmarks/bank.py outputs/bank --prompts 300 --speed_prompts 8 --max_steps 60
    python tests/benchmarks/bank.py outputs/bank --lora lora_r=32 lora_alpha=64

Makes the base, the adapters for code and legal text, and a full fine-tune of each on the same
answers with as many steps (all as ordinary runs, gone on from where they stopped), and measures
them all with `python -m eval.run --bank`. Then prints each thing that a bank must show, its numbers
with 95% intervals (paired bootstrap over prompts), and whether it holds.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.prompts import load_prompts
from eval.reporting.report import read_report
from eval.reporting.tables import bank_tables

DOMAINS = ("code", "legal")
FULL = {"use_peft": "false", "learning_rate": "3e-3"}  # what the recipes of whole drafts take
BYTES, GAIN, APART, MINUTES = 0.15, 0.15, 0.04, 20
PEFT_PROMPTS, PEFT_TOKENS = 8, 48


def made(folder, recipe, keys):
    """Seconds of the run after its answers."""
    command = [sys.executable, "-m", "distill.train", "--recipe", recipe, "--output_dir", folder]
    command += [f"--{key}={value}" for key, value in keys.items()]
    if (folder / "report" / "report.json").is_file():
        return None
    subprocess.run([*command, "--coverage_curve=true"], check=True)
    clock = time.monotonic()
    subprocess.run(command, check=True)
    return time.monotonic() - clock


def runs(args):
    """Makes every run of the bank; minutes after the answers of those made now."""
    keys = {"max_train_prompts": args.prompts, "num_train_epochs": args.epochs}
    keys |= {} if args.max_steps is None else {"max_steps": args.max_steps}
    short = {"max_eval_prompts": 32, "speed_prompts": 2, "gamma": 2, "lookup_first": "false"}
    base = args.folder / "base"
    minutes = {"base": made(base, "base", short)}
    lora = dict(pair.split("=") for pair in args.lora)
    for domain in DOMAINS:
        own = args.folder / domain
        shared = {"base": base} | keys | short
        minutes[domain] = made(own, f"{domain}/lora", shared | {"max_eval_prompts": 160} | lora)
        full = args.folder / f"{domain}-full"
        if not full.exists():
            shutil.copytree(own / "answers", full / "answers")
        minutes[full.name] = made(full, f"{domain}/lora", shared | {"max_eval_prompts": 160} | FULL)
    return {name: seconds / 60 for name, seconds in minutes.items() if seconds is not None}


def peft_agrees(folder, domain):
    """How many greedy texts of the draft are peft's own, of base and adapter, in fp32."""
    own = folder / domain
    base = AutoModelForCausalLM.from_pretrained(folder / "base" / "draft", dtype=torch.float32)
    alone = PeftModel.from_pretrained(base, str(own / "draft" / "adapter")).merge_and_unload()
    for weight in alone.eval().parameters():
        weight.data = weight.data.to(torch.bfloat16).float()  # and not the rotary frequencies
    merged = AutoModelForCausalLM.from_pretrained(own / "draft", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(own / "draft")
    same = 0
    for prompt in load_prompts(str(own / "prompts" / "eval.jsonl"), PEFT_PROMPTS):
        ids = tokenizer(prompt.text, return_tensors="pt")
        one, other = (
            model.generate(**ids, max_new_tokens=PEFT_TOKENS, do_sample=False)
            for model in (alone, merged)
        )
        same += torch.equal(one, other)
    return same


def says(what, holds):
    print(f"{'holds        ' if holds else 'DOES NOT HOLD'}  {what}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=1900, help="answered, of each domain")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--max_steps", type=int, help="of each, in place of --epochs")
    parser.add_argument("--speed_prompts", type=int, default=40, help="of each domain")
    parser.add_argument("--lora", nargs="*", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    minutes = runs(args)
    command = ["-m", "eval.run", "--bank", args.folder, "--speed_prompts", str(args.speed_prompts)]
    subprocess.run([sys.executable, *command], check=True)
    report = read_report(args.folder / "report" / "report.json")
    bank = report.bank
    for table in bank_tables(report):
        print(f"\n{table.title}\n" + "\t".join(table.header))
        for row in table.rows:
            print("\t".join(map(str, row)))
    print()
    alpha = {(cell.draft, cell.domain): cell for cell in bank.cells}
    for adapter in bank.adapters:
        name = adapter.name
        cell, full = alpha[name, name], alpha[f"{name}-full", name].alpha.mean
        gain = cell.alpha_over_base
        says(f"{name}: gain of alpha {gain:.3f}, lower bound over {GAIN}", gain.ci95[0] > GAIN)
        says(f"{name}: {adapter.of_base:.1%} of the base's bytes", adapter.of_base <= BYTES)
        apart = full - cell.alpha.mean
        says(f"{name}: full fine-tuning has {apart:+.3f} more alpha", apart <= APART)
        same = peft_agrees(args.folder, name)
        says(f"{name}: peft alone, {same} of {PEFT_PROMPTS} texts ours", same == PEFT_PROMPTS)
        print(f"               {name}: swap {adapter.swap_ms:.1f} ms, base not read again")
    if set(DOMAINS) <= set(minutes):
        both = sum(minutes[domain] for domain in DOMAINS)
        says(f"both adapters {both:.1f} minutes after their answers", both <= MINUTES)
    for name, draft in report.drafts.items():
        ledger = draft.lossless
        text = f"{ledger.identical} of {ledger.prompts} texts identical, rest at ties"
        says(f"{name}: {text}", ledger.unexplained == 0)
    for gain in bank.routing.gain:
        if gain.over in ("average", *DOMAINS):
            says(f"routed over {gain.over}: speed-up {gain.speedup:+.3f}", gain.speedup.mean >= 0)


if __name__ == "__main__":
    main()
