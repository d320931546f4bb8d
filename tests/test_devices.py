"""Every stage on a device that this machine lacks: tensors of two devices never meet.

Tensors have shapes, devices and no data (torch's FakeTensorMode), on a made-up device `gpu`: torch
refuses `cuda` in a build without it. What needs data (a number, a list, a mask's count) is made up,
too. The checks run in another process, because torch keeps a made-up device.
"""

import multiprocessing
import traceback
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils import send_to_device
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)
from transformers import LlamaConfig, LlamaForCausalLM

from align.checkpoint import Checkpoint
from distill.drafters import eagle3, medusa, pruned
from distill.drafters.kind import Origin
from distill.export import full_vocabulary
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
from distill.models import head_entries
from distill.teacher.answers import top_logprobs
from distill.teacher.states import read_states
from distill.teacher.store import CachedAnswer
from eval.decoding.build import build_decoder
from eval.decoding.drafters.causal_lm import CausalLMDrafter
from eval.decoding.drafters.formats import formats
from eval.decoding.drafters.lookup import lookup_first, prompt_lookup
from eval.decoding.generation import Kept, generate_batched
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import Target, device_count
from eval.decoding.verification import Sampling, agreement, argmax, warp
from eval.measuring.agreement import teacher_forced_logits
from eval.measuring.environment import environment
from eval.measuring.timing import fastest_length, step_costs
from eval.prompts import Prompt, PromptSet
from tests.distill.drafters.batches import batch_of, planned

