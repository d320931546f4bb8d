"""What fits where: the lines of docs/memory.md, from configs alone.

    python tests/benchmarks/what_fits.py

Of the recipes that name models on the Hub. Their configs stand in tests/distill/configs, cut down
to the numbers that decide shapes, so that no network is needed.
"""

from pathlib import Path

from transformers import AutoConfig

from distill.memory import needs
from distill.recipe import build_recipe, read_yaml, recipe_files

CONFIGS = Path(__file__).resolve().parents[1] / "distill" / "configs"


def config_of(spec):
    return AutoConfig.from_pretrained(CONFIGS / spec.rpartition("/")[2])


def hub_recipes():
    """Name -> recipe of every one whose target is on the Hub."""
    read = {name: build_recipe(read_yaml(path)) for name, path in recipe_files().items()}
    return {name: one for name, one in read.items() if not one.target.startswith("pypi:")}


def needs_of(recipe):
    return needs(recipe, config_of(recipe.target), recipe.draft and config_of(recipe.draft))


STAGES = ["answering", "preparing", "distilling", "exporting", "evaluating"]


def row(name, recipe):
    """A line of the table: GiB of each stage, the device in GB, GiB on disk."""
    needed = needs_of(recipe)
    peaks = {stage.name: f"{stage.peak / 2**30:.1f}" for stage in needed.stages}
    disk = (f"{size / 2**30:.2f}" for size in (needed.answers_on_disk, needed.checkpoint))
    cells = [f"`{name}`", *(peaks.get(stage, "") for stage in STAGES)]
    return f"| {' | '.join([*cells, f'{needed.device / 1e9:.1f}', *disk])} |"


if __name__ == "__main__":
    for name, recipe in hub_recipes().items():
        print(row(name, recipe))
