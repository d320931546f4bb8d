import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from align.checkpoint import Checkpoint
from align.errors import UserError
from distill.drafters.eagle3 import KIND
from distill.drafters.initialisation import to_train
from distill.drafters.kind import Draft
from eval.decoding.build import build_decoder
from eval.decoding.drafters import dflash
from eval.decoding.drafters.eagle3 import load_eagle3
from eval.decoding.drafters.formats import published_format
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.target import Target
from tests.dflash import save_published
from tests.eagle3 import PublishedEagle3


@pytest.fixture
def target(tiny_llama):
    model = tiny_llama(spread=4, vocab_size=64).eval()
    return Target(Checkpoint("target", Path()), model, build_decoder(model, 64), frozenset())


@pytest.fixture
def draft(target, tmp_path):
    """The folder of a published draft of that kind for the target, with changes of its config."""

    def save(kind, **changes):
        config, folder = target.model.config, tmp_path / "draft"
        shape = config.to_dict() | {"head_dim": config.hidden_size // config.num_attention_heads}
        if "DFlash" in kind:
            ids = torch.arange(9) if kind == "DFlash, speculators" else None
            save_published(folder, shape, [0], ids)
        else:
            keys = ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
            keys = (*keys, "num_attention_heads", "num_key_value_heads")
            sizes = {key: shape[key] for key in keys}
            PublishedEagle3(kind, sizes, [1], torch.arange(64)).save(folder)
        path = folder / "config.json"
        about = json.loads(path.read_text())
        about.get("transformer_layer_config", about).update(changes)
        path.write_text(json.dumps(about))
        return folder

    return save


@pytest.mark.parametrize("kind", ["DFlash", "EAGLE", "speculators"])
def test_a_published_draft_of_shorter_texts_than_the_prompts_is_refused(draft, target, kind):
    folder = draft(kind, max_position_embeddings=63)
    with pytest.raises(UserError, match=r"up to position 63, .* take 64"):
        load_drafter(str(folder), target)
    shorter = replace(target, decoder=build_decoder(target.model, 63))
    assert load_drafter(str(folder), shorter).layers == (1,)


def test_a_trained_draft_of_shorter_texts_than_the_prompts_is_refused(draft, target, tmp_path):
    embedding, config = target.decoder.embedding, target.model.config
    model, ids = load_eagle3(draft("EAGLE", max_position_embeddings=63), embedding, config)
    (tmp_path / "trained").mkdir()
    trained = Draft(to_train(model, torch.ones(1), embedding), ids)
    trained.model.ttt_steps = 1
    KIND.save(tmp_path / "trained", trained, embedding, target.checkpoint)
    with pytest.raises(UserError, match="up to position 63"):
        load_drafter(str(tmp_path / "trained"), target)


@pytest.mark.parametrize(
    ("name", "lack"),
    [
        ("LiLiCorrDraftModel", "which cannot"),
        ("Qwen3DSparkModel", "DSpark"),
        ("PEagleSpeculator", "P-EAGLE"),
        ("XPressSpeculator", "XPress"),
    ],
)
def test_an_architecture_that_is_not_computed_is_refused_by_its_name(draft, target, name, lack):
    folder = draft("DFlash", architectures=[name])
    with pytest.raises(UserError, match=rf"{name}.*{lack}"):
        load_drafter(str(folder), target)
    path = folder / "config.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"architectures": ["Qwen3ForCausalLM"]}))
    assert published_format(folder) is None


WINDOW = {"use_sliding_window": True, "sliding_window": 8}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
BOTH_WAYS = [(8, False), (None, False)]
INNER = {"mask_token_id": 63, "target_layer_ids": [0]}


@pytest.mark.parametrize(
    ("layout", "changes", "views"),
    [
        ("z-lab", {}, [(None, False)] * 2),
        ("z-lab", MIXED, [(8, True), (None, False)]),
        ("z-lab", MIXED | {"is_causal": False}, BOTH_WAYS),
        ("z-lab", MIXED | {"dflash_config": INNER | {"causal": False}}, BOTH_WAYS),
        (
            "z-lab",
            {"is_causal": True, "dflash_config": INNER | {"causal": False}},
            [(None, True)] * 2,
        ),
        (
            "z-lab",
            WINDOW | {"layer_types": None, "max_window_layers": 1},
            [(None, False), (8, True)],
        ),
        ("speculators", MIXED, BOTH_WAYS),
        ("speculators", MIXED | {"sliding_window_non_causal": False}, [(8, True), (None, False)]),
        ("speculators", {"sliding_window_non_causal": False}, [(None, False)] * 2),
        (
            "speculators",
            WINDOW | {"layer_types": None, "max_window_layers": 0},
            [(None, False)] * 2,
        ),
    ],
)
def test_a_dflash_layer_has_the_window_and_the_direction_of_its_config(
    draft, target, layout, changes, views
):
    both_ways = changes.get("sliding_window_non_causal")
    folder = draft(f"DFlash, {layout}", **changes)
    if both_ways is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert load_drafter(str(folder), target).decoder.views == views


@pytest.mark.parametrize(
    ("depth", "of_target", "layers"),
    [(1, 36, (19,)), (2, 8, (2, 6)), (8, 36, (2, 7, 11, 16, 20, 25, 29, 34))],
)
def test_a_dflash_draft_without_layer_ids_reads_those_of_the_authors_default(
    depth, of_target, layers
):
    about = {"num_hidden_layers": depth, "num_target_layers": of_target}
    about |= {"dflash_config": {"mask_token_id": 3}}
    assert dflash.target_layers({}, about) == layers
