"""A folder as a repository of the Hugging Face Hub.

Large files are stored first, each by its hash; one commit at the end names them all. So a
repository shows the whole draft or what it showed before, and a push that broke off goes on where
it stopped.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HTTPError

# What earlier pushes may have left there under names that this one does not have.
OURS = ["*.safetensors", "*.safetensors.index.json", "compact/*"]


class HubError(ValueError):
    """A push that the Hub did not take to its end."""


def push_folder(folder: Path, repo_id: str, public: bool) -> str:
    """Upload `folder` to the model repository `repo_id`, made if need be, and return its address.

    The token is that of the environment or of `hf auth login`. Raises HubError for an ill-formed
    name, without a login, for a repository of the other visibility, and where the Hub refuses or
    is not reached; the message never has the token. The same call then goes on.
    """
    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", repo_id):
        raise HubError(f"{repo_id!r} is not the name of a Hub repository; write it as ORG/NAME")
    api = HfApi()
    try:
        api.whoami()
        address = api.create_repo(repo_id, private=not public, exist_ok=True)
        if api.repo_info(repo_id).private == public:
            remedy = "leave --public out" if public else "give --public"
            raise HubError(
                f"{repo_id} exists and is {'private' if public else 'public'}: change that in its "
                f"settings on the Hub, {remedy}, or name another repository"
            )
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message="Draft model",
            delete_patterns=OURS,
        )
    except HubError:
        raise
    except (OSError, HTTPError, RuntimeError, ValueError) as error:
        # huggingface_hub wraps what stopped the upload of a file in a RuntimeError
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        text = " ".join(str(cause).split()) or type(cause).__name__
        if token := get_token():  # should a server repeat it
            text = text.replace(token, "***")
        raise HubError(
            f"the Hub did not take {repo_id} ({text}). Nothing of it is visible there yet; run the "
            "same command again to go on, or publish with --to FOLDER"
        ) from None
    return str(address)
