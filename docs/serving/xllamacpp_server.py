"""Serves GGUF files with xllamacpp: python xllamacpp_server.py TARGET.gguf PORT [DRAFT.gguf]"""

import sys

import xllamacpp as x

p = x.CommonParams()
p.model.path, p.port, p.n_ctx, p.n_parallel = sys.argv[1], int(sys.argv[2]), 4096, 1
p.endpoint_metrics, p.fit_params, p.cache_ram_mib = True, False, 0
if sys.argv[3:]:
    kinds = x.common_speculative_type
    p.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]  # or ..._SIMPLE
    p.speculative.draft.mparams.path, p.speculative.draft.n_max = sys.argv[3], 2
    p.speculative.draft.p_min, p.speculative.draft.backend_sampling = 0, False
server = x.Server(p)
input("Enter ends it.")
