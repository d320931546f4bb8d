"""`report_to`, as in transformers: what the training's trackers get, without a network.

trackio (0.43) was tried by hand: it reads its folder when trl imports it, which a test cannot set.
"""

import struct

import pytest

from distill import train
from distill.recipe import RecipeError
from distill.trainer import training_config

LOGGED = {"train/loss", "train/grad_norm", "train/learning_rate", "train/epoch"}


def scalars(path):
    """{name: {step: value}} of TensorBoard's file of records: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found, data = {}, path.read_bytes()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_tensorboard_gets_the_loss_of_every_logged_step(job, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "evaluate", lambda *_: None)
    recipe = job(tmp_path / "run", report_to="tensorboard", max_steps=4, logging_steps=2)
    assert train.run(recipe) == 0
    (path,) = recipe.folder.glob("runs/*/events.out.tfevents.*")
    found = scalars(path)
    assert set(found) >= LOGGED
    assert set(found["train/loss"]) == {2, 4}
    assert all(value > 0 for value in found["train/loss"].values())


def test_a_tracker_that_is_not_installed_is_refused_before_anything_runs(job, tmp_path):
    recipe = job(tmp_path / "run", report_to=["tensorboard", "swanlob"])
    with pytest.raises(RecipeError, match=r"report_to names 'swanlob', .*`pip install swanlob`"):
        train.run(recipe)
    assert not recipe.folder.exists()


def test_without_the_key_nothing_is_tracked(job, tmp_path):
    assert training_config(job(tmp_path / "run")).report_to == []
