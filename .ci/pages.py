"""MkDocs hook: the reference of the commands is made from the commands themselves."""

from __future__ import annotations

from typing import Any

import typer
from typer.cli import get_docs_for_click

from hpctrain.cli.main import app

_PAGE, _MARK = "reference/commands.md", "<!-- commands -->"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the reference in the place of its mark."""
    if page.file.src_uri != _PAGE:
        return markdown
    if markdown.count(_MARK) != 1:
        raise ValueError(f"docs/{_PAGE} needs the line {_MARK} once: the commands go there")
    return markdown.replace(_MARK, commands())


def commands() -> str:
    """Every command with its arguments and options, in Markdown, below headings of the second level."""
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="hpctrain")
    for name in group.list_commands(context):
        # What stands for a command until it is called makes room for the command itself; its help is the shorter one.
        summary = group.commands[name].help
        _, command, _ = group.resolve_command(context, [name])
        command.name, command.short_help = name, summary
    return get_docs_for_click(obj=group, ctx=context, name="hpctrain", indent=1)
