"""MTP heads as they are trained: their steps, and what is written beside the target's files."""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.modeling_layers import MtpModel

from align.checkpoint import Checkpoint, weight_files
from align.errors import UserError
from align.files import read_json
from distill.drafters import mtp
from distill.drafters.kind import Origin
from distill.teacher.states import read_states
from eval.decoding.build import build_decoder
from eval.decoding.drafters.drafter import Text
from eval.decoding.drafters.mtp import FORMAT, SERVED, fused_experts, load_mtp
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.engines.start_vllm import speculation
from eval.reporting.fields import read_report
from tests.mtp import FAMILIES, HYBRID, mtp_config, save_target

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58, 9, 7, 9, 32, 3, 8, 46, 26, 43]
GAMMA = 3


def loaded(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    checkpoint = Checkpoint.open(folder)
    return Target(checkpoint, model, build_decoder(model, 120), frozenset({62}))


def base_draft(target):
    return mtp.KIND.initialise(Origin(target, None, [], 1, GAMMA, (2,)))


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_target(folder, request.param)
    return loaded(folder)


def last_states(target, ids):
    """The target's last state at all ids [1, T, H]."""
    return read_states(target.decoder, torch.tensor([*ids, 0]), (2,))[0][None].clone()


def test_steps_of_a_draft_are_those_of_its_session(target):
    model, drafter = (
        base_draft(target).model,
        FORMAT.drafter(base_draft(target).model, None, target),
    )
    seen = set()
    for end in range(2, len(TEXT)):
        known = last_states(target, TEXT[: end - 1])
        so_far = Text(TEXT[:end], 64, Sampling(1.0), torch.Generator(), {2: known}, GAMMA)
        got, q, _ = drafter.start(so_far).propose(GAMMA)
        whole = torch.tensor([[*TEXT[:end], *got[:-1].tolist()]])
        read = torch.nn.functional.pad(known[:, :, None], (0, 0, 0, 0, 0, GAMMA))
        with torch.no_grad():
            steps = mtp.unrolled(model, whole, read, GAMMA)
            rows = [model.lm_head(y[0, end - 1 + step]) for step, y in enumerate(steps)]
        torch.testing.assert_close(q, torch.stack(rows).softmax(-1), rtol=1e-3, atol=1e-5)
        seen.update(got.tolist())
    assert len(seen) > 3


def weights_of(folder):
    """All tensors of a checkpoint; of a name in two files that of the last one."""
    return {k: v for path in weight_files(folder) for k, v in load_file(path).items()}


def first_step_of_qwen(model, weights, ids, hidden):
    """The head's inputs [1, T, H] of `mtp` as vLLM computes them, with transformers' modules."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    body = type(model)(config).to(hidden.dtype).eval().model
    layer = {
        name.removeprefix("mtp.layers.0."): tensor
        for name, tensor in fused_experts(weights).items()
        if name.startswith("mtp.layers.0.")
    }
    body.layers[0].load_state_dict(layer)

    def normed(name, x):
        body.norm.load_state_dict({"weight": weights[f"mtp.{name}.weight"]})
        return body.norm(x)

    with torch.no_grad():
        embedded = normed("pre_fc_norm_embedding", model.get_input_embeddings()(ids))
        read = torch.cat([embedded, normed("pre_fc_norm_hidden", hidden)], -1)
        body.norm.load_state_dict({"weight": weights["mtp.norm.weight"]})
        return body(inputs_embeds=read @ weights["mtp.fc.weight"].T).last_hidden_state


def trained_weight(layer, dense):
    return layer.mlp.down_proj.weight if dense else layer.mlp.experts.down_proj


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_trained_is_written_back_to_the_bit(tmp_path, family, dtype):
    """And transformers loads the target, and its head, from what is written."""
    source, folder = tmp_path / "target", tmp_path / "draft"
    save_target(source, family, dtype=dtype)
    folder.mkdir()
    target = loaded(source)
    draft = base_draft(target)
    embedding = target.decoder.embedding
    mtp.KIND.save(folder, draft, embedding, Checkpoint.open(source))
    before = weights_of(source)
    after = load_file(folder / "model.safetensors")
    prefix = "mtp." if FAMILIES[family] is HYBRID else "model.layers.2."
    head = set() if FAMILIES[family] is HYBRID else {prefix + "shared_head.head.weight"}
    assert after.keys() - before.keys() == head
    assert after.keys() - head == {name for name in before if name.startswith(prefix)}
    for name, tensor in after.items():
        same = before["lm_head.weight" if name in head else name]
        assert tensor.dtype == same.dtype
        assert torch.equal(tensor, same)
    again = mtp.KIND.load(folder, embedding, lambda: before["lm_head.weight"]).model.state_dict()
    assert all(torch.equal(again[k], v) for k, v in draft.model.state_dict().items())

    # one weight is trained: it alone is another one, in transformers as well
    dense = family == "qwen3_5_text"
    with torch.no_grad():
        trained_weight(draft.model.model.layers[0], dense)[1] += 1
    served, tuned = tmp_path / "tuned" / SERVED, tmp_path / "tuned"
    tuned.mkdir()
    mtp.KIND.save(tuned, draft, embedding, Checkpoint.open(source))
    places = read_json(served / "model.safetensors.index.json")["weight_map"]
    assert places.keys() == before.keys() | head
    assert {name for name in places if places[name] == "tuned-mtp.safetensors"} == after.keys()
    assert sorted(places.values())[-1] == "tuned-mtp.safetensors"  # vLLM keeps the last of a name
    for path in weight_files(served)[:-1]:
        assert os.path.samefile(path, source / path.name.replace("-target", ""))
    model = AutoModelForCausalLM.from_pretrained(served).eval()
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    wanted = trained_weight(draft.model.model.layers[0], dense).to(dtype)
    ids, hidden = torch.tensor([TEXT]), last_states(target, TEXT[:-1]).to(dtype)
    if not head:
        other = weights_of(served)
        assert sum(not torch.equal(other[name], tensor) for name, tensor in after.items()) == 1
        y = first_step_of_qwen(model, other, ids[:, 1:], hidden)
    else:
        # transformers knows the layers of the published sizes only
        model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]
        theirs = MtpModel.from_pretrained(model)
        (block,) = theirs.layers
        assert torch.equal(block.mtp_block.mlp.experts.down_proj, wanted)
        # the first step is that of transformers, but for the first input's embedding
        embedded = theirs.embed_tokens(ids[:, 1:]).clone()
        embedded[:, 0] = 0
        with torch.no_grad():
            y = theirs.forward_layer(
                0, hidden, torch.arange(len(TEXT) - 1)[None], None, inputs_embeds=embedded
            )
    drafter = FORMAT.load(tuned, loaded(served))
    cache = drafter.decoder.new_cache(1, len(TEXT))
    ours, carried = drafter.decoder.read(ids[:, 1:], hidden, 0, cache)
    torch.testing.assert_close(ours, y)
    # vLLM's GLM passes the state on without the last norm
    assert torch.equal(carried, ours) == (family != "glm4_moe")


def test_a_checkpoint_with_a_vision_model_is_a_target_like_one_without(tmp_path):
    """Qwen3.5's have one. Their text model has other names there, and their head has not."""
    source, folder = tmp_path / "target", tmp_path / "draft"
    save_target(tmp_path / "text", "qwen3_5_text")
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16}
    text = mtp_config("qwen3_5_text").to_dict()
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(source)
    head = {k: v for k, v in weights_of(tmp_path / "text").items() if k.startswith("mtp.")}
    whole = source / "model.safetensors"
    save_file(load_file(whole) | head, whole, metadata={"format": "pt"})
    target = loaded(source)
    draft = base_draft(target)
    folder.mkdir()
    mtp.KIND.save(folder, draft, target.decoder.embedding, Checkpoint.open(source))
    written = load_file(folder / "model.safetensors")
    assert written.keys() == head.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in head.items())
    assert weights_of(folder / SERVED).keys() == weights_of(source).keys()
    assert FORMAT.load(folder, target).decoder.config.model_type == "qwen3_5_text"


