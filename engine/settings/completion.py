"""`rekindle completion`: installs what a shell needs to complete our commands."""

from __future__ import annotations

import os

from cyclopts import App
from cyclopts.completion import CompletionContext
from cyclopts.completion.detect import ShellDetectionError, detect_shell

from engine.settings.option_types import Shell
from engine.settings.user_error import UserError

SHELLS: tuple[Shell, ...] = ("bash", "zsh", "fish")


def model_names(context: CompletionContext) -> list[str]:
    """Return what may follow `serve`: names of models, and paths that go on from what has been typed."""
    from engine.settings.model_catalog import SHIPPED, complete_paths, list_local_models  # noqa: PLC0415 - only who completes a name needs it

    word = context.incomplete
    return [
        *SHIPPED,
        *(model.name for model in list_local_models(os.environ)),
        *(complete_paths(word) if "/" in word else ()),
    ]


def install_completion(app: App, shell: Shell | None, *, show: bool) -> int:
    """Install shell completion, or print what it needs. Raises UserError or OSError."""
    chosen = shell or detect_user_shell()
    if show:
        print(app.generate_completion(shell=chosen))
        return 0
    path = app.install_completion(shell=chosen)
    print(f"{chosen} completes rekindle, from {path}, in every shell that starts from now on")
    if chosen == "zsh":
        print("where completion is on: `autoload -Uz compinit && compinit` in .zshrc, below the line that was added")
    return 0


def detect_user_shell() -> Shell:
    """Return the shell that this process was started from. Raises UserError if it is not known."""
    try:
        found = detect_shell()
    except ShellDetectionError:
        found = None
    for shell in SHELLS:
        if shell == found:
            return shell
    raise UserError(
        f"your shell is {found or 'unknown'}; accepted: {', '.join(SHELLS)}, as in `rekindle completion bash`"
    )
