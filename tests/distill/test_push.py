"""A push shows the whole draft or nothing new, and its messages tell no token."""

from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

from align.errors import UserError
from distill import publish
from distill.publish import OURS, push_folder

TOKEN = "hf_NobodyMayReadThis"
NAME = "me/code-draft"
STAGES = ["whoami", "create_repo", "model_info", "upload_folder"]


@pytest.fixture
def api(monkeypatch):
    """The Hub's client, which takes its own arguments only; the repository is private."""
    api = create_autospec(HfApi, instance=True)
    api.create_repo.return_value = f"https://hub/{NAME}"
    api.model_info.return_value = SimpleNamespace(private=True, siblings=[], tags=[])
    monkeypatch.setattr(publish, "HfApi", lambda: api)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return api


@pytest.mark.parametrize("public", [False, True])
def test_a_push_is_one_commit_that_removes_what_earlier_ones_named_otherwise(api, tmp_path, public):
    api.model_info.return_value.private = not public
    assert push_folder(tmp_path, NAME, public) == f"https://hub/{NAME}"
    api.create_repo.assert_called_once_with(NAME, private=not public, exist_ok=True)
    api.upload_folder.assert_called_once_with(
        repo_id=NAME,
        folder_path=tmp_path,
        commit_message="Draft model",
        ignore_patterns=["served/*"],  # links to the target's files
        delete_patterns=OURS,
    )
    assert "compact/*" in OURS  # a draft that is no longer trimmed
    assert "README.md" not in OURS


@pytest.mark.parametrize("public", [True, False])
def test_a_repository_of_the_other_visibility_is_refused(api, tmp_path, public):
    api.model_info.return_value.private = public
    with pytest.raises(UserError, match="--public"):
        push_folder(tmp_path, NAME, public)
    assert not api.upload_folder.called


def test_the_weights_of_others_are_not_deleted(api, tmp_path):
    info = api.model_info.return_value
    info.siblings = [SimpleNamespace(rfilename="model-00001-of-00002.safetensors")]
    with pytest.raises(UserError, match="another repository"):
        push_folder(tmp_path, NAME, False)
    assert not api.upload_folder.called
    info.tags = ["draft-model", "draftsmith"]
    assert push_folder(tmp_path, NAME, False)


def wrapped():
    """As huggingface_hub raises it where the upload of a file has stopped."""
    error = RuntimeError("Error while uploading")
    error.__cause__ = HTTPError(f"cut, {TOKEN}")
    return error


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LocalTokenNotFoundError("no token found"), "no token found"),
        (OfflineModeIsEnabled("offline"), "offline"),
        (ConnectionError(f"refused {TOKEN}"), r"refused \*\*\*"),
        (ValueError("a card without metadata"), "without metadata"),
        (wrapped(), r"cut, \*\*\*"),
    ],
)
def test_a_fault_is_told_without_the_token_and_the_same_call_goes_on(
    api, tmp_path, stage, error, reason
):
    getattr(api, stage).side_effect = error
    with pytest.raises(UserError, match=reason) as refused:
        push_folder(tmp_path, NAME, public=False)
    assert TOKEN not in str(refused.value)
    assert api.upload_folder.called == (stage == "upload_folder")
    getattr(api, stage).side_effect = None
    push_folder(tmp_path, NAME, public=False)
