"""Every command of draftsmith as one: `draftsmith COMMAND [--option VALUE ...]`."""

import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

COMMANDS = {
    "train": "distill.train",
    "eval": "eval.run",
    "demo": "eval.demo",
    "publish": "distill.publish",
    "alive": "eval.alive",
    "drift": "eval.drift",
    "adapt": "distill.adapt",
    "check": "align.check",
    "to_gguf": "align.to_gguf",
}


def source(module: str) -> Path:
    """The file of a module, which is not imported."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def main() -> int:
    """Returns an exit status: that of the command, 2 if it is not known."""
    name, *argv = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: draftsmith COMMAND [--option VALUE ...]\n")
        for command, module in COMMANDS.items():
            with source(module).open(encoding="utf-8") as file:
                summary = file.readline().strip().strip('"')
            print(f"  {command:8} {summary}")
        print("\ndraftsmith COMMAND --help shows the options of a command.")
        return 0
    if name not in COMMANDS:
        print(f"error: no command {name!r}; use {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if name == "train":  # one process for each GPU, as in the documents
        launch = [sys.executable, "-m", "accelerate.commands.launch"]
        os.execv(sys.executable, [*launch, str(source("distill.train")), *argv])
    return int(importlib.import_module(COMMANDS[name]).main(argv) or 0)
