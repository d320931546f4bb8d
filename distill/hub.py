"""A folder as a repository of the Hugging Face Hub.

Large files are stored first, each by its hash; one commit at the end names them all. So a
repository shows the whole draft or what it showed before, and a push that broke off goes on where
it stopped.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError

# What earlier pushes may have left there under names that this one does not have.
OURS = ["*.safetensors", "*.safetensors.index.json", "compact/*"]
REMEDIES: dict[int | None, str] = {
    401: "the token is not valid: run `hf auth login --force` or set HF_TOKEN to another",
    403: "the token may not write there: give it write access, or name a repository of yours",
    413: "it takes no more data: free storage on the Hub, or publish fewer forms",
}


class HubError(ValueError):
    """A push that the Hub did not take to its end."""


def push_folder(folder: Path, repo_id: str, public: bool) -> str:
    """Upload `folder` to the model repository `repo_id`, made if need be, and return its address.

    The token is that of the environment or of `hf auth login`. Raises HubError for an ill-formed
    name, without a login, for a repository of the other visibility, and where the Hub refuses or
    is not reached: the same call then goes on.
    """
    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", repo_id):
        raise HubError(f"{repo_id!r} is no Hub repository: write it as ORG/NAME")
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
    except LocalTokenNotFoundError:
        raise HubError("not logged in to the Hub: run `hf auth login` or set HF_TOKEN") from None
    except HubError:
        raise
    except (HfHubHTTPError, HTTPError, ConnectionError, RuntimeError, ValueError) as error:
        # huggingface_hub wraps what stopped the upload of a file in a RuntimeError
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        raise HubError(_reason(cause, repo_id)) from None
    return str(address)


def _reason(error: BaseException, repo_id: str) -> str:
    """What to tell a user. Never the token, should a server repeat it."""
    text = " ".join(str(error).split()) or type(error).__name__
    if token := get_token():
        text = text.replace(token, "***")
    again = "Nothing of it is visible there yet; run the same command again to go on"
    if not isinstance(error, HfHubHTTPError | ValueError):
        return f"the Hub was not reached ({text}): go online, or publish with --to FOLDER. {again}"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    remedy = REMEDIES.get(status, "try again later")
    return f"the Hub refused {repo_id} ({text}): {remedy}. {again}"
