"""What ends a text, and the hash by which weights are known."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from align.errors import UserError
from align.sources import SourceError
from eval.decoding.drafters.compact import read_token_ids, weights_of
from eval.decoding.target import stop_tokens, weights_sha256


@pytest.fixture
def stops(tiny):
    """What ends a text of a model with such configurations, under a tokenizer that ends in 0."""

    def of(config, generation):
        model = tiny(0)
        model.config.eos_token_id, model.generation_config.eos_token_id = config, generation
        return stop_tokens(model, SimpleNamespace(eos_token_id=0))

    return of


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(None, None, {0}), (7, None, {0, 7}), ([7, 8], [8, 9], {0, 7, 8, 9}), (0, [5, 6], {0, 5, 6})],
)
def test_every_end_of_text_is_known(stops, config, generation, expected):
    assert stops(config, generation) == expected


def test_the_hash_of_weights_covers_every_file(tmp_path):
    """It is that of the list that `sha256sum *.safetensors` prints."""
    for shards in ((b"one",), (b"one", b"two"), (b"one", b"three")):
        files = {f"model-{i}.safetensors": weights for i, weights in enumerate(shards)}
        for name, weights in files.items():
            (tmp_path / name).write_bytes(weights)
        sums = [f"{hashlib.sha256(w).hexdigest()}  {name}\n" for name, w in files.items()]
        of_list = hashlib.sha256("".join(sums).encode()).hexdigest()
        expected = of_list if len(shards) > 1 else sums[0][:64]
        assert weights_sha256(str(tmp_path)) == expected
        assert weights_sha256(f"lookup-first:{tmp_path}") == expected
    assert weights_sha256(str(tmp_path / "none")) is None


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
