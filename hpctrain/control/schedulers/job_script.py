"""Renders job scripts from the templates in ``slurm/``."""

from __future__ import annotations

import shlex
from typing import Any

from hpctrain.control.schedulers.profile import ClusterProfile, slurm_folder


def render(template: str, profile: ClusterProfile, **values: Any) -> str:
    """The text of a job script.

    Args:
        template: the name of its file.
        profile: gives modules, setup lines and variables.
        values: the other names of the template.
    """
    # Imported here because only this needs it, and it takes long.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # noqa: S701 - it is bash, which the filter quotes for
        loader=FileSystemLoader(slurm_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(template).render(
        modules=profile.modules, setup=profile.setup, environment=profile.environment, **values
    )
