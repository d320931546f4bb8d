"""Every stage on a device that this machine lacks: tensors of two devices never meet.

Tensors have shapes, devices and no data (torch's FakeTensorMode), on a made-up device `gpu`: torch
refuses `cuda` in a build without it. What needs data (a number, a list, a mask's count) is made up,
too. The checks run in a process of their own, since a made-up device stays.
"""

import json
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)
from transformers import LlamaConfig, LlamaForCausalLM

from distill.answer_cache import CachedAnswer
from distill.answers import top_logprobs
from distill.export import full_vocabulary
from distill.models import head_rows
from distill.prepare import prune_and_fit
from distill.trainer import attach_distillation_forward
from eval.decoding.build import build_decoder
from eval.decoding.drafters.pruned import pruned_drafter
from eval.decoding.generation import generate_batched
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling, agreement, argmax, warp
from eval.measuring.agreement import entropy_bits, teacher_forced_logits
from eval.prompts import Prompt

ROOT = Path(__file__).resolve().parents[1]
GPU = "gpu:0"
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
            return _zeros(args[0].shape)
        made_up = {"item": 1, "__int__": 1, "__index__": 1, "__float__": 1.0, "__bool__": True}
        if isinstance(args[0] if args else None, torch.Tensor) and func.__name__ in made_up:
            return made_up[func.__name__]
        if func in (torch.tensor, torch.as_tensor) and "device" in kwargs:
            # made on the CPU first, and there is no such device to copy the numbers to
            device = kwargs.pop("device")
            made = func(*args, **kwargs)
            return torch.empty(made.shape, dtype=made.dtype, device=device)
        if func is torch.Tensor.to and isinstance(args[-1], torch.device):
            return torch.empty(args[0].shape, dtype=args[0].dtype, device=args[-1])
        if func is torch.linalg.lstsq:
            states, wanted = args
            assert states.device == wanted.device
            return SimpleNamespace(solution=states.new_zeros(states.shape[1], wanted.shape[1]))
        return func(*args, **kwargs)


def _zeros(shape):
    return 0 if not shape else [_zeros(shape[1:]) for _ in range(shape[0])]


