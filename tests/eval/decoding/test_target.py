"""What ends a text, and the hash by which weights are known."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from align.checkpoint import Checkpoint
from align.errors import SourceError, UserError
from eval.decoding.drafters.compact import read_token_ids, weights_of
from eval.decoding.target import load_target


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, {0}),  # a Llama's class has 2
        ({"eos_token_id": None}, {}, {0}),
        ({"eos_token_id": 7}, {"eos_token_id": None}, {0, 7}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": [8, 9]}, {0, 7, 8, 9}),
        ({"text_config": {"eos_token_id": 5}, "eos_token_id": 6}, None, {0, 5}),
        ({"text_config": {"hidden_size": 8}, "eos_token_id": 6}, None, {0, 6}),
    ],
)
def test_every_end_of_text_is_known_from_the_files(tmp_path, config, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    model = Checkpoint.open(tmp_path)
    model.tokenizer = SimpleNamespace(eos_token_id=0)
    assert model.stops == expected


def test_a_target_ends_its_outputs_where_align_check_says(folder, tmp_path):
    shutil.copytree(folder / "target", tmp_path / "target")
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / "target" / name
        about = json.loads(path.read_text())
        about.pop("eos_token_id")
        path.write_text(json.dumps(about))
    target = load_target(Checkpoint.open(tmp_path / "target"), torch.float32, "cpu", 64)
    ends = Checkpoint.open(tmp_path / "target").vocabulary.all_stops
    assert target.stops == ends == {target.checkpoint.tokenizer.eos_token_id}
    assert target.model.config.eos_token_id not in ends  # the default of its class


def test_the_two_tables_of_a_trimmed_head_agree(tmp_path):
    token_ids = torch.tensor([1, 2, 4])
    d2t = token_ids - torch.arange(3)
    for t2d in ({}, {"t2d": torch.tensor([False, True, True, False, True])}):
        tensors = {"d2t": d2t} | t2d
        assert read_token_ids(tmp_path, tensors).equal(token_ids)
        assert not tensors
    with pytest.raises(UserError, match="TOK-015"):
        read_token_ids(
            tmp_path, {"d2t": d2t, "t2d": torch.tensor([True, True, True, False, False])}
        )


def test_a_draft_is_read_from_its_own_file_alone(tmp_path):
    weights = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, weights)
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "older.safetensors")
    read = weights_of(tmp_path, "cpu")
    assert read.keys() == {"a"}
    assert read["a"].tolist() == [1, 1]
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(SourceError, match=weights.name):
        weights_of(tmp_path, "cpu")