GPU, OTHER_GPU = "gpu:0", "gpu:1"
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
PARTS += ("model.rotary_emb",)
V, K, H = 300, 270, 32
SHAPE = LlamaConfig(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


class MadeUpData(TorchFunctionMode):
    """What a program reads off a tensor: zeros as lists, one as a number, true."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist:
            return np.zeros(args[0].shape, int).tolist()
        made_up = {"item": 1, "__int__": 1, "__index__": 1, "__float__": 1.0, "__bool__": True}
        if isinstance(args[0] if args else None, torch.Tensor) and func.__name__ in made_up:
            return made_up[func.__name__]
        if func in (torch.tensor, torch.as_tensor) and "device" in kwargs:
            # made on the CPU first, and there is no such device to copy the numbers to
            device = kwargs.pop("device")
            made = func(*args, **kwargs)
            return torch.empty(made.shape, dtype=made.dtype, device=device)
        if func is torch.Tensor.to:
            device, dtype = _asked(args[1:], kwargs)
            if device not in (None, args[0].device):
                return torch.empty(args[0].shape, dtype=dtype or args[0].dtype, device=device)
        if func is torch.linalg.lstsq:
            states, wanted = args
            assert states.device == wanted.device
            return SimpleNamespace(solution=states.new_zeros(states.shape[1], wanted.shape[1]))
        return func(*args, **kwargs)


def _asked(args, kwargs):
    """Device and dtype that Tensor.to is asked for."""
    found = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
    for one in args:
        if isinstance(one, torch.Tensor):
            found = {"device": one.device, "dtype": one.dtype}
        elif isinstance(one, torch.dtype):
            found["dtype"] = one
        elif isinstance(one, (torch.device, str)):
            found["device"] = torch.device(one)
    return found.values()


class AsCudaIndexes(TorchDispatchMode):
    """CUDA's rule, which fake tensors do not know: indices on a CPU or with what they index."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            for index in args[1]:
                if index is not None and index.device not in (torch.device("cpu"), args[0].device):
                    raise RuntimeError(f"an index on {index.device} into {args[0].device}")
            # of a mask over the vocabulary nobody knows how many are set
            many = tree_map(
                lambda i: (
                    torch.zeros(V - K, dtype=torch.long, device=i.device)
                    if isinstance(i, torch.Tensor) and i.dtype == torch.bool
                    else i
                ),
                args[1],
            )
            args = (args[0], many, *args[2:])
        if func is torch.ops.aten.nonzero.default:
            return torch.zeros((V - K, 1), dtype=torch.long, device=args[0].device)
        if func is torch.ops.aten.bincount.default:
            return torch.zeros(args[2], dtype=torch.long, device=args[0].device)
        return func(*args, **(kwargs or {}))


class Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


class NoGenerator:
    def __init__(self, device="cpu"):
        self.device = device

    def manual_seed(self, seed):
        return self


def without_generator(make):
    return lambda *args, generator=None, **options: make(*args, **options)


def converted(module, convert, recurse=True):
    """nn.Module._apply; torch's own swaps the contents of tensors, of which there are none."""
    for child in module.children():
        converted(child, convert)
    for held in (module._parameters, module._buffers):
        for name, one in [*held.items()]:
            if one is not None:
                new = convert(one.detach())
                held[name] = torch.nn.Parameter(new) if held is module._parameters else new
    return module


@contextmanager
def pretended():
    quiet = torch.autograd.set_multithreading_enabled(False)  # the device has no thread
    with (
        FakeTensorMode(),
        AsCudaIndexes(),
        MadeUpData(),
        quiet,
        patch("torch.Generator", NoGenerator),
        patch("torch.rand", without_generator(torch.rand)),
        patch("torch.randn", without_generator(torch.randn)),
        patch.object(torch.Tensor, "normal_", without_generator(torch.Tensor.normal_)),
        patch.object(torch.nn.Module, "_apply", converted),
        # its own reads memory that is not there
        patch.object(torch.Tensor, "__deepcopy__", lambda tensor, _: torch.clone(tensor)),
    ):
        yield


def placed(model, home=lambda name: GPU, dtype=None):
    """The model, its tensors as new ones on the device of each name."""
    for at, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name, one in [*held.items()]:
                if one is not None:
                    new = dtype if one.is_floating_point() and held is module._parameters else None
                    one = torch.empty(one.shape, dtype=new or one.dtype, device=home(at))
                    held[name] = torch.nn.Parameter(one) if held is module._parameters else one
    return model


def build(rows=V, layers=2, dtype=torch.bfloat16, home=lambda name: GPU):
    config = LlamaConfig(**SHAPE.to_dict() | {"num_hidden_layers": layers})
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
        model.lm_head = torch.nn.Linear(H, rows, bias=False, dtype=dtype)
    return placed(model, home, dtype).eval()


def answers(count=3):
    """Cached outputs, as a run reads them."""

    def ids(*shape):
        return torch.zeros(shape, dtype=torch.long)

    return [CachedAnswer(ids(6), ids(9), ids(9, 15), torch.zeros(9, 15)) for _ in range(count)]


def as_target(model):
    return Target(Checkpoint("target", Path()), model, build_decoder(model, 64), frozenset({299}))


def as_drafter(model, ids):
    decoder = build_decoder(model, 64)
    return CausalLMDrafter(decoder=decoder, token_ids=ids, vocab_size=V, vocabulary={})


def target():
    return as_target(build())


def spread_target():
    """Its second layer and what has no layer but the embedding on a second device, as by
    device_map: auto.
    """
    later = ("model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    homes = {name: OTHER_GPU if name.startswith(later) else GPU for name in PARTS}
    model = build(home=lambda name: OTHER_GPU if name.startswith(later) else GPU)
    return as_target(dispatch_model(model, homes, force_hooks=True))


# --- the checks, in the order of a run


def answering():
    for whole in (target(), spread_target()):
        for temperature in (0.0, 0.7):
            decoding = Decoding(Sampling(temperature), whole.stops, 5)
            kept = Kept(lambda logits: top_logprobs(logits, 15))
            prompts = [[1, 2, 3], [4, 5], [6]]
            made = generate_batched(whole.decoder, prompts, decoding, 2, [0, 1, 2], kept)
            assert len([ids.cpu() for a in made for ids, _ in a.captured[:1]]) == 3


def token_ids():
    """As a drafter has them: beside the target."""
    return torch.zeros(K, dtype=torch.long, device=GPU)


def rows_of_a_trimmed_head():
    rows = head_entries(token_ids(), V)
    assert rows.device.type == "cpu"  # where the answers are
    assert rows[answers()[0].top_ids].shape == (9, 15)


def exporting():
    tuned = build(K, 1, dtype=torch.float32)
    full = full_vocabulary(tuned, token_ids(), answers())
    assert full.lm_head.weight.shape == (V, H)


def decoding():
    """With a whole head; `drafting` has trimmed ones."""
    whole = target()
    every_way(whole, as_drafter(build(V, 1), None))


def looking_up():
    whole = target()
    for drafter in (
        prompt_lookup(whole),
        lookup_first(as_drafter(build(K, 1), token_ids()), whole.stops),
    ):
        every_way(whole, drafter)


def choosing_gamma():
    whole = target()
    drafter = as_drafter(build(K, 1), token_ids())
    prompts = PromptSet("made up", [Prompt("p", "x")], [[1, 2, 3]])
    how = Decoding(Sampling(), frozenset(), 1)
    (costs,) = step_costs(whole.decoder, [drafter], 20, 2, how, 3)
    how = Decoding(Sampling(), whole.stops, 4)
    assert fastest_length(whole, drafter, prompts, how, costs, 2)[0] in (1, 2)


def keeping_states():
    states = read_states(target().decoder, answers()[0].text, (0, 1, 2))
    assert {state.device for state in states} == {torch.device(GPU)}


def every_way(whole, drafter):
    for temperature in (0.0, 0.7):
        how = Decoding(Sampling(temperature), whole.stops, 4)
        run = decode(whole.decoder, drafter, Prompt("p", "x"), [1, 2, 3], how, 2)
        assert len(run.tokens) == 4


def measuring():
    whole = target()
    drafter = as_drafter(build(K, 1), token_ids())
    for sampling in (Sampling(), Sampling(0.7, 20, 0.9)):
        logits = teacher_forced_logits(whole.decoder, [1, 2, 3, 4], 3)
        q = drafter.teacher_forced([1, 2, 3], [4], sampling, {})
        assert agreement(warp(logits[0, :1], sampling), q).device.type == "gpu"
        argmax(q).where(q.amax(-1) > 0, -1)
    drafter.step(20, Sampling())()


def a_target_on_two_devices():
    whole = spread_target()
    assert device_count(whole.model) == 2
    states, ids = dict.fromkeys((0, 1, 2)), torch.zeros((1, 4), dtype=torch.long, device=GPU)
    whole.decoder.forward(ids, 0, whole.decoder.new_cache(1, 8), states=states)
    assert {state.device for state in states.values()} == {torch.device(GPU)}


def started(kind, whole, fitted):
    """A draft of that kind and its head's ids; fitted: on answers, not of its shape alone."""
    layers, fit_layers = kind.target_layers(SHAPE.to_dict()), kind.fit_layers(SHAPE.to_dict(), 1)
    texts, ids = list(answers()) if fitted else [], torch.zeros(K).long()

    def states(layers):
        zeros = torch.zeros((14, len(layers), H), dtype=torch.bfloat16)
        return (lambda answer: zeros) if fitted and layers else None

    read = states(layers), 3, states(fit_layers)
    return kind.initialise(Origin(whole, ids, texts, 1, 3, layers, 0, None, *read))


def starting(kind):
    for whole in (target(), spread_target()):
        rows = V if kind.language_model else K  # trimmed when it is read
        assert started(kind, whole, True).model.get_output_embeddings().weight.shape == (rows, H)


def drafting(kind):
    for whole in (target(), spread_target()):
        model = placed(started(kind, whole, False).model, dtype=torch.bfloat16)
        if kind.language_model:
            drafter = as_drafter(model, None)
        else:
            drafter = formats()[kind.name].drafter(model, token_ids(), whole)
        drafter.step(20, Sampling())()
        drafter.step(20, Sampling(0.7))()
        every_way(whole, drafter)


def batches(kind):
    """A batch to train on, and one to measure on: they are made and planned on the CPU."""
    read = len(kind.target_layers(SHAPE.to_dict()))
    states = [torch.zeros(8, read, H)] * 2 if read else None
    batch = batch_of([[0] * 9] * 2, (2, 3), states, top=15)
    model = SimpleNamespace(blocks=[None] * 3, ttt_steps=3)
    return [planned(batch, kind, model, training) for training in (True, False)]


BATCHES = {each.KIND: batches(each.KIND) for each in (pruned, eagle3, medusa)}


def training(kind):
    model = placed(started(kind, target(), False).model, dtype=torch.float32).train()
    give_loss_forward(model, kind, forward_kl)
    for batch, keys in zip(BATCHES[kind], ({}, {"temperature": 0.0}), strict=True):
        output = model(**send_to_device(batch._asdict(), GPU), **keys)
        if not keys:
            output.loss.backward()
    assert model.get_output_embeddings().weight.grad.device.type == "gpu"


WITHOUT_A_KIND = (answering, rows_of_a_trimmed_head, exporting, decoding, measuring, looking_up)
WITHOUT_A_KIND += (choosing_gamma, keeping_states, a_target_on_two_devices)
CHECKS = {check.__name__: check for check in WITHOUT_A_KIND} | {
    f"{check.__name__} {kind.__name__.rpartition('.')[2]}": partial(check, kind.KIND)
    for check in (starting, drafting, training)
    for kind in (pruned, eagle3, medusa)
}


def run_checks(sending):
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    _setup_privateuseone_for_python_backend("gpu", Backend())
    found = {}
    for name, check in CHECKS.items():
        try:
            with pretended():
                check()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    sending.send(found)


@pytest.fixture(scope="module")
def outcomes():
    """Name of a check -> its traceback, empty where it went through."""
    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe()
    process = fork.Process(target=run_checks, args=[sending])
    process.start()
    sending.close()  # so that a process that ends without a word is no wait
    found = receiving.recv()
    process.join()
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_tensors_of_two_devices_never_meet(outcomes, name):
    assert outcomes[name] == ""


def test_a_report_counts_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    names = [environment("torch", None, torch.device("cuda"), n)["hardware"] for n in (1, 8)]
    assert names == ["a GPU", "8 x a GPU"]