class AsCudaIndexes(TorchDispatchMode):
    """CUDA's rule, which fake tensors do not know: indices on a CPU or with what they index."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            for index in args[1]:
                if index is not None and index.device.type not in ("cpu", args[0].device.type):
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
        return func(*args, **(kwargs or {}))


class Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


class NoGenerator:
    def __init__(self, device="cpu"):
        self.device = device

    def manual_seed(self, seed):
        return self


def rand(shape, generator, rand=torch.rand, **options):
    return rand(shape, **options)


@contextmanager
def pretended():
    quiet = torch.autograd.set_multithreading_enabled(False)  # the device has no thread of its own
    with (
        FakeTensorMode(),
        AsCudaIndexes(),
        MadeUpData(),
        quiet,
        patch("torch.Generator", NoGenerator),
        patch("torch.rand", rand),
        # its own reads memory that is not there
        patch.object(torch.Tensor, "__deepcopy__", lambda tensor, _: torch.clone(tensor)),
    ):
        yield


def build(rows=V, layers=2, dtype=torch.bfloat16):
    config = LlamaConfig(**SHAPE.to_dict() | {"num_hidden_layers": layers})
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
        model.lm_head = torch.nn.Linear(H, rows, bias=False, dtype=dtype)
    for module in model.modules():
        for name, held in [*module._parameters.items()]:
            if held is not None:
                empty = torch.empty(held.shape, dtype=dtype, device=GPU)
                setattr(module, name, torch.nn.Parameter(empty))
        for name, held in [*module._buffers.items()]:
            setattr(module, name, torch.empty(held.shape, dtype=held.dtype, device=GPU))
    return model.eval()


def answers(count=3):
    """As they are read from the cache."""

    def ids(*shape):
        return torch.zeros(shape, dtype=torch.long)

    return [CachedAnswer(i, ids(6), ids(9), ids(9, 15), torch.zeros(9, 15)) for i in range(count)]


def target():
    model = build()
    return Target("target", model, None, build_decoder(model, 64), frozenset({299}))


# --- the checks, in the order of a run


def answering():
    for temperature in (0.0, 0.7):
        made = generate_batched(
            *(target().decoder, [[1, 2, 3], [4, 5], [6]], 5, frozenset({299})),
            *(Sampling(temperature), 2, [0, 1, 2]),
            capture=lambda logits: top_logprobs(logits, 15),
        )
        assert len([ids.cpu() for a in made for ids, _ in a.captured[:1]]) == 3


def fitting():
    with (
        patch("distill.prepare.choose_tokens", lambda *_: torch.zeros(K, dtype=torch.long)),
        patch("distill.prepare.lost_mass", lambda *_: 0.0),
    ):
        made = prune_and_fit(target().model, answers(), 1, 20, K, {0})
    assert made.full_head.shape == (V, H)
    assert made.model.lm_head.weight.device.type == "gpu"


def token_ids():
    """As load_compact has them: beside the target."""
    return torch.zeros(K, dtype=torch.long, device=GPU)


def rows_of_a_trimmed_head():
    rows = head_rows(token_ids(), V)
    assert rows.device.type == "cpu"  # where the answers are
    assert rows[answers()[0].top_ids].shape == (9, 15)


def training():
    model = build(K, 1, dtype=torch.float32).train()
    attach_distillation_forward(model)
    batch = {
        "input_ids": torch.zeros((2, 15), dtype=torch.long, device=GPU),
        "attention_mask": None,
        "positions": torch.zeros(18, dtype=torch.long, device=GPU),
        "top_ids": torch.zeros((18, 15), dtype=torch.long, device=GPU),
        "top_logprobs": torch.zeros((18, 15), device=GPU),
    }
    model(**batch).loss.backward()
    assert model.lm_head.weight.grad.device.type == "gpu"


def exporting():
    tuned = build(K, 1, dtype=torch.float32)
    full_head = torch.zeros((V, H), dtype=torch.bfloat16)  # prepare_draft reads it from its file
    full = full_vocabulary(tuned, token_ids(), full_head, answers())
    assert full.lm_head.weight.shape == (V, H)


def decoding():
    whole = target()
    for ids, model in ((token_ids(), build(K, 1)), (None, build(V, 1))):
        drafter = pruned_drafter(model, ids, whole)
        for temperature in (0.0, 0.7):
            for rows in (1, 2):
                for stop_below in (0.0, 0.4):
                    runs = decode(
                        *(whole.decoder, drafter, [Prompt(str(i), "x") for i in range(rows)]),
                        [[1, 2, 3]] * rows,
                        Decoding(Sampling(temperature), whole.stops, 9),
                        DraftLength(3, stop_below),
                    )
                    assert [len(run.tokens) for run in runs] == [9] * rows


def measuring():
    whole = target()
    drafter = pruned_drafter(build(K, 1), token_ids(), whole)
    for sampling in (Sampling(), Sampling(0.7, 20, 0.9)):
        logits = teacher_forced_logits(whole.decoder, [1, 2, 3, 4], 3)
        (q,) = drafter.teacher_forced([1, 2, 3], [4], [sampling], {})
        assert agreement(warp(logits[:, :1], sampling), q).device.type == "gpu"
        argmax(q)[0].where(q[0].amax(-1) > 0, -1)
        entropy_bits(logits)
    drafter.step(20, Sampling())()


CHECKS = (*(answering, fitting, rows_of_a_trimmed_head, training, exporting, decoding, measuring),)


@pytest.fixture(scope="module")
def outcomes():
    """Name of a check -> its traceback, empty where it went through."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_devices"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_tensors_of_two_devices_never_meet(outcomes, name):
    assert outcomes[name] == ""


def main():
    _setup_privateuseone_for_python_backend("gpu", Backend())
    found = {}
    for check in CHECKS:
        try:
            with pretended():
                check()
            found[check.__name__] = ""
        except Exception:
            found[check.__name__] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
