"""The files of recipes: where they are, and how a recipe is read and written as YAML."""

from __future__ import annotations

import difflib
import io
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from align.errors import UserError

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


class RecipeError(UserError):
    """A recipe that cannot be used. The message has key or file, reason and remedy."""


def recipe_files() -> dict[str, Path]:
    """The file of every recipe that ships, by its name."""
    files = (p for p in sorted(RECIPES.rglob("*.yaml")) if p.parent != RECIPES / "accelerate")
    names = ((p.relative_to(RECIPES).with_suffix("").as_posix(), p) for p in files)
    return {name.removesuffix("/default"): path for name, path in names}


def find_recipe(name: str) -> Path:
    """The file of a recipe's name or path. Raises RecipeError naming the nearest one."""
    files = recipe_files()
    if name in files:
        return files[name]
    path = Path(name)
    if path.is_file():
        return path
    near = difflib.get_close_matches(name, files, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise RecipeError(
        f"No recipe {name!r}: there is neither such a file nor such a name. {hint}There are "
        f"{', '.join(files)}."
    )


def new_yaml() -> YAML:
    """YAML 1.2: `1e-3` is a number, `no` is text, `010` is ten, a key occurs once."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.representer.add_representer(str, _quoted)
    return yaml


def _quoted(representer: Any, text: str) -> Any:
    """The text as YAML; U+0085 only within ", where it is escaped, else it is read as a space."""
    style = '"' if "\x85" in text else None
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style)


def yaml_text(value: Any) -> str:
    """A value in a recipe's form: `null`, `true`, `1e-05`."""
    text = io.StringIO()
    new_yaml().dump(value, text)
    return text.getvalue().removesuffix("...\n").strip()


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a recipe's file, not checked. Raises RecipeError for a file without keys."""
    try:
        values = new_yaml().load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).partition("\nTo suppress")[0].split())
        raise RecipeError(f"{path} cannot be read as YAML ({reason}); correct it.") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError(
            f"{path} has no keys, so it is not a recipe; restore the file, or write a line "
            "`key: value` for every key."
        )
    return values
