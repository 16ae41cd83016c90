"""``lm convert push``: what is sent to the Hugging Face hub, and what is refused before anything is sent."""

import json
import sys
from types import SimpleNamespace
from unittest.mock import call, create_autospec

import huggingface_hub
import published
import pytest
from huggingface_hub.utils import filter_repo_objects

from experiments import __main__ as cli
from experiments.cli.convert_push import exported_files, push_checkpoint
from experiments.runs.paths import SETTINGS
from lm.config.base import SettingError
from lm.convert.checkpoint import CONFIG, INDEX, SINGLE

ADDRESS = "https://huggingface.co/mine/model"


class Refusal(OSError):
    """What the hub answers to a token that may not write."""

    response = SimpleNamespace(status_code=403)


@pytest.fixture
def export(tmp_path):
    """An exported folder with a model card and hidden files."""
    folder = published.write("bert", tmp_path / "export")
    (folder / "README.md").write_text("A model.\n")
    for name in (".env", ".git/config", "1_Pooling/.cache/x", "1_Pooling/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def hub(monkeypatch):
    """A stand-in of the hub's interface that has its signatures; there is a token."""
    api = create_autospec(huggingface_hub.HfApi, instance=True)
    api.create_repo.return_value = ADDRESS
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    return api


def calls(hub):
    return [name for name, _, _ in hub.method_calls]


def test_an_export_goes_to_a_repository_that_is_created_first(export, hub, capsys):
    push_checkpoint(export, "mine/model", commit_message="Ten more epochs")
    create, upload = hub.method_calls
    assert create == call.create_repo("mine/model", private=None, exist_ok=True)
    assert upload[0] == "upload_folder"
    sent = {"repo_id": "mine/model", "folder_path": export, "revision": "main"}
    assert upload.kwargs.items() >= (sent | {"commit_message": "Ten more epochs"}).items()
    assert f"to {ADDRESS}\n" in capsys.readouterr().out


def test_another_revision_is_a_branch_that_is_created_before_the_upload(export, hub, capsys):
    push_checkpoint(export, "mine/model", revision="longer")
    assert calls(hub) == ["create_repo", "create_branch", "upload_folder"]
    hub.create_branch.assert_called_once_with("mine/model", branch="longer", exist_ok=True)
    assert hub.upload_folder.call_args.kwargs["revision"] == "longer"
    assert f"{ADDRESS}/tree/longer\n" in capsys.readouterr().out


def test_a_private_model_never_goes_to_a_public_repository(export, hub):
    hub.model_info.return_value = SimpleNamespace(private=False)
    with pytest.raises(SettingError, match=f"public.*nothing was uploaded.*{ADDRESS}/settings"):
        push_checkpoint(export, "mine/model", private=True)
    assert not hub.upload_folder.called
    hub.model_info.return_value = SimpleNamespace(private=True)
    push_checkpoint(export, "mine/model", private=True)
    assert hub.create_repo.call_args.kwargs["private"] is True and hub.upload_folder.called


def test_a_dry_run_lists_what_is_uploaded_and_asks_the_hub_nothing(export, hub, monkeypatch, capsys):
    push_checkpoint(export, "mine/model")
    present = [path.relative_to(export).as_posix() for path in export.rglob("*") if path.is_file()]
    ignored = hub.upload_folder.call_args.kwargs["ignore_patterns"]
    uploaded = sorted(filter_repo_objects(present, ignore_patterns=ignored))
    assert {CONFIG, SINGLE, "README.md", "tokenizer.json", "1_Pooling/config.json"} <= {*uploaded}
    assert not any(name.startswith(".") or "/." in name for name in uploaded)
    hub.reset_mock()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    capsys.readouterr()
    assert cli.dispatch(["convert", "push", str(export), "mine/model", "--dry-run", "--private"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert not hub.method_calls
    listed = {line.split()[-1]: int(line.split()[0].replace(",", "")) for line in lines}
    assert listed == {name: (export / name).stat().st_size for name in uploaded}
    assert last.startswith(f"would upload {len(uploaded)} files") and "private repository mine/model" in last


def test_weights_of_an_earlier_upload_do_not_stay_beside_those_of_the_folder(export, hub):
    push_checkpoint(export, "mine/model")
    there = [SINGLE, INDEX, "model-00001-of-00002.safetensors", "README.md", "onnx/model.onnx", "notes.md"]
    deleted = filter_repo_objects(there, allow_patterns=hub.upload_folder.call_args.kwargs["delete_patterns"])
    assert [*deleted] == there[:3]


@pytest.mark.parametrize("repo", ["model", "a/b/c", "hf:mine/model", "mine/", "mine/my model", ""])
def test_a_name_without_its_owner_is_refused(repo, export, hub):
    with pytest.raises(SettingError, match="should be OWNER/NAME"):
        push_checkpoint(export, repo)
    assert not hub.method_calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "lacks config.json"),
        (lambda folder: (folder / "README.md").unlink(), "lacks README.md.*lm convert export"),
        (lambda folder: (folder / SINGLE).unlink(), "neither model.safetensors nor"),
        (lambda folder: (folder / CONFIG).write_text("["), "config.json is not JSON"),
        (lambda folder: (folder / SETTINGS).write_text("{}"), "is a run; .* lm convert export"),
    ],
)
def test_a_folder_that_is_no_export_is_refused(change, message, export, hub):
    change(export)
    with pytest.raises(SettingError, match=message):
        push_checkpoint(export, "mine/model")
    assert not hub.method_calls


def test_a_shard_that_the_index_names_has_to_be_in_the_folder(export, hub):
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (export / SINGLE).rename(export / shards[0])
    (export / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    with pytest.raises(SettingError, match=f"lacks {shards[1]};"):
        push_checkpoint(export, "mine/model")
    (export / shards[1]).write_bytes(b"")
    assert {*shards, INDEX} <= exported_files(export).keys()


def test_a_missing_package_and_a_missing_token_are_said_with_the_mend(export, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(SettingError, match="hf auth login"):
        push_checkpoint(export, "mine/model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SettingError, match=r"huggingface_hub: pip install 'lm-study\[hub\]'"):
        push_checkpoint(export, "mine/model")
    assert not hub.method_calls


def test_a_refusal_of_the_hub_is_one_line_with_the_mend(export, hub, capsys):
    hub.create_repo.side_effect = Refusal("403 Forbidden\n\nYou may not write to mine.")
    assert cli.dispatch(["convert", "push", str(export), "mine/model"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "403 Forbidden" in line and "hf auth login" in line and not hub.upload_folder.called
    hub.create_repo.side_effect = None
    hub.upload_folder.side_effect = OSError("no route to host")
    with pytest.raises(SettingError, match="cannot be uploaded to mine/model .no route to host.$"):
        push_checkpoint(export, "mine/model")