def test_a_target_without_the_layer_is_refused(tmp_path):
    save_target(tmp_path, "glm4_moe")
    target = loaded(tmp_path)
    target.model.save_pretrained(tmp_path)  # as fine-tuning does
    with pytest.raises(UserError, match="has 0 layers for multi-token prediction"):
        base_draft(target)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_stale_copy_of_the_embedding_is_replaced_where_the_layer_is_tuned(tmp_path, family):
    """Fine-tuning leaves it as it was. As it is, the layer drafts with the embedding of its own."""
    save_target(tmp_path, family)
    weights, target = weights_of(tmp_path), loaded(tmp_path)
    name = (
        "mtp.embed_tokens.weight"
        if family == "qwen3_next"
        else "model.layers.2.embed_tokens.weight"
    )
    copied = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {name: copied}, tmp_path / "model.safetensors")
    base_draft(target)
    save_file(weights | {name: copied + 1}, tmp_path / "model.safetensors")
    draft, embedding = base_draft(target), target.decoder.embedding
    (tmp_path / "draft").mkdir()
    mtp.KIND.save(tmp_path / "draft", draft, embedding, Checkpoint.open(tmp_path))
    assert torch.equal(load_file(tmp_path / "draft" / "model.safetensors")[name], copied)
    served = weights_of(tmp_path / "draft" / SERVED)
    assert torch.equal(served[name], served["model.embed_tokens.weight"])
    with pytest.raises(UserError, match="another input embedding"):
        load_mtp(tmp_path, embedding, embedding, target.model.config)


def test_vllm_gets_the_target_with_the_tuned_layer(finished):
    recipe = finished("mtp")
    draft = recipe.folder / "draft"
    config = json.loads(speculation(draft, 3)[1])
    assert config == {"method": "mtp", "model": str(draft / SERVED), "num_speculative_tokens": 3}
    assert (draft / SERVED / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["mtp", "mtp hybrid"])
def test_the_tuned_head_is_accepted_more_often_on_other_prompts(finished, name):
    folder = finished(name).folder
    drafts = read_report(folder / "report" / "report.json").drafts
    assert drafts["tuned"].alpha.mean > drafts["untuned"].alpha.mean + 0.2
    # a checkpoint has what is trained, by the names with which it is resumed
    saved = load_file(folder / "checkpoint-120" / "model.safetensors").keys()
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.eh_proj.weight"} <= saved
    assert not any("lm_head" in name or "embed_tokens" in name for name in saved)
    tensors = [weights_of(place) for place in (Path(finished(name).target), folder / "draft")]
    kept = {"model.layers.2.mlp.gate.e_score_correction_bias"} if name == "mtp" else set()
    if name == "mtp":
        head = "model.layers.2.shared_head.head.weight"
        assert torch.equal(tensors[1].pop(head), tensors[0]["lm_head.weight"])
    same = {key for key, tensor in tensors[1].items() if torch.equal(tensor, tensors[0][key])}
    assert same == kept
