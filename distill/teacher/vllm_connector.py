"""The part of `VllmStates` (vllm_states.py) that runs in vLLM: it writes states to files.

vLLM's ExampleHiddenStatesConnector copies states on a CUDA stream, and its CPU build has none. This
class copies them in the order of computation, on any device. vLLM imports this module in its own
environment, so the module imports nothing of draftsmith.
"""

from __future__ import annotations

import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class Copied:
    """In place of the CUDA event of a copy, which is complete."""

    def query(self) -> bool:
        return True


class StatesConnector(ExampleHiddenStatesConnector):
    """Writes `token_ids` [T] and `hidden_states` [T, L, H] of each prompt before it is freed."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten().to(self._kv_cache.device)
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        lock = self._lock_fds.pop(pending.req_id)  # held since the prompt's first step
        try:
            tensors = {"token_ids": pending.token_ids, "hidden_states": states.cpu()}
            save_file(tensors, pending.filename)
        except Exception as error:  # the client names the missing file; vLLM would end
            print(f"{pending.filename} was not written: {error}", flush=True)
        finally:
            os.close(lock)
        self._req_copy_events[pending.req_id] = Copied()
