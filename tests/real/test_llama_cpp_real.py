"""A real llama.cpp, from npm, decodes the embedded target's GGUF file with drafts and without."""

import shutil

import numpy as np
import pytest
from gguf import GGUFReader

from align.sources import load_tokenizer, resolve_file
from distill.recipe import load_recipe
from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.driven import measure_driven
from eval.engines.environments import EngineMissing, install
from eval.engines.llama_cpp import EngineError, LlamaCpp
from eval.measuring.journal import Journal
from eval.prompts import Prompt, render_set

pytestmark = pytest.mark.real

TOKENS, GAMMA = 32, 3
DROPPED = 6  # layers


@pytest.fixture(scope="module", autouse=True)
def llama_cpp():
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not here: llama.cpp comes from npm")
    try:
        install("llama.cpp")
    except EngineMissing as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def spec():
    return load_recipe(["--recipe", "code"]).target


@pytest.fixture(scope="module")
def target(spec):
    return resolve_file(spec)


@pytest.fixture(scope="module")
def worse(target, tmp_path_factory):
    """The target with its last layers silenced: right often, not always."""
    path = tmp_path_factory.mktemp("worse") / "worse.gguf"
    shutil.copyfile(target, path)
    last = GGUFReader(path).fields["llama.block_count"].contents()
    silenced = tuple(f"blk.{layer}." for layer in range(last - DROPPED, last))
    for tensor in GGUFReader(path, "r+").tensors:
        if tensor.name.startswith(silenced) and tensor.name.endswith(
            ("attn_output.weight", "ffn_down.weight")
        ):
            np.asarray(tensor.data)[:] = 0
    return path


@pytest.fixture(scope="module")
def timed(spec):
    texts = ["def mean(values):\n", "import os\n\ndef files(folder):\n", "class Stack:\n"]
    prompts = [Prompt(str(i), prompt=text) for i, text in enumerate(texts)]
    return render_set("made up", prompts, load_tokenizer(spec), 2048, TOKENS)


@pytest.fixture(scope="module")
def engine(target, worse):
    with LlamaCpp(str(target), {"worse": str(worse), "self": str(target)}, GAMMA, 256) as engine:
        yield engine


def how(engine):
    return Decoding(Sampling(), engine.stops, TOKENS)


def test_the_text_is_the_target_s_own(engine, timed, tmp_path):
    report = measure_driven(engine, timed, how(engine), Journal(tmp_path / "j"), {})
    worse, own = report.drafts["worse"], report.drafts["self"]
    for draft in (worse, own):
        assert draft.lossless.unexplained == 0
        assert draft.lossless.identical >= 2
    assert own.tau.mean == GAMMA + 1
    assert 0 < worse.accepted_over_drafted.mean < 1
    assert (report.dtype, own.memory.kv_bytes_per_token.target) == ("q4_1", 23040)
    assert engine.stops >= {2}  # <|im_end|>


def test_logits_of_both_widths_choose_the_text(engine, timed):
    """What ties are explained by: each way's own logits have its text's token at the top."""
    ids = timed.ids[0]
    blocks = engine.blocks(0, timed.prompts[0], ids, how(engine))
    text = [token for block in blocks["emitted"] for token in block]
    assert any(len(block) < GAMMA + 1 for block in blocks["emitted"][1:-1])  # some were rejected
    for position in (0, 1, 7, len(text) - 1):
        single, wide = engine.logits(blocks, ids, position)
        assert wide.argmax() == text[position]
        assert (single - wide).abs().max() < 0.5


def test_files_that_llama_cpp_cannot_take(target, tmp_path):
    cut, other, text = (tmp_path / name for name in ("cut.gguf", "other.gguf", "text.gguf"))
    whole = target.read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    other.write_bytes(whole.replace("Ġreturn".encode(), "Ġretorn".encode(), 1))
    text.write_text("none")
    for path, says in (
        (cut, r"failed to load: .*cut.gguf: .*the file is cut, or of a kind"),
        (other, r"another vocabulary .*token \d+ is 'Ġretorn', the target's is 'Ġreturn'.*tune"),
        (text, r"text.gguf is no GGUF file"),
    ):
        with pytest.raises(EngineError, match=says):
            LlamaCpp(str(target), {"draft": str(path)}, GAMMA, 256)


def test_a_process_that_is_killed(target, timed):
    with LlamaCpp(str(target), {"self": str(target)}, GAMMA, 256) as engine:
        engine._process.kill()
        with pytest.raises(EngineError, match=r"ended while it was asked to decode \(status -9"):
            engine.decode(None, timed.prompts[0], timed.ids[0], how(engine))
