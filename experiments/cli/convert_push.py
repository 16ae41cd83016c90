"""``lm convert push``: uploads an exported model to the Hugging Face hub."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.console import print_line
from experiments.runs.init_from import CONFIG, first_line, import_hub
from experiments.runs.paths import SETTINGS
from lm.config.base import SettingError, read_object

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAIN = "main"  # the branch that the hub shows and loads
HIDDEN = (".*", "*/.*")  # patterns of files that are not uploaded
# Patterns of weights to delete from the repository if the folder lacks them: an earlier upload may have had
# other shards, which transformers would read.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
REFUSED = (401, 403)  # status codes of HTTP: no valid token, or one that may not write there


def push_checkpoint(
    folder: Path,
    repo: str,
    /,
    private: bool = False,
    revision: str = MAIN,
    commit_message: str = "Upload model",
    dry_run: bool = False,
) -> None:
    """Upload an exported model to the Hugging Face hub, with its tokenizer and its model card.

    The repository is created if it does not exist. Hidden files are not uploaded. Weights of an earlier
    upload that the folder lacks are deleted, since transformers might read them; other files are kept.

        lm convert push my-t5 OWNER/my-t5 --dry-run

    Args:
        folder: Folder that lm convert export has written.
        repo: Name of the repository on the hub, OWNER/NAME.
        private: Create the repository as a private one; an existing public one is refused.
        revision: Branch for the files, created from main if it does not exist.
        commit_message: Message of the commit.
        dry_run: Only list the files and their sizes, without network and token.
    """
    files = exported_files(folder)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo, re.ASCII):
        raise SettingError(f"REPO {repo!r} should be OWNER/NAME, as in https://huggingface.co/OWNER/NAME")
    count = f"{len(files)} files ({sum(files.values()) / 1e6:.1f} MB)"
    if dry_run:
        for name, size in files.items():
            print_line(f"{size:>15,} bytes  {name}")
        kind = "private repository" if private else "repository"
        print_line(f"would upload {count} to the {kind} {repo}, branch {revision}")
        return
    api = hub_api()
    try:
        address = str(api.create_repo(repo, private=private or None, exist_ok=True))
        is_unexpectedly_public = private and not api.model_info(repo).private
        if not is_unexpectedly_public:
            if revision != MAIN:
                api.create_branch(repo, branch=revision, exist_ok=True)
                address += f"/tree/{revision}"
            api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
                ignore_patterns=list(HIDDEN),
                delete_patterns=list(WEIGHTS),
            )
    except Exception as error:  # of the network, of the hub, or of the name; none has a common class
        raise SettingError(f"{folder} cannot be uploaded to {repo} ({reason_of(error)})") from error
    if is_unexpectedly_public:
        raise SettingError(
            f"{repo} is public, and --private was given: nothing was uploaded; make it private at "
            f"{address}/settings, or name another repository"
        )
    print_line(f"uploaded {count} to {address}")


def exported_files(folder: Path) -> dict[str, int]:
    """Return ``{name: size [bytes]}`` of the files of an export that are uploaded: all but hidden ones.

    Raises SettingError if config.json, weights or the model card are missing, or the folder is a run.
    """
    from experiments.runs.model_card import CARD
    from lm.convert.checkpoint import weight_files

    if (folder / SETTINGS).exists():
        raise SettingError(f"{folder} is a run; export its model first: lm convert export {folder} FOLDER")
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }
    missing = [name for name in (CONFIG, CARD) if name not in files]
    missing = missing or [name for name in weight_files(folder) if name not in files]
    if missing:
        raise SettingError(
            f"{folder} lacks {', '.join(missing)}; it should be a folder that `lm convert export` has written"
        )
    read_object(folder / CONFIG)
    return files


def hub_api() -> "HfApi":
    """Return the interface to the hub; SettingError if its package or a token is missing."""
    hub = import_hub("lm convert push")
    if hub.get_token() is None:
        raise SettingError("the Hugging Face hub needs a token: run `hf auth login`, or set HF_TOKEN")
    return hub.HfApi()


def reason_of(error: Exception) -> str:
    """Return the first line of the hub's error, and how to fix it if the token was refused."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    fix = "; run `hf auth login` with a token that may write there" if status in REFUSED else ""
    return f"{first_line(error)}{fix}"
