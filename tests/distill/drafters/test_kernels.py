"""How many kernels a step of training starts, with widths that play no part.

A GPU computes them faster than a host starts them, so their number is the time of a step of a small
draft. The norm is one kernel forward and two backward, as on
CUDA, because a CPU takes it apart; its gradients are zeros here.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from align.checkpoint import Checkpoint
from distill.drafters.attention import Attention
from distill.drafters.kind import Origin, kinds
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
from eval.decoding.build import build_decoder
from eval.decoding.target import Target
from tests.distill.drafters.batches import batch_of, planned
from tests.distill.drafters.conftest import MASK, SIZE, VOCAB

TEXTS, PROMPTS = [[5] * 40] * 4, (30,) * 4
NO_KERNEL = ("detach", "_unsafe_view", "empty", "_reshape_alias", "lift_fresh", "alias")


@torch.library.custom_op("draftsmith_test::norm", mutates_args=())
def fused_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    assert x.dtype == weight.dtype  # else CUDA takes it apart, too
    return torch.rms_norm(x, weight.shape, weight, eps)


@torch.library.custom_op("draftsmith_test::norm_backward", mutates_args=())
def fused_backward(pull: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    return [torch.zeros_like(x), torch.zeros_like(weight)]


class Kernels(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if not func.is_view and not name.startswith(NO_KERNEL):
            self.counts[name] += 2 if name == "norm_backward" else 1
        return func(*args, **kwargs or {})


@pytest.fixture
def as_on_cuda(monkeypatch):
    fused_norm.register_autograd(
        lambda ctx, pull: (*fused_backward(pull, *ctx.saved_tensors), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
    )
    monkeypatch.setattr(F, "rms_norm", lambda x, _, weight, eps: fused_norm(x, weight, eps))
    right = Attention.__init__
    dense = {"by_text": False}
    monkeypatch.setattr(
        Attention, "__init__", lambda self, *marks, **keys: right(self, *marks, **keys | dense)
    )


# what each kind took before texts were packed: 1,089, 1,251 and 4,166
@pytest.mark.parametrize(
    ("name", "layers", "most"),
    [("eagle3", 1, 510), ("dflash", 5, 620), ("pard", 24, 2060)],
)
def test_a_step_starts_few_kernels_and_reads_nothing_off_the_device(
    tiny_llama, as_on_cuda, name, layers, most
):
    shape = {"hidden_size": SIZE, "intermediate_size": 40, "num_hidden_layers": 24}
    model = tiny_llama(0, 4, vocab_size=VOCAB, num_key_value_heads=2, **shape)
    target = Target(Checkpoint("tiny", Path()), model, build_decoder(model, 120), frozenset())
    kind = kinds()[name]
    read = kind.target_layers(model.config.to_dict())
    draft = kind.initialise(Origin(target, None, [], layers, 6, read, MASK)).model.float()
    give_loss_forward(draft.train(), kind, forward_kl)
    states = [torch.zeros(39, len(read), SIZE).bfloat16()] * len(TEXTS) if read else None
    batch = batch_of(TEXTS, PROMPTS, states, top=15)
    batch = planned(batch._replace(top_logprobs=torch.full((40, 15), -3.0)), kind, draft)
    trained = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for _ in range(2):  # the first step makes the optimiser's state
        with Kernels() as kernels:
            with torch.autocast("cpu", torch.bfloat16):
                loss = draft(**batch._asdict()).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert kernels.counts.total() <= most
    read_off = kernels.counts.keys() & {"_local_scalar_dense", "nonzero", "item", "bincount"}
    assert not read_off
