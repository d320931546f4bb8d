"""Heads that the real speculators package makes: read here as it computes them, tuned, and read
by it again.

    DRAFTSMITH_SPECULATORS_PYTHON=FOLDER/bin/python pytest tests/real/test_speculators.py

It needs a Python with speculators 0.9, which has other requirements; else this is skipped.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align.checkpoint import Checkpoint
from align.errors import UserError
from distill.drafters.kind import Origin, kinds
from distill.drafters.mtp import SERVED
from eval.decoding.build import build_decoder
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.target import Target, load_target
from tests.mtp import save_target
from tests.siblings import LARGE, save_sibling

pytestmark = pytest.mark.real
PYTHON = os.environ.get("DRAFTSMITH_SPECULATORS_PYTHON")
# our kind of each head that is read
READ = {
    "eagle3": "eagle3",
    "eagle3, window": "eagle3",
    "dflash": "dflash",
    "dflash, full": "dflash",
    "dflash, mixed": "dflash",
    "dflash, both ways": "dflash",
    "dflash, window": "dflash",
    "dflash2": "dflash",
    "mtp": "mtp",
}
OWN = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
WINDOW = 12  # of "dflash, window", which has one layer
REFUSED = {"peagle": "P-EAGLE", "dspark": "DSpark", "xpress": "XPress"}


def speculators(*words):
    """Run speculators_heads.py with these words."""
    script = Path(__file__).with_name("speculators_heads.py")
    done = subprocess.run([PYTHON, script, *words], env=OWN, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with two targets, and their heads by kind with what the package computes."""
    if PYTHON is None:
        pytest.skip("DRAFTSMITH_SPECULATORS_PYTHON names no Python with speculators")
    root = tmp_path_factory.mktemp("heads")
    save_sibling(root / "target", LARGE, 1, layers=8)
    save_target(root / "hybrid", "qwen3_next")
    speculators("make", root / "target", root)
    speculators("make-mtp", root / "hybrid", root)
    return root


@pytest.fixture(scope="module")
def target_of(root):
    """The target of a kind of head."""
    model = load_target(Checkpoint.open(root / "target"), torch.float32, "cpu", 128)
    hybrid = Checkpoint.open(root / "hybrid").load(torch.float32)
    decoder = build_decoder(hybrid, 128)
    targets = {
        "target": model,
        "hybrid": Target(Checkpoint.open(root / "hybrid"), hybrid, decoder, frozenset()),
    }
    return lambda kind: targets["hybrid" if kind == "mtp" else "target"]


@torch.no_grad()
def computed(folder, target, read):
    """The logits here, and those of speculators, for the same tokens. read: its file."""
    drafter, ids = load_drafter(str(folder), target), read["ids"]
    decoder = drafter.decoder
    states = dict.fromkeys(drafter.layers)
    target.decoder.forward(ids, 0, target.decoder.new_cache(1, ids.shape[1]), states=states)
    beside = drafter.side_by_side(states, torch.float32)
    torch.testing.assert_close(beside, read["states"], atol=1e-4, rtol=1e-4)
    if drafter.form != "dflash":
        fused = drafter.fused({k: v[:, :-1] for k, v in states.items()})
        logits = decoder.head(drafter.from_start(ids[:, 1:], fused))
        expected = read["logits"][0]
        return logits[:, : expected.shape[1]], expected
    anchors, expected = read["anchors"], read["logits"][:, 1:]
    count, width, _ = read["logits"].shape
    cache = decoder.new_cache(1, ids.shape[1] + count * width)
    decoder.add_context(beside, 0, cache)
    places = anchors[:, None] + torch.arange(width)
    slots = []
    for slot in range(1, width):
        if (views := decoder.views) == [(WINDOW, True)]:
            # speculators counts all slots' windows from the anchor
            decoder.views = [(WINDOW + slot + 1, True)]
        y = decoder.read(ids[0, anchors], anchors, width, ids.shape[1], cache)[:, slot]
        decoder.views = views
        slots.append(decoder.selected(decoder.head(y), y, ids[0, places[:, slot - 1]]))
    return torch.stack(slots, 1), expected


@pytest.mark.parametrize("kind", READ)
def test_a_head_is_read_as_speculators_computes_it(root, target_of, kind):
    here, there = computed(root / kind, target_of(kind), load_file(root / f"{kind}.safetensors"))
    assert there[there.isfinite()].std() > 1
    torch.testing.assert_close(here, there, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", READ)
def test_a_head_that_is_written_back_is_the_same_there(root, target_of, kind, tmp_path):
    target = target_of(kind)
    own, layers = kinds()[READ[kind]], load_drafter(str(root / kind), target).layers
    origin = Origin(target, None, [], 1, 4, layers, published=root / kind)
    (tmp_path / "draft").mkdir()
    own.save(tmp_path / "draft", own.initialise(origin), origin.embedding, target.checkpoint)
    if kind == "mtp":  # it lies in its target's own layout
        speculators("extract", tmp_path / "draft" / SERVED, tmp_path / "again")
    else:
        speculators("read", tmp_path / "draft", tmp_path / "again.safetensors")
    again, before = (
        load_file(f / n)
        for f, n in ((tmp_path, "again.safetensors"), (root, f"{kind}.safetensors"))
    )
    for name, tensor in before.items():
        torch.testing.assert_close(again[name], tensor, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", REFUSED)
def test_other_heads_are_refused_by_name_with_what_they_need(root, target_of, kind):
    with pytest.raises(UserError, match=REFUSED[kind]):
        load_drafter(str(root / kind), target_of(kind))


@pytest.mark.parametrize("kind", [kind for kind in READ if kind != "mtp"])
def test_a_head_is_tuned_and_read_there_again(root, tmp_path, distilled, kind):
    (tmp_path / "target").symlink_to(root / "target")
    draft = distilled("run", draft=str(root / kind), max_steps=8, learning_rate=1e-3)
    speculators("read", draft, tmp_path / "tuned.safetensors")
    tuned, before = (
        load_file(tmp_path / "tuned.safetensors"),
        load_file(root / f"{kind}.safetensors"),
    )
    target = load_target(Checkpoint.open(tmp_path / "target"), torch.float32, "cpu", 128)
    here, there = computed(draft, target, tuned)
    torch.testing.assert_close(here, there, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(there, computed(root / kind, target, before)[1], atol=1e-2)
